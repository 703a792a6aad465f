"""Sequence packing: concatenates the rows of a micro-batch into one row without padding.

Shape suffixes: B rows, L tokens of the longest row, T tokens of all rows.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

import torch
from torch import Tensor

from flowrl.data.batch.tensordicts import row_positions


# Not frozen: torch.compile traces into frozen dataclasses and would recompile each layer for every micro-batch.
@dataclass(eq=False)
class Pack:
    """Index mapping between padded rows [B, L] and one packed row [1, T] with the rows in the same order."""

    lengths: tuple[int, ...]
    """Number of tokens of each row, at least 1."""
    padded_index_T: Tensor
    """Index of each token in the flattened padded rows, int64 [T]."""
    positions_T: Tensor
    """Position of each token in its row, int64 [T], starting at 0."""
    cu_seqlens: Tensor
    """Cumulative row lengths as in flash-attn, int32 [B + 1], starting at 0."""

    # Cached, because every layer reads these properties.
    @cached_property
    def max_length(self) -> int:
        return max(self.lengths)

    @cached_property
    def equal_length_runs(self) -> list[tuple[int, int]]:
        """Groups of adjacent rows with equal length, as pairs (number of rows, tokens per row)."""
        return [(len(list(same)), length) for length, same in groupby(self.lengths)]

    def to(self, device: torch.device | str) -> "Pack":
        indices = (self.padded_index_T, self.positions_T, self.cu_seqlens)
        padded_index_T, positions_T, cu_seqlens = (x.to(device) for x in indices)
        return replace(self, padded_index_T=padded_index_T, positions_T=positions_T, cu_seqlens=cu_seqlens)

    def with_filler_row(self, num_tokens: int) -> "Pack":
        """Returns the layout with one additional row of filler tokens at the end, which `unpack` drops."""
        if not num_tokens:
            return self
        return replace(
            self,
            lengths=(*self.lengths, num_tokens),
            positions_T=torch.cat([self.positions_T, torch.arange(num_tokens, device=self.positions_T.device)]),
            cu_seqlens=torch.cat([self.cu_seqlens, self.cu_seqlens[-1:] + num_tokens]),
        )

    def pack(self, rows_BL: Tensor) -> Tensor:
        """Converts padded rows to one packed row [1, T]."""
        return rows_BL.flatten()[self.padded_index_T][None]

    def unpack(self, values_1T: Tensor, shape: torch.Size) -> Tensor:
        """Converts a packed row to padded rows of `shape` [B, L], with 0 at padding."""
        empty = values_1T.new_zeros(shape.numel())
        return empty.index_copy(0, self.padded_index_T, values_1T.squeeze(0)).view(shape)


def pack_rows(lengths: Iterable[int]) -> Pack:
    """Returns the packed layout of rows with these lengths, on the CPU. Padded rows are as wide as the longest row."""
    lengths_B = torch.tensor(list(lengths), dtype=torch.int64)
    mask_BL = row_positions(lengths_B)
    cu_seqlens = torch.nn.functional.pad(lengths_B.cumsum(0), (1, 0)).to(torch.int32)
    positions_BL = torch.arange(mask_BL.shape[1]).expand(mask_BL.shape)
    return Pack(tuple(lengths_B.tolist()), mask_BL.flatten().nonzero().squeeze(1), positions_BL[mask_BL], cu_seqlens)
