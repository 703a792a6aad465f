"""KV cache and decode attention that make each row's result independent of the other rows in the batch.

Shape suffixes: B rows, H key-value heads, G query heads per key-value head, C cached positions, L tokens of the forward
pass, D head dimension.

The cache stores the token at position p of a row at index p. Attention masks all later indices. Rows of different
lengths can therefore decode together, with the same summation order in any batch. The attended length is a multiple of
32, because vectorized code sums a remainder in a different order. Values are summed in blocks of 128 positions, because
matrix products choose their summation order by the number of positions.

A prefill fills an empty row. An extension is a prefill of tokens that follow cached ones. Decode steps and extensions
do not use torch's attention kernel, whose summation order on the CPU depends on memory addresses.

Between two turns of an episode, copies of its keys and values (`TurnCaches`) occupy no row of the cache.
"""

import math
from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from flowrl.engines.models.attention import attend, capped_attention

SLOT_MULTIPLE = 32
_BLOCK = 128
"""Number of positions that one matrix product sums, a multiple of `SLOT_MULTIPLE`."""

_ATTENTION = "flowrl_slots"

LayerStates = tuple[Tensor, Tensor]
"""Keys and values of one row in one layer, [H, C, D] each: heads, positions, head dimension."""


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def with_slot_attention(model: PreTrainedModel) -> PreTrainedModel:
    """Copies the module tree of a model. The copy attends over a `SlotCache` and shares all parameters and buffers."""
    AttentionInterface.register(_ATTENTION, _slot_attention)
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    copy = deepcopy(model, shared)
    copy.set_attn_implementation(_ATTENTION)
    return copy


def _slot_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    sliding_window: int | None = None,
    position_ids: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Returns the attention outputs, [B, L, H x G, D].

    Args:
        query: [B, H x G, L, D], for G query heads per key-value head.
        key, value: [B, H, C, D], for C positions.
        attention_mask: None for a causal prefill with C = L. Otherwise an additive mask [B, 1, L, C], with L = 1 for a
            decode step and L > 1 for an extension.
        sliding_window: number of tokens in the sliding window. None: the layer has no window.
        position_ids: [B, L], positions of the queries. Used if there is a mask.
    """
    if attention_mask is None:
        attended = attend(query, key, value, pack=None, scaling=scaling, window=sliding_window, softcap=softcap)
        return attended, None
    if sliding_window is not None and sliding_window < key.shape[2]:
        assert position_ids is not None, "the decoder passes positions"
        slots_C = torch.arange(key.shape[2], device=key.device)
        is_before_window_BLC = slots_C <= position_ids[..., None] - sliding_window
        attention_mask = attention_mask.masked_fill(is_before_window_BLC[:, None], -math.inf)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if softcap is not None:
        return capped_attention(query * scale, key, value, attention_mask, softcap), None
    if query.shape[2] > 1:
        return _attend_extension(query * scale, key, value, attention_mask), None
    return attend_slots(query.squeeze(2), key, value, attention_mask, scale).view(
        query.shape[0], 1, query.shape[1], -1
    ), None


def attend_slots(query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, scale: float) -> Tensor:
    """Returns the attention outputs of a decode step, [B, H x G x D]. The arguments are those of `_slot_attention`,
    except that `query` is [B, H x G, D].
    """
    query_BHGD = (query * scale).view(query.shape[0], key.shape[1], -1, query.shape[2])
    weights_BHGC = torch.matmul(query_BHGD, key.transpose(2, 3)).add_(attention_mask).softmax(-1)
    return _sum_values(weights_BHGC, value).flatten(1)


def _sum_values(weights_BHMC: Tensor, value_BHCD: Tensor) -> Tensor:
    """Returns the sums of the values of C positions, weighted by M rows of weights, [B, H, M, D].

    Further positions with weight 0 do not change the bits of the result.
    """
    if weights_BHMC.shape[-1] <= _BLOCK:
        return torch.matmul(weights_BHMC, value_BHCD)
    attended = torch.matmul(weights_BHMC[..., :_BLOCK], value_BHCD[:, :, :_BLOCK])
    for start in range(_BLOCK, weights_BHMC.shape[-1], _BLOCK):
        block = slice(start, start + _BLOCK)
        attended += torch.matmul(weights_BHMC[..., block], value_BHCD[:, :, block])
    return attended


def _attend_extension(query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor) -> Tensor:
    """Returns the attention outputs of a prefill that follows cached tokens, [B, L, H x G, D].

    `query` is already scaled.
    """
    length = query.shape[2]
    # The L queries of all G heads that share keys and values are the rows of one matrix.
    query_BHMD = query.unflatten(1, (key.shape[1], -1)).flatten(2, 3)
    logits_BHGLC = torch.matmul(query_BHMD, key.transpose(2, 3)).unflatten(2, (-1, length))
    weights_BHMC = logits_BHGLC.add_(attention_mask[:, :, None]).softmax(-1).flatten(2, 3)
    attended_BHGLD = _sum_values(weights_BHMC, value).unflatten(2, (-1, length))
    return attended_BHGLD.flatten(1, 2).transpose(1, 2).contiguous()


@dataclass(frozen=True)
class _Extension:
    """Indices of an extension of U rows by up to L tokens each, T in total. The tokens are padded on the right."""

    rows_U: Tensor
    """Row of the cache."""
    positions_UL: Tensor
    """Position in the row. Padding repeats the position of the row's last token."""
    source_T: tuple[Tensor, Tensor]
    """Indices of each token in [U, L]."""
    target_T: tuple[Tensor, Tensor]
    """Row of the cache and position of each token."""


class _SlotLayer(CacheLayerMixin):
    """Keys and values of one layer, [B, H, C, D] each."""

    def __init__(self, cache: "SlotCache") -> None:
        super().__init__()
        self._cache = cache
        self.keys = self.values = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocates zeros. Attention multiplies masked positions by 0 and therefore needs finite values there."""
        shape = (self._cache.num_rows, key_states.shape[1], self._cache.capacity)
        self.keys = key_states.new_zeros((*shape, key_states.shape[-1]))
        self.values = value_states.new_zeros((*shape, value_states.shape[-1]))
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Stores the keys and values of the new tokens. Returns all keys and values to which the tokens attend."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        cache = self._cache
        if cache.extension is not None:
            return self._extend(cache.extension, key_states, value_states)
        if cache.prefilled is not None:
            slots = slice(0, key_states.shape[2])
            self.keys[cache.prefilled, :, slots] = key_states
            self.values[cache.prefilled, :, slots] = value_states
            return key_states, value_states
        return self.append(key_states.squeeze(2), value_states.squeeze(2))

    def _extend(self, extension: _Extension, keys_UHLD: Tensor, values_UHLD: Tensor) -> tuple[Tensor, Tensor]:
        """Stores the keys and values of an extension. Returns those of all attended positions, [U, H, C, D] each."""
        assert self.keys is not None and self.values is not None
        (row_T, column_T), (target_T, position_T) = extension.source_T, extension.target_T
        self.keys[target_T, :, position_T] = keys_UHLD[row_T, :, column_T]
        self.values[target_T, :, position_T] = values_UHLD[row_T, :, column_T]
        rows, width = extension.rows_U, self._cache.width
        return self.keys[rows, :, :width], self.values[rows, :, :width]

    def read(self, row: int, num_slots: int) -> LayerStates:
        """Returns a copy of the first `num_slots` positions of a row."""
        assert self.keys is not None and self.values is not None
        return self.keys[row, :, :num_slots].clone(), self.values[row, :, :num_slots].clone()

    def write(self, row: int, keys_HCD: Tensor, values_HCD: Tensor) -> None:
        """Stores keys and values in the first positions of a row."""
        if not self.is_initialized:
            self.lazy_initialization(keys_HCD[None], values_HCD[None])
        assert self.keys is not None and self.values is not None
        self.keys[row, :, : keys_HCD.shape[1]] = keys_HCD
        self.values[row, :, : values_HCD.shape[1]] = values_HCD

    def append(self, keys_BHD: Tensor, values_BHD: Tensor) -> tuple[Tensor, Tensor]:
        """Stores the keys and values of a decode step. Returns those of all attended positions."""
        assert self.keys is not None and self.values is not None
        index = self._cache.step_index(keys_BHD.shape[1])
        for stored, new in ((self.keys, keys_BHD), (self.values, values_BHD)):
            stored.view(-1, stored.shape[-1]).index_copy_(0, index, new.flatten(0, 1))
        width = self._cache.width
        return self.keys[:, :, :width], self.values[:, :, :width]

    def select(self, rows: Tensor, capacity: int) -> None:
        """Keeps the rows with these indices, which may repeat. Extends the row length to `capacity` if needed."""
        if self.keys is not None and self.values is not None:
            self.keys = _select(self.keys, rows, capacity)
            self.values = _select(self.values, rows, capacity)

    def copy(self, sources: Tensor, targets: Tensor, num_slots: int) -> None:
        if self.keys is not None and self.values is not None:
            self.keys[targets, :, :num_slots] = self.keys[sources, :, :num_slots]
            self.values[targets, :, :num_slots] = self.values[sources, :, :num_slots]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Returns (number of keys, index of the first key) for a prefill. Decode steps and extensions pass an explicit
        mask instead.
        """
        return query_length, 0

    def get_seq_length(self) -> int:
        """Returns the first position of a prefill. Decode steps and extensions pass explicit positions instead."""
        return 0

    def get_max_length(self) -> int:
        """Returns -1, which means that the cache has no maximum length."""
        return -1


def _select(slots_BHCD: Tensor, rows: Tensor, capacity: int) -> Tensor:
    if capacity == slots_BHCD.shape[2]:
        return slots_BHCD[rows]
    grown = slots_BHCD.new_zeros((len(rows), slots_BHCD.shape[1], capacity, slots_BHCD.shape[3]))
    grown[:, :, : slots_BHCD.shape[2]] = slots_BHCD[rows]
    return grown


class SlotCache(Cache):
    """KV cache (`past_key_values` of transformers) for prefills, extensions and decode steps."""

    def __init__(self, num_layers: int, num_rows: int, num_slots: int, device: torch.device | str) -> None:
        """Creates a cache for `num_rows` rows of `num_slots` tokens. The cache grows if a row becomes longer."""
        super().__init__(layers=[_SlotLayer(self) for _ in range(num_layers)])
        self.num_rows = num_rows
        self.capacity = round_up(num_slots, SLOT_MULTIPLE)
        self.width = self.capacity
        self.prefilled: Tensor | None = None
        self.extension: _Extension | None = None
        self.positions = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.row_numbers = torch.arange(num_rows, device=device)
        self._step_index: dict[int, Tensor] = {}
        """Number of heads -> `step_index` of the current step."""

    @property
    def passed_rows(self) -> int:
        """Number of rows of the prepared pass."""
        if self.extension is not None:
            return len(self.extension.rows_U)
        return self.num_rows if self.prefilled is None else len(self.prefilled)

    def begin_prefill(self, rows: Tensor) -> None:
        """Prepares a prefill of right-padded tokens. `rows` are the indices of the rows that receive the keys and
        values.
        """
        self.prefilled, self.extension = rows, None

    def begin_extension(self, rows_U: Tensor, starts_U: Tensor, is_token_UL: Tensor) -> Tensor:
        """Prepares a prefill of right-padded tokens that follow the cached ones.

        Args:
            rows_U: distinct indices of the rows of the cache.
            starts_U: position of the first new token of each row.
            is_token_UL: false for padding. Each row has at least one new token.
        Returns: the positions [U, L] of the tokens.
        """
        row_T, column_T = is_token_UL.nonzero().unbind(1)
        last_U1 = is_token_UL.sum(1, keepdim=True) - 1
        columns_L = torch.arange(is_token_UL.shape[1], device=is_token_UL.device)
        positions_UL = starts_U[:, None] + columns_L.minimum(last_U1)
        target_T = (rows_U[row_T], positions_UL[row_T, column_T])
        self.prefilled, self.extension = None, _Extension(rows_U, positions_UL, (row_T, column_T), target_T)
        self.width = round_up(int(positions_UL.max()) + 1, SLOT_MULTIPLE)
        assert self.width <= self.capacity, "the decoder has allocated the row"
        return positions_UL

    def begin_step(self, positions: Tensor, longest: int) -> None:
        """Prepares a decode step with one token per row, at `positions` [B]. No row may exceed `longest` tokens."""
        self.prefilled = self.extension = None
        self.positions = positions
        self.width = round_up(longest, SLOT_MULTIPLE)
        if self.width > self.capacity:
            # Doubling makes the total cost of growth linear.
            self.select(self.row_numbers, 2 * self.width)
        self._step_index.clear()

    def step_index(self, num_heads: int) -> Tensor:
        """Returns the index of the step's tokens in the keys [B, H, C, D] of a layer, viewed as [B x H x C, D]."""
        if num_heads not in self._step_index:
            heads = torch.arange(num_heads, device=self.positions.device)
            index_BH = (self.row_numbers[:, None] * num_heads + heads) * self.capacity + self.positions[:, None]
            self._step_index[num_heads] = index_BH.flatten()
        return self._step_index[num_heads]

    def append(self, layer: int, keys_BHD: Tensor, values_BHD: Tensor) -> tuple[Tensor, Tensor]:
        """Stores the keys and values of a decode step in a layer. Returns those of all attended positions."""
        slots = self.layers[layer]
        assert isinstance(slots, _SlotLayer)
        if not slots.is_initialized:
            slots.lazy_initialization(keys_BHD, values_BHD)
        return slots.append(keys_BHD, values_BHD)

    def mask(self, dtype: torch.dtype) -> Tensor:
        """Returns the additive mask of a decode step [B, 1, 1, C] or an extension [B, 1, L, C]. It is 0 at the position
        of the token and before it, and -inf at later positions.
        """
        positions_BL = self.positions[:, None] if self.extension is None else self.extension.positions_UL
        slots_C = torch.arange(self.width, device=positions_BL.device)
        return torch.where(slots_C > positions_BL[..., None], -math.inf, 0.0).to(dtype)[:, None]

    def grow(self, num_rows: int, num_slots: int) -> None:
        """Grows the cache to at least `num_rows` rows of `num_slots` tokens. The contents of new rows are undefined."""
        capacity = round_up(num_slots, SLOT_MULTIPLE)
        if num_rows > self.num_rows or capacity > self.capacity:
            missing = max(0, num_rows - self.num_rows)
            self.select(nn.functional.pad(self.row_numbers, (0, missing)), capacity)

    def read(self, row: int, num_slots: int) -> list[LayerStates]:
        """Returns a copy of the first `num_slots` positions of a row, for each layer."""
        return [self.read_layer(layer, row, num_slots) for layer in range(len(self.layers))]

    def read_layer(self, layer: int, row: int, num_slots: int) -> LayerStates:
        """Returns a copy of the first `num_slots` positions of a row in one layer."""
        slots = self.layers[layer]
        assert isinstance(slots, _SlotLayer)
        return slots.read(row, num_slots)

    def write(self, row: int, layers: Sequence[LayerStates]) -> None:
        """Stores the result of `read` in a row."""
        for layer, (keys, values) in zip(self.layers, layers, strict=True):
            assert isinstance(layer, _SlotLayer)
            layer.write(row, keys, values)

    def copy(self, sources: Tensor, targets: Tensor, num_slots: int) -> None:
        """Copies the first `num_slots` positions of source rows to target rows. A row must not be both source and
        target.
        """
        for layer in self.layers:
            assert isinstance(layer, _SlotLayer)
            layer.copy(sources, targets, num_slots)

    def select(self, rows: Tensor, capacity: int | None = None) -> None:
        """Keeps the rows with these indices, which may repeat. Extends the row length to `capacity` if set."""
        self.capacity = max(self.capacity, capacity or 0)
        for layer in self.layers:
            assert isinstance(layer, _SlotLayer)
            layer.select(rows, self.capacity)
        self.num_rows = len(rows)
        self.row_numbers = torch.arange(len(rows), device=rows.device)


@dataclass(frozen=True)
class TurnCache:
    """Keys and values of an episode's tokens, copied when a turn ended."""

    tokens: tuple[int, ...]
    """The C tokens that have keys and values: all tokens of the episode except the last sampled one."""
    layers: Sequence[LayerStates]
    """Keys and values of each layer."""


class TurnCaches:
    """Caches of the episodes whose next turn has not begun.

    No cache is evicted to save memory. Whether a turn reuses a cache would then depend on timing, and keys and values
    of decode steps differ from those of a prefill in the last bit.
    """

    def __init__(self) -> None:
        self._caches: dict[str, TurnCache] = {}
        """Request id -> cache."""

    def __len__(self) -> int:
        return len(self._caches)

    @property
    def num_bytes(self) -> int:
        """Bytes of all keys and values."""
        tensors = (states for cache in self._caches.values() for layer in cache.layers for states in layer)
        return sum(states.nbytes for states in tensors)

    def keep(self, request_id: str, cache: TurnCache) -> None:
        self._caches[request_id] = cache

    def take(self, request_id: str, history: tuple[int, ...]) -> TurnCache | None:
        """Removes the cache of an episode and returns it. Returns None if there is no cache, or if `history`, the
        tokens of the next turn's row, does not continue its tokens. A restarted episode is an example.
        """
        cache = self._caches.pop(request_id, None)
        if cache is None or history[: len(cache.tokens)] != cache.tokens:
            return None
        return cache

    def release(self, request_ids: Iterable[str]) -> None:
        """Drops the caches of these episodes. Ignores unknown ids."""
        for request_id in request_ids:
            self._caches.pop(request_id, None)

    def clear(self) -> None:
        """Drops all caches, because they belong to old weights."""
        self._caches.clear()
