"""Whether a plan can do what a schedule asks: makers apart from those who train, and routes that lead somewhere."""

from collections.abc import Sequence

from flowrl.config import ActorConfig, ConfigError, CriticConfig, OnPolicyConfig, Placement, RunConfig
from flowrl.controller.placement.plan import Plan, RolePlan

Lanes = tuple[tuple[int, ...], ...]
"""For each data-parallel rank of the actor the replicas of the rollout that feed it."""


def check_schedule(config: RunConfig, planned: Plan) -> None:
    """Refuses a schedule, or routes, that the plan cannot follow. Raises `ConfigError`."""
    if not isinstance(config, OnPolicyConfig):
        if config.placement.routes is not None:
            raise ConfigError(
                f"placement.routes says which replicas of the rollout feed which ranks of the actor, but "
                f"{type(config).__name__} has no rollout: remove it"
            )
        return
    if config.schedule.kind == "async":
        for role, value in config:
            if isinstance(value, ActorConfig | CriticConfig):
                _check_apart(planned.roles["rollout"], planned.roles[role])
    if config.schedule.streams and config.rollout.leaves_devices(gpus=planned.kind == "cuda"):
        _check_stays(planned)
    lanes_of(config, planned)


def _check_apart(rollout: RolePlan, trained: RolePlan) -> None:
    shared = _shared_pool(rollout, trained)
    if shared is None:
        return
    raise ConfigError(
        f"schedule.kind is async, but rollout and {trained.role}, which trains, share devices of pool {shared}, where "
        f"one waits while the other works: give rollout a pool of its own, as placement/detached_2m1t.yaml does, or "
        f"set schedule.kind: sync"
    )


def _check_stays(planned: Plan) -> None:
    """Refuses others on the devices of a vLLM that leaves them: it can do so only when it works on nothing."""
    rollout, actor = planned.roles["rollout"], planned.roles["actor"]
    for other in planned.roles.values():
        shared = None if other is rollout else _shared_pool(rollout, other)
        if shared is not None:
            raise ConfigError(
                f"schedule.kind is async, at which vLLM always works on prompts, but {other.role} is on devices of "
                f"rollout, pool {shared}, which vLLM is to leave to it: give {other.role} the pool of actor, "
                f"{actor.pool}, or set rollout.vllm.sleep: false"
            )


def _shared_pool(rollout: RolePlan, other: RolePlan) -> str | None:
    """The first pool of which both have a device; None where they share none."""
    theirs = {place for slot in other.slots for place in slot.places}
    return next((slot.owner for slot in rollout.slots if theirs & set(slot.places)), None)


def lanes_of(config: OnPolicyConfig, planned: Plan) -> Lanes | None:
    """Who feeds whom by `placement.routes`; None where any replica of the rollout may feed any rank of the actor.

    Raises: `ConfigError` for routes that mean nothing here.
    """
    feeds = _feeds(config.placement)
    if feeds is None:
        return None
    _check_schedule_of_routes(config)
    makers, trainers = planned.roles["rollout"].mesh.dp, planned.roles["actor"].mesh.dp
    _check_routes(feeds, makers, trainers)
    _check_shares(config, trainers)
    return tuple(tuple(maker for maker in range(makers) if rank in feeds[maker]) for rank in range(trainers))


def check_routes(placement: Placement, planned: Plan) -> None:
    """Refuses routes of a placement by itself, without a run's config, that lead nowhere. Raises `ConfigError`."""
    feeds = _feeds(placement)
    if feeds is not None and {"rollout", "actor"} <= planned.roles.keys():
        _check_routes(feeds, planned.roles["rollout"].mesh.dp, planned.roles["actor"].mesh.dp)


def _feeds(placement: Placement) -> Sequence[Sequence[int]] | None:
    """For each replica of the rollout the ranks of the actor that it feeds; None where nothing is said."""
    if placement.routes is None:
        return None
    for role in placement.routes:
        if role != "rollout":
            raise ConfigError(f"placement.routes.{role} is no role that feeds others: name rollout")
    if "rollout" not in placement.routes:
        raise ConfigError("placement.routes is empty: name the ranks that each replica feeds, or remove it")
    return placement.routes["rollout"]


def _check_schedule_of_routes(config: OnPolicyConfig) -> None:
    schedule = config.schedule
    if not schedule.streams:
        is_async = schedule.kind == "async"
        setting = "max_staleness is 0" if is_async else f"kind is {schedule.kind}"
        fix = "max_staleness: 1" if is_async else "kind: async"
        raise ConfigError(
            f"placement.routes says which replica of rollout gets which prompts, but schedule.{setting}, at which each "
            f"step's are split evenly over all: remove placement.routes, or set schedule.{fix}"
        )
    if schedule.overprovision:
        raise ConfigError(
            f"schedule.overprovision is {schedule.overprovision}, by which a step takes what is finished first, but "
            f"placement.routes says whose prompts it takes: set schedule.overprovision: 0, or remove placement.routes"
        )


def _check_shares(config: OnPolicyConfig, trainers: int) -> None:
    """A rank gets the same part of a step and of each of its minibatches, so that its rows stay its own."""
    each = f"placement.routes gives each of the {trainers} data-parallel ranks of actor an equal share of"
    if config.prompts_per_step % trainers:
        raise ConfigError(
            f"{each} a step, but a step has batch_size / samples_per_prompt = {config.prompts_per_step} prompts: "
            f"make it a multiple of {trainers}, or remove placement.routes"
        )
    if config.minibatch_size % trainers:
        raise ConfigError(
            f"{each} a minibatch, but minibatch_size is {config.minibatch_size}: make it a multiple of {trainers}, or "
            f"remove placement.routes"
        )


def _check_routes(feeds: Sequence[Sequence[int]], makers: int, trainers: int) -> None:
    if len(feeds) != makers:
        raise ConfigError(
            f"placement.routes.rollout has {_lists(len(feeds))}, but rollout has {makers} replicas: give one for each"
        )
    for maker, ranks in enumerate(feeds):
        where = f"placement.routes.rollout.{maker}"
        if not ranks:
            raise ConfigError(
                f"{where} is empty, so that replica {maker} of rollout has no trainer: name ranks of actor, or make "
                f"the pool of rollout smaller"
            )
        for rank in ranks:
            if rank >= trainers:
                raise ConfigError(
                    f"{where} names rank {rank}, but the data-parallel ranks of actor are 0 to {trainers - 1}: name "
                    f"one of these"
                )
        if len(set(ranks)) < len(ranks):
            raise ConfigError(f"{where} is {list(ranks)}, which names a rank twice: name each once")
    fed = {rank for ranks in feeds for rank in ranks}
    for rank in range(trainers):
        if rank not in fed:
            raise ConfigError(
                f"placement.routes.rollout names rank {rank} of actor nowhere, so that nobody feeds it: name it in the "
                f"list of a replica, or make the pool of actor smaller"
            )


def _lists(count: int) -> str:
    return f"{count} list" if count == 1 else f"{count} lists"
