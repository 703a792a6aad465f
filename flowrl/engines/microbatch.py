"""What one forward pass sees: a few rows of similar length, right-padded.

Shape suffixes: B rows, L the longest row of the micro-batch, T tokens of the table.

Padding stands on the right, so that causal attention keeps real tokens from seeing it without an attention mask.
"""

from dataclasses import dataclass, replace

import torch
from tensordict import TensorDictBase
from torch import Tensor

from flowrl.data.table import lengths, row_positions


@dataclass(frozen=True)
class MicroBatch:
    """Some rows of a table, padded for one forward pass."""

    input_ids: Tensor
    """int64 [B, L], 0 where there is no token."""
    mask: Tensor
    """bool [B, L], true where there is a token."""
    tokens: dict[str, Tensor]
    """The other token columns, each [B, L, ...], 0 where there is no token."""
    rows: dict[str, Tensor]
    """The row columns that are tensors, each [B, ...]."""
    index: Tensor
    """int64 [B], which rows of the table these are."""

    @property
    def lengths(self) -> Tensor:
        """Tokens per row, int64 [B]."""
        return self.mask.sum(-1)

    def to(self, device: torch.device | str) -> "MicroBatch":
        """The same micro-batch on a device; itself if it is there already."""
        if self.input_ids.device == torch.device(device):
            return self
        return replace(
            self,
            input_ids=self.input_ids.to(device),
            mask=self.mask.to(device),
            tokens={name: column.to(device) for name, column in self.tokens.items()},
            rows={name: column.to(device) for name, column in self.rows.items()},
            index=self.index.to(device),
        )


def microbatches(table: TensorDictBase, max_tokens: int) -> list[MicroBatch]:
    """Cuts a table into micro-batches.

    Rows are sorted by length, equal lengths in table order, and packed while rows x longest <= max_tokens. A row longer
    than that stands alone.

    Args:
        table: with `input_ids`; rows of at least one token.
        max_tokens: >= 1, padding included.
    Returns: every row in exactly one micro-batch; an empty table gives none.
    """
    lengths_B = lengths(table)
    sorted_lengths_B, order_B = torch.sort(lengths_B, stable=True)
    sizes = _sizes(sorted_lengths_B.tolist(), max_tokens)
    starts_B = torch.cumsum(lengths_B, 0) - lengths_B
    return [_pad(table, index, lengths_B[index], starts_B[index]) for index in order_B.split(sizes)] if sizes else []


def empty_microbatch(table: TensorDictBase) -> MicroBatch:
    """A row of two tokens of which none counts, with the columns of a table: a pass that adds nothing."""
    tokens = {name: column.new_zeros((1, 2, *column.shape[1:])) for name, column in table["tokens"].items()}
    rows = {n: c.new_zeros((1, *c.shape[1:])) for n, c in table["rows"].items() if isinstance(c, Tensor)}
    rows.pop("length", None)
    mask_BL = torch.zeros((1, 2), dtype=torch.bool)
    return MicroBatch(tokens.pop("input_ids"), mask_BL, tokens, rows, torch.zeros(0, dtype=torch.int64))


def _sizes(ascending: list[int], max_tokens: int) -> list[int]:
    assert not ascending or ascending[0] > 0, "a row without tokens cannot be run"
    sizes: list[int] = []
    size = 0
    for length in ascending:
        if size and (size + 1) * length > max_tokens:
            sizes.append(size)
            size = 0
        size += 1
    return [*sizes, size] if size else []


def _pad(table: TensorDictBase, index_B: Tensor, lengths_B: Tensor, starts_B: Tensor) -> MicroBatch:
    mask_BL = row_positions(lengths_B)
    positions_BL = starts_B[:, None] + torch.arange(mask_BL.shape[1])
    tokens = {}
    for name, column in table["tokens"].items():
        padded = column.new_zeros((*mask_BL.shape, *column.shape[1:]))
        padded[mask_BL] = column[positions_BL[mask_BL]]
        tokens[name] = padded
    rows = {n: c[index_B] for n, c in table["rows"].items() if isinstance(c, Tensor) and n != "length"}
    return MicroBatch(tokens.pop("input_ids"), mask_BL, tokens, rows, index_B)
