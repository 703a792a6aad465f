"""Splits a batch into micro-batches. The rows of a micro-batch have similar lengths and are padded or packed for one
forward pass. Rows of a group, such as a pair, stay in one micro-batch.

Shape suffixes: B rows, G groups of rows, L tokens of the longest row of the micro-batch, T tokens of the batch.

Rows are right-padded, so causal attention needs no mask. The model processes a packed micro-batch without padding, but
the loss function always receives padded rows.
"""

from dataclasses import dataclass, replace

import torch
from tensordict import TensorDictBase
from torch import Tensor

from flowrl.config import UserError
from flowrl.data.batch.tensordicts import lengths, row_positions
from flowrl.devices.device import get_device
from flowrl.engines.models.attention import Pack, pack_rows

_PASS_COST = 1 / 16
"""Estimated fixed cost of a forward pass, as a fraction of the token budget."""


@dataclass(frozen=True)
class Groups:
    """Rows that a loss needs in one micro-batch: the rows with the same value in a row column.

    Groups are never split. Splitting a group would need a second forward pass, which costs a third more time and
    supports only losses of log-probabilities.
    """

    column: str
    """Name of the row column that identifies the group of each row."""
    size: int | str
    """Number of rows of every group, or the name of a row column with the size of each row's group. If the actual
    number differs, because rows are missing, an error is raised.
    """


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
    groups: Tensor | None = None
    """Index of each row's group in the micro-batch, int64 [B], ascending. Rows of a group have the order of the batch.
    None without groups.
    """
    num_groups: int = 0
    """Number of groups."""
    num_targets: int | None = None
    """Number of tokens that the requested outputs need, except the first token of each row. None if it is unknown. A
    model then reads the number from the device.
    """

    @property
    def lengths(self) -> Tensor:
        """Returns the number of tokens per row, int64 [B]."""
        return self.mask.sum(-1)

    def to(self, device: torch.device | str) -> "MicroBatch":
        """Returns the micro-batch with all tensors on a device. Starts one copy of all tensors, without waiting."""
        if self.input_ids.device == torch.device(device):
            return self
        own = [self.input_ids, self.mask, self.index, *([] if self.groups is None else [self.groups])]
        pack = () if self.pack is None else self.pack.tensors
        sent = iter(get_device(device).send([*own, *pack, *self.tokens.values(), *self.rows.values()]))
        return replace(
            self,
            input_ids=next(sent),
            mask=next(sent),
            index=next(sent),
            groups=None if self.groups is None else next(sent),
            pack=None if self.pack is None else self.pack.with_tensors(next(sent), next(sent), next(sent)),
            tokens={name: next(sent) for name in self.tokens},
            rows={name: next(sent) for name in self.rows},
        )


def index_groups(batch: TensorDictBase, groups: Groups) -> Tensor:
    """Returns the index of each row's group, int64 [B], from 0 to the number of groups - 1.

    Raises UserError if a group does not have its declared number of rows, because the batch was split inside the group.
    """
    ids_B = _group_column(batch, groups.column)
    unique_G, index_B, counts_G = ids_B.unique(return_inverse=True, return_counts=True)
    size_B = torch.full_like(ids_B, groups.size) if isinstance(groups.size, int) else _group_column(batch, groups.size)
    wrong_B = counts_G[index_B] != size_B
    if bool(wrong_B.any()):
        row = int(wrong_B.nonzero()[0])
        raise UserError(
            f"the loss needs all rows of a group in one call, but group {unique_G[index_B[row]].item()} of the column "
            f"{groups.column!r} has {counts_G[index_B[row]].item()} instead of {size_B[row].item()}: keep them "
            f"together, for example with batch.minibatches(..., groups={groups.column!r})"
        )
    return index_B


def _group_column(batch: TensorDictBase, name: str) -> Tensor:
    column = batch["rows"].get(name)
    if isinstance(column, Tensor) and column.dim() == 1 and not column.dtype.is_floating_point:
        return column
    raise UserError(f"the column {name!r} of the groups of a loss must be a row column of integers")


def microbatches(
    batch: TensorDictBase, max_tokens: int, *, packed: bool = False, groups_B: Tensor | None = None
) -> list[MicroBatch]:
    """Splits a batch into micro-batches. Every row is in exactly one micro-batch.

    Groups are sorted by their longest row (stable) and split into consecutive runs. Without `groups_B`, every row is a
    group. Packed groups are combined greedily. For padded rows, the runs minimize the number of padded tokens plus a
    fixed cost per micro-batch. A group larger than `max_tokens` gets its own micro-batch.

    Args:
        batch: rows of at least one token, with a token column `input_ids`.
        max_tokens: >= 1, token budget of a micro-batch. Padding counts unless the rows are packed.
        packed: whether the model processes packed rows.
        groups_B: index of each row's group, from `index_groups`. The rows of a group stay in one micro-batch, adjacent
            and in the order of the batch.
    """
    lengths_B = lengths(batch)
    assert not len(lengths_B) or int(lengths_B.min()) > 0, "rows have at least one token"
    units_B = torch.arange(len(lengths_B)) if groups_B is None else groups_B
    num_rows_G = torch.bincount(units_B)
    longest_G = torch.zeros_like(num_rows_G).scatter_reduce(0, units_B, lengths_B, "amax")
    num_tokens_G = torch.zeros_like(num_rows_G).scatter_add(0, units_B, lengths_B)
    order_G = torch.sort(longest_G, stable=True).indices
    order_B = torch.sort(torch.argsort(order_G)[units_B], stable=True).indices
    num_rows = num_rows_G[order_G].tolist()
    if packed:
        counts = _packed_counts(num_tokens_G[order_G].tolist(), max_tokens)
    else:
        counts = _padded_counts(longest_G[order_G].tolist(), num_rows, max_tokens)
    ends = torch.tensor(counts).cumsum(0).tolist()
    sizes = [sum(num_rows[end - count : end]) for end, count in zip(ends, counts, strict=True)]
    starts_B = torch.cumsum(lengths_B, 0) - lengths_B
    indices = order_B.split(sizes) if sizes else ()
    micros = [_pad(batch, index, lengths_B[index], starts_B[index], packed) for index in indices]
    if groups_B is None:
        return micros
    grouped = []
    for micro in micros:
        unique_G, index_B = groups_B[micro.index].unique_consecutive(return_inverse=True)
        grouped.append(replace(micro, groups=index_B, num_groups=len(unique_G)))
    return grouped


def empty_microbatch(batch: TensorDictBase, *, packed: bool = False, groups: Groups | None = None) -> MicroBatch:
    """Returns a dummy micro-batch with one fully masked row, or one group of such rows. It contributes no gradient."""
    num_rows = 1 if groups is None else _size_of_first_group(batch, groups)
    tokens = {name: column.new_zeros((num_rows, 2, *column.shape[1:])) for name, column in batch["tokens"].items()}
    rows = {n: c.new_zeros((num_rows, *c.shape[1:])) for n, c in batch["rows"].items() if isinstance(c, Tensor)}
    rows.pop("length", None)
    mask_BL = torch.zeros((num_rows, 2), dtype=torch.bool)
    index = torch.zeros(0, dtype=torch.int64)
    pack = pack_rows([2] * num_rows) if packed else None
    micro = MicroBatch(tokens.pop("input_ids"), mask_BL, tokens, rows, index, pack)
    return micro if groups is None else replace(micro, groups=torch.zeros(num_rows, dtype=torch.int64), num_groups=1)


def _size_of_first_group(batch: TensorDictBase, groups: Groups) -> int:
    """Returns the number of rows of the first group of a batch, or 2 for a batch without rows."""
    if isinstance(groups.size, int):
        return groups.size
    sizes = _group_column(batch, groups.size)
    return int(sizes[0]) if len(sizes) else 2


def _packed_counts(num_tokens: list[int], max_tokens: int) -> list[int]:
    """Returns the number of groups of each micro-batch, given the number of tokens of each group."""
    counts: list[int] = []
    count = total = 0
    for tokens in num_tokens:
        if count and total + tokens > max_tokens:
            counts.append(count)
            count = total = 0
        count, total = count + 1, total + tokens
    return [*counts, count] if count else []


def _padded_counts(longest: list[int], num_rows: list[int], max_tokens: int) -> list[int]:
    """Returns the number of groups of each micro-batch, so that the total cost of `microbatches` is minimal.

    Dynamic programming: the minimal cost of the first n groups follows from the minimal costs of fewer groups.

    Args:
        longest: number of tokens of each group's longest row, ascending.
        num_rows: number of rows of each group.
    """
    rows_before_G = torch.tensor([0, *num_rows]).cumsum(0)
    costs_G = torch.zeros(len(longest) + 1, dtype=torch.float64)
    starts = [0] * (len(longest) + 1)
    for end, length in enumerate(longest, 1):
        # Smallest number of earlier rows with which the padded rows of the micro-batch fit into the budget.
        fewest = rows_before_G[end] - max_tokens // length
        first = min(int(torch.searchsorted(rows_before_G, fewest)), end - 1)
        costs = costs_G[first:end] + length * (rows_before_G[end] - rows_before_G[first:end])
        cost, offset = costs.min(0)
        costs_G[end], starts[end] = cost + _PASS_COST * max_tokens, first + int(offset)
    counts = []
    end = len(longest)
    while end:
        counts.append(end - starts[end])
        end = starts[end]
    return counts[::-1]


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
