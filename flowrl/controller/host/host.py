"""Host: what runs in one process, the workers of all roles on one device. Every backend calls it the same way."""

import sys
import time
import traceback
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from flowrl.config import CheckFailed, UserError
from flowrl.controller.calls.wire import FutureArgument, Request, TableArgument
from flowrl.controller.errors import (
    ContractError,
    FlowError,
    ProcessLost,
    WorkerCheckError,
    WorkerError,
    WorkerUserError,
)
from flowrl.controller.host.rendezvous import join_process_group, role_process_group
from flowrl.controller.host.resident_worker import ResidentWorker
from flowrl.controller.placement.plan import Mesh
from flowrl.controller.worker import Worker, WorkerContext
from flowrl.data.batch.block import Description
from flowrl.data.batch.payload import Payload

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Construction:
    """One worker to be made in a host."""

    role: str
    cls: type[Worker]
    args: tuple
    kwargs: Mapping[str, Any]
    mesh: Mesh
    rank: int
    local_rank: int
    node: int
    device: str
    num_threads: int
    aligned_roles: frozenset[str] = frozenset()
    num_tp_devices: int = 1
    can_offload: bool = False
    attempt: int = 0
    """Of several attempts at the same program, the one that it is made in."""


@dataclass(frozen=True)
class Report:
    """What the driver reads of every call: when it ran, and a batch result's description."""

    arrived_ns: int
    started_ns: int
    ended_ns: int
    finished_ns: int
    description: Description | None = None
    revived: bool = False
    """Whether the process took a lost one's place for this call."""


class Host:
    """The workers of one process."""

    def __init__(self) -> None:
        self._workers: dict[str, Worker] = {}
        self._attempts: dict[str, int] = {}
        """Role -> the attempt in which its worker was made."""
        self._groups: dict[str, ProcessGroup | None] = {}
        self._states: dict[str, int] = {}
        self._stateful: dict[str, set[str]] = {}
        """Role -> the methods that have given it its state."""
        self._turns = ResidentWorker(self._workers)
        self.address = "127.0.0.1"
        self.replaced = False

    def join(
        self, name: str, address: tuple[str, int], rank: int, world_size: int, node: int, kind: str
    ) -> tuple[Any, Report]:
        """Enters the process group of the host set `name`.

        Called with port 0, rank 0 opens the rendezvous and returns its address. Raises `WorkerError`.
        """
        with _told_to_driver(name, rank, node, "join"):
            started_ns = time.time_ns()
            opened = join_process_group(address, rank, world_size, kind)
            return opened, _untimed(started_ns)

    def open_group(self, role: str, ranks: Sequence[int], rank: int, node: int) -> tuple[None, Report]:
        """Makes a role's communicator among processes of the set that was joined. Raises `WorkerError`."""
        with _told_to_driver(role, rank, node, "join"):
            started_ns = time.time_ns()
            self._groups[role] = role_process_group(ranks)
            return None, _untimed(started_ns)

    def construct(self, made: Construction, *after: Any) -> tuple[None, Report]:  # Any: reports
        """Makes a worker; what must be done before is among the arguments. Raises `WorkerError`."""
        with _told_to_driver(made.role, made.rank, made.node, "__init__"):
            started_ns = time.time_ns()
            self._construct(made)
            return None, _untimed(started_ns)

    def _construct(self, made: Construction) -> None:
        if torch := sys.modules.get("torch"):
            torch.set_num_threads(made.num_threads)
        worker = made.cls.__new__(made.cls)
        worker.context = WorkerContext(
            role=made.role,
            rank=made.rank,
            world_size=made.mesh.size,
            local_rank=made.local_rank,
            node=made.node,
            device=made.device,
            mesh=made.mesh,
            process_group=self._groups.get(made.role),
            colocated=self._workers,
            aligned_roles=made.aligned_roles,
            num_tp_devices=made.num_tp_devices,
            address=self.address,
            replaced=self.replaced,
            can_offload=made.can_offload,
        )
        self._turns.clear()
        worker.__init__(*made.args, **made.kwargs)
        self._workers[made.role], self._attempts[made.role] = worker, made.attempt
        self._states[made.role] = 0
        self._stateful[made.role] = set()

    def call(self, request: Request, *objects: Any) -> tuple[Any, Report]:  # Any: payloads and results
        """Runs one method. Returns its result and the report that travels apart from it. Raises `WorkerError`."""
        arrived_ns = time.time_ns()
        if request.role not in self._workers:
            cause = "the process of its worker has ended, and with it what the worker held"
            raise ProcessLost(request.role, request.rank, request.node, request.method, cause)
        with _told_to_driver(request.role, request.rank, request.node, request.method):
            arguments, payloads = _read(request, objects)
            started_ns = time.time_ns()
            if request.contract.memory != ():
                self._turns.take(request.role, request.contract.memory)
            result = _run(self._workers[request.role], request, arguments, payloads)
            ended_ns = time.time_ns()
            value, description = _packed(result, list(payloads.values()), request)
        if request.contract.replay:
            self._states[request.role] = request.call_id
            self._stateful[request.role].add(request.method)
        return value, Report(arrived_ns, started_ns, ended_ns, time.time_ns(), description)

    def evict(self, role: str, rank: int, node: int) -> tuple[None, Report]:
        """Has all workers leave the device; who told of them is its first. Raises `WorkerError`."""
        with _told_to_driver(role, rank, node, "evict"):
            started_ns = time.time_ns()
            self._turns.clear()
            return None, _untimed(started_ns)

    def lacks(self, constructions: Sequence[Construction]) -> bool:
        """Whether a worker is missing that was made in the process before this one, or is of an earlier attempt."""
        return any(self._attempts.get(made.role, -1) < made.attempt for made in constructions)

    def settle_states(self, until: int) -> None:
        """What roles were given by calls until this one is no state any more that another undoes."""
        for role, number in self._states.items():
            if 0 < number <= until:
                self._states[role], self._stateful[role] = 0, set()

    def is_behind(self, role: str, states: Sequence[Request]) -> bool:
        """Whether a role was not given the last of these states yet."""
        return self._states.get(role, 0) < _last_of(role, states)

    def is_ahead(self, role: str, states: Sequence[Request]) -> bool:
        """Whether a role was given a state after the last of these: calls to a new process may come in any order."""
        return self._states.get(role, 0) > _last_of(role, states)

    def replaces(self, role: str, states: Sequence[Request]) -> bool:
        """Whether these states, given again, leave nothing of those that a role has."""
        return self._stateful.get(role, set()) <= {state.method for state in states if state.role == role}


def _last_of(role: str, states: Sequence[Request]) -> int:
    return max((state.call_id for state in states if state.role == role), default=0)


@contextmanager
def _told_to_driver(role: str, rank: int, node: int, method: str) -> Iterator[None]:
    """What is raised in here leaves the process as a `WorkerError` with role, rank and traceback."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 (process boundary: everything is raised again)
        kind = WorkerCheckError if isinstance(error, CheckFailed) else WorkerError
        kind = WorkerUserError if isinstance(error, UserError) and not isinstance(error, FlowError) else kind
        cause = f"{type(error).__name__}: {error}"
        raise kind(role, rank, node, method, cause, traceback.format_exc(), _connection_lost(error)) from None


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
"""What gloo, NCCL and TCPStore say on a rank whose peer has gone."""


def _connection_lost(error: Exception) -> bool:
    return isinstance(error, RuntimeError | OSError) and any(text in str(error).lower() for text in _CONNECTION_LOST)


def _untimed(started_ns: int) -> Report:
    """The report of a call that reads nothing and returns nothing."""
    ended_ns = time.time_ns()
    return Report(started_ns, started_ns, ended_ns, ended_ns)


def _read(request: Request, objects: Sequence) -> tuple[dict[str, Any], dict[str, Payload]]:
    """The arguments as the method takes them, and the payloads behind those that are tables."""
    payloads = {n: a.read(objects) for n, a in request.arguments.items() if isinstance(a, TableArgument)}
    arguments = {n: a.read(objects) if isinstance(a, FutureArgument) else a for n, a in request.arguments.items()}
    if payloads:
        from flowrl.data.batch.tensordicts import to_tensordict  # noqa: PLC0415 (torch only where a table is used)

        arguments |= {name: to_tensordict(payload) for name, payload in payloads.items()}
    return arguments, payloads


def _run(worker: Worker, request: Request, arguments: Mapping[str, Any], tables: Collection[str]) -> Any:
    """Calls the method. Raises `ContractError` if it wrote into its inputs."""
    versions = {name: _versions(arguments[name]) for name in tables}
    result = getattr(worker, request.method)(**arguments)
    for name, before in versions.items():
        _check_unwritten(name, before)
    return result


def _packed(result: Any, inputs: list[Payload], request: Request) -> tuple[Any, Description | None]:
    """The result as it is stored, and what the driver is told of it."""
    if not request.returns_result:
        return None, None
    if not request.returns_batch:
        return result, None
    payload = _as_payload(result, inputs, request)
    return payload, Description.of(payload)


def _versions(table: Any) -> list[tuple[str, Any, int]]:  # Any: TensorDict and tensors; torch is not imported here
    """Every input tensor with torch's count of its in-place writes."""
    found = []
    for part in ("rows", "tokens"):
        for name in table[part].keys():  # noqa: SIM118 (a TensorDict)
            column = table[part].get(name)
            if hasattr(column, "_version"):
                found.append((name, column, column._version))
    return found


def _check_unwritten(parameter: str, before: list[tuple[str, Any, int]]) -> None:
    """Inputs are shared memory: torch would write into every other reader's copy without an error."""
    for name, tensor, version in before:
        if tensor._version != version:
            raise ContractError(
                f"the method wrote into column {name!r} of its argument {parameter!r}, which other readers share; "
                f"work on a clone and return the result"
            )


def _as_payload(result: Any, inputs: list[Payload], request: Request) -> Payload:
    """The result as a payload that holds to the contract. Raises `ContractError`."""
    from flowrl.data.batch.tensordicts import from_tensordict  # noqa: PLC0415 (torch only where a table is used)

    contract = request.contract
    if not hasattr(result, "batch_size"):
        raise ContractError(
            f"the method must return a table (a TensorDict of rows and tokens), not {type(result).__name__}"
        )
    lengths: np.ndarray | None = next((p.lengths for p in inputs if p.lengths is not None), None)
    payload = from_tensordict(result, lengths if contract.rows == "same" else None)
    if contract.writes is not None and set(payload.columns) != set(contract.writes):
        found = ", ".join(payload.columns) or "no columns"
        raise ContractError(f"the method declares writes=({', '.join(contract.writes)}) but returned {found}")
    times = 1 if contract.rows == "same" else contract.rows
    if isinstance(times, int) and inputs and payload.num_rows != inputs[0].num_rows * times:
        raise ContractError(
            f"the method declares rows={contract.rows!r}, which is {inputs[0].num_rows * times} rows here, "
            f"but returned {payload.num_rows}"
        )
    return payload
