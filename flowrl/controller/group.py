"""WorkerGroup: calls the workers of a role from the driver, after evictions of other processes from shared devices."""

import importlib
import inspect
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar

from flowrl.controller.backends.base import Backend
from flowrl.controller.calls.calls import PING_TIMEOUT_S, CallRef, Calls, find_records
from flowrl.controller.calls.failures import PING
from flowrl.controller.dispatch import (
    BatchSlice,
    DispatchMode,
    Future,
    find_row_order,
    get_dispatch_mode,
    get_dp_rank,
    get_leader_ranks,
    is_leader,
)
from flowrl.controller.errors import ContractError
from flowrl.controller.placement.plan import Mesh, Slot
from flowrl.controller.wire import References, Request, lower_arguments
from flowrl.controller.worker import Contract, Dispatch, Worker, get_registered_methods, register
from flowrl.data.batch.batch import Batch, TaskRunner
from flowrl.data.batch.block import Block, Ref, Shard

if TYPE_CHECKING:
    from tensordict import TensorDict


class DeviceOwnership:
    """Tracks which processes own the memory of shared devices, and selects the processes to evict before a call.

    A deadlock is impossible, because a call waits only for its evictions, and an eviction only for earlier calls.
    """

    def __init__(self, slots: Iterable[Slot]) -> None:
        users: defaultdict[tuple[int, int], list[Slot]] = defaultdict(list)
        for slot in slots:
            for device in slot.node_devices:
                users[device].append(slot)
        self._sharers: dict[Slot, tuple[Slot, ...]] = {}
        """Process -> other processes on its devices. Contains only processes with shared devices."""
        for shared in users.values():
            for slot in shared if len(shared) > 1 else ():
                others = (other for other in shared if other != slot)
                self._sharers[slot] = tuple(dict.fromkeys((*self._sharers.get(slot, ()), *others)))
        self._can_offload: set[Slot] = set()
        self._owners: set[Slot] = set()

    def is_shared(self, slot: Slot) -> bool:
        return slot in self._sharers

    def sharers(self, slot: Slot) -> tuple[Slot, ...]:
        """Returns the other processes on the devices of a process."""
        return self._sharers.get(slot, ())

    def claim_for_worker(self, slot: Slot, can_offload: bool) -> list[Slot]:
        """Claims the devices for a new worker, like `claim`. With `can_offload`, later calls can evict the process."""
        if can_offload and slot in self._sharers:
            self._can_offload.add(slot)
        return self.claim(slot)

    def claim(self, slot: Slot) -> list[Slot]:
        """Makes a process the owner of its devices, and returns the previous owners that must be evicted.

        An owner is evicted if the owner or `slot` can offload. The eviction of an owner that cannot offload only waits
        for its calls.
        """
        if slot not in self._sharers:
            return []
        evicted = [
            other
            for other in self._sharers[slot]
            if other in self._owners and not self._can_offload.isdisjoint((slot, other))
        ]
        self._owners.difference_update(evicted)
        self._owners.add(slot)
        return evicted

    def join(self, slot: Slot) -> None:
        """Adds a process to the owners of its devices. Present owners remain."""
        if slot in self._sharers:
            self._owners.add(slot)

    def forget(self, slots: Sequence[Slot]) -> None:
        self._owners.difference_update(slots)
        self._can_offload.difference_update(slots)

    def is_evicted_by(self, slots: Iterable[Slot], others: Iterable[Slot]) -> bool:
        """Returns whether a call to a process in `others` evicts a process in `slots`."""
        callers = set(others)
        return any(not callers.isdisjoint(self._sharers[slot]) for slot in self._can_offload.intersection(slots))


class DeviceEviction:
    """Sends evictions to processes before other processes use their devices."""

    def __init__(self, ledger: DeviceOwnership, backend: Backend, calls: Calls, kind: str) -> None:
        self.ledger = ledger
        self._backend, self._calls, self._kind = backend, calls, kind
        self._pending: dict[Slot, tuple[CallRef, set[Slot]]] = {}
        """Evicted process -> (eviction, processes on the same devices that have not waited for the eviction yet). A
        process with several devices is evicted once, for a call on any of these devices.
        """

    def before(self, slot: Slot) -> list[CallRef]:
        """Evicts other processes before a call to a process. Returns the evictions that the call must wait for."""
        return self._evict_all(slot, self.ledger.claim(slot))

    def before_first(self, slot: Slot, *, can_offload: bool) -> list[CallRef]:
        """Evicts other processes before the construction of a worker. Returns the evictions to wait for."""
        return self._evict_all(slot, self.ledger.claim_for_worker(slot, can_offload))

    def before_joining(self, slot: Slot) -> list[CallRef]:
        """Adds a process to the owners of its devices before a call, without evictions. Returns earlier evictions that
        the call must wait for.
        """
        self.ledger.join(slot)
        return self._evict_all(slot, ())

    def forget(self, slots: Sequence[Slot]) -> None:
        """Forgets processes that have ended."""
        self.ledger.forget(slots)
        for slot in slots:
            self._pending.pop(slot, None)

    def _evict_all(self, slot: Slot, evicted: Iterable[Slot]) -> list[CallRef]:
        """Evicts processes before a call to `slot`. Returns these and earlier evictions that the call must wait for."""
        self._pending.pop(slot, None)
        for other in evicted:
            if self._calls.failures.get_error(other.pool) is None:  # a failed pool has no processes left
                self._pending[other] = self._evict(other), set(self.ledger.sharers(other))
        awaited = []
        for other, (eviction, waiting) in list(self._pending.items()):
            if slot in waiting:
                awaited.append(eviction)
                waiting.remove(slot)
            if not waiting:
                del self._pending[other]
        return awaited

    def _evict(self, slot: Slot) -> CallRef:
        role, rank = self._calls.recovery.get_first_role(slot)
        replaceable = self._calls.recovery.get_plan(slot) is not None
        report = self._backend.evict(slot, role, rank, replaceable=replaceable)
        record = self._calls.add(report, role, rank, "evict", slot, f"{self._kind}:{slot.device}")
        return CallRef(report, record, self._calls)


Parameters = ParamSpec("Parameters")
Result = TypeVar("Result", covariant=True)
Submitted = TypeVar("Submitted", covariant=True)
Value = TypeVar("Value")


class RemoteMethod(Generic[Parameters, Result, Submitted]):
    """A registered method of a group. A call waits for the result if the method is `blocking`; `submit` never waits."""

    def __init__(self, group: "WorkerGroup", name: str, function: Callable, contract: Contract) -> None:
        self._group, self._contract = group, contract
        self.__name__ = name
        self.__doc__ = function.__doc__
        signature = inspect.signature(function)
        self.__signature__ = signature.replace(parameters=list(signature.parameters.values())[1:])

    def __call__(self, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        result: Any = self.submit(*args, **kwargs)  # Any: a Batch or a Future
        if not self._contract.blocking:
            return result
        if isinstance(result, Future):
            return result.get()
        self._group.wait_for_batch(result)
        return result

    def submit(self, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Submitted:
        """Submits a call and returns its `Batch` or `Future` without waiting for the result.

        Raises `ContractError` if the arguments do not fit the signature of the method.
        """
        try:
            bound = self.__signature__.bind(*args, **kwargs)
        except TypeError as error:
            raise ContractError(f"{self._group.role}.{self.__name__}{self.__signature__}: {error}") from None
        self._group.run_before_call(self.__name__)
        arguments = _name_arguments(bound)
        contract = self._group.resolve(self.__name__, self._contract, arguments)
        result: Any = self._group.submit(self.__name__, contract, arguments)
        return result


class WorkerGroup:
    """The workers of a role. Its attributes are the registered methods of the worker class.

    `Cluster.group` creates groups.
    """

    def __init__(
        self,
        role: str,
        cls: type[Worker],
        slots: Sequence[Slot],
        mesh: Mesh,
        backend: Backend,
        calls: Calls,
        eviction: DeviceEviction,
        kind: str,
        ranks: Sequence[int] | None = None,
        constructor: tuple[tuple, Mapping[str, Any]] = ((), {}),
    ) -> None:
        self.role, self.cls, self.mesh = role, cls, mesh
        self._constructor = constructor
        """Positional and keyword arguments with which the workers were constructed."""
        self.slots = tuple(slots)
        self.tasks: TaskRunner | None = None
        self._ranks = range(len(slots)) if ranks is None else tuple(ranks)
        """Ranks within the role. The ranks of a replica need not start at 0."""
        self._replicas: dict[int, WorkerGroup] = {}
        self._before_call: dict[str, Callable[[], None]] = {}
        """Method -> function that runs before each call of the method. Groups of replicas share this dictionary."""
        self._backend, self._calls, self._eviction, self._kind = backend, calls, eviction, kind
        for name, (function, contract) in get_registered_methods(cls).items():
            if name in dir(type(self)) or name in self.__dict__:
                raise ContractError(
                    f"{cls.__name__}.{name} has the name of an attribute of WorkerGroup; rename the method"
                )
            setattr(self, name, RemoteMethod(self, name, function, contract))

    def __getattr__(self, name: str) -> RemoteMethod[..., Any, Any]:
        cls = self.__dict__.get("cls")
        if cls is not None and hasattr(cls, name):
            raise AttributeError(
                f"{cls.__name__}.{name} is not registered; decorate it with @register(Dispatch....) to call it"
            )
        raise AttributeError(
            f"group {self.__dict__.get('role')!r} of {cls.__name__ if cls else '?'} has no method {name!r}"
        )

    @property
    def world_size(self) -> int:
        return len(self.slots)

    @property
    def pool(self) -> str:
        return self.slots[0].pool

    def replica(self, rank: int) -> "WorkerGroup":
        """Returns a group with the ranks of one data-parallel replica. `rank` is the data-parallel rank.

        Errors and traces contain ranks within the role, not within the replica. The inline backend has one replica.

        Raises:
            ContractError: the worker class is not `replicated`, or the replica does not exist.
        """
        if not self.cls.replicated:
            raise ContractError(
                f"{self.role} has no replicas: {self.cls.__name__} is not `replicated`, and its ranks may wait for "
                f"each other; call the group"
            )
        if not 0 <= rank < self.mesh.dp:
            raise ContractError(f"{self.role} has no replica {rank}; it has {self.mesh.dp}, counted from 0")
        if rank not in self._replicas:
            indices = [index for index in range(self.world_size) if get_dp_rank(self.mesh, index) == rank]
            self._replicas[rank] = WorkerGroup(
                self.role,
                self.cls,
                [self.slots[index] for index in indices],
                replace(self.mesh, dp=1),
                self._backend,
                self._calls,
                self._eviction,
                self._kind,
                [self._ranks[index] for index in indices],
                self._constructor,
            )
            self._replicas[rank].tasks = self.tasks
            self._replicas[rank]._before_call = self._before_call
        return self._replicas[rank]

    def set_before_call(self, method: str, function: Callable[[], None]) -> Callable[[], None]:
        """Sets a function that the driver runs before each call of a method, also of a replica. `function` may block.

        Returns: a function that removes `function`.
        """
        self._before_call[method] = function

        def remove() -> None:
            self._before_call.pop(method, None)

        return remove

    def run_before_call(self, method: str) -> None:
        if (function := self._before_call.get(method)) is not None:
            function()

    def format_device(self, slot: Slot) -> str:
        """Returns the name of a slot's device in traces, such as `cuda:1`."""
        return slot.pool if slot.device < 0 else f"{self._kind}:{slot.device}"

    def is_colocated_in(self, other: "WorkerGroup") -> bool:
        """Returns whether the other group uses all processes of this group."""
        return set(self.slots) <= set(other.slots)

    def is_colocated_with(self, other: "WorkerGroup") -> bool:
        """Returns whether both groups use the same processes."""
        return self.is_colocated_in(other) and other.is_colocated_in(self)

    @property
    def shares_model(self) -> bool:
        """Whether other roles in the processes of this group can use the group's model. False with pipeline stages,
        because no rank has all layers.
        """
        args, kwargs = self._constructor
        return self.mesh.pp == 1 and self.cls.shares_model(*args, **kwargs)

    def is_evicted_by(self, other: "WorkerGroup") -> bool:
        """Returns whether calls of the other group evict this group's processes from a shared device."""
        return self._eviction.ledger.is_evicted_by(self.slots, other.slots)

    def __repr__(self) -> str:
        return f"WorkerGroup({self.role}: {self.world_size} x {self.cls.__name__} on {self.pool})"

    def run(
        self, fn: Callable, /, *args: Any, rank_zero: bool = False, **kwargs: Any
    ) -> Any:  # Any: the function's own
        """Runs `fn(worker, *args, **kwargs)` on every rank, waits, and returns the list of results.

        The function needs no registration, but must be picklable. It receives batches as TensorDicts and futures as
        their values. With `rank_zero`, runs the function only on rank 0 and returns its result.

        Raises:
            ContractError: the arguments do not fit the signature of the function.
            WorkerError: the function raised an exception.
        """
        try:
            bound = inspect.signature(fn).bind(None, *args, **kwargs)
        except TypeError as error:
            name = getattr(fn, "__name__", repr(fn))
            raise ContractError(f"{self.role}.run: {name}(worker, ...): {error}") from None
        worker, *others = bound.signature.parameters.values()
        if {p.kind for p in others} & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY}:
            raise ContractError(f"{self.role}.run: arguments are sent by name; name each parameter of the function")
        named = _name_arguments(bound)
        del named[worker.name]
        contract = Contract(Dispatch.RANK_ZERO if rank_zero else Dispatch.ONE_TO_ALL)
        result = self.submit(
            "run_function", contract, {"fn": fn} | {f"of_{name}": value for name, value in named.items()}
        )
        assert isinstance(result, Future)
        return result.get()

    def keep_alive(self) -> None:
        """Starts to ping each process about once per second while the driver waits.

        Processes that serve other processes may have no call in flight. Without pings, the driver would notice the end
        of such a process only in its next call. With pings, the driver replaces lost processes and processes that a
        signal has stopped. Does nothing with the inline backend.
        """
        if not self._backend.is_remote:
            return
        timeout_s = PING_TIMEOUT_S if self._calls.timeout_s is None else min(PING_TIMEOUT_S, self._calls.timeout_s / 2)
        contract = Contract(Dispatch.ONE_TO_ALL, blocking=False, memory=(), timeout_s=timeout_s)
        mode = get_dispatch_mode(contract.mode)
        for index, slot in enumerate(self.slots):
            self._calls.add_ping(slot, lambda index=index: self._send(index, PING, contract, mode, {}, ()).record)

    def resolve(self, method: str, contract: Contract, arguments: Mapping[str, Any]) -> Contract:
        """Returns the contract of a call: the method's contract, or the result of the contract's `resolve` function."""
        if contract.resolve is None:
            return contract
        with _naming(self.role, method):
            return contract.resolve(replace(contract, resolve=None), self.cls, arguments, self._call_settings)

    @cached_property
    def _call_settings(self) -> Any:  # Any: see `Worker.call_settings`
        args, kwargs = self._constructor
        return self.cls.call_settings(*args, **kwargs)

    def submit(self, method: str, contract: Contract, arguments: Mapping[str, Any]) -> "Batch | Future":
        """Scatters the arguments of a call, sends the call to its ranks, and returns the result without waiting.

        Raises `FlowError` if the pool has failed (in any call), if the cluster is closed, or if the arguments violate
        the contract.
        """
        self._calls.raise_if_failed(self.pool)
        mode = get_dispatch_mode(contract.mode)
        with _naming(self.role, method):
            per_rank = mode.scatter(self.mesh, contract, dict(arguments))
        if len(per_rank) != self.world_size:
            raise ContractError(
                f"dispatch mode {mode.name} returned {len(per_rank)} entries for the {self.world_size} ranks of "
                f"{self.role}"
            )
        with self._calls.lock:
            # Scattering may wait for row lengths, and the pool may fail during this wait.
            self._calls.raise_if_failed(self.pool)
            called = {index: args for index, args in enumerate(per_rank) if args is not None}
            evictions = self._claim_devices(contract, tuple(called))
            results = {}
            for index, args in called.items():
                results[index] = self._send(index, method, contract, mode, args, evictions.get(index, ()))
        if mode.gather is None:
            leaders = [per_rank[index] for index in get_leader_ranks(self.mesh)]
            result = self._make_batch(contract, leaders, results)
        else:
            result = self._make_future(mode.gather, results)
        if self._calls.on_submit is not None:
            self._calls.on_submit(self, method, arguments, result)
        return result

    def _make_future(self, gather: Callable, results: Mapping[int, CallRef]) -> Future:
        records = [ref.record for ref in results.values()]

        def fetch(refs: Sequence[Ref], timeout_s: float | None) -> list[Any]:
            self._calls.wait(records, timeout_s)
            return self._calls.fetch(refs)

        return Future(tuple(results.values()), gather, self.mesh, fetch)

    def _claim_devices(self, contract: Contract, indices: Sequence[int]) -> dict[int, list[CallRef]]:
        """Makes the ranks `indices` the owners of their devices for a call, and evicts other processes from these
        devices. An eviction offloads a process.

        Returns: index of a rank -> evictions that must be done before the rank runs the call.
        """
        if contract.memory == ():
            return {}
        prepare = self._eviction.before if contract.evicts else self._eviction.before_joining
        evictions = {i: awaited for i in indices if (awaited := prepare(self.slots[i]))}
        if not evictions or not self.cls.collective:
            return evictions
        # All ranks wait for all evictions, because no rank may enter a collective while a peer waits for its device.
        everything = [eviction for evicted in evictions.values() for eviction in evicted]
        return dict.fromkeys(indices, everything)

    def _send(
        self,
        index: int,
        method: str,
        contract: Contract,
        mode: DispatchMode,
        arguments: Mapping[str, Any],
        evictions: Sequence[CallRef],
    ) -> CallRef:
        references = References(self._calls.put_once, self.cls.collective)
        returns_batch = mode.gather is None
        returns_result = not returns_batch or is_leader(self.mesh, index)
        rank, slot = self._ranks[index], self.slots[index]
        submitted_ns, call_id = time.time_ns(), self._calls.next_call_id()
        with _naming(self.role, method):
            lowered = lower_arguments(dict(arguments), references)
        profiled = self._calls.profiled
        profile = None if profiled is None else profiled.path(self.role, rank, method)
        request = Request(
            call_id, self.role, rank, slot.node, method, lowered, contract, returns_batch, returns_result, profile
        )
        awaited = [*references.refs, *(eviction.carrier for eviction in evictions)]
        value, report = self._backend.call(slot, request, awaited, self._calls.recovery.get_plan(slot))
        self._calls.recovery.record_call(slot, request, references.refs)
        record = self._calls.add(
            report,
            self.role,
            rank,
            method,
            slot,
            self.format_device(slot),
            call_id=call_id,
            submitted_ns=submitted_ns,
            inputs=[*references.sources, *evictions],
            contract=contract,
            is_isolated=self.cls.stateless and not self.cls.collective,
        )
        return CallRef(value, record, self._calls)

    def _make_batch(
        self, contract: Contract, arguments: Sequence[Mapping[str, Any] | None], results: Mapping[int, CallRef]
    ) -> Batch:
        """Returns a batch of the results of the leader ranks, in the row order of the input batch."""
        slices = [
            next((value for value in args.values() if isinstance(value, BatchSlice)), None)
            for args in arguments
            if args is not None
        ]
        shards = []
        for index, rows in zip(get_leader_ranks(self.mesh), slices, strict=True):
            record = results[index].record
            description = CallRef(record.report_ref, record, self._calls, is_description=True)
            shards.append(Shard(results[index], description, _count_result_rows(contract, rows)))
        block = Block(shards)
        columns = contract.writes if contract.writes is not None else tuple(shards[0].description.get().columns)
        splits = [rows.rows if rows else (0, 0) for rows in slices]
        order = find_row_order(splits) if contract.rows == "same" else None
        return Batch.of_block(block, columns, order, self.tasks)

    def wait_for_batch(self, batch: Batch) -> None:
        """Waits for the calls that compute a batch. Raises `FlowError` if a call failed."""
        self._calls.wait(find_records(batch), None)


# For the group types in stub files, which `flowrl stubs` writes. Group types do not exist at run time.

if TYPE_CHECKING:

    class TypedGroup(WorkerGroup):
        """Base class of group types. A type checker knows all of their methods and rejects other names."""

        __getattr__: None  # pyright: ignore[reportIncompatibleMethodOverride]

    def blocking(
        method: Callable[Concatenate[Any, Parameters], Value],
    ) -> RemoteMethod[Parameters, Value, Future[Value]]:
        """Types a method whose call waits for the value, and whose `submit` returns a future."""
        ...

    def nonblocking(
        method: Callable[Concatenate[Any, Parameters], Value],
    ) -> RemoteMethod[Parameters, Future[Value], Future[Value]]:
        """Types a method whose call and `submit` return a future."""
        ...

    def batched(method: Callable[Concatenate[Any, Parameters], Batch]) -> RemoteMethod[Parameters, Batch, Batch]:
        """Types a method that returns a batch."""
        ...


@contextmanager
def _naming(role: str, method: str) -> Iterator[None]:
    """Adds role and method to the message of a `ContractError`."""
    try:
        yield
    except ContractError as error:
        raise ContractError(f"{role}.{method}: {error}") from None


def _name_arguments(bound: inspect.BoundArguments) -> dict[str, Any]:
    arguments = dict(bound.arguments)
    for parameter in bound.signature.parameters.values():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            arguments |= arguments.pop(parameter.name, {})
    return arguments


def _count_result_rows(contract: Contract, rows: BatchSlice | None) -> int | None:
    if contract.rows == "unknown":
        return None
    num_rows = rows.num_rows if rows else 0
    return num_rows if contract.rows == "same" else num_rows * contract.rows


class Tasks(Worker):
    """Worker that runs functions of batches in a separate process, in parallel to the roles."""

    stateless = True

    def __init__(self, modules: tuple[str, ...] = ()) -> None:
        for module in modules:
            importlib.import_module(module)

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def apply(self, table: "TensorDict", fn: Callable, **kwargs: Any) -> "TensorDict":  # Any: the function's own
        return fn(table, **kwargs)

    @register(Dispatch.RANK_ZERO, blocking=False)
    def reduce(self, table: "TensorDict", fn: Callable, **kwargs: Any) -> Any:  # Any: the function's own result
        return fn(table, **kwargs)


class GroupTasks:
    """Runs functions of batches (`TaskRunner`) on the task worker of the cluster."""

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group
        group.tasks = self

    def apply(self, fn: Callable, batch: Batch, writes: tuple[str, ...], rows: str, kwargs: dict) -> Batch:
        kind = "same" if rows == "same" else "unknown"
        contract = Contract(Dispatch.DP_COMPUTE_PROTO, blocking=False, writes=writes, rows=kind)
        result = self._group.submit("apply", contract, {"table": batch, "fn": fn, **kwargs})
        assert isinstance(result, Batch)
        return result

    def reduce(self, fn: Callable, batch: Batch, kwargs: dict) -> Future:
        contract = Contract(Dispatch.RANK_ZERO, blocking=False)
        result = self._group.submit("reduce", contract, {"table": batch, "fn": fn, **kwargs})
        assert isinstance(result, Future)
        return result
