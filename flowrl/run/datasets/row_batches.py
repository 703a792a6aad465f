"""Batches of the rows of a dataset, in the order of its epochs."""

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Protocol, runtime_checkable

import numpy as np

from flowrl.data.batch.batch import Batch
from flowrl.data.order.epoch_order import EpochOrder


@runtime_checkable
class Skippable(Protocol):
    """A stream of batches that a resumed run can advance without computing the batches."""

    def skip(self, num_batches: int) -> None:
        """Advances by `num_batches` batches."""
        ...


class RowBatches(Iterator[Batch]):
    """Iterator of the batches of all epochs. The last batch of an epoch may have fewer rows. `skip` reads no rows."""

    def __init__(
        self,
        order: EpochOrder,
        num_rows: int,
        make_batch: Callable[[np.ndarray], Batch],
        *,
        epochs: int | None = None,
    ) -> None:
        """Starts at the first batch of epoch 0.

        Args:
            order: the order of the rows in every epoch.
            num_rows: number of rows of a batch.
            make_batch: returns the batch of row indices (int64).
            epochs: number of passes over the rows; None is endless.
        """
        self._order, self._num_rows, self._make_batch, self._epochs = order, num_rows, make_batch, epochs
        self._num_drawn = 0

    def __next__(self) -> Batch:
        epoch, index = divmod(self._num_drawn, -(-len(self._order) // self._num_rows))
        if self._epochs is not None and epoch >= self._epochs:
            raise StopIteration
        self._num_drawn += 1
        return self._make_batch(self._order.rows(epoch)[index * self._num_rows : (index + 1) * self._num_rows])

    def skip(self, num_batches: int) -> None:
        """Advances by `num_batches` batches, without reading their rows."""
        self._num_drawn += num_batches


class Lookahead:
    """Wraps a stream of batches to check whether another batch follows.

    Draws a batch only when `has_next` or `pop` is called, because the stream may generate it with the current weights.
    """

    def __init__(self, stream: Iterator[Batch]) -> None:
        self._stream = stream
        self._drawn: list[Batch] = []

    def has_next(self) -> bool:
        if not self._drawn:
            self._drawn = list(islice(self._stream, 1))
        return bool(self._drawn)

    def pop(self) -> Batch:
        """Returns the next batch, which must exist."""
        assert self.has_next()
        return self._drawn.pop()
