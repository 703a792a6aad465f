"""Sends the actor's weights to the rollout without blocking the driver."""

from collections.abc import Sequence
from dataclasses import dataclass

from flowrl.config import RolloutConfig, RunConfig
from flowrl.controller.dispatch import Future
from flowrl.controller.group import WorkerGroup
from flowrl.controller.placement.plan import Plan
from flowrl.weight_sync.transfer import (
    TRANSFERS,
    ObjectStoreTransfer,
    WeightTransfer,
    choose_transport,
    has_per_replica_updates,
    resolve_transport,
)
from flowrl.weight_sync.verification import ComparedWeights, WeightsCheck


@dataclass(frozen=True)
class WeightSnapshot:
    """Exported weights of one version, which replicas load later."""

    version: int
    _transfer: WeightTransfer
    _buckets: Sequence[Future]
    _check: WeightsCheck

    def is_ready(self) -> bool:
        """Returns whether the actor has exported the snapshot; loading it earlier blocks the replica."""
        return all(bucket.done() for bucket in self._buckets)

    def futures(self) -> Sequence[Future]:
        """Returns the futures that `is_ready` polls."""
        return self._buckets

    def send(self, rollout: WorkerGroup) -> tuple[Sequence[Future], ComparedWeights | None]:
        """Submits the load calls to a rollout or to one replica. Does not wait.

        Returns: the load calls, and the comparison with the actor's weights (None if disabled).
        """
        return self._transfer.load(self._buckets, rollout, self.version), self._check.compare(rollout)


class WeightSync:
    """Sends the actor's weights to the rollout in chunks of bounded size, without blocking the driver.

    Chunks move directly between worker processes; the driver only submits calls. Each process runs its calls in
    submission order. Calls submitted before a sync therefore use the old weights, and calls submitted after it the new
    weights.
    """

    def __init__(self, config: RunConfig, plan: Plan) -> None:
        self._role_configs, self._plan = dict(config), plan
        self._per_replica = has_per_replica_updates(config)
        self._transfers: dict[tuple[str, str], WeightTransfer] = {}

    def prepare(self, actor: WorkerGroup, rollout: WorkerGroup) -> None:
        """Requests the chunk count in advance, so that `send` does not wait for it."""
        if not rollout.is_colocated_with(actor):
            self._transfer(actor, rollout)

    def send(self, actor: WorkerGroup, rollout: WorkerGroup, version: int) -> ComparedWeights | None:
        """Sends the actor's current weights as `version`; returns their comparison (None if disabled).

        A rollout in the actor's processes shares its weights, so only the version number is set.
        """
        if rollout.is_colocated_with(actor):
            rollout.set_version.submit(version)
            return None
        transfer = self._transfer(actor, rollout)
        check = WeightsCheck(actor, rollout, version, self._rollout_config(rollout))
        transfer.send(version)
        return check.compare(rollout)

    # Export and load as separate steps, for replicas that keep generating until the new weights are ready.

    def connect(self, actor: WorkerGroup, rollout: WorkerGroup) -> None:
        """Waits for both constructors and connects the transfer, so that `export` does not wait."""
        self._transfer(actor, rollout).connect()

    def export(self, actor: WorkerGroup, rollout: WorkerGroup, version: int) -> WeightSnapshot:
        """Submits the export of the actor's current weights; replicas load the snapshot later. Does not wait."""
        transfer = self._transfer(actor, rollout)
        check = WeightsCheck(actor, rollout, version, self._rollout_config(rollout))
        return WeightSnapshot(version, transfer, transfer.export(), check)

    def updates_all_replicas(self, actor: WorkerGroup, rollout: WorkerGroup) -> bool:
        """Returns whether all replicas must load a version together, in one call of the whole group."""
        return self._transfer(actor, rollout).updates_all_replicas

    def _rollout_config(self, rollout: WorkerGroup) -> RolloutConfig | None:
        """Returns the role's settings; None for a user-defined role."""
        config = self._role_configs.get(rollout.role)
        return config if isinstance(config, RolloutConfig) else None

    def _transfer(self, actor: WorkerGroup, rollout: WorkerGroup) -> WeightTransfer:
        roles = (actor.role, rollout.role)
        if roles not in self._transfers:
            config = self._rollout_config(rollout)
            if config is None:
                self._transfers[roles] = ObjectStoreTransfer(actor, rollout)
            else:
                transport = choose_transport(
                    self._plan.roles[actor.role],
                    self._plan.roles[rollout.role],
                    self._plan.kind,
                    config,
                    per_replica=self._per_replica,
                )
                cls = TRANSFERS[resolve_transport(transport, actor, rollout, config)]
                self._transfers[roles] = cls(actor, rollout, config.transfer, config.sent_dtype)
        return self._transfers[roles]
