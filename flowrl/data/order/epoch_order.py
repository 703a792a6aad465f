"""The order of rows in every epoch: shuffled by a seed, with weights of the files."""

from collections.abc import Sequence

import numpy as np


class EpochOrder:
    """Maps positions in an endless stream to rows. The order depends only on the seed, the weights and the epoch."""

    def __init__(self, parts: Sequence[tuple[int, float]], *, seed: int, shuffle: bool = True) -> None:
        """Creates the order of the rows of several files. Row indices are consecutive over all files.

        Args:
            parts: number of rows and weight of each file. An epoch has `round(rows * weight)` rows of a file. Each row
                of a file is used once before any row is used again.
            seed: seed of the random order.
            shuffle: if False, every epoch has the order of the files.
        """
        self._parts, self._seed, self._shuffle = list(parts), seed, shuffle
        self._counts = [round(rows * weight) for rows, weight in self._parts]
        self._is_weighted = any(weight != 1 for _, weight in self._parts)
        self._epoch, self._order = -1, np.zeros(0, dtype=np.int64)

    def __len__(self) -> int:
        """Returns the number of rows of an epoch."""
        return sum(self._counts)

    def row(self, position: int) -> int:
        """Returns the row at a position of the stream, from 0."""
        epoch, offset = divmod(position, len(self))
        return int(self.rows(epoch)[offset])

    def rows(self, epoch: int) -> np.ndarray:
        """Returns the rows of an epoch in their order."""
        if epoch != self._epoch:
            rows = self._weighted_rows(epoch) if self._is_weighted else np.arange(len(self))
            if self._shuffle:
                rows = rows[np.random.default_rng([self._seed, epoch]).permutation(len(rows))]
            self._epoch, self._order = epoch, rows
        return self._order

    def _weighted_rows(self, epoch: int) -> np.ndarray:
        chosen, first = [], 0
        for part, ((num_rows, _), count) in enumerate(zip(self._parts, self._counts, strict=True)):
            positions = np.arange(epoch * count, (epoch + 1) * count)
            passes, offsets = positions // num_rows, positions % num_rows
            if self._shuffle:
                for index in np.unique(passes):
                    # The number of the file is part of the seed, so that this order differs from the order of an epoch.
                    order = np.random.default_rng([self._seed, int(index), part + 1]).permutation(num_rows)
                    offsets[passes == index] = order[offsets[passes == index]]
            chosen.append(first + offsets)
            first += num_rows
        return np.concatenate(chosen)
