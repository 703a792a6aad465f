"""Which way new weights take, from where the two roles run. Pure: a plan and a config in, a name out."""

from typing import Literal

from flowrl.config import RolloutConfig
from flowrl.controller.plan import PlacementError, RolePlan

Transport = Literal["shared", "object_store", "cuda_ipc", "nccl"]


def transport_of(actor: RolePlan, rollout: RolePlan, kind: str, config: RolloutConfig) -> Transport:
    """The way that `transfer.via` asks for, or the best that there is.

    `shared` is none: the rollout runs in the actor's processes and samples from its weights.

    Raises:
        PlacementError: what was asked for cannot be there.
    """
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
