"""What one forward pass sees: a few rows of similar length, right-padded or also packed.

Shape suffixes: B rows, L the longest row of the micro-batch, T tokens of the table.

Padding stands on the right, so that causal attention keeps real tokens from seeing it without an attention mask. A
micro-batch with a pack is run by the model without padding; losses see padded rows in either case.
"""

from dataclasses import dataclass, replace

import torch
from tensordict import TensorDictBase
from torch import Tensor

from flowrl.data.batch.tensordicts import lengths, row_positions
from flowrl.engines.models.packing import Pack, pack_rows

_PASS_SHARE = 1 / 16
"""What one more padded pass may save at least, of the tokens that a pass may hold."""


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
    pack: Pack | None = None
    """The same rows without padding, for models that run them so; None where they are to be run as they stand here."""

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
            pack=None if self.pack is None else self.pack.to(device),
        )


def microbatches(table: TensorDictBase, max_tokens: int, *, packed: bool = False) -> list[MicroBatch]:
    """Cuts a table into micro-batches.

    Rows are sorted by length, equal lengths in table order, and cut into neighbours: packed ones while they fit;
    padded ones so that passes and padding together cost least, where a pass costs as much as a sixteenth of
    `max_tokens`. A row longer than `max_tokens` stands alone.

    Args:
        table: with `input_ids`; rows of at least one token.
        max_tokens: >= 1, of a micro-batch, padding included where it is not packed.
        packed: for a model that runs packed rows.
    Returns: every row in exactly one micro-batch; an empty table gives none.
    """
    lengths_B = lengths(table)
    sorted_lengths_B, order_B = torch.sort(lengths_B, stable=True)
    ascending = sorted_lengths_B.tolist()
    assert not ascending or ascending[0] > 0, "a row without tokens cannot be run"
    sizes = (_sizes_of_packs if packed else _sizes_padded)(ascending, max_tokens)
    starts_B = torch.cumsum(lengths_B, 0) - lengths_B
    chosen = order_B.split(sizes) if sizes else ()
    return [_pad(table, index, lengths_B[index], starts_B[index], packed) for index in chosen]


def empty_microbatch(table: TensorDictBase, *, packed: bool = False) -> MicroBatch:
    """A row of two tokens of which none counts, with the columns of a table: a pass that adds nothing."""
    tokens = {name: column.new_zeros((1, 2, *column.shape[1:])) for name, column in table["tokens"].items()}
    rows = {n: c.new_zeros((1, *c.shape[1:])) for n, c in table["rows"].items() if isinstance(c, Tensor)}
    rows.pop("length", None)
    mask_BL = torch.zeros((1, 2), dtype=torch.bool)
    index = torch.zeros(0, dtype=torch.int64)
    return MicroBatch(tokens.pop("input_ids"), mask_BL, tokens, rows, index, pack_rows([2]) if packed else None)


def _sizes_of_packs(ascending: list[int], max_tokens: int) -> list[int]:
    sizes: list[int] = []
    size = held = 0
    for length in ascending:
        if size and held + length > max_tokens:
            sizes.append(size)
            size = held = 0
        size, held = size + 1, held + length
    return [*sizes, size] if size else []


def _sizes_padded(ascending: list[int], max_tokens: int) -> list[int]:
    """The cut of least cost, by the least costs of all shorter prefixes."""
    costs_B = torch.zeros(len(ascending) + 1, dtype=torch.float64)
    before = [0] * (len(ascending) + 1)
    for end, length in enumerate(ascending, 1):
        first = end - min(end, max(1, max_tokens // length))
        costs = costs_B[first:end] + length * torch.arange(end - first, 0, -1)
        cost, place = costs.min(0)
        costs_B[end], before[end] = cost + _PASS_SHARE * max_tokens, first + int(place)
    sizes = []
    end = len(ascending)
    while end:
        sizes.append(end - before[end])
        end = before[end]
    return sizes[::-1]


def _pad(table: TensorDictBase, index_B: Tensor, lengths_B: Tensor, starts_B: Tensor, packed: bool) -> MicroBatch:
    mask_BL = row_positions(lengths_B)
    positions_BL = starts_B[:, None] + torch.arange(mask_BL.shape[1])
    tokens = {}
    for name, column in table["tokens"].items():
        padded = column.new_zeros((*mask_BL.shape, *column.shape[1:]))
        padded[mask_BL] = column[positions_BL[mask_BL]]
        tokens[name] = padded
    rows = {n: c[index_B] for n, c in table["rows"].items() if isinstance(c, Tensor) and n != "length"}
    pack = pack_rows(lengths_B.tolist()) if packed else None
    return MicroBatch(tokens.pop("input_ids"), mask_BL, tokens, rows, index_B, pack)
