"""Blocks: references to the columns that one call computed, in shards of rows, and plans to read rows from blocks."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np

from flowrl.data.batch.payload import Payload, RowSelection

Rows = tuple[int, int] | np.ndarray
"""Row positions: a half-open range or an array."""


class Ref(Protocol):
    """Reference to a value in this process or in the object store. The value may not be computed yet."""

    @property
    def carrier(self) -> "Ref":
        """Returns the backend's reference, which is sent to worker processes instead of this object."""
        ...

    def get(self) -> Any:  # Any: a payload, a description or a method's own result
        """Waits for the value and returns it."""
        ...

    def get_with(self, others: "Sequence[Ref]") -> list[Any]:
        """Waits for this reference and for other references of the same type. Returns their values."""
        ...

    def done(self) -> bool:
        """Returns whether the value is available without waiting."""
        ...


@dataclass(frozen=True, eq=False)
class LocalRef:
    value: Any  # Any: see Ref

    @property
    def carrier(self) -> "LocalRef":
        return self

    def get(self) -> Any:
        return self.value

    def get_with(self, others: Sequence[Ref]) -> list[Any]:
        return [self.value, *(other.get() for other in others)]

    def done(self) -> bool:
        return True


def read_together(refs: Sequence[Ref]) -> list[Any]:  # Any: see Ref
    """Returns the values of references. References of the same type are fetched together."""
    values: dict[int, Any] = {}
    by_type: dict[type, list[Ref]] = {}
    for ref in refs:
        by_type.setdefault(type(ref), []).append(ref)
    for first, *others in by_type.values():
        values |= zip(map(id, (first, *others)), first.get_with(others), strict=True)
    return [values[id(ref)] for ref in refs]


@dataclass(frozen=True)
class Description:
    """Metadata of a payload (the stored rows). The driver fetches it without the values."""

    num_rows: int
    columns: Mapping[str, str]
    """Maps a column to its kind: "row", "object" or "token"."""
    lengths: np.ndarray | None = None

    @staticmethod
    def of(payload: Payload) -> "Description":
        kinds = {name: "row" if isinstance(c, np.ndarray) else "object" for name, c in payload.rows.items()}
        return Description(payload.num_rows, kinds | dict.fromkeys(payload.tokens, "token"), payload.lengths)


@dataclass(frozen=True, eq=False)
class Shard:
    """The rows of a result that one rank computed. A shard contains references to the values and to their metadata."""

    payload: Ref
    description: Ref
    num_rows: int | None
    """Number of rows, or None if only the metadata contains it."""
    names: Mapping[str, str] | None = None
    """Name of each column in the block -> its name in the payload. If None, the names are the same.
    """

    def source(self, name: str) -> str:
        return name if self.names is None else self.names[name]

    def sources(self, columns: dict[str, str]) -> dict[str, str]:
        """Replaces the values of `columns`, which are column names in the block, by column names in the payload."""
        return columns if self.names is None else {name: self.names[column] for name, column in columns.items()}

    def renamed(self, names: Mapping[str, str]) -> "Shard":
        """Returns a shard with renamed columns. `names` maps new names to current names."""
        return replace(self, names={name: self.source(source) for name, source in names.items()})


class Block:
    """Columns that one call computed, in shards of rows."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self.shards = tuple(shards)
        self._sizes: np.ndarray | None = None
        self._layout: bytes | None = None

    # Not `cached_property`: before Python 3.12, its lock is shared by all blocks and would be held during the wait.

    @property
    def sizes(self) -> np.ndarray:
        """Number of rows per shard. Waits for the metadata of shards whose number of rows is unknown."""
        if self._sizes is None:
            known = (s.description.get().num_rows if s.num_rows is None else s.num_rows for s in self.shards)
            self._sizes = np.fromiter(known, dtype=np.int64, count=len(self.shards))
        return self._sizes

    @property
    def layout(self) -> bytes:
        """Shard sizes as bytes, for use as a dictionary key. Blocks with the same shard sizes have equal layouts."""
        if self._layout is None:
            self._layout = self.sizes.tobytes()
        return self._layout

    @property
    def num_rows(self) -> int:
        return int(self.sizes.sum())

    @cached_property
    def remote_descriptions(self) -> tuple[list[Ref], list[Ref]]:
        """Metadata of the shards in other processes, and the references to send to get it."""
        remote = [s.description for s in self.shards if not isinstance(s.description, LocalRef)]
        return remote, [description.carrier for description in remote]

    @cached_property
    def remote_payloads(self) -> tuple[list[Ref], list[Ref]] | None:
        """Payloads of all shards, and the references to send to get them. None if a payload is local or has renamed
        columns.
        """
        if any(isinstance(s.payload, LocalRef) or s.names is not None for s in self.shards):
            return None
        return [s.payload for s in self.shards], [s.payload.carrier for s in self.shards]

    def kind(self, name: str) -> str | None:
        """Waits for the first shard and returns the kind of a column ("row", "object" or "token"), or None if the
        column is missing.
        """
        return self.shards[0].description.get().columns.get(self.shards[0].source(name))

    def done(self) -> bool:
        return all(shard.description.done() for shard in self.shards)

    def lengths(self) -> np.ndarray | None:
        """Waits for all shards and returns the number of tokens per row, or None without token columns."""
        lengths = [shard.description.get().lengths for shard in self.shards]
        present = [part for part in lengths if part is not None]
        return np.concatenate(present) if present else None


class Column(NamedTuple):
    """A column of a batch. `index` maps rows of the batch to rows of the block. If it is None, row i maps to row i."""

    block: Block
    index: np.ndarray | None
    source: str
    """Name of the column in the block."""


# Plans that select rows of shards, computed with NumPy.


@dataclass(frozen=True)
class Piece:
    """Rows to read from one shard, and their positions in the result."""

    shard: int
    rows: RowSelection
    targets: RowSelection = None
    """Row positions in the result; None means all rows."""


@dataclass(frozen=True)
class GatherPlan:
    """Rows to read from each shard of a block."""

    num_rows: int
    pieces: tuple[Piece, ...]


def split_evenly(num_rows: int, num_parts: int) -> list[tuple[int, int]]:
    """Splits rows into contiguous ranges whose sizes differ by at most 1. Larger ranges come first."""
    size, larger = divmod(num_rows, num_parts)
    ends = np.cumsum([size + (part < larger) for part in range(num_parts)])
    return [(int(end) - size - (part < larger), int(end)) for part, end in enumerate(ends)]


def split_by_weight(weights_N: np.ndarray, num_parts: int) -> list[np.ndarray]:
    """Splits rows into parts with similar sums of weights. Each part has its rows in ascending order.

    The algorithm is longest processing time first (Graham 1969, Bounds on Multiprocessing Timing Anomalies).
    """
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    loads = np.zeros(num_parts)
    for row in np.argsort(-weights_N, kind="stable"):
        lightest = int(np.argmin(loads))
        parts[lightest].append(int(row))
        loads[lightest] += weights_N[row]
    return [np.array(sorted(part), dtype=np.int64) for part in parts]


def index_groups(ids_N: np.ndarray) -> tuple[np.ndarray, int]:
    """Returns the index of each row's group, and the number of groups. Groups are numbered by their first row.

    Rows with the same id form a group.
    """
    unique, first, index_N = np.unique(ids_N, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[index_N], len(unique)


def split_groups(ids_N: np.ndarray, num_parts: int, weights_N: np.ndarray | None = None) -> list[Rows]:
    """Splits rows into parts that contain whole groups. Each part has its rows in ascending order.

    Without weights, the parts have consecutive groups and similar numbers of rows. With weights, the parts have similar
    sums of weights.
    """
    index_N, num_groups = index_groups(ids_N)
    if weights_N is None:
        num_rows_G = np.bincount(index_N, minlength=num_groups)
        middle_G = np.cumsum(num_rows_G) - num_rows_G / 2
        part_G = np.minimum((middle_G * num_parts // max(1, len(ids_N))).astype(np.int64), num_parts - 1)
    else:
        part_G = np.zeros(num_groups, dtype=np.int64)
        weights_G = np.bincount(index_N, weights=weights_N, minlength=num_groups)
        for part, groups in enumerate(split_by_weight(weights_G, num_parts)):
            part_G[groups] = part
    parts = [np.flatnonzero(part_G[index_N] == part) for part in range(num_parts)]
    return [block_rows(rows, (0, len(rows))) for rows in parts]


def block_rows(index: np.ndarray | None, rows: Rows) -> Rows:
    """Maps rows of a batch to rows of a block with `index`. Returns a range if the rows of the block are
    consecutive.
    """
    if index is None:
        return rows
    mapped = index[rows[0] : rows[1]] if isinstance(rows, tuple) else index[rows]
    count = len(mapped)
    is_range = count > 0 and mapped[-1] - mapped[0] == count - 1 and bool(np.all(np.diff(mapped) == 1))
    return (int(mapped[0]), int(mapped[-1]) + 1) if is_range else mapped


def gather(sizes: Sequence[int] | np.ndarray, rows: Rows) -> GatherPlan:
    """Returns the plan for reading `rows` of a block with these shard sizes."""
    ends = np.cumsum(sizes)
    if isinstance(rows, tuple):
        return _gather_range(ends, *rows)
    if not len(rows):
        return _empty_plan()
    shard_of_row = ends.searchsorted(rows, side="right")
    by_shard = None
    if (shard_of_row[1:] < shard_of_row[:-1]).any():
        by_shard = shard_of_row.argsort(kind="stable")
        rows, shard_of_row = rows[by_shard], shard_of_row[by_shard]
    bounds = [0, *((shard_of_row[1:] != shard_of_row[:-1]).nonzero()[0] + 1).tolist(), len(rows)]
    rows = rows - (ends - sizes)[shard_of_row]
    shards = shard_of_row[bounds[:-1]].tolist()
    sources = _selections(rows, bounds)
    targets = [slice(*bound) for bound in pairwise(bounds)] if by_shard is None else _selections(by_shard, bounds)
    return GatherPlan(len(rows), tuple(map(Piece, shards, sources, targets)))


def _selections(positions: np.ndarray, bounds: Sequence[int]) -> list[slice | np.ndarray]:
    """Splits positions at the indices `bounds`. A part with consecutive positions is returned as a slice."""
    jumps = [0, *(positions[1:] - positions[:-1] != 1).cumsum().tolist()]
    firsts = positions[bounds[:-1]].tolist()
    return [
        slice(first, first + stop - start) if jumps[start] == jumps[stop - 1] else positions[start:stop]
        for first, (start, stop) in zip(firsts, pairwise(bounds), strict=True)
    ]


def _gather_range(ends: np.ndarray, start: int, stop: int) -> GatherPlan:
    if start >= stop:
        return _empty_plan()
    pieces = []
    shard = int(np.searchsorted(ends, start, side="right"))
    low = start
    while low < stop:
        first = int(ends[shard - 1]) if shard else 0
        end = int(ends[shard])
        high = min(stop, end)
        if low < high:
            rows = None if (low, high) == (first, end) else slice(low - first, high - first)
            pieces.append(Piece(shard, rows, slice(low - start, high - start)))
        low, shard = high, shard + 1
    return GatherPlan(stop - start, tuple(pieces))


def _empty_plan() -> GatherPlan:
    # An empty piece determines the columns of the empty result.
    return GatherPlan(0, (Piece(0, slice(0, 0)),))


def gathers(columns: Mapping[str, Column], rows: Rows) -> Iterator[tuple[Block, dict[str, str], GatherPlan]]:
    """Yields the plans for reading `rows` of some columns, as `(block, {name: name in the block}, plan)` for each
    block.

    Blocks with the same index and the same shard sizes share a plan.
    """
    groups: dict[tuple[int, int | None], dict[str, Column]] = {}
    for name, column in columns.items():
        groups.setdefault((id(column.block), _index_id(column.index)), {})[name] = column
    plans: dict[tuple[int | None, bytes], GatherPlan] = {}
    for (_, index_id), own in groups.items():
        block, index, _ = next(iter(own.values()))
        key = (index_id, block.layout)
        if key not in plans:
            plans[key] = gather(block.sizes, block_rows(index, rows))
        yield block, {name: column.source for name, column in own.items()}, plans[key]


def concat_columns(names: Sequence[str], parts: Sequence[Mapping[str, Column]]) -> dict[str, Column]:
    """Concatenates the rows of columns of several batches. Columns that share blocks and indices also share them in the
    result.
    """
    groups: dict[tuple, list[str]] = {}
    for name in names:
        key = tuple((id(part[name].block), _index_id(part[name].index)) for part in parts)
        groups.setdefault(key, []).append(name)
    columns: dict[str, Column] = {}
    indices: dict[tuple, np.ndarray] = {}
    for key, own in groups.items():
        first = [part[own[0]] for part in parts]
        block, sources = _concat_blocks(own, parts)
        index = None
        if any(column.index is not None for column in first):
            shape = tuple((index_id, c.block.num_rows) for (_, index_id), c in zip(key, first, strict=True))
            if shape not in indices:
                indices[shape] = _concat_indices(first)
            index = indices[shape]
        columns |= {name: Column(block, index, source) for name, source in sources.items()}
    return {name: columns[name] for name in names}


def _concat_blocks(names: Sequence[str], parts: Sequence[Mapping[str, Column]]) -> tuple[Block, dict[str, str]]:
    """Returns a block with the shards of all parts, and `{name: name in the block}`."""
    sources = {name: {part[name].source for part in parts} for name in names}
    if all(len(own) == 1 for own in sources.values()):
        shards = [shard for part in parts for shard in part[names[0]].block.shards]
        return Block(shards), {name: own.pop() for name, own in sources.items()}
    # The parts have different names in their blocks, so each shard maps the names.
    renamed = []
    for part in parts:
        own = {name: part[name].source for name in names}
        renamed += [shard.renamed(own) for shard in part[names[0]].block.shards]
    return Block(renamed), {name: name for name in names}


def _concat_indices(columns: Sequence[Column]) -> np.ndarray:
    offset, indices = 0, []
    for block, index, _ in columns:
        size = block.num_rows
        indices.append(np.arange(offset, offset + size) if index is None else index + offset)
        offset += size
    return np.concatenate(indices)


def _index_id(index: np.ndarray | None) -> int | None:
    return None if index is None else id(index)
