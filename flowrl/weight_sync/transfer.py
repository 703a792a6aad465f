"""Sends the actor's weights to the rollout over the transport that fits the placement."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from flowrl.config import ConfigError, LoraConfig, RolloutConfig, RunConfig, TrainedConfig, TransferConfig, models_of
from flowrl.controller.placement.plan import Plan
from flowrl.controller.placement.weight_transport import (
    Transport,
    choose_transport,
    choose_transports,
    has_per_replica_updates,
)
from flowrl.weight_sync.verification import ComparedWeights, WeightsCheck, has_weights_in_process

if TYPE_CHECKING:  # `flowrl plan` selects a transport without numpy
    from flowrl.controller.dispatch import Future
    from flowrl.controller.group import WorkerGroup


class WeightTransfer(Protocol):
    """Sends an actor's weights to a rollout."""

    def send(self, version: int) -> None:
        """Submits export and load of the current weights for the whole rollout."""


@runtime_checkable
class SnapshotTransfer(WeightTransfer, Protocol):
    """Exports weights in one call and loads them in another, so that the rollout generates in between."""

    updates_all_replicas: bool
    """Whether all replicas must load a version together, in one call of the whole group."""

    def connect(self) -> None:
        """Waits until `export` can run without blocking."""

    def export(self) -> Sequence[Future]:
        """Submits the export of the current weights; returns the futures to pass to `load`."""
        ...

    def load(self, buckets: Sequence[Future], rollout: WorkerGroup, version: int) -> Sequence[Future]:
        """Submits and returns the calls that load exported weights into a rollout or one replica."""
        ...


class _BucketTransfer:
    """Base class of the transports of all weights. A transport sends buckets of at most `bucket_mb`, or one weight."""

    def __init__(
        self, actor: WorkerGroup, rollout: WorkerGroup, config: TransferConfig, dtype: str | None = None
    ) -> None:
        self._actor, self._rollout, self._config = actor, rollout, config
        self._bucketing = (config.bucket_mb, dtype)
        self._num_buckets: Future = actor.num_buckets.submit(*self._bucketing)


class ObjectStoreTransfer(_BucketTransfer):
    """Sends buckets through Ray's object store, which keeps one copy per node."""

    updates_all_replicas = False

    def connect(self) -> None:
        self._num_buckets.get()

    def export(self) -> Sequence[Future]:
        return [self._actor.weights.submit(bucket, *self._bucketing) for bucket in range(self._num_buckets.get())]

    def load(self, buckets: Sequence[Future], rollout: WorkerGroup, version: int) -> Sequence[Future]:
        load = rollout.load_weights.submit
        return [load(weights, version, bucket, len(buckets)) for bucket, weights in enumerate(buckets)]

    def send(self, version: int) -> None:
        # All exports are submitted before the first load, so a time-shared device switches roles once.
        self.load(self.export(), self._rollout, version)


class AdapterTransfer:
    """Sends only the actor's LoRA adapter, through Ray's object store. The rollout merges the adapter into its base
    model.
    """

    updates_all_replicas = False

    def __init__(self, actor: WorkerGroup, rollout: WorkerGroup, config: TransferConfig, lora: LoraConfig) -> None:
        self._actor, self._rollout, self._lora, self._bucket_mb = actor, rollout, lora, config.bucket_mb

    def connect(self) -> None:
        """Does nothing, because an export needs no connection."""

    def export(self) -> Sequence[Future]:
        return [self._actor.adapter.submit()]

    def load(self, buckets: Sequence[Future], rollout: WorkerGroup, version: int) -> Sequence[Future]:
        (adapter,) = buckets
        return [rollout.load_adapter.submit(adapter, self._lora, self._bucket_mb, version)]

    def send(self, version: int) -> None:
        self.load(self.export(), self._rollout, version)


class CudaIpcTransfer(_BucketTransfer):
    """Shares buckets through CUDA IPC on the GPUs that both roles use.

    All buckets use the same buffer, so the rollout reads each bucket before the actor exports the next. A rollout on
    the actor's GPUs does not generate while the actor trains, so there are no snapshots.

    A transfer needs memory for the weights of both roles. The actor first releases all other memory of its processes.
    The rollout then onloads its weights. The next call of the rollout evicts the actor, and then onloads the KV cache.
    """

    def send(self, version: int) -> None:
        num_buckets = self._num_buckets.get()
        done: Future = self._actor.begin_sharing.submit()
        for bucket in range(num_buckets):
            shared = self._actor.share_weights.submit(bucket, *self._bucketing, after=done)
            done = self._rollout.load_ipc.submit(shared, version, bucket, num_buckets)
        self._actor.release_weights.submit(after=done)


class BroadcastTransfer(_BucketTransfer):
    """Broadcasts buckets from the actor's first rank, or from all of its ranks, to all devices of the rollout."""

    updates_all_replicas = True

    _metadata: Sequence[Future] = ()
    """Descriptions of the buckets; empty before `connect`."""

    def connect(self) -> None:
        """Creates the groups of the senders and all rollout devices. Runs only once."""
        if self._metadata:
            return
        num_buckets = self._num_buckets.get()
        num_receivers = sum(len(slot.node_devices) for slot in self._rollout.slots)
        group = self._actor.open_transfer_group(num_receivers, self._config.senders == "all")
        self._rollout.join_transfer_group.submit(group)
        self._actor.join_transfer_group.submit(group)
        self._metadata = [
            self._actor.describe_weights.submit(bucket, *self._bucketing) for bucket in range(num_buckets)
        ]

    def export(self) -> Sequence[Future]:
        """Submits the broadcasts. Returns a future that resolves when the actor is ready to broadcast."""
        self.connect()
        reached = self._actor.num_buckets.submit(*self._bucketing)
        for bucket in range(len(self._metadata)):
            self._actor.broadcast_weights.submit(bucket, *self._bucketing)
        return [reached]

    def load(self, buckets: Sequence[Future], rollout: WorkerGroup, version: int) -> Sequence[Future]:
        load, num_buckets = rollout.load_broadcast.submit, len(self._metadata)
        return [load(metadata, version, bucket, num_buckets) for bucket, metadata in enumerate(self._metadata)]

    def send(self, version: int) -> None:
        self.connect()
        for bucket, metadata in enumerate(self._metadata):
            self._rollout.load_broadcast.submit(metadata, version, bucket, len(self._metadata))
            self._actor.broadcast_weights.submit(bucket, *self._bucketing)


TRANSFERS: Mapping[Transport, Callable[[WorkerGroup, WorkerGroup, TransferConfig, str | None], WeightTransfer]] = {
    "object_store": ObjectStoreTransfer,
    "cuda_ipc": CudaIpcTransfer,
    "nccl": BroadcastTransfer,
    "gloo": BroadcastTransfer,
}


def check_cuda_ipc(config: RunConfig, planned: Plan, problem: tuple[str, str] | None) -> None:
    """Raises ConfigError if a weight sync needs CUDA IPC, but the machine does not support it.

    `problem`: result of `flowrl.controller.placement.inventory.find_ipc_problem`.
    """
    if problem is None:
        return
    reason, permission = problem
    transports = choose_transports(config, planned)
    for role, value in config:
        if not isinstance(value, RolloutConfig) or transports.get(role) != "cuda_ipc":
            continue
        fix = f"set {role}.transfer.via: object_store" + (f", or {permission}" if permission else "")
        raise ConfigError(
            f"{role}.transfer.via is {value.transfer.via}, which selects CUDA IPC on these devices, but {reason}: {fix}"
        )


def check_senders(config: RunConfig, planned: Plan) -> None:
    """Raises ConfigError if `transfer.senders: all` has no effect."""
    transports, actor = choose_transports(config, planned), models_of(config).get("actor")
    for role, value in config:
        if not isinstance(value, RolloutConfig) or value.transfer.senders == "one":
            continue
        transport, mesh, reason = transports.get(role), planned.roles["actor"].mesh, None
        if transport not in ("nccl", "gloo"):
            reason = f"the transport of its weights is {transport}, which has no senders"
        elif isinstance(actor, TrainedConfig) and actor.lora is not None:
            reason = "the first rank of the actor sends all weights, because it merges the LoRA adapter"
        elif mesh.tp > 1 or mesh.pp > 1:
            size = f"tp {mesh.tp}" if mesh.tp > 1 else f"pp {mesh.pp}"
            reason = f"the first rank of the actor sends all weights, because the actor has {size}"
        if reason is not None:
            raise ConfigError(f"{role}.transfer.senders is all, but {reason}: set {role}.transfer.senders: one")


@dataclass(frozen=True)
class WeightSnapshot:
    """Exported weights of one version, which replicas load later."""

    version: int
    _transfer: SnapshotTransfer
    _buckets: Sequence[Future]
    _check: WeightsCheck

    def is_ready(self) -> bool:
        """Returns whether the actor has exported the snapshot. A load before this would block the replica."""
        return all(bucket.done() for bucket in self._buckets)

    def futures(self) -> Sequence[Future]:
        return self._buckets

    def send(self, rollout: WorkerGroup) -> tuple[Sequence[Future], ComparedWeights | None]:
        """Submits the load calls to a rollout or replica. Returns the calls and the comparison, if enabled."""
        return self._transfer.load(self._buckets, rollout, self.version), self._check.compare(rollout)


class WeightSync:
    """Sends the actor's weights to the rollout in buckets of bounded size, without blocking the driver.

    Buckets move directly between worker processes; the driver only submits calls. Each process runs calls in the order
    of submission. Calls submitted before a sync therefore use the old weights, and later calls use the new weights.
    """

    def __init__(self, config: RunConfig, plan: Plan) -> None:
        self._role_configs, self._plan = dict(config), plan
        self._per_replica = has_per_replica_updates(config)
        self._transfers: dict[tuple[str, str], WeightTransfer] = {}

    def prepare(self, actor: WorkerGroup, rollout: WorkerGroup) -> None:
        """Requests the number of buckets in advance, so that `send` does not wait for this number."""
        if not has_weights_in_process(actor, rollout):
            self._transfer(actor, rollout)

    def send(self, actor: WorkerGroup, rollout: WorkerGroup, version: int) -> ComparedWeights | None:
        """Sends the actor's current weights as `version`. Returns the comparison of the weights, if enabled.

        If the rollout reads the actor's weights in its own process, sends only the version number.
        """
        if has_weights_in_process(actor, rollout):
            rollout.set_version.submit(version)
            return None
        transfer = self._transfer(actor, rollout)
        check = WeightsCheck(actor, rollout, version, self._rollout_config(rollout))
        transfer.send(version)
        return check.compare(rollout)

    # Replicas that generate until the new weights are ready use export and load as separate steps.

    def connect(self, actor: WorkerGroup, rollout: WorkerGroup) -> None:
        """Waits for the actor and the rollout to start and connects the transfer, so that `export` does not wait."""
        self._snapshot_transfer(actor, rollout).connect()

    def export(self, actor: WorkerGroup, rollout: WorkerGroup, version: int) -> WeightSnapshot:
        """Submits the export of the actor's current weights and returns a snapshot for the replicas. Does not wait."""
        transfer = self._snapshot_transfer(actor, rollout)
        check = WeightsCheck(actor, rollout, version, self._rollout_config(rollout))
        return WeightSnapshot(version, transfer, transfer.export(), check)

    def updates_all_replicas(self, actor: WorkerGroup, rollout: WorkerGroup) -> bool:
        return self._snapshot_transfer(actor, rollout).updates_all_replicas

    def _snapshot_transfer(self, actor: WorkerGroup, rollout: WorkerGroup) -> SnapshotTransfer:
        transfer = self._transfer(actor, rollout)
        assert isinstance(transfer, SnapshotTransfer), "check_schedule rejects async on the devices of the actor"
        return transfer

    def _rollout_config(self, rollout: WorkerGroup) -> RolloutConfig | None:
        """Returns the settings of the rollout role; None for a user-defined role."""
        config = self._role_configs.get(rollout.role)
        return config if isinstance(config, RolloutConfig) else None

    def _transfer(self, actor: WorkerGroup, rollout: WorkerGroup) -> WeightTransfer:
        roles = (actor.role, rollout.role)
        if roles not in self._transfers:
            config = self._rollout_config(rollout)
            if config is None:
                self._transfers[roles] = ObjectStoreTransfer(actor, rollout, TransferConfig())
            else:
                trained = self._role_configs.get(actor.role)
                lora = trained.lora if isinstance(trained, TrainedConfig) and trained.sends_adapter else None
                transport = choose_transport(
                    self._plan.roles[actor.role],
                    self._plan.roles[rollout.role],
                    self._plan.kind,
                    config,
                    per_replica=self._per_replica,
                    shares_model=actor.shares_model,
                    offloads=actor.is_evicted_by(rollout),
                    sends_adapter=lora is not None,
                )
                if transport == "adapter":
                    assert lora is not None, "the actor has an adapter"
                    self._transfers[roles] = AdapterTransfer(actor, rollout, config.transfer, lora)
                else:
                    self._transfers[roles] = TRANSFERS[transport](actor, rollout, config.transfer, config.sent_dtype)
        return self._transfers[roles]
