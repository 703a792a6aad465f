"""Splits a batch into micro-batches. The rows of a micro-batch have similar lengths and are padded or packed for one
forward pass.

Shape suffixes: B rows, L tokens of the longest row of the micro-batch, T tokens of the batch.

Rows are right-padded, so causal attention needs no mask. The model processes a packed micro-batch without padding, but
the loss function always receives padded rows.
"""

from dataclasses import dataclass, replace

import torch
from tensordict import TensorDictBase
from torch import Tensor

from flowrl.data.batch.tensordicts import lengths, row_positions
from flowrl.engines.models.attention import Pack, pack_rows

_PASS_COST = 1 / 16
"""Estimated fixed cost of a forward pass, as a fraction of the token budget."""


@dataclass(frozen=True)
class MicroBatch:
    """Rows of a batch, padded for one forward pass."""

    input_ids: Tensor
    """Token ids, int64 [B, L]. 0 at padding."""
    mask: Tensor
    """Mask of tokens, bool [B, L]. False at padding."""
    tokens: dict[str, Tensor]
    """All other token columns by name, each [B, L, ...]. 0 at padding."""
    rows: dict[str, Tensor]
    """All row columns that are tensors, by name. Each has shape [B, ...]."""
    index: Tensor
    """Index of each row in the batch, int64 [B]."""
    pack: Pack | None = None
    """Packed layout of the rows. None if the model processes padded rows."""

    @property
    def lengths(self) -> Tensor:
        """Returns the number of tokens per row, int64 [B]."""
        return self.mask.sum(-1)

    def to(self, device: torch.device | str) -> "MicroBatch":
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


def microbatches(batch: TensorDictBase, max_tokens: int, *, packed: bool = False) -> list[MicroBatch]:
    """Splits a batch into micro-batches. Every row is in exactly one micro-batch.

    Rows are sorted by length (stable) and split into consecutive groups. Packed rows are grouped greedily. For padded
    rows, the groups minimize the number of padded tokens plus a fixed cost per micro-batch. A row longer than
    `max_tokens` gets its own micro-batch.

    Args:
        batch: rows of at least one token, with a token column `input_ids`.
        max_tokens: >= 1, token budget of a micro-batch. Padding counts unless the rows are packed.
        packed: whether the model processes packed rows.
    """
    lengths_B = lengths(batch)
    sorted_lengths_B, order_B = torch.sort(lengths_B, stable=True)
    ascending = sorted_lengths_B.tolist()
    assert not ascending or ascending[0] > 0, "rows have at least one token"
    sizes = (_packed_sizes if packed else _padded_sizes)(ascending, max_tokens)
    starts_B = torch.cumsum(lengths_B, 0) - lengths_B
    indices = order_B.split(sizes) if sizes else ()
    return [_pad(batch, index, lengths_B[index], starts_B[index], packed) for index in indices]


def empty_microbatch(batch: TensorDictBase, *, packed: bool = False) -> MicroBatch:
    """Returns a dummy micro-batch with one fully masked row. It contributes no gradient."""
    tokens = {name: column.new_zeros((1, 2, *column.shape[1:])) for name, column in batch["tokens"].items()}
    rows = {n: c.new_zeros((1, *c.shape[1:])) for n, c in batch["rows"].items() if isinstance(c, Tensor)}
    rows.pop("length", None)
    mask_BL = torch.zeros((1, 2), dtype=torch.bool)
    index = torch.zeros(0, dtype=torch.int64)
    return MicroBatch(tokens.pop("input_ids"), mask_BL, tokens, rows, index, pack_rows([2]) if packed else None)


def _packed_sizes(ascending: list[int], max_tokens: int) -> list[int]:
    sizes: list[int] = []
    size = num_tokens = 0
    for length in ascending:
        if size and num_tokens + length > max_tokens:
            sizes.append(size)
            size = num_tokens = 0
        size, num_tokens = size + 1, num_tokens + length
    return [*sizes, size] if size else []


def _padded_sizes(ascending: list[int], max_tokens: int) -> list[int]:
    """Returns the number of rows of each micro-batch, so that the total cost of `microbatches` is minimal.

    Dynamic programming: the minimal cost of the first n rows follows from the minimal costs of fewer rows.
    """
    costs_B = torch.zeros(len(ascending) + 1, dtype=torch.float64)
    starts = [0] * (len(ascending) + 1)
    for end, length in enumerate(ascending, 1):
        first = end - min(end, max(1, max_tokens // length))
        costs = costs_B[first:end] + length * torch.arange(end - first, 0, -1)
        cost, offset = costs.min(0)
        costs_B[end], starts[end] = cost + _PASS_COST * max_tokens, first + int(offset)
    sizes = []
    end = len(ascending)
    while end:
        sizes.append(end - starts[end])
        end = starts[end]
    return sizes[::-1]


def _pad(batch: TensorDictBase, index_B: Tensor, lengths_B: Tensor, starts_B: Tensor, packed: bool) -> MicroBatch:
    mask_BL = row_positions(lengths_B)
    positions_BL = starts_B[:, None] + torch.arange(mask_BL.shape[1])
    tokens = {}
    for name, column in batch["tokens"].items():
        padded = column.new_zeros((*mask_BL.shape, *column.shape[1:]))
        padded[mask_BL] = column[positions_BL[mask_BL]]
        tokens[name] = padded
    rows = {n: c[index_B] for n, c in batch["rows"].items() if isinstance(c, Tensor) and n != "length"}
    pack = pack_rows(lengths_B.tolist()) if packed else None
    return MicroBatch(tokens.pop("input_ids"), mask_BL, tokens, rows, index_B, pack)
