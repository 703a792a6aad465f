"""Host: what runs in one process, the workers of all roles on one device. Every backend calls it the same way."""

import time
import traceback
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flowrl.config import UserError
from flowrl.controller.errors import ContractError, FlowError, RefusedError, WorkerError
from flowrl.controller.plan import Mesh, Slot
from flowrl.controller.rendezvous import join_process_group, role_process_group
from flowrl.controller.wire import FutureArgument, Request, TableArgument
from flowrl.controller.worker import Worker, WorkerContext
from flowrl.data.block import Description
from flowrl.data.payload import Payload


@dataclass(frozen=True)
class Construction:
    """One worker to be made in a host."""

    role: str
    cls: type[Worker]
    args: tuple
    kwargs: Mapping[str, Any]
    mesh: Mesh
    slot: Slot
    device: str
    num_threads: int


@dataclass(frozen=True)
class Report:
    """What the driver reads of every call: when it ran, and a batch result's description."""

    arrived_ns: int
    started_ns: int
    ended_ns: int
    finished_ns: int
    description: Description | None = None


class Host:
    """The workers of one process."""

    def __init__(self) -> None:
        self._workers: dict[str, Worker] = {}

    def join(self, address: tuple[str, int], slot: Slot, world_size: int, kind: str) -> tuple[Any, Report]:
        """Enters the pool's process group. Called with port 0, rank 0 opens the rendezvous and returns its address.

        Raises `WorkerError`.
        """
        started_ns = time.time_ns()
        try:
            opened = join_process_group(address, slot.rank, world_size, kind)
        except Exception as error:  # noqa: BLE001 (process boundary: raised again with pool and rank)
            raise _failure(slot.pool, slot.rank, slot.node, "join", error) from None
        return opened, _untimed(started_ns)

    def construct(self, construction: Construction) -> tuple[None, Report]:
        """Makes a worker. Raises `WorkerError`."""
        started_ns = time.time_ns()
        try:
            self._construct(construction)
        except Exception as error:  # noqa: BLE001 (process boundary: raised again with role and rank)
            raise _failure(
                construction.role, construction.slot.rank, construction.slot.node, "__init__", error
            ) from None
        return None, _untimed(started_ns)

    def _construct(self, made: Construction) -> None:
        group = None
        if made.cls.collective:
            group = role_process_group(made.mesh.size, made.num_threads)
        slot = made.slot
        worker = made.cls.__new__(made.cls)
        worker.context = WorkerContext(
            role=made.role,
            rank=slot.rank,
            world_size=made.mesh.size,
            local_rank=slot.local_rank,
            node=slot.node,
            device=made.device,
            mesh=made.mesh,
            process_group=group,
            colocated=self._workers,
        )
        worker.__init__(*made.args, **made.kwargs)
        self._workers[made.role] = worker

    def call(self, request: Request, *objects: Any) -> tuple[Any, Report]:  # Any: payloads and results
        """Runs one method. Returns its result and the report that travels apart from it. Raises `WorkerError`."""
        arrived_ns = time.time_ns()
        worker = self._workers[request.role]
        try:
            arguments, payloads = _read(request, objects)
            started_ns = time.time_ns()
            result = _run(worker, request, arguments, payloads)
            ended_ns = time.time_ns()
            value, description = _packed(result, list(payloads.values()), request)
        except Exception as error:  # noqa: BLE001 (process boundary: raised again with role and rank)
            at = worker.context
            raise _failure(request.role, at.rank, at.node, request.method, error) from None
        return value, Report(arrived_ns, started_ns, ended_ns, time.time_ns(), description)


def _failure(role: str, rank: int, node: int, method: str, error: Exception) -> WorkerError:
    kind = RefusedError if isinstance(error, UserError) and not isinstance(error, FlowError) else WorkerError
    return kind(role, rank, node, method, f"{type(error).__name__}: {error}", traceback.format_exc())


def _untimed(started_ns: int) -> Report:
    """The report of a call that reads nothing and returns nothing."""
    ended_ns = time.time_ns()
    return Report(started_ns, started_ns, ended_ns, ended_ns)


def _read(request: Request, objects: Sequence) -> tuple[dict[str, Any], dict[str, Payload]]:
    """The arguments as the method takes them, and the payloads behind those that are tables."""
    payloads = {n: a.read(objects) for n, a in request.arguments.items() if isinstance(a, TableArgument)}
    arguments = {n: a.read(objects) if isinstance(a, FutureArgument) else a for n, a in request.arguments.items()}
    if payloads:
        from flowrl.data.table import to_table  # noqa: PLC0415 (torch only where a table is used)

        arguments |= {name: to_table(payload) for name, payload in payloads.items()}
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
    if not request.answers:
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
    from flowrl.data.table import from_table  # noqa: PLC0415 (torch only where a table is used)

    contract = request.contract
    if not hasattr(result, "batch_size"):
        raise ContractError(
            f"the method must return a table (a TensorDict of rows and tokens), not {type(result).__name__}"
        )
    lengths: np.ndarray | None = next((p.lengths for p in inputs if p.lengths is not None), None)
    payload = from_table(result, lengths if contract.rows == "same" else None)
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
