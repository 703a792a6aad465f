"""WorkerGroup: the driver's handle of one role's ranks, and the one path through which every call passes."""

import inspect
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from flowrl.controller.backends.base import Backend
from flowrl.controller.calls.call_record import CallRecord
from flowrl.controller.calls.calls import Calls, Tracked, records_of
from flowrl.controller.calls.wire import References, Request, lower
from flowrl.controller.dispatch import DispatchMode, Part, dispatch_mode, dp_rank, is_leader, leaders, order_of
from flowrl.controller.errors import ContractError
from flowrl.controller.future import Future
from flowrl.controller.placement.device_ownership import DeviceEviction
from flowrl.controller.placement.plan import Mesh, Slot
from flowrl.controller.register import Contract, Dispatch, registered_methods
from flowrl.controller.worker import Worker
from flowrl.data.batch.batch import Batch, TaskRunner
from flowrl.data.batch.block import Block, Ref, Shard
from flowrl.data.batch.layout import Rows

# Submissions of one process to many ranks must not interleave: collectives meet in the same order everywhere.
submission = threading.RLock()


class RemoteMethod:
    """A registered method of a group. Called, it waits if its contract says so; `submit` never waits."""

    def __init__(self, group: "WorkerGroup", name: str, function: Callable, contract: Contract) -> None:
        self._group, self._contract = group, contract
        self.__name__ = name
        self.__doc__ = function.__doc__
        signature = inspect.signature(function)
        self.__signature__ = signature.replace(parameters=list(signature.parameters.values())[1:])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # Any: the worker's own types
        result = self.submit(*args, **kwargs)
        if not self._contract.blocking:
            return result
        if isinstance(result, Future):
            return result.get()
        self._group.settle_batch(result)
        return result

    def submit(self, *args: Any, **kwargs: Any) -> Any:  # Any: a Batch or a Future
        """Starts the call and returns its `Batch` or `Future` at once. Wrong arguments raise before a thing is sent."""
        try:
            bound = self.__signature__.bind(*args, **kwargs)
        except TypeError as error:
            raise ContractError(
                f"{self._group.role}.{self.__name__}{self.__signature__} was called wrongly: {error}"
            ) from None
        return self._group.submit(self.__name__, self._contract, _by_name(bound))


class WorkerGroup:
    """All ranks of one role, with the worker class's registered methods. Made by `Cluster.group`.

    A `replica` is a group too, with some of the role's `slots`, and the mesh of these alone.
    """

    def __init__(
        self,
        role: str,
        cls: type[Worker],
        slots: Sequence[Slot],
        mesh: Mesh,
        backend: Backend,
        calls: Calls,
        handover: DeviceEviction,
        kind: str,
        ranks: Sequence[int] | None = None,
    ) -> None:
        self.role, self.cls, self.mesh = role, cls, mesh
        self.slots = tuple(slots)
        self.tasks: TaskRunner | None = None
        self._ranks = range(len(slots)) if ranks is None else tuple(ranks)
        self._replicas: dict[int, WorkerGroup] = {}
        self._backend, self._calls, self._handover, self._kind = backend, calls, handover, kind
        for name, (function, contract) in registered_methods(cls).items():
            dispatch_mode(contract.mode)
            if name in dir(type(self)) or name in self.__dict__:
                raise ContractError(
                    f"{cls.__name__}.{name} has the name of something every group has; rename the method"
                )
            setattr(self, name, RemoteMethod(self, name, function, contract))

    def __getattr__(self, name: str) -> RemoteMethod:
        cls = self.__dict__.get("cls")
        if cls is not None and hasattr(cls, name):
            raise AttributeError(
                f"{cls.__name__}.{name} is not registered: add @register(Dispatch....) above its def to call it"
            )
        raise AttributeError(
            f"group {self.__dict__.get('role')!r} of {cls.__name__ if cls else '?'} has no method {name!r}"
        )

    @property
    def world_size(self) -> int:
        return len(self.slots)

    @property
    def pool(self) -> str:
        """The name of the pool that the group's first rank is in."""
        return self.slots[0].pool

    def replica(self, rank: int) -> "WorkerGroup":
        """A view of one data-parallel replica, whose methods are called as the group's are, and run on its ranks alone.

        Requests, errors and traces have the ranks of the role. There are `mesh.dp` replicas, counted from 0; the
        inline backend makes one.

        Raises:
            ContractError: the ranks may need each other, or there is no such replica.
        """
        if not self.cls.replicated:
            raise ContractError(
                f"{self.role} has no replicas to call one by one: {self.cls.__name__} is not `replicated`, so its "
                f"ranks may wait for each other, and one that is called alone would wait for ever; call the group"
            )
        if not 0 <= rank < self.mesh.dp:
            raise ContractError(f"{self.role} has no replica {rank}; it has {self.mesh.dp}, counted from 0")
        if rank not in self._replicas:
            self._replicas[rank] = self._replica(rank)
        return self._replicas[rank]

    def _replica(self, rank: int) -> "WorkerGroup":
        own = [place for place in range(self.world_size) if dp_rank(self.mesh, place) == rank]
        view = WorkerGroup(
            self.role,
            self.cls,
            [self.slots[place] for place in own],
            replace(self.mesh, dp=1),
            self._backend,
            self._calls,
            self._handover,
            self._kind,
            [self._ranks[place] for place in own],
        )
        view.tasks = self.tasks
        return view

    def device_name(self, slot: Slot) -> str:
        """What traces call a slot's device; a CPU slot is a process, so it has a number too."""
        return slot.pool if slot.device < 0 else f"{self._kind}:{slot.device}"

    def lives_in(self, other: "WorkerGroup") -> bool:
        """Whether every rank of this group is in a process that has a rank of the other."""
        return set(self.slots) <= set(other.slots)

    def lives_with(self, other: "WorkerGroup") -> bool:
        """Whether the two have the very same processes."""
        return self.lives_in(other) and other.lives_in(self)

    def offloads_for(self, other: "WorkerGroup") -> bool:
        """Whether it leaves a device when the other group is called: what it has there is then out of reach."""
        return self._handover.ledger.leave(self.slots, other.slots)

    def __repr__(self) -> str:
        return f"WorkerGroup({self.role}: {self.world_size} x {self.cls.__name__} on {self.pool})"

    def run(
        self, fn: Callable, /, *args: Any, rank_zero: bool = False, **kwargs: Any
    ) -> Any:  # Any: the function's own
        """Runs `fn(worker, *args, **kwargs)` on every rank and returns their results in a list; waits for them.

        For a look at a worker or a change to it that needs no method of its own. Batches arrive as tables, futures as
        their values, as in any call; the function itself is pickled.

        Args:
            rank_zero: run it on rank 0 alone, and return its result.
        Raises:
            ContractError: the arguments do not fit the function.
            WorkerError: it raised.
        """
        try:
            bound = inspect.signature(fn).bind(None, *args, **kwargs)
        except TypeError as error:
            name = getattr(fn, "__name__", repr(fn))
            raise ContractError(f"{self.role}.run: {name}(worker, ...) was called wrongly: {error}") from None
        worker, *others = bound.signature.parameters.values()
        if {p.kind for p in others} & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY}:
            raise ContractError(f"{self.role}.run: arguments travel by name: give each parameter of the function one")
        named = _by_name(bound)
        del named[worker.name]
        contract = Contract(Dispatch.RANK_ZERO if rank_zero else Dispatch.ONE_TO_ALL)
        result = self.submit(
            "run_function", contract, {"fn": fn} | {f"of_{name}": value for name, value in named.items()}
        )
        assert isinstance(result, Future)
        return result.get()

    def submit(self, method: str, contract: Contract, arguments: Mapping[str, Any]) -> "Batch | Future":
        """Sends one call to its ranks: checked, scattered, lowered, submitted and recorded here and nowhere else."""
        self._calls.check(self.pool)
        mode = dispatch_mode(contract.mode)
        try:
            per_rank = mode.scatter(self.mesh, contract, dict(arguments))
        except ContractError as error:
            raise ContractError(f"{self.role}.{method}: {error}") from None
        if len(per_rank) != self.world_size:
            raise ContractError(
                f"dispatch mode {mode.name} made {len(per_rank)} parts for the {self.world_size} ranks of {self.role}"
            )
        with submission:
            # Scattering may have waited, and its processes may have been ended meanwhile.
            self._calls.check(self.pool)
            called = [place for place, part in enumerate(per_rank) if part is not None]
            rooms = {} if contract.memory == () else self._rooms(called)
            results = {
                place: self._send(place, method, contract, mode, part, rooms.get(place, ()))
                for place in called
                if (part := per_rank[place]) is not None
            }
        if mode.gather is None:
            return self._as_batch(contract, [per_rank[place] for place in leaders(self.mesh)], results)
        records = [record for _, record in results.values()]
        refs = [value for value, _ in results.values()]

        def fetch(refs: Sequence[Ref], timeout_s: float | None) -> list[Any]:
            self._calls.settle(records, timeout_s)
            return self._calls.fetch(refs)

        return Future(refs, mode.gather, self.mesh, fetch)

    def _rooms(self, places: Sequence[int]) -> dict[int, list[Tracked]]:
        """Has other processes leave the devices of slots; what each must wait for."""
        rooms = {place: going for place in places if (going := self._handover.before(self.slots[place]))}
        if not rooms or not self.cls.collective:
            return rooms
        # A rank whose own device is free must not enter a collective alone when a peer's is not given up.
        every = [room for going in rooms.values() for room in going]
        return dict.fromkeys(places, every)

    def _send(
        self,
        place: int,
        method: str,
        contract: Contract,
        mode: DispatchMode,
        arguments: Mapping[str, Any],
        rooms: Sequence[Tracked],
    ) -> tuple[Tracked, CallRecord]:
        references = References(self._calls.share, self.cls.collective)
        returns_batch = mode.gather is None
        answers = not returns_batch or is_leader(self.mesh, place)
        rank, slot = self._ranks[place], self.slots[place]
        submitted_ns, number = time.time_ns(), self._calls.next_number()
        lowered = lower(dict(arguments), references)
        request = Request(number, self.role, rank, slot.node, method, lowered, contract, returns_batch, answers)
        awaited = [*references.refs, *(room.carrier for room in rooms)]
        value, report = self._backend.call(slot, request, awaited, self._calls.revivals.of(slot))
        self._calls.revivals.called(slot, request, references.refs)
        record = self._calls.add(
            report,
            self.role,
            rank,
            method,
            slot,
            self.device_name(slot),
            number=number,
            submitted_ns=submitted_ns,
            inputs=[*references.sources, *rooms],
            contract=contract,
        )
        return Tracked(value, record, self._calls), record

    def _as_batch(
        self,
        contract: Contract,
        parts: Sequence[Mapping[str, Any] | None],
        results: Mapping[int, tuple[Tracked, CallRecord]],
    ) -> Batch:
        """The leaders' results as one batch, its rows in the order of the batch that went in, if one did."""
        rows = [_rows_taken(part) for part in parts if part is not None]
        shards = []
        for place, taken in zip(leaders(self.mesh), rows, strict=True):
            value, record = results[place]
            description = Tracked(record.report_ref, record, self._calls, describes=True)
            shards.append(Shard(value, description, _rows_after(contract, taken)))
        block = Block(shards)
        columns = contract.writes if contract.writes is not None else tuple(shards[0].description.get().columns)
        order = order_of(rows) if contract.rows == "same" else None
        return Batch.of_block(block, columns, order, self.tasks)

    def settle_batch(self, batch: Batch, timeout_s: float | None = None) -> None:
        """Waits until a batch that this group made is computed. Raises what the call raised."""
        self._calls.settle(records_of(batch), timeout_s)


def _by_name(bound: inspect.BoundArguments) -> dict[str, Any]:
    """Every argument under a name of its own, those that go into `**others` too."""
    arguments = dict(bound.arguments)
    for parameter in bound.signature.parameters.values():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            arguments |= arguments.pop(parameter.name, {})
    return arguments


def _rows_taken(arguments: Mapping[str, Any]) -> Rows:
    return next((argument.rows for argument in arguments.values() if isinstance(argument, Part)), (0, 0))


def _rows_after(contract: Contract, taken: Rows) -> int | None:
    if contract.rows == "unknown":
        return None
    count = taken[1] - taken[0] if isinstance(taken, tuple) else len(taken)
    return count if contract.rows == "same" else count * contract.rows
