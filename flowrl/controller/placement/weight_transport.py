"""Selects the transport of weights from an actor to a rollout, from the placement of both."""

from typing import Literal

from flowrl.config import AsyncSchedule, RolloutConfig, RunConfig, TrainedConfig, models_of
from flowrl.controller.placement.plan import PlacementError, Plan, RolePlan

Transport = Literal["shared", "local", "object_store", "adapter", "cuda_ipc", "nccl", "gloo"]
"""Name of a transport. `shared` transfers nothing, because the rollout uses the weights in the actor's processes. With
`local`, the rollout runs in the actor's processes and copies the weights within each process. `adapter` sends only a
LoRA adapter through the object store.
"""


def has_per_replica_updates(config: RunConfig) -> bool:
    """Returns whether each rollout replica loads new weights separately, once its requests have finished."""
    return any(isinstance(value, AsyncSchedule) and value.is_streaming and not value.interrupt for _, value in config)


def choose_transports(config: RunConfig, planned: Plan) -> dict[str, Transport]:
    """Returns rollout role -> transport; empty without an actor. Raises PlacementError like `choose_transport`."""
    transports: dict[str, Transport] = {}
    actor, per_replica = planned.roles.get("actor"), has_per_replica_updates(config)
    if actor is None:
        return transports
    models = models_of(config)
    shares_model = "actor" not in models or models["actor"].engine.capabilities.shares_weights
    trained = models.get("actor")
    offloading = [role for role, value in models.items() if value.engine.offload == "idle"]
    is_offloaded = any(
        not set(actor.slots).isdisjoint(planned.roles[role].slots) for role in offloading if role in planned.roles
    )
    for role, value in config:
        if not isinstance(value, RolloutConfig) or role not in planned.roles:
            continue
        transports[role] = choose_transport(
            actor,
            planned.roles[role],
            planned.kind,
            value,
            per_replica=per_replica,
            shares_model=shares_model,
            offloads=is_offloaded,
            sends_adapter=isinstance(trained, TrainedConfig) and trained.sends_adapter,
        )
    return transports


def choose_transport(
    actor: RolePlan,
    rollout: RolePlan,
    kind: str,
    config: RolloutConfig,
    *,
    per_replica: bool = False,
    shares_model: bool = True,
    offloads: bool = False,
    sends_adapter: bool = False,
) -> Transport:
    """Returns the transport that `transfer.via` requests. For `auto`, returns the fastest available transport.

    `auto` selects the object store instead of CUDA IPC if the actor offloads, and instead of NCCL with per-replica
    updates. With `sends_adapter`, `adapter` replaces the object store.

    Args:
        kind: device kind of the placement, `cpu` or `cuda`.
        per_replica: result of `has_per_replica_updates`.
        shares_model: whether a rollout in the actor's processes can use the actor's model. Ignored with pipeline
            stages, because no rank has all layers.
        offloads: whether the actor's processes offload GPU memory while the rollout runs.
        sends_adapter: whether the actor can send an adapter instead of all weights.
    Raises PlacementError if the placement or the schedule does not support the requested transport.
    """
    via = config.transfer.via
    transport = _transport_between(actor, rollout, kind, config, shares_model and actor.mesh.pp == 1)
    if transport == "cuda_ipc" and offloads and via == "auto":
        transport = "object_store"  # CUDA IPC between roles that offload is not tested on GPUs yet
    if transport == "object_store" and sends_adapter:
        return "adapter"
    if transport not in ("nccl", "gloo") or not per_replica:
        return transport
    if via != "auto":
        raise PlacementError(
            f"{rollout.role}.transfer.via is {transport}, which updates all replicas together, but "
            f"schedule.interrupt is false, which updates each replica by itself: set schedule.interrupt: true, or "
            f"{rollout.role}.transfer.via: auto"
        )
    return "adapter" if sends_adapter else "object_store"


def _transport_between(
    actor: RolePlan, rollout: RolePlan, kind: str, config: RolloutConfig, shares_model: bool
) -> Transport:
    via = config.transfer.via
    gpu_transports = config.capabilities.gpu_transports
    if not config.capabilities.own_process and set(rollout.slots) == set(actor.slots):
        return _transport_in_process(actor, rollout, config, shares_model)
    if kind != "cuda":
        return _transport_on_cpus(rollout, via)
    if via == "object_store":
        return "object_store"
    setting = f"{rollout.role}.transfer.via is {via}"
    if via == "gloo":
        raise PlacementError(f"{setting}, but placement.device is {kind}: set {rollout.role}.transfer.via: auto")
    rollout_gpus, actor_gpus = (
        {device for slot in role.slots for device in slot.node_devices} for role in (rollout, actor)
    )
    if rollout_gpus == actor_gpus:
        if via == "nccl":
            raise PlacementError(
                f"{setting}, but {rollout.role} uses the same GPUs as {actor.role}, and NCCL allows one process per "
                f"GPU: set {rollout.role}.transfer.via: auto"
            )
        return "cuda_ipc" if "cuda_ipc" in gpu_transports else "object_store"
    if via == "cuda_ipc":
        raise PlacementError(
            f"{setting}, but {rollout.role} and {actor.role} use different GPUs, and CUDA IPC works only within one "
            f"GPU: set {rollout.role}.transfer.via: auto"
        )
    if rollout_gpus & actor_gpus:
        if via == "nccl":
            raise PlacementError(
                f"{setting}, but {rollout.role} and {actor.role} have GPUs in common, and NCCL allows one process per "
                f"GPU: set {rollout.role}.transfer.via: object_store"
            )
        return "object_store"
    return "nccl" if "nccl" in gpu_transports else "object_store"


def _transport_on_cpus(rollout: RolePlan, via: str) -> Transport:
    if via == "gloo":
        return "gloo"
    if via not in ("auto", "object_store"):
        raise PlacementError(
            f"{rollout.role}.transfer.via is {via}, but placement.device is cpu: set {rollout.role}.transfer.via: auto"
        )
    return "object_store"


def _transport_in_process(actor: RolePlan, rollout: RolePlan, config: RolloutConfig, shares_model: bool) -> Transport:
    """Returns the transport to a rollout in the processes of the actor."""
    via = config.transfer.via
    if not shares_model and via in ("auto", "object_store"):
        return "object_store"
    if via != "auto":
        raise PlacementError(
            f"{rollout.role}.transfer.via is {via}, but {rollout.role} runs in the processes of {actor.role}, so "
            f"its weights do not leave the process: set {rollout.role}.transfer.via: auto"
        )
    return "shared" if config.can_share_weights else "local"
