"""Messages between the driver and hosts (worker processes).

A call is a small request and a list of references to its inputs. In the driver, `lower_arguments` replaces batches and
futures by positions in the list. In the worker process, `read` converts each argument to a table or a value.
"""

import pickle
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat
from pathlib import Path
from typing import Any

from flowrl.config import ONE_DEVICE, ReplicaSizes
from flowrl.controller.dispatch import Arguments, BatchSlice, Future, Gather
from flowrl.controller.errors import ContractError
from flowrl.controller.placement.plan import Mesh
from flowrl.controller.worker import Contract, Worker
from flowrl.data.batch.batch import Batch
from flowrl.data.batch.block import Block, Description, GatherPlan, LocalRef, Ref, Shard, gathers
from flowrl.data.batch.payload import Payload, RowSelection, Source, collect, merge

_NEEDS_RAY_PICKLER = re.compile(rb"__main__|\x8c.ray[.\x94]", re.DOTALL)
"""Matches pickles of objects from `__main__` or Ray, which only Ray's pickler supports."""

BY_VALUE_BYTES = 64 * 1024
"""Maximum size of rows that are sent inside the request. Larger rows are stored as a separate object."""


@dataclass(frozen=True)
class BlockArgument:
    """One rank's rows of a block. A block holds the columns that one call computed."""

    plan: GatherPlan
    pieces: tuple[tuple[int | Payload, dict[str, str]], ...]
    """(rows or position of their reference, {column: column in the shard}) of each piece of the plan."""

    def read(self, objects: Sequence) -> Payload:
        sources = []
        for piece, (rows_or_position, columns) in zip(self.plan.pieces, self.pieces, strict=True):
            if isinstance(rows_or_position, Payload):
                sources.append(Source(rows_or_position, columns, None, piece.targets))
            else:
                sources.append(Source(decode(objects[rows_or_position]), columns, piece.rows, piece.targets))
        return collect(self.plan.num_rows, sources)

    def with_own_objects(self) -> "BlockArgument":
        """Returns the argument with copies of the Python objects in its rows. Arrays are shared."""
        pieces = ((r.with_own_objects() if isinstance(r, Payload) else r, columns) for r, columns in self.pieces)
        return replace(self, pieces=tuple(pieces))


@dataclass(frozen=True)
class TableArgument:
    """One rank's rows of a batch argument."""

    num_rows: int
    blocks: tuple[BlockArgument, ...]

    def read(self, objects: Sequence) -> Payload:
        parts = [block.read(objects) for block in self.blocks]
        return merge(parts) if parts else Payload(self.num_rows)


@dataclass(frozen=True)
class FutureArgument:
    """A future argument: positions of the results of an earlier call, and the function that gathers these results."""

    positions: tuple[int, ...]
    gather: Gather
    mesh: Mesh

    def read(self, objects: Sequence) -> Any:
        return self.gather(self.mesh, [objects[position] for position in self.positions])


@dataclass(frozen=True)
class Request:
    """One call on one rank."""

    call_id: int
    role: str
    rank: int
    node: int
    method: str
    arguments: dict[str, Any]
    contract: Contract
    returns_batch: bool
    """Whether the result is a table. The contract declares its columns and rows."""
    returns_result: bool = True
    """False for ranks that return nothing, because the leader of their replica returns the same rows."""
    profile: Path | None = None
    """File to which the process writes a profile of the call, if it has imported torch."""


@dataclass(frozen=True)
class Construction:
    """Arguments to construct one worker in a host."""

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
    replica: ReplicaSizes = ONE_DEVICE
    can_offload: bool = False
    attempt: int = 0
    """Number of program restarts before the construction."""
    deterministic: bool = False
    """Whether the process uses only operations whose results are the same bit by bit in each run."""


@dataclass(frozen=True)
class Report:
    """Timing of a call and metadata of its result. The driver reads the report of every call."""

    arrived_ns: int
    started_ns: int
    ended_ns: int
    finished_ns: int
    description: Description | None = None
    is_replacement: bool = False
    """Whether this is the first call of a process that replaces a lost process."""
    usage: Mapping[str, float] = field(default_factory=dict)
    """What the call has used and done (`CallEvent.usage`)."""


@dataclass(frozen=True)
class RecoveryPlan:
    """Constructions and replay log of a process. Every call contains the plan; only a replacement process uses it."""

    constructions: tuple[Construction, ...]
    """The workers of the process, in the order of construction."""

    replay_log: tuple[tuple[Request, tuple[Ref, ...]], ...]
    """(request, inputs) of the calls that set the state of the workers, in the order of submission."""

    attempt_start_id: int = 0
    """Id of the last call before the program restarted. Recovery does not undo state that earlier calls have set."""

    @property
    def requests(self) -> list[Request]:
        return [request for request, _ in self.replay_log]


@dataclass
class References:
    """Collects the references of one request while its arguments are lowered."""

    put_rows: Callable[[LocalRef], Ref]
    awaits_peers: bool = True
    """Whether the rank also waits for the inputs of its peers, because the call contains collectives."""
    refs: list[Ref] = field(default_factory=list)
    """References that the backend sends to the worker."""
    sources: list[Ref] = field(default_factory=list)
    """The driver's reference for each entry of `refs`. A `CallRef` also has the record of the call that computes the
    value.
    """
    _positions: dict[int, int] = field(default_factory=dict)
    """id(reference) -> position, for the first `_num_indexed` references."""
    _num_indexed: int = 0
    _awaited_blocks: set[int] = field(default_factory=set)
    _added_blocks: set[int] = field(default_factory=set)

    def add(self, ref: Ref) -> int:
        """Adds a reference, unless the list contains it, and returns its position."""
        carrier = ref.carrier
        for position in range(self._num_indexed, len(self.refs)):
            self._positions.setdefault(id(self.refs[position]), position)
        self._num_indexed = len(self.refs)
        if id(carrier) not in self._positions:
            self.refs.append(carrier)
            self.sources.append(ref)
        return self._positions.get(id(carrier), self._num_indexed)

    def lower(self, value: Any) -> Any:
        if isinstance(value, BatchSlice):
            return self._lower_batch(value)
        if isinstance(value, dict | list | tuple) and _holds_reference(value):
            raise ContractError("a Batch or Future inside a list or dictionary is not resolved; pass it as an argument")
        if isinstance(value, Future):
            return FutureArgument(tuple(self.add(ref) for ref in value.refs), value.gather, value.mesh)
        return value

    def _lower_batch(self, rows: BatchSlice) -> TableArgument:
        blocks = []
        for block, columns, plan in gathers({name: rows.batch.column(name) for name in rows.columns}, rows.rows):
            blocks.append(BlockArgument(plan, self._lower_pieces(block, plan, columns)))
            if self.awaits_peers and len(block.shards) > 1:
                self._await_all_shards(block)
        return TableArgument(rows.num_rows, tuple(blocks))

    def _await_all_shards(self, block: Block) -> None:
        """Adds all descriptions of a block, so that no rank enters a collective if the input of a peer has failed."""
        if id(block) not in self._awaited_blocks:
            self._awaited_blocks.add(id(block))
            descriptions, carriers = block.remote_descriptions
            self.refs.extend(carriers)
            self.sources.extend(descriptions)

    def _lower_pieces(
        self, block: Block, plan: GatherPlan, columns: dict[str, str]
    ) -> tuple[tuple[int | Payload, dict[str, str]], ...]:
        if block.remote_payloads is None or id(block) in self._added_blocks:
            return tuple(self._lower_piece(block.shards[piece.shard], piece.rows, columns) for piece in plan.pieces)
        # Fast path for shuffled rows, which have many pieces: one `add` per piece would dominate the time of a call.
        self._added_blocks.add(id(block))
        payloads, carriers = block.remote_payloads
        shards = [piece.shard for piece in plan.pieces]
        positions = range(len(self.refs), len(self.refs) + len(shards))
        self.refs.extend(map(carriers.__getitem__, shards))
        self.sources.extend(map(payloads.__getitem__, shards))
        return tuple(zip(positions, repeat(columns)))

    def _lower_piece(
        self, shard: Shard, rows: RowSelection, columns: dict[str, str]
    ) -> tuple[int | Payload, dict[str, str]]:
        names = shard.sources(columns)
        if not isinstance(shard.payload, LocalRef):
            return self.add(shard.payload), names
        payload: Payload = shard.payload.value
        if payload.nbytes_of(rows, names) <= BY_VALUE_BYTES:
            return payload.take(rows, names), {name: name for name in names}
        return self.add(self.put_rows(shard.payload)), names


def lower_arguments(arguments: Arguments, references: References) -> dict[str, Any]:
    """Returns the wire form of all arguments, and adds their inputs to `references`."""
    return {name: references.lower(value) for name, value in arguments.items()}


def encode(value: Any) -> Any:  # Any: requests, reports and payloads
    """Pickles a small value to bytes. Returns other values unchanged, so that Ray serializes them.

    Ray's Python pickler is three times slower for small objects. It is required for large arrays (zero-copy reads),
    functions and classes of `__main__` (pickled by value), and Ray's object references (reference counting).
    """
    budget = BY_VALUE_BYTES

    def fits_in_band(buffer: pickle.PickleBuffer) -> bool:
        nonlocal budget
        budget -= buffer.raw().nbytes
        return budget >= 0

    try:
        data = pickle.dumps(value, protocol=5, buffer_callback=fits_in_band)
    except (pickle.PicklingError, AttributeError, TypeError):
        return value
    is_small = budget >= 0 and len(data) <= 2 * BY_VALUE_BYTES
    return data if is_small and not _NEEDS_RAY_PICKLER.search(data) else value


def decode(value: Any) -> Any:
    return pickle.loads(value) if isinstance(value, bytes) else value


def _holds_reference(value: dict | list | tuple) -> bool:
    return any(isinstance(item, Batch | Future) for item in (value.values() if isinstance(value, dict) else value))
