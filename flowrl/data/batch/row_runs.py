"""Runs: stretches of consecutive rows or tokens, and copying them from one flat column straight into another."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

LONG_RUN_BYTES = 512
"""Runs of this many bytes or more, on average, are copied one by one; shorter ones cost less element by element."""


@dataclass(frozen=True)
class Runs:
    """What to copy: `counts[i]` elements from `sources[i]` on go to where `targets[i]` says."""

    sources: np.ndarray
    targets: np.ndarray
    counts: np.ndarray

    @staticmethod
    def one(source: int, target: int, count: int) -> "Runs":
        return Runs(np.array([source]), np.array([target]), np.array([count]))

    @staticmethod
    def of(sources: np.ndarray, targets: np.ndarray) -> "Runs":
        """Element `sources[i]` goes to `targets[i]`; neighbours that stay neighbours become one run."""
        if not len(sources):
            return Runs(sources, targets, np.zeros(0, dtype=np.int64))
        breaks = np.flatnonzero((np.diff(sources) != 1) | (np.diff(targets) != 1)) + 1
        starts = np.concatenate([[0], breaks])
        return Runs(sources[starts], targets[starts], np.diff(starts, append=len(sources)))

    def of_tokens(self, source_offsets: np.ndarray, target_offsets: np.ndarray) -> "Runs":
        """The runs of the tokens of these rows, given where each row's tokens begin and the last row's end."""
        starts = source_offsets[self.sources]
        counts = source_offsets[self.sources + self.counts] - starts
        return Runs(starts, target_offsets[self.targets], counts)

    def copy(self, column: np.ndarray, out: np.ndarray) -> None:
        """Copies the runs of `column` to their places in `out`."""
        if len(self.counts) == 1 or self._is_long(bytes_each(column)):
            for source, target, count in self._each():
                out[target : target + count] = column[source : source + count]
            return
        sources, targets = self._elements
        if isinstance(targets, slice) and column.dtype == out.dtype:
            # With another mode than clip NumPy fills a buffer of its own and copies it.
            np.take(column, sources, axis=0, out=out[targets], mode="clip")
        else:
            out[targets] = column[sources]

    def _is_long(self, size: int) -> bool:
        return int(self.counts.sum()) * size >= LONG_RUN_BYTES * len(self.counts)

    def _each(self) -> Iterator[tuple[int, int, int]]:
        return zip(self.sources.tolist(), self.targets.tolist(), self.counts.tolist(), strict=True)

    @cached_property
    def _elements(self) -> tuple[np.ndarray, np.ndarray | slice]:
        """Where every element comes from and where it goes."""
        ends = np.cumsum(self.counts)
        total = int(ends[-1]) if len(ends) else 0
        within = np.arange(total) - np.repeat(ends - self.counts, self.counts)
        sources = np.repeat(self.sources, self.counts) + within
        if total and np.array_equal(self.targets - self.targets[0], ends - self.counts):
            return sources, slice(int(self.targets[0]), int(self.targets[0]) + total)
        return sources, np.repeat(self.targets, self.counts) + within

    def copy_objects(self, values: list | np.ndarray, out: list) -> None:
        """The same for a column of objects."""
        for source, target, count in self._each():
            out[target : target + count] = values[source : source + count]


def bytes_each(column: np.ndarray) -> int:
    """Bytes of one row or token."""
    return column.itemsize * math.prod(column.shape[1:])


def offsets(lengths: np.ndarray) -> np.ndarray:
    """Where each row's tokens begin, and after them where the last row's end: one entry more than rows."""
    return np.concatenate([[0], np.cumsum(lengths)])


def one_dtype(columns: Iterable[np.ndarray]) -> np.dtype:
    """The dtype that holds the values of all."""
    dtypes = {column.dtype for column in columns}
    return dtypes.pop() if len(dtypes) == 1 else np.result_type(*dtypes)
