"""Splits logits into chunks of positions, so that functions on logits need bounded memory.

Shape suffixes: B rows, T token positions, V vocabulary.
"""

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

Slices = tuple[slice, slice]
"""A slice of rows and a slice of positions."""


class Context(Protocol):
    """Type of the autograd context, which torch does not declare."""

    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]
    temperature: float
    softcap: float | None

    def save_for_backward(self, *tensors: Tensor | None) -> None: ...

    def set_materialize_grads(self, value: bool) -> None: ...


def chunks(shape: torch.Size, elements: int) -> Iterator[tuple[Slices, Slices]]:
    """Yields (slices of the logits, slices of the tokens that they predict), covering every prediction once.

    Arguments:
        shape: [B, T, V], of the logits. The last position predicts no token.
        elements: > 0, approximate number of logits per chunk; a single position may exceed it.
    """
    num_rows, num_positions, vocabulary = shape
    positions_at_once = max(1, min(num_positions, elements // max(1, vocabulary)))
    rows_at_once = max(1, elements // max(1, positions_at_once * vocabulary))
    for row in range(0, num_rows, rows_at_once):
        rows = slice(row, row + rows_at_once)
        for start in range(0, num_positions - 1, positions_at_once):
            stop = min(start + positions_at_once, num_positions - 1)
            yield (rows, slice(start, stop)), (rows, slice(start + 1, stop + 1))
