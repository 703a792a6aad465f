"""Runs: stretches of consecutive rows or tokens, and copying them from one flat column straight into another."""

from collections.abc import Iterable
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

    @cached_property
    def num_elements(self) -> int:
        return int(self.counts.sum())

    @cached_property
    def _each(self) -> list[tuple[int, int, int]]:
        return list(zip(self.sources.tolist(), self.targets.tolist(), self.counts.tolist(), strict=True))

    @cached_property
    def _source_positions(self) -> np.ndarray:
        return self._positions(self.sources)

    @cached_property
    def _target_positions(self) -> np.ndarray | slice:
        before = np.cumsum(self.counts) - self.counts
        if len(self.targets) and np.array_equal(self.targets - self.targets[0], before):
            return slice(int(self.targets[0]), int(self.targets[0]) + self.num_elements)
        return self._positions(self.targets)

    def _positions(self, starts: np.ndarray) -> np.ndarray:
        if self.num_elements == len(starts) and np.all(self.counts == 1):
            return starts
        before = np.cumsum(self.counts) - self.counts
        return np.repeat(starts - before, self.counts) + np.arange(self.num_elements)

    def copy(self, column: np.ndarray, out: np.ndarray) -> None:
        """Copies the runs of `column` to their places in `out`."""
        bytes_each = column.itemsize * int(np.prod(column.shape[1:]))
        if self.num_elements * bytes_each >= LONG_RUN_BYTES * len(self.counts):
            for source, target, count in self._each:
                out[target : target + count] = column[source : source + count]
        elif isinstance(self._target_positions, slice) and column.dtype == out.dtype:
            # With another mode than clip NumPy fills a buffer of its own and copies it.
            np.take(column, self._source_positions, axis=0, out=out[self._target_positions], mode="clip")
        else:
            out[self._target_positions] = column[self._source_positions]

    def copy_objects(self, values: list | np.ndarray, out: list) -> None:
        """The same for a column of objects."""
        for source, target, count in self._each:
            out[target : target + count] = values[source : source + count]


def offsets(lengths: np.ndarray) -> np.ndarray:
    """Where each row's tokens begin, and after them where the last row's end: one entry more than rows."""
    return np.concatenate([[0], np.cumsum(lengths)])


def one_dtype(columns: Iterable[np.ndarray]) -> np.dtype:
    """The dtype that holds the values of all."""
    dtypes = {column.dtype for column in columns}
    return dtypes.pop() if len(dtypes) == 1 else np.result_type(*dtypes)
