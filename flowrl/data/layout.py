"""Which rows of which shard: the index arithmetic behind every batch edit and every dispatch. Pure NumPy."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flowrl.data.payload import RowSelection

Rows = tuple[int, int] | np.ndarray
"""Rows of a batch: a half-open range, or positions."""


@dataclass(frozen=True)
class Piece:
    """Some rows of one shard."""

    shard: int
    rows: RowSelection


@dataclass(frozen=True)
class Gather:
    """How to build rows out of shards: stack the pieces, then take `order` of the stack (None: as stacked)."""

    pieces: tuple[Piece, ...]
    order: np.ndarray | None = None


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
    is_range = len(taken) > 0 and taken[-1] - taken[0] == len(taken) - 1 and bool(np.all(np.diff(taken) == 1))
    return (int(taken[0]), int(taken[-1]) + 1) if is_range else taken


def gather(sizes: Sequence[int], rows: Rows) -> Gather:
    """The pieces of shards of these sizes that make up `rows` of the block."""
    ends = np.cumsum(sizes)
    if isinstance(rows, tuple):
        return _gather_range(ends, *rows)
    shard_of_row = np.searchsorted(ends, rows, side="right")
    order = None
    if len(rows) and np.any(np.diff(shard_of_row) < 0):
        by_shard = np.argsort(shard_of_row, kind="stable")
        order = np.empty_like(by_shard)
        order[by_shard] = np.arange(len(by_shard))
        rows, shard_of_row = rows[by_shard], shard_of_row[by_shard]
    cuts = np.flatnonzero(np.diff(shard_of_row)) + 1
    pieces = []
    for part in np.split(np.arange(len(rows)), cuts) if len(rows) else ():
        shard = int(shard_of_row[part[0]])
        first = int(ends[shard - 1]) if shard else 0
        pieces.append(Piece(shard, rows[part] - first))
    return Gather(tuple(pieces) or (Piece(0, slice(0, 0)),), order)


def _gather_range(ends: np.ndarray, start: int, stop: int) -> Gather:
    pieces = []
    first = 0
    for shard, end in enumerate(ends):
        low, high = max(start, first) - first, min(stop, int(end)) - first
        if low < high:
            whole = low == 0 and high == int(end) - first
            pieces.append(Piece(shard, None if whole else slice(low, high)))
        first = int(end)
    return Gather(tuple(pieces) or (Piece(0, slice(0, 0)),))
