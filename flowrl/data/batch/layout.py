"""Which rows of which shard: the index arithmetic behind every batch edit and every dispatch. Pure NumPy."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from flowrl.config import UserError
from flowrl.data.batch.payload import RowSelection

Rows = tuple[int, int] | np.ndarray
"""Rows of a batch: a half-open range, or positions."""


@dataclass(frozen=True)
class Piece:
    """Some rows of one shard, and where they go."""

    shard: int
    rows: RowSelection
    at: RowSelection = None
    """Which of the gathered rows they become; None: all."""


@dataclass(frozen=True)
class GatherPlan:
    """How to build rows out of shards."""

    num_rows: int
    pieces: tuple[Piece, ...]


def split_evenly(num_rows: int, num_parts: int) -> list[tuple[int, int]]:
    """Contiguous ranges whose sizes differ by at most one, the larger first; empty ones are legal."""
    size, larger = divmod(num_rows, num_parts)
    ends = np.cumsum([size + (part < larger) for part in range(num_parts)])
    return [(int(end) - size - (part < larger), int(end)) for part, end in enumerate(ends)]


def split_by_weight(weights_N: np.ndarray, num_parts: int) -> list[np.ndarray]:
    """Row positions per part so that the parts' sums of weights are close: longest processing time first.

    Graham (1969), Bounds on Multiprocessing Timing Anomalies. Each part keeps its rows in ascending order.
    """
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    loads = np.zeros(num_parts)
    for row in np.argsort(-weights_N, kind="stable"):
        lightest = int(np.argmin(loads))
        parts[lightest].append(int(row))
        loads[lightest] += weights_N[row]
    return [np.array(sorted(part), dtype=np.int64) for part in parts]


def block_rows(index: np.ndarray | None, rows: Rows) -> Rows:
    """Batch rows to rows of a block whose `index` maps one to the other (None: they are the same)."""
    if index is None:
        return rows
    taken = index[rows[0] : rows[1]] if isinstance(rows, tuple) else index[rows]
    return (int(taken[0]), int(taken[-1]) + 1) if _is_range(taken) else taken


def _is_range(positions: np.ndarray) -> bool:
    count = len(positions)
    return count > 0 and positions[-1] - positions[0] == count - 1 and bool(np.all(np.diff(positions) == 1))


def gather(sizes: Sequence[int] | np.ndarray, rows: Rows) -> GatherPlan:
    """The pieces of shards of these sizes that make up `rows` of the block."""
    ends = np.cumsum(sizes)
    if isinstance(rows, tuple):
        return _gather_range(ends, *rows)
    if not len(rows):
        return _nothing()
    shard_of_row = ends.searchsorted(rows, side="right")
    by_shard = None
    if (shard_of_row[1:] < shard_of_row[:-1]).any():
        by_shard = shard_of_row.argsort(kind="stable")
        rows, shard_of_row = rows[by_shard], shard_of_row[by_shard]
    cuts = [0, *((shard_of_row[1:] != shard_of_row[:-1]).nonzero()[0] + 1).tolist(), len(rows)]
    rows = rows - (ends - sizes)[shard_of_row]
    shards = shard_of_row[cuts[:-1]].tolist()
    read = _selections(rows, cuts)
    written = [slice(*cut) for cut in pairwise(cuts)] if by_shard is None else _selections(by_shard, cuts)
    return GatherPlan(len(rows), tuple(map(Piece, shards, read, written)))


def _selections(positions: np.ndarray, cuts: Sequence[int]) -> list[slice | np.ndarray]:
    """The positions between each cut and the next, as a slice where they are consecutive."""
    jumps = [0, *(positions[1:] - positions[:-1] != 1).cumsum().tolist()]
    firsts = positions[cuts[:-1]].tolist()
    return [
        slice(first, first + stop - start) if jumps[start] == jumps[stop - 1] else positions[start:stop]
        for first, (start, stop) in zip(firsts, pairwise(cuts), strict=True)
    ]


def _gather_range(ends: np.ndarray, start: int, stop: int) -> GatherPlan:
    if start >= stop:
        return _nothing()
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


def _nothing() -> GatherPlan:
    # There is always a piece: it tells which columns there are.
    return GatherPlan(0, (Piece(0, slice(0, 0)),))


@dataclass(frozen=True)
class Compaction:
    """What becomes of a block: the shards that stay, and behind them the rows that are rewritten."""

    rewritten: np.ndarray
    """Bool `[shards]`."""
    moved: np.ndarray
    """The rows of the block that are rewritten, in their order."""
    places: np.ndarray
    """Row of the block -> its row afterwards."""


def compaction(sizes: np.ndarray, taken: np.ndarray) -> Compaction | None:
    """Rewrites the shards of which fewer than half of the rows are `taken` (bool per row); None if there are none.

    Smaller shards are rewritten with them, so that many compactions leave few shards.
    """
    before = np.concatenate([[0], np.cumsum(taken)])
    ends = np.cumsum(sizes)
    counts = before[ends] - before[ends - sizes]
    rewritten = counts * 2 < sizes
    if not rewritten.any():
        return None
    total = int(counts[rewritten].sum())
    for shard in np.argsort(counts, kind="stable"):
        if not rewritten[shard] and counts[shard] <= total:
            rewritten[shard] = True
            total += int(counts[shard])
    leaves = np.repeat(rewritten, sizes)
    moved, stays = np.flatnonzero(leaves & taken), np.flatnonzero(~leaves)
    places = np.full(len(taken), -1)
    places[stays] = np.arange(len(stays))
    places[moved] = np.arange(len(moved)) + len(stays)
    return Compaction(rewritten, moved, places)


def shuffled(chance: np.random.Generator, num_rows: int, rows: int, sections: int = 1) -> np.ndarray:
    """Every row once, in a random order, to be read `rows` at a time.

    With `sections`, which divide both, each piece so read has an equal part of each of so many equal stretches of rows,
    in the order of the stretches. Raises: UserError where they do not.
    """
    if sections == 1:
        return chance.permutation(num_rows)
    if num_rows % sections or rows % sections:
        raise UserError(
            f"the batch has rows for {sections} data-parallel ranks that are to stay apart (placement.routes), which "
            f"minibatches of {rows} of its {num_rows} rows cannot hold in equal parts: take a multiple of {sections} "
            f"rows, or remove placement.routes"
        )
    size, part = num_rows // sections, rows // sections
    order = np.stack([chance.permutation(size) + size * section for section in range(sections)])
    return np.concatenate([order[:, start : start + part].ravel() for start in range(0, size, part)])
