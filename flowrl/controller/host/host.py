"""Host: constructs and calls the workers of all roles in one process, offloads idle workers, and restores lost ones."""

import signal
import sys
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from flowrl.config import CheckFailed, Follower, UserError
from flowrl.controller.errors import (
    ContractError,
    FlowError,
    ProcessLost,
    WorkerCheckError,
    WorkerError,
    WorkerUserError,
)
from flowrl.controller.host.rendezvous import join_process_group, role_process_group
from flowrl.controller.placement.cpu_threads import use_threads
from flowrl.controller.wire import Construction, FutureArgument, RecoveryPlan, Report, Request, TableArgument
from flowrl.controller.worker import Worker, WorkerContext
from flowrl.data.batch.block import Description, Ref
from flowrl.data.batch.payload import Payload

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from flowrl.devices.device import Device


_SHORTEST_PHASE_S = 1e-3
"""Shorter phases of a switch moved no memory, and are not reported."""


class ResidentWorker:
    """Tracks which worker of a process is on the device. Only the called worker and its weight owners are loaded."""

    def __init__(self, workers: Mapping[str, Worker]) -> None:
        self._workers = workers
        self._resident: str | None = None
        self._seconds: dict[str, float] = {}
        """Usage `seconds/ROLE/PHASE` since the last `pop_seconds`."""
        self._resident_parts: frozenset[str] | None = None
        """Memory parts of the resident worker that are loaded. None means all parts."""

    def activate(self, role: str, parts: tuple[str, ...] | None = None) -> None:
        """Offloads the other workers, and loads the worker of `role`, or only `parts` of its memory."""
        is_resident = self._resident == role
        if is_resident and (
            self._resident_parts is None or (parts is not None and self._resident_parts.issuperset(parts))
        ):
            return
        onloaded = self._resident_parts if is_resident and self._resident_parts else frozenset()
        phase = f"onload_{'_'.join(parts)}" if parts is not None else "onload_rest" if onloaded else "onload"
        self._resident = None  # stays None if a transfer fails
        worker = self._workers[role]
        if not is_resident:
            self._offload_others(worker)
        with self.timed(role, phase):
            if parts is None:
                worker.onload()
            else:
                worker.onload_parts(parts)
        self._resident, self._resident_parts = role, None if parts is None else onloaded.union(parts)

    def _offload_others(self, worker: Worker) -> None:
        weight_owners = worker.weight_owners
        for other in self._workers.values():
            if other is not worker:
                with self.timed(other.context.role, "offload"):
                    other.offload(keep_weights=other in weight_owners)
        for owner in weight_owners:
            with self.timed(owner.context.role, "onload"):
                owner.onload()

    def offload_all(self) -> None:
        self._resident = None
        for role, worker in self._workers.items():
            with self.timed(role, "offload"):
                worker.offload(keep_weights=False)

    def pop_seconds(self) -> dict[str, float]:
        """Returns the seconds of offloading and onloading since the last call, by name `seconds/ROLE/PHASE`."""
        seconds, self._seconds = self._seconds, {}
        return seconds

    @contextmanager
    def timed(self, role: str, phase: str) -> Iterator[None]:
        """Measures a phase of a switch, in which memory of `role` moves."""
        started_s = time.perf_counter()
        yield
        seconds = time.perf_counter() - started_s
        if seconds >= _SHORTEST_PHASE_S:
            name = f"seconds/{role}/{phase}"
            self._seconds[name] = self._seconds.get(name, 0.0) + seconds


def release_cached_memory() -> None:
    """Returns freed blocks of torch's cache to the GPU, because other processes cannot allocate them otherwise."""
    if "torch" in sys.modules:
        from flowrl.devices.device import release_unused_memory  # noqa: PLC0415 (loads torch only where it is used)

        release_unused_memory()


class Host:
    def __init__(self, release_memory: Callable[[], None] = release_cached_memory) -> None:
        """`release_memory` runs after each eviction."""
        self._release_memory = release_memory
        self._workers: dict[str, Worker] = {}
        self._attempts: dict[str, int] = {}
        """Role -> number of program restarts before its worker was constructed."""
        self._groups: dict[str, ProcessGroup | None] = {}
        self._state_ids: dict[str, int] = {}
        self._state_methods: dict[str, set[str]] = {}
        """Role -> methods that have set state of its worker."""
        self._resident = ResidentWorker(self._workers)
        self.address = "127.0.0.1"
        self.followers: Sequence[Follower] = ()
        self.replaced = False

    def join(
        self, name: str, address: tuple[str, int], rank: int, world_size: int, node: int, kind: str
    ) -> tuple[Any, Report]:
        """Joins the process group of the failure group `name`. Raises `WorkerError`.

        With rank 0 and port 0, opens the rendezvous instead and returns its address.
        """
        with _as_worker_error(name, rank, node, "join"):
            started_ns = time.time_ns()
            opened = join_process_group(address, rank, world_size, kind)
            return opened, _simple_report(started_ns)

    def open_group(self, role: str, ranks: Sequence[int], rank: int, node: int) -> tuple[None, Report]:
        """Creates the process group of a role, as a subgroup of the joined process group. Raises `WorkerError`."""
        with _as_worker_error(role, rank, node, "join"):
            started_ns = time.time_ns()
            self._groups[role] = role_process_group(ranks)
            return None, _simple_report(started_ns)

    def construct(self, construction: Construction, *after: Any) -> tuple[None, Report]:  # Any: reports
        """Constructs a worker, after the evictions `after`. Raises `WorkerError` if the constructor fails."""
        with _as_worker_error(construction.role, construction.rank, construction.node, "__init__"):
            started_ns = time.time_ns()
            self._construct(construction)
            return None, _simple_report(started_ns)

    def _construct(self, construction: Construction) -> None:
        use_threads(construction.num_threads)
        if construction.deterministic:
            from flowrl.devices.device import get_device  # noqa: PLC0415 (loads torch only where it is used)

            get_device(construction.device).make_deterministic()
        if construction.device != "cpu":
            from flowrl.devices.device import use_exact_float32  # noqa: PLC0415 (loads torch only where it is used)

            use_exact_float32()
        worker = construction.cls.__new__(construction.cls)
        worker.context = WorkerContext(
            role=construction.role,
            rank=construction.rank,
            world_size=construction.mesh.size,
            local_rank=construction.local_rank,
            node=construction.node,
            device=construction.device,
            mesh=construction.mesh,
            process_group=self._groups.get(construction.role),
            colocated=self._workers,
            aligned_roles=construction.aligned_roles,
            replica=construction.replica,
            followers=self.followers,
            address=self.address,
            replaced=self.replaced,
            can_offload=construction.can_offload,
        )
        self._resident.offload_all()
        self._resident.pop_seconds()
        worker.__init__(*construction.args, **construction.kwargs)
        self._workers[construction.role], self._attempts[construction.role] = worker, construction.attempt
        self._state_ids[construction.role] = 0
        self._state_methods[construction.role] = set()

    def close(self) -> None:
        """Closes all workers."""
        for worker in self._workers.values():
            worker.close()

    def call(self, request: Request, *objects: Any) -> tuple[Any, Report]:  # Any: payloads and results
        """Runs a worker method and returns its result and its report. Raises `WorkerError`."""
        arrived_ns = time.time_ns()
        if request.role not in self._workers:
            cause = "the worker's process has ended and its state is lost"
            raise ProcessLost(request.role, request.rank, request.node, request.method, cause)
        with _as_worker_error(request.role, request.rank, request.node, request.method):
            arguments, payloads = _read_arguments(request, objects)
            started_ns = time.time_ns()
            worker, uses_device = self._workers[request.role], request.contract.memory != ()
            if uses_device:
                self._resident.activate(request.role, request.contract.memory)
            device = _used_device(worker) if uses_device else None
            if device is not None:
                device.begin_peak()
            with _profiler(request):
                result = _run_method(worker, request, arguments, payloads)
            ended_ns = time.time_ns()
            value, description = _pack_result(result, list(payloads.values()), request)
            usage = self._resident.pop_seconds() | worker.pop_usage()
            # On the CPU, a measurement takes about as long as a short call, which therefore has none.
            if device is not None and (usage or device.index is not None):
                usage |= _device_usage(device, usage)
        if request.contract.replay:
            self._state_ids[request.role] = request.call_id
            self._state_methods[request.role].add(request.method)
        return value, Report(arrived_ns, started_ns, ended_ns, time.time_ns(), description, usage=usage)

    def evict(self, role: str, rank: int, node: int) -> tuple[None, Report]:
        """Offloads all workers of the process and releases its cached memory. Raises `WorkerError` with `role` and
        `rank`.
        """
        with _as_worker_error(role, rank, node, "evict"):
            started_ns = time.time_ns()
            self._resident.offload_all()
            with self._resident.timed(role, "release"):
                self._release_memory()
            return None, replace(_simple_report(started_ns), usage=self._resident.pop_seconds())

    def lacks(self, constructions: Sequence[Construction]) -> bool:
        """Returns whether one of these workers is missing, or was constructed before the last program restart."""
        return any(self._attempts.get(construction.role, -1) < construction.attempt for construction in constructions)

    def forget_states(self, until: int) -> None:
        """Makes the state set by calls up to id `until` permanent. Recovery does not undo this state."""
        for role, call_id in self._state_ids.items():
            if 0 < call_id <= until:
                self._state_ids[role], self._state_methods[role] = 0, set()

    def is_behind(self, role: str, states: Sequence[Request]) -> bool:
        """Returns whether the last call in `states` (calls that set worker state) has not run yet."""
        return self._state_ids.get(role, 0) < _last_of(role, states)

    def is_ahead(self, role: str, states: Sequence[Request]) -> bool:
        """Returns whether a call submitted after `states` has already set worker state. Retries arrive in any order."""
        return self._state_ids.get(role, 0) > _last_of(role, states)

    def overwrites_state(self, role: str, states: Sequence[Request]) -> bool:
        """Returns whether a replay of `states` (calls that set worker state) overwrites all state of the role's worker.

        This is true if `states` contains a call of every method that has set state of this worker.
        """
        return self._state_methods.get(role, set()) <= {state.method for state in states if state.role == role}


class ReplaceableHost(Host):
    """A host whose process may replace a lost process. It then restores the workers and the state of that process."""

    def __init__(self, read: Callable[[Sequence[Ref]], list[Any]]) -> None:  # Any: payloads and results
        """`read` returns the values of references, which are the inputs of replayed calls."""
        super().__init__()
        self._read = read
        self._is_restored = False
        """Whether `restore` has restored a lost process, and no call has reported it yet."""

    def call_after_recovery(self, request: Request, plan: RecoveryPlan | None, *objects: Any) -> tuple[Any, Report]:
        """Runs `call`. A replacement process first restores the workers and the state of the lost process."""
        is_replacement = self._is_restored or (plan is not None and self.lacks(plan.constructions))
        self._is_restored = False
        if plan is not None:
            self.recover(plan, request.role)
        value, report = self.call(request, *objects)
        return value, replace(report, is_replacement=True) if is_replacement else report

    def construct_once(self, construction: Construction, *after: Any) -> tuple[None, Report]:  # Any: reports
        """Constructs a worker. Does nothing if a recovery has already constructed it."""
        if self.lacks([construction]):
            return self.construct(construction, *after)
        return None, _simple_report(time.time_ns())

    def restore(self, plan: RecoveryPlan) -> None:
        """Constructs missing workers, and replays the calls that need no device memory. The next call reports it."""
        if self.lacks(plan.constructions):
            self.recover(plan, role="")
            self._is_restored = True

    def recover(self, plan: RecoveryPlan, role: str) -> None:
        """Constructs missing workers, and replays the calls that set the state of `role`.

        After a construction, also replays such calls of the other roles of the process if they need no device memory.
        Workers of other processes may need this state before the driver calls these roles, for example a server.
        """
        missing = [construction for construction in plan.constructions if self.lacks([construction])]
        self.replaced = self.replaced or bool(missing)
        self.forget_states(plan.attempt_start_id)
        # A retried call needs the state at its submission. If a later call has changed the state, replay restores it.
        # If replay cannot overwrite all of the state, the worker is constructed again.
        is_ahead = self.is_ahead(role, plan.requests)
        rebuild = is_ahead and not self.overwrites_state(role, plan.requests)
        for construction in [*missing, *(c for c in plan.constructions if c.role == role and rebuild)]:
            self.construct(construction)
        roles = {construction.role for construction in missing} - {role}
        is_replayed = is_ahead or self.is_behind(role, plan.requests)
        for state, refs in plan.replay_log:
            if (state.role == role and is_replayed) or (state.role in roles and state.contract.memory == ()):
                self.call(state, *self._read(refs))


def _last_of(role: str, states: Sequence[Request]) -> int:
    return max((state.call_id for state in states if state.role == role), default=0)


@contextmanager
def _as_worker_error(role: str, rank: int, node: int, method: str) -> Iterator[None]:
    """Converts any exception to a `WorkerError` with role, rank and traceback."""
    try:
        yield
    except (SystemExit, KeyboardInterrupt) as error:
        # A host process ignores Ctrl-C, so its own code has raised the exception. In the driver, the user interrupts.
        if isinstance(error, KeyboardInterrupt) and signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
            raise
        raise WorkerUserError(role, rank, node, method, _describe_exit(error), traceback.format_exc()) from None
    except Exception as error:  # noqa: BLE001 (process boundary: re-raised)
        kind = WorkerCheckError if isinstance(error, CheckFailed) else WorkerError
        kind = WorkerUserError if isinstance(error, UserError) and not isinstance(error, FlowError) else kind
        cause = f"{type(error).__name__}: {error}"
        text = str(error).lower()
        is_symptom = isinstance(error, RuntimeError | OSError) and any(part in text for part in _CONNECTION_LOST)
        raise kind(role, rank, node, method, cause, traceback.format_exc(), is_symptom) from None


def _describe_exit(error: SystemExit | KeyboardInterrupt) -> str:
    """Returns an error message with the function that called `sys.exit` or raised `KeyboardInterrupt`."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    action = f"called sys.exit({error.code!r})" if isinstance(error, SystemExit) else "raised KeyboardInterrupt"
    return (
        f"{type(error).__name__}: {frame.name} ({frame.filename}, line {frame.lineno}) {action}: a worker method "
        f"must return, or raise another exception"
    )


_CONNECTION_LOST = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "failed to recv",
    "socket closed",
    "remote process exited",
    "communicator was aborted",
)
"""Parts of error messages of gloo, NCCL and TCPStore after a peer has exited."""


def _profiler(request: Request) -> AbstractContextManager[None]:
    """Returns a context that records a profile of the call, if the request has a file for it."""
    if request.profile is None or "torch" not in sys.modules:
        return nullcontext()
    from flowrl.devices.profiler import record_profile  # noqa: PLC0415 (loads torch only where it is used)

    return record_profile(request.profile, f"{request.role}.{request.method}")


def _used_device(worker: Worker) -> "Device | None":
    """Returns the device of a worker, or None if the process has not used it."""
    if "torch" not in sys.modules:
        return None
    from flowrl.devices.device import used_device  # noqa: PLC0415 (loads torch only where it is used)

    return used_device(worker.device)


def _device_usage(device: "Device", usage: Mapping[str, float]) -> dict[str, float]:
    """Returns the memory of a device after a call, and its peak FLOP/s if the call has FLOPs in its `usage`."""
    memory = device.memory()
    own: dict[str, float] = {"allocated": memory.peak, "reserved": memory.reserved, "free": memory.free}
    if device.index is not None:
        own["memory_fraction"] = memory.peak_fraction
    peak = device.peak_flops if "flops" in usage else None
    return own if peak is None else own | {"peak_flops": peak}


def _simple_report(started_ns: int) -> Report:
    ended_ns = time.time_ns()
    return Report(started_ns, started_ns, ended_ns, ended_ns)


def _read_arguments(request: Request, objects: Sequence) -> tuple[dict[str, Any], dict[str, Payload]]:
    """Returns the method's arguments by name, and the payloads (stored rows) of its batch arguments."""
    payloads = {n: a.read(objects) for n, a in request.arguments.items() if isinstance(a, TableArgument)}
    arguments = {n: a.read(objects) if isinstance(a, FutureArgument) else a for n, a in request.arguments.items()}
    if payloads:
        from flowrl.data.batch.tensordicts import to_tensordict  # noqa: PLC0415 (loads torch only for batches)

        arguments |= {name: to_tensordict(payload) for name, payload in payloads.items()}
    return arguments, payloads


def _run_method(worker: Worker, request: Request, arguments: Mapping[str, Any], tables: Collection[str]) -> Any:
    """Calls the method. Raises `ContractError` if the method writes to its input tensors."""
    versions = {name: _versions(arguments[name]) for name in tables}
    result = getattr(worker, request.method)(**arguments)
    for name, before in versions.items():
        _check_unwritten(name, before)
    return result


def _pack_result(result: Any, inputs: list[Payload], request: Request) -> tuple[Any, Description | None]:
    """Converts the result to its stored form. Returns it with its metadata for the driver."""
    if not request.returns_result:
        return None, None
    if not request.returns_batch:
        return result, None
    payload = _as_payload(result, inputs, request)
    return payload, Description.of(payload)


def _versions(batch: Any) -> list[tuple[str, Any, int]]:  # Any: TensorDict and tensors; torch is not imported here
    """Returns (column, tensor, torch version counter) of all input tensors. In-place writes increase the counter."""
    versions = []
    for kind in ("rows", "tokens"):
        for name in batch[kind].keys():  # noqa: SIM118 (a TensorDict)
            column = batch[kind].get(name)
            if hasattr(column, "_version"):
                versions.append((name, column, column._version))
    return versions


def _check_unwritten(parameter: str, before: list[tuple[str, Any, int]]) -> None:
    """Raises `ContractError` if the method has written to an input tensor, because other processes share its memory.

    `before` is the result of `_versions` before the method ran.
    """
    for name, tensor, version in before:
        if tensor._version != version:
            raise ContractError(
                f"the method wrote to column {name!r} of its argument {parameter!r}, which other processes share; "
                f"clone the tensor and return the result"
            )


def _as_payload(result: Any, inputs: list[Payload], request: Request) -> Payload:
    from flowrl.data.batch.tensordicts import from_tensordict  # noqa: PLC0415 (loads torch only for batches)

    contract = request.contract
    if not hasattr(result, "batch_size"):
        raise ContractError(
            f"the method must return a TensorDict of rows and tokens (make_tensordict), not {type(result).__name__}"
        )
    lengths: np.ndarray | None = next((p.lengths for p in inputs if p.lengths is not None), None)
    payload = from_tensordict(result, lengths if contract.rows == "same" else None)
    if contract.writes is not None and set(payload.columns) != set(contract.writes):
        returned = ", ".join(payload.columns) or "no columns"
        raise ContractError(f"the method declares writes=({', '.join(contract.writes)}) but returned {returned}")
    times = 1 if contract.rows == "same" else contract.rows
    if isinstance(times, int) and inputs and payload.num_rows != inputs[0].num_rows * times:
        raise ContractError(
            f"the method declares rows={contract.rows!r}, which is {inputs[0].num_rows * times} rows here, "
            f"but returned {payload.num_rows}"
        )
    return payload
