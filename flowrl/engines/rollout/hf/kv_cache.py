"""Keys and values of past tokens, and attention over them, so that a row's arithmetic ignores the rows beside it.

Shape suffixes: B rows, H key-value heads, G queries per key-value head, C slots, L tokens, D head dimension.

A row's token at position p stands in slot p, whatever the other rows hold; slots it has not reached are masked. So rows
of different lengths decode together, new tokens are written in place, and a row sees the same numbers in the same order
in any batch. The number of slots in use is a multiple of 32 for the same reason: vector code handles a ragged end in
another order.

A decode step has its own attention: torch's CPU kernel sums in an order that depends on where its scratch memory lies,
and transformers copies keys and values once per query head before it calls a kernel with a mask.
"""

import math
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from flowrl.engines.models.attention import attend, capped_attention

SLOT_MULTIPLE = 32
_ATTENTION = "flowrl_slots"


def round_up(number: int, multiple: int) -> int:
    """The smallest multiple that is not below a number."""
    return -(-number // multiple) * multiple


def with_slot_attention(model: PreTrainedModel) -> PreTrainedModel:
    """A second frame around the same weights, which reads a `SlotCache` fast.

    Parameters and buffers are the model's own: training one trains the other, and nothing of the model is changed.
    """
    AttentionInterface.register(_ATTENTION, _slot_attention)
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    frame = deepcopy(model, shared)
    frame.set_attn_implementation(_ATTENTION)
    return frame


def _slot_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it: of queries [B, H x G, L, D] over keys and values [B, H, C, D].

    Gives [B, L, H x G, D]. Without a mask this is a prefill, causal from the first slot; with one, additive
    [B, 1, 1, C], a decode step.
    """
    if attention_mask is None:
        return attend(query, key, value, pack=None, scaling=scaling, softcap=softcap), None
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if softcap is not None:
        return capped_attention(query * scale, key, value, attention_mask, softcap), None
    num_rows, num_heads, _, head_dim = query.shape
    query_BHGD = (query * scale).view(num_rows, key.shape[1], -1, head_dim)
    weights_BHGC = torch.matmul(query_BHGD, key.transpose(2, 3)).add_(attention_mask).softmax(-1)
    return torch.matmul(weights_BHGC, value).view(num_rows, 1, num_heads, -1), None


class _SlotLayer(CacheLayerMixin):
    """One layer's keys and values, [B, H, C, D] each."""

    def __init__(self, cache: "SlotCache") -> None:
        super().__init__()
        self._cache = cache
        self.keys = self.values = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Makes empty slots. They are zero, because what a masked slot holds is multiplied by 0, and must be finite."""
        shape = (self._cache.num_rows, key_states.shape[1], self._cache.capacity)
        self.keys = key_states.new_zeros((*shape, key_states.shape[-1]))
        self.values = value_states.new_zeros((*shape, value_states.shape[-1]))
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Stores new tokens and returns all that queries may look at; called by the model in each layer."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        cache = self._cache
        if cache.prefilled is not None:
            slots = slice(0, key_states.shape[2])
            self.keys[cache.prefilled, :, slots] = key_states
            self.values[cache.prefilled, :, slots] = value_states
            return key_states, value_states
        self.keys[cache.row_numbers, :, cache.positions] = key_states.squeeze(2)
        self.values[cache.row_numbers, :, cache.positions] = value_states.squeeze(2)
        return self.keys[:, :, : cache.width], self.values[:, :, : cache.width]

    def take(self, rows: Tensor, capacity: int) -> None:
        """Keeps the rows at an index (which may repeat them), in at least as many slots as before."""
        if self.keys is not None and self.values is not None:
            self.keys = _take(self.keys, rows, capacity)
            self.values = _take(self.values, rows, capacity)

    def copy(self, sources: Tensor, targets: Tensor, num_slots: int) -> None:
        """Copies the first slots of rows to others."""
        if self.keys is not None and self.values is not None:
            self.keys[targets, :, :num_slots] = self.keys[sources, :, :num_slots]
            self.values[targets, :, :num_slots] = self.values[sources, :, :num_slots]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Keys that a prefill looks at, and where they begin; a decode step brings its own mask."""
        return query_length, 0

    def get_seq_length(self) -> int:
        """Where a prefill begins; a decode step brings its own positions."""
        return 0

    def get_max_length(self) -> int:
        """No maximum: slots are added as rows grow."""
        return -1


def _take(slots_BHCD: Tensor, rows: Tensor, capacity: int) -> Tensor:
    if capacity == slots_BHCD.shape[2]:
        return slots_BHCD[rows]
    grown = slots_BHCD.new_zeros((len(rows), slots_BHCD.shape[1], capacity, slots_BHCD.shape[3]))
    grown[:, :, : slots_BHCD.shape[2]] = slots_BHCD[rows]
    return grown


class SlotCache(Cache):
    """The `past_key_values` of a prefill and of the decode steps after it."""

    def __init__(self, num_layers: int, num_rows: int, num_slots: int, device: torch.device | str) -> None:
        """Makes a cache for `num_rows` rows of up to `num_slots` tokens; it grows when they get longer."""
        super().__init__(layers=[_SlotLayer(self) for _ in range(num_layers)])
        self.num_rows = num_rows
        self.capacity = round_up(num_slots, SLOT_MULTIPLE)
        self.width = self.capacity
        self.prefilled: Tensor | None = None
        self.positions = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.row_numbers = torch.arange(num_rows, device=device)

    def begin_prefill(self, rows: Tensor) -> None:
        """The next forward pass brings right-padded tokens of these rows, an index, from position 0."""
        self.prefilled = rows

    def begin_step(self, positions: Tensor, longest: int) -> None:
        """The next forward pass brings one token per row.

        Args:
            positions: int64 [B], where it stands in its row.
            longest: a bound on the tokens of any row, this one included.
        """
        self.prefilled = None
        self.positions = positions
        self.width = round_up(longest, SLOT_MULTIPLE)
        if self.width > self.capacity:
            # Doubling: the copies of all growth together cost no more than one copy of the longest row.
            self.take(self.row_numbers, 2 * self.width)

    def mask(self, dtype: torch.dtype) -> Tensor:
        """What is added to a decode step's scores, [B, 1, 1, slots in use]: 0 for the row's tokens, -inf for others."""
        slots_C = torch.arange(self.width, device=self.positions.device)
        unseen_BC = slots_C > self.positions[:, None]
        mask_BC = torch.zeros(unseen_BC.shape, dtype=dtype, device=unseen_BC.device)
        return mask_BC.masked_fill_(unseen_BC, -math.inf)[:, None, None]

    def grow(self, num_rows: int, num_slots: int) -> None:
        """Makes it at least so large; what new rows hold is not said."""
        capacity = round_up(num_slots, SLOT_MULTIPLE)
        if num_rows > self.num_rows or capacity > self.capacity:
            missing = max(0, num_rows - self.num_rows)
            self.take(nn.functional.pad(self.row_numbers, (0, missing)), capacity)

    def copy(self, sources: Tensor, targets: Tensor, num_slots: int) -> None:
        """Copies the first slots of rows at an index to those at another, none of which is among them."""
        for layer in self.layers:
            assert isinstance(layer, _SlotLayer)
            layer.copy(sources, targets, num_slots)

    def take(self, rows: Tensor, capacity: int | None = None) -> None:
        """Keeps the rows at an index, which may repeat them; `capacity` adds slots."""
        self.capacity = max(self.capacity, capacity or 0)
        for layer in self.layers:
            assert isinstance(layer, _SlotLayer)
            layer.take(rows, self.capacity)
        self.num_rows = len(rows)
        self.row_numbers = torch.arange(len(rows), device=rows.device)
