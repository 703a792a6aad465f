"""Which way new weights take, from where the two roles run. Pure: a plan and a config in, a name out."""

from typing import Literal

from flowrl.config import RolloutConfig, RunConfig, ScheduleConfig
from flowrl.controller.placement.plan import PlacementError, RolePlan

Transport = Literal["shared", "object_store", "cuda_ipc", "nccl"]


def takes_one_by_one(config: RunConfig) -> bool:
    """Whether each replica of the rollout takes new weights by itself, when it has finished what it works on."""
    return any(isinstance(value, ScheduleConfig) and value.streams and not value.interrupt for _, value in config)


def transport_of(
    actor: RolePlan, rollout: RolePlan, kind: str, config: RolloutConfig, *, one_by_one: bool = False
) -> Transport:
    """The way that `transfer.via` asks for, or the best that there is.

    `shared` is none: the rollout runs in the actor's processes and samples from its weights.

    Args:
        kind: of the devices.
        one_by_one: as `takes_one_by_one` says.
    Raises:
        PlacementError: what was asked for cannot be there.
    """
    way = _way_between(actor, rollout, kind, config)
    if way != "nccl" or not one_by_one:
        return way
    if config.transfer.via == "nccl":
        raise PlacementError(
            f"{rollout.role}.transfer.via is nccl, by which all replicas take weights together, but schedule.interrupt "
            f"is false, by which each does so when it has finished: set schedule.interrupt: true, or "
            f"{rollout.role}.transfer.via: auto"
        )
    return "object_store"


def _way_between(actor: RolePlan, rollout: RolePlan, kind: str, config: RolloutConfig) -> Transport:
    asked = config.transfer.via
    if config.engine == "hf" and set(rollout.slots) == set(actor.slots):
        if asked != "auto":
            raise PlacementError(
                f"{rollout.role}.transfer.via is {asked}, but {rollout.role} is in the processes of {actor.role} and "
                f"samples from its weights, which do not travel: set {rollout.role}.transfer.via: auto"
            )
        return "shared"
    if asked == "object_store" or (asked == "auto" and (config.engine == "hf" or kind != "cuda")):
        return "object_store"
    where = f"{rollout.role}.transfer.via is {asked}"
    if kind != "cuda":
        raise PlacementError(f"{where}, but the devices are of kind {kind}: set {rollout.role}.transfer.via: auto")
    theirs, own = ({place for slot in role.slots for place in slot.places} for role in (rollout, actor))
    if theirs == own:
        if asked == "nccl":
            raise PlacementError(
                f"{where}, but {rollout.role} is on GPUs of {actor.role}, and NCCL takes one process per GPU: set "
                f"{rollout.role}.transfer.via: auto"
            )
        return "cuda_ipc"
    if asked == "cuda_ipc":
        raise PlacementError(
            f"{where}, but {rollout.role} and {actor.role} are not on the same GPUs, and memory is shared within a GPU "
            f"alone: set {rollout.role}.transfer.via: auto"
        )
    if theirs & own:
        if asked == "nccl":
            raise PlacementError(
                f"{where}, but some of the GPUs of {rollout.role} are those of {actor.role}, and NCCL takes one "
                f"process per GPU: set {rollout.role}.transfer.via: object_store"
            )
        return "object_store"
    return "nccl"
