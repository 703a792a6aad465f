"""Checks `schedule` and `placement.routes` against a placement plan, and draws the data flow for `flowrl plan`."""

from collections.abc import Sequence

from flowrl.config import (
    AsyncSchedule,
    ConfigError,
    Placement,
    RolloutConfig,
    RolloutRunConfig,
    RunConfig,
    TrainedConfig,
)
from flowrl.controller.placement.plan import Plan, RolePlan
from flowrl.controller.placement.weight_transport import Transport, choose_transports
from flowrl.schedules.scheduler import TrainerRoutes

MAX_DRAWN_RANKS = 6
"""Largest number of ranks that are drawn per role. Dots replace the middle ranks of a larger role."""

_TRANSPORT_LABELS: dict[Transport, str] = {
    "shared": "none (the rollout uses the actor's weights)",
    "local": "copied within the process",
    "object_store": "object store",
    "adapter": "LoRA adapter through the object store",
    "cuda_ipc": "CUDA IPC",
    "nccl": "NCCL",
    "gloo": "gloo",
}


def check_schedule(config: RunConfig, planned: Plan) -> None:
    """Raises `ConfigError` if the placement plan does not support the schedule or the routes of the config."""
    if not isinstance(config, RolloutRunConfig):
        if config.placement.routes is not None:
            raise ConfigError(f"placement.routes is set, but {type(config).__name__} has no rollout: remove it")
        return
    if config.schedule.kind == "async":
        for role, value in config:
            if isinstance(value, TrainedConfig):
                _check_dedicated_devices(planned.roles["rollout"], planned.roles[role])
    if config.schedule.is_streaming and config.rollout.can_sleep(on_gpus=planned.kind == "cuda"):
        _check_no_offload(config.rollout, planned)
    if config.rollout.transfer.drop_weights:
        _check_drop(config, planned)
    trainer_routes(config, planned)


def _check_drop(config: RolloutRunConfig, planned: Plan) -> None:
    """Raises `ConfigError` if the rollout does not sleep, or generates while the actor trains."""
    start, fix = "rollout.transfer.drop_weights is true, but", "set rollout.transfer.drop_weights: false"
    if config.schedule.kind != "sync":
        raise ConfigError(
            f"{start} with schedule.kind {config.schedule.kind} the rollout generates while the actor trains: {fix}, "
            f"or schedule.kind: sync"
        )
    if not config.rollout.can_sleep(on_gpus=planned.kind == "cuda"):
        setting = config.rollout.name_setting("sleep")
        raise ConfigError(
            f"{start} the rollout does not sleep, so it keeps its weights while other roles use the devices: {fix}"
            f"{'' if setting is None else f', or rollout.{setting}: true'}"
        )


def _check_dedicated_devices(rollout: RolePlan, trained: RolePlan) -> None:
    shared = _shared_pool(rollout, trained)
    if shared is not None:
        raise ConfigError(
            f"schedule.kind async requires dedicated devices for rollout, but rollout and {trained.role} share devices "
            f"of pool {shared}: give rollout its own pool, as in `placement: detached_2m1t`, or set "
            f"schedule.kind: sync"
        )


def _check_no_offload(config: RolloutConfig, planned: Plan) -> None:
    """Raises `ConfigError` if a role shares devices with a rollout that offloads, because streaming cannot pause."""
    rollout, actor = planned.roles["rollout"], planned.roles["actor"]
    for other in planned.roles.values():
        shared = None if other is rollout else _shared_pool(rollout, other)
        if shared is not None:
            setting = config.name_setting("sleep")
            raise ConfigError(
                f"rollout offloads its devices for {other.role}, which shares pool {shared}, but with schedule.kind "
                f"async it is never idle: assign {other.role} to pool {actor.pool}"
                f"{'' if setting is None else f', or set rollout.{setting}: false'}"
            )


def _shared_pool(rollout: RolePlan, other: RolePlan) -> str | None:
    """Returns the first pool in which both roles use the same device, or None."""
    devices = {device for slot in other.slots for device in slot.node_devices}
    return next((slot.owner for slot in rollout.slots if devices & set(slot.node_devices)), None)


def trainer_routes(config: RolloutRunConfig, planned: Plan) -> TrainerRoutes | None:
    """Returns the rollout replicas that serve each actor rank, or None without routes.

    Raises `ConfigError` if they do not fit.
    """
    targets = _route_targets(config.placement)
    if targets is None:
        return None
    _check_routed_schedule(config)
    num_replicas, num_trainers = planned.roles["rollout"].mesh.dp, planned.roles["actor"].mesh.dp
    _check_targets(targets, num_replicas, num_trainers)
    _check_equal_shares(config, num_trainers)
    return tuple(
        tuple(replica for replica in range(num_replicas) if rank in targets[replica]) for rank in range(num_trainers)
    )


def check_routes(placement: Placement, planned: Plan) -> None:
    """Raises `ConfigError` if the routes of a placement file do not fit its plan. Needs no run config."""
    targets = _route_targets(placement)
    if targets is not None and {"rollout", "actor"} <= planned.roles.keys():
        _check_targets(targets, planned.roles["rollout"].mesh.dp, planned.roles["actor"].mesh.dp)


def _route_targets(placement: Placement) -> Sequence[Sequence[int]] | None:
    """Returns the actor ranks that each rollout replica serves, or None without routes."""
    if placement.routes is None:
        return None
    for role in placement.routes:
        if role != "rollout":
            raise ConfigError(f"placement.routes.{role} is not supported: only rollout can have routes")
    if "rollout" not in placement.routes:
        raise ConfigError("placement.routes is empty: list the actor ranks of each replica, or remove it")
    return placement.routes["rollout"]


def _check_routed_schedule(config: RolloutRunConfig) -> None:
    schedule = config.schedule
    if not isinstance(schedule, AsyncSchedule) or not schedule.is_streaming:
        is_async = schedule.kind == "async"
        setting = "max_staleness is 0" if is_async else f"kind is {schedule.kind}"
        fix = "max_staleness: 1" if is_async else "kind: async"
        raise ConfigError(
            f"placement.routes requires a streaming schedule, but schedule.{setting}: remove placement.routes, or set "
            f"schedule.{fix}"
        )
    if schedule.overprovision:
        raise ConfigError(
            f"schedule.overprovision is {schedule.overprovision}, but placement.routes does not support "
            f"over-provisioning: set schedule.overprovision: 0, or remove placement.routes"
        )
    if config.dynamic_sampling is not None or config.on_failure == "drop":
        setting = "on_failure is drop" if config.dynamic_sampling is None else "dynamic_sampling is set"
        raise ConfigError(
            f"{setting}, so a step may have fewer rows, but placement.routes needs equal shares of a step: remove "
            f"placement.routes, or do not drop rows"
        )


def _check_equal_shares(config: RolloutRunConfig, num_trainers: int) -> None:
    """Raises `ConfigError` if the ranks cannot get equal shares of a step's prompts or of a minibatch."""
    rule = f"placement.routes gives each of the {num_trainers} data-parallel ranks of actor an equal share of"
    if config.prompts_per_step % num_trainers:
        raise ConfigError(
            f"{rule} a step, but a step has batch_size / samples_per_prompt = {config.prompts_per_step} prompts: "
            f"make it a multiple of {num_trainers}, or remove placement.routes"
        )
    if config.minibatch_size % num_trainers:
        raise ConfigError(
            f"{rule} a minibatch, but minibatch_size is {config.minibatch_size}: make it a multiple of {num_trainers}, "
            f"or remove placement.routes"
        )


def _check_targets(targets: Sequence[Sequence[int]], num_replicas: int, num_trainers: int) -> None:
    if len(targets) != num_replicas:
        raise ConfigError(
            f"placement.routes.rollout has length {len(targets)}, but rollout has {num_replicas} replicas: list the "
            f"actor ranks of each replica"
        )
    for replica, ranks in enumerate(targets):
        key = f"placement.routes.rollout.{replica}"
        if not ranks:
            raise ConfigError(f"{key} is empty: list at least one actor rank, or make the pool of rollout smaller")
        for rank in ranks:
            if rank >= num_trainers:
                raise ConfigError(f"{key} contains rank {rank}; available actor ranks: 0 to {num_trainers - 1}")
        if len(set(ranks)) < len(ranks):
            raise ConfigError(f"{key} is {list(ranks)}, which contains a rank twice: list each rank once")
    served = {rank for ranks in targets for rank in ranks}
    for rank in range(num_trainers):
        if rank not in served:
            raise ConfigError(
                f"placement.routes.rollout does not contain actor rank {rank}: add it to a replica, or make the pool "
                f"of actor smaller"
            )


def render_graph(config: RolloutRunConfig, planned: Plan) -> str:
    """Draws the schedule, the rollout replicas, the actor ranks and the data flow between them as text."""
    rollout, actor = planned.roles["rollout"], planned.roles["actor"]
    replicas = [_label(rollout, rank) for rank in range(rollout.mesh.dp)]
    trainers = [_label(actor, rank) for rank in range(actor.mesh.dp)]
    transport = choose_transports(config, planned)["rollout"]
    weights = f"weights: {_TRANSPORT_LABELS[transport]}"
    routes = trainer_routes(config, planned)
    if routes is None:
        graph = _draw_graph(_shorten(replicas), _shorten(trainers), _describe_rollouts(config), f"(2) {weights}")
    else:
        graph = [*_draw_routes(replicas, trainers, routes), f"(2) {weights}, from all actor ranks to all replicas"]
    return "\n".join([_describe_schedule(config, rollout, actor), *graph])


def _describe_schedule(config: RolloutRunConfig, rollout: RolePlan, actor: RolePlan) -> str:
    schedule = config.schedule
    if not schedule.staleness:
        kind = "sync" if schedule.kind == "sync" else "async with max_staleness 0 (same as sync)"
        return f"schedule: {kind}; each step generates, then trains"
    if not isinstance(schedule, AsyncSchedule):
        shared = _shared_pool(rollout, actor) is not None
        suffix = "; generation and training alternate on shared devices" if shared else ""
        return f"schedule: one_step_off; generates the next step while a step trains{suffix}"
    terms = [f"max staleness {schedule.staleness}"]
    if schedule.max_concurrent is not None:
        terms.append(f"at most {schedule.max_concurrent} concurrent prompts")
    if schedule.overprovision:
        terms.append(f"over-provisioned by {schedule.overprovision} prompts")
    terms.append("weight updates between two tokens" if schedule.interrupt else "weight updates when a replica is idle")
    return f"schedule: async; {', '.join(terms)}"


def _describe_rollouts(config: RolloutRunConfig) -> str:
    schedule, prompts, samples = config.schedule, config.prompts_per_step, config.samples_per_prompt
    overprovision = schedule.overprovision if isinstance(schedule, AsyncSchedule) else 0
    max_untrained = (schedule.staleness + 1) * prompts + overprovision
    per_prompt = f" x {samples} samples" if samples > 1 else ""
    limit = f", at most {max_untrained} untrained" if schedule.is_streaming else ""
    return f"(1) rollouts: {prompts} prompts{per_prompt} per step{limit}"


def _label(role: RolePlan, rank: int) -> str:
    mesh = role.mesh
    slots = [slot for i, slot in enumerate(role.slots) if mesh.coordinates(i).dp == rank]
    names = [f"{node}:{device}" for slot in slots for node, device in slot.node_devices]
    devices = "+".join(names) if len(names) <= 2 else f"{names[0]} to {names[-1]}"
    return f"{role.role} {rank}  {devices}"


def _shorten(labels: Sequence[str]) -> list[str]:
    if len(labels) <= MAX_DRAWN_RANKS:
        return list(labels)
    return [*labels[: MAX_DRAWN_RANKS - 2], "...", labels[-1]]


def _draw_graph(replicas: Sequence[str], trainers: Sequence[str], rollouts: str, weights: str) -> list[str]:
    height = max(len(replicas), len(trainers))
    arrow_row = (height - 1) // 2
    left, right = _center(replicas, height), _center(trainers, height)
    width = max(map(len, replicas))
    # The return arrow ends below the first letters of both columns, so its label must fit between them.
    between = max(len(rollouts) + 8, len(weights) + 6 - width)
    lines = []
    for row in range(height):
        start = f"{left[row]:<{width}} --{'+' if len(replicas) > 1 else '-'}" if left[row] else " " * (width + 4)
        middle = f"{'  ' + rollouts + '  ':-^{between}}" if row == arrow_row else " " * between
        end = f"{'+' if len(trainers) > 1 else '-'}-> {right[row]}" if right[row] else ""
        lines.append((start + middle + end).rstrip())
    back = width + between + 5
    lines.append(f"  ^{'|':>{back + 1}}")
    lines.append(f"  +{'  ' + weights + '  ':-^{back}}+")
    return lines


def _center(labels: Sequence[str], height: int) -> list[str]:
    above = (height - len(labels)) // 2
    return [*[""] * above, *labels, *[""] * (height - above - len(labels))]


def _draw_routes(replicas: Sequence[str], trainers: Sequence[str], routes: TrainerRoutes) -> list[str]:
    width = max(map(len, replicas))
    lines = []
    for replica, label in enumerate(replicas):
        served = [trainers[rank] for rank, sources in enumerate(routes) if replica in sources]
        lines.append(f"{label:<{width}} --  (1) rollouts  --> {', '.join(served)}")
    return lines
