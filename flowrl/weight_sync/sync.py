"""New weights on their way from the actor to the rollout."""

from collections.abc import Sequence
from dataclasses import dataclass

from flowrl.config import RolloutConfig, RunConfig, TransferConfig
from flowrl.controller.dispatch import Future
from flowrl.controller.group import WorkerGroup
from flowrl.controller.placement.plan import PlacementError, Plan
from flowrl.weight_sync.transfer import Transport, takes_one_by_one, transport_of
from flowrl.weight_sync.verification import ComparedWeights, WeightsCheck


@dataclass(frozen=True)
class WeightSnapshot:
    """A policy's weights at one moment, on their way to whoever is to sample from them."""

    number: int
    _way: "_Way"
    _parts: Sequence[Future]
    _check: WeightsCheck

    def ready(self) -> bool:
        """Whether the actor has come so far. Until then a rollout that was given them would wait for it."""
        return all(part.done() for part in self._parts)

    def awaited(self) -> Sequence[Future]:
        """What `ready` looks at."""
        return self._parts

    def deliver(self, rollout: WorkerGroup) -> tuple[Sequence[Future], ComparedWeights | None]:
        """Gives them to a rollout, or to a replica of it, which answers with them all calls from now on. Does not wait.

        Returns: the calls that bring them, and what is compared, if anything is.
        """
        return self._way.deliver(self._parts, rollout, self.number), self._check.compare(rollout)


class WeightSync:
    """Hands a policy's weights to a rollout, in parts of bounded size, without waiting for anything.

    Parts go from process to process; the driver only says which. Calls of one process come in the order in which they
    are submitted, so every part is of the weights that the actor has after the calls before it, and the rollout
    answers the calls before it with the old weights, and those after it with the new ones.
    """

    def __init__(self, config: RunConfig, plan: Plan) -> None:
        self._roles, self._plan = dict(config), plan
        self._one_by_one = takes_one_by_one(config)
        self._ways: dict[tuple[str, str], _Way] = {}

    def prepare(self, actor: WorkerGroup, rollout: WorkerGroup) -> None:
        """Asks for what `send` needs to know, so that it need not wait."""
        if not rollout.is_colocated_with(actor):
            self._way(actor, rollout)

    def send(self, actor: WorkerGroup, rollout: WorkerGroup, version: int) -> ComparedWeights | None:
        """Gives the rollout the actor's present weights, as those of a version; what is compared of them, if any is.

        In the same processes the rollout samples from the actor's own weights, and only their number changes.
        """
        if rollout.is_colocated_with(actor):
            rollout.set_version.submit(version)
            return None
        way = self._way(actor, rollout)
        found = self._roles.get(rollout.role)
        check = WeightsCheck(actor, rollout, version, found if isinstance(found, RolloutConfig) else None)
        way.send(version)
        return check.compare(rollout)

    # In two halves, for rollouts that go on working until new weights are there.

    def open(self, actor: WorkerGroup, rollout: WorkerGroup) -> None:
        """Does what `export` would wait for. Waits for the constructors of both."""
        self._way(actor, rollout).open()

    def export(self, actor: WorkerGroup, rollout: WorkerGroup, version: int) -> WeightSnapshot:
        """Has the actor give away its present weights, for replicas to take when they can. Does not wait."""
        way, found = self._way(actor, rollout), self._roles.get(rollout.role)
        check = WeightsCheck(actor, rollout, version, found if isinstance(found, RolloutConfig) else None)
        return WeightSnapshot(version, way, way.export(), check)

    def goes_to_all(self, actor: WorkerGroup, rollout: WorkerGroup) -> bool:
        """Whether all replicas must take a version together, as one call of the whole group."""
        return self._way(actor, rollout).to_all

    def _way(self, actor: WorkerGroup, rollout: WorkerGroup) -> "_Way":
        roles = (actor.role, rollout.role)
        if roles not in self._ways:
            found = self._roles.get(rollout.role)
            if isinstance(found, RolloutConfig):
                places = self._plan.roles
                transport = transport_of(
                    places[actor.role], places[rollout.role], self._plan.kind, found, one_by_one=self._one_by_one
                )
                way = _WAYS[_where_it_lies(transport, actor, rollout, found)]
                self._ways[roles] = way(actor, rollout, found.transfer, found.sent_dtype)
            else:  # a role of the user's own
                self._ways[roles] = _Way(actor, rollout, TransferConfig(), None)
        return self._ways[roles]


def _where_it_lies(transport: Transport, actor: WorkerGroup, rollout: WorkerGroup, config: RolloutConfig) -> Transport:
    """The way, where the actor's processes stay on a GPU that the rollout comes back to; through the host else."""
    if transport != "cuda_ipc" or not actor.is_evicted_by(rollout):
        return transport
    if config.transfer.via == "cuda_ipc":
        raise PlacementError(
            f"{rollout.role}.transfer.via is cuda_ipc, but the processes of {actor.role} leave their GPUs while "
            f"{rollout.role} is there (engine.offload: idle, of any role in them): set "
            f"{rollout.role}.transfer.via: auto"
        )
    return "object_store"


class _Way:
    """Through the object store: once into each node's memory, from where it is read without a copy."""

    to_all = False

    def __init__(self, actor: WorkerGroup, rollout: WorkerGroup, config: TransferConfig, dtype: str | None) -> None:
        self._actor, self._rollout = actor, rollout
        self._how = (config.chunk_mb, dtype)
        self._count: Future = actor.num_chunks.submit(*self._how)

    def open(self) -> None:
        self._count.get()

    def export(self) -> Sequence[Future]:
        return [self._actor.weights.submit(chunk, *self._how) for chunk in range(self._count.get())]

    def deliver(self, parts: Sequence[Future], rollout: WorkerGroup, version: int) -> Sequence[Future]:
        load = rollout.load_weights.submit
        return [load(weights, version, chunk, len(parts)) for chunk, weights in enumerate(parts)]

    def send(self, version: int) -> None:
        # All leave before the first arrives: a device that the two have in turns changes hands once.
        self.deliver(self.export(), self._rollout, version)


class _SharedWay(_Way):
    """In the memory of the GPUs that both are on, a part after the other has been read."""

    def export(self) -> Sequence[Future]:
        raise AssertionError("a rollout on the actor's GPUs cannot work while that trains")

    def send(self, version: int) -> None:
        count, read = self._count.get(), None
        for chunk in range(count):
            parts = self._actor.share_weights.submit(chunk, *self._how, after=read)
            read = self._rollout.load_shared.submit(parts, version, chunk, count)
        self._actor.release_weights.submit(after=read)


class _LinkedWay(_Way):
    """From the actor's first GPU to all of the rollout's, which receive a part while it is sent."""

    to_all = True

    def __init__(self, actor: WorkerGroup, rollout: WorkerGroup, config: TransferConfig, dtype: str | None) -> None:
        super().__init__(actor, rollout, config, dtype)
        self._chunk_bytes = int(config.chunk_mb * 1e6)
        self._described: Sequence[Future] = ()

    def open(self) -> None:
        if not self._described:
            self._join(self._count.get())

    def export(self) -> Sequence[Future]:
        self.open()
        # The actor answers this when it comes to sending. It sends when all receive.
        reached = self._actor.num_chunks.submit(*self._how)
        for chunk in range(len(self._described)):
            self._actor.send_weights.submit(chunk, *self._how)
        return [reached]

    def deliver(self, parts: Sequence[Future], rollout: WorkerGroup, version: int) -> Sequence[Future]:
        load, count = rollout.load_sent.submit, len(self._described)
        return [load(described, version, chunk, count) for chunk, described in enumerate(self._described)]

    def send(self, version: int) -> None:
        self.open()
        for chunk, described in enumerate(self._described):
            self._rollout.load_sent.submit(described, version, chunk, len(self._described))
            self._actor.send_weights.submit(chunk, *self._how)

    def _join(self, count: int) -> None:
        """Once, before the first weights are sent."""
        host, port = self._actor.open_link()
        leads = [1 + len(slot.led) for slot in self._rollout.slots]
        link = {"host": host, "port": port, "world_size": 1 + sum(leads), "buffer_bytes": self._chunk_bytes}
        self._rollout.join_link.submit(link)
        self._actor.join_link.submit(link)
        self._described = [self._actor.describe_weights.submit(chunk, *self._how) for chunk in range(count)]


_WAYS: dict[Transport, type[_Way]] = {"object_store": _Way, "cuda_ipc": _SharedWay, "nccl": _LinkedWay}
