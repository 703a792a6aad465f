"""Rows one after another in a single row, so that a model computes no padding.

Shape suffixes: B rows, L the longest of them, T the tokens of all.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

import torch
from torch import Tensor

from flowrl.data.batch.tensordicts import row_positions


# Not frozen: torch.compile would look into one that is, and compile each layer anew for every micro-batch.
@dataclass(eq=False)
class Pack:
    """Where the tokens of padded rows [B, L] stand in one row [1, T] without padding, rows in the same order."""

    lengths: tuple[int, ...]
    """Tokens per row, B of them, each at least 1."""
    places_T: Tensor
    """int64 [T], where each token stands in the rows laid end to end with their padding."""
    positions_T: Tensor
    """int64 [T], the number of each token in its row, from 0."""
    bounds: Tensor
    """int32 [B + 1], where rows begin, and the end of the last."""

    # Computed once: every layer asks for these two.
    @cached_property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return max(self.lengths)

    @cached_property
    def runs(self) -> list[tuple[int, int]]:
        """(rows, tokens of each) of neighbours of the same length."""
        return [(len(list(same)), length) for length, same in groupby(self.lengths)]

    def to(self, device: torch.device | str) -> "Pack":
        """The same on a device; the lengths stay where Python reads them."""
        places_T, positions_T, bounds = (x.to(device) for x in (self.places_T, self.positions_T, self.bounds))
        return replace(self, places_T=places_T, positions_T=positions_T, bounds=bounds)

    def filled(self, count: int) -> "Pack":
        """The same for a row [1, T + count], whose last tokens are a row by themselves, which `rows` does not take."""
        if not count:
            return self
        return replace(
            self,
            lengths=(*self.lengths, count),
            positions_T=torch.cat([self.positions_T, torch.arange(count, device=self.positions_T.device)]),
            bounds=torch.cat([self.bounds, self.bounds[-1:] + count]),
        )

    def flat(self, rows_BL: Tensor) -> Tensor:
        """Padded rows -> [1, T]."""
        return rows_BL.flatten()[self.places_T][None]

    def rows(self, values_1T: Tensor, shape: torch.Size) -> Tensor:
        """Back at [B, L], which is `shape`; 0 where there is no token."""
        empty = values_1T.new_zeros(shape.numel())
        return empty.index_copy(0, self.places_T, values_1T.squeeze(0)).view(shape)


def pack_rows(lengths: Iterable[int]) -> Pack:
    """How rows of these lengths, padded to the longest, are packed; on the CPU."""
    lengths_B = torch.tensor(list(lengths), dtype=torch.int64)
    mask_BL = row_positions(lengths_B)
    bounds = torch.nn.functional.pad(lengths_B.cumsum(0), (1, 0)).to(torch.int32)
    positions_BL = torch.arange(mask_BL.shape[1]).expand(mask_BL.shape)
    return Pack(tuple(lengths_B.tolist()), mask_BL.flatten().nonzero().squeeze(1), positions_BL[mask_BL], bounds)
