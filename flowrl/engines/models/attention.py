"""Causal attention over padded or packed rows, registered as a transformers attention implementation.

Sequence packing concatenates the rows of a micro-batch into one row without padding. Packed rows never attend to each
other. In half precision on a GPU, one call of torch's variable-length attention kernel processes all rows. Otherwise,
adjacent rows of equal length are processed together, with one call per group.

Shape suffixes: B rows, H heads, L tokens of the longest row, T tokens of a packed row, E head size.
"""

import inspect
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.auto_factory import _get_model_class

from flowrl.data.batch.tensordicts import row_positions
from flowrl.devices.device import get_device

ROWS = "flowrl_rows"
"""Name of this attention implementation in transformers."""

FLASH = "flash_attention_2"

_HALF_PRECISION = (torch.bfloat16, torch.float16)

_GROUPED = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
"""Argument of torch's kernel that enables grouped-query attention. Empty for torch 2.11, whose kernel groups heads
without an argument."""


# Not frozen: torch.compile traces into frozen dataclasses and would recompile each layer for every micro-batch.
@dataclass(eq=False)
class Pack:
    """Index mapping between padded rows [B, L] and one packed row [1, T]. Both have the rows in the same order."""

    lengths: tuple[int, ...]
    """Number of tokens of each row. Every row has at least 1 token."""
    padded_index_T: Tensor
    """int64 [T], index of each token in the flattened padded rows."""
    positions_T: Tensor
    """int64 [T], position of each token in its row, starting at 0."""
    cu_seqlens: Tensor
    """int32 [B + 1], cumulative row lengths as in flash-attn, starting at 0."""

    # Cached, because every layer reads these properties.
    @cached_property
    def max_length(self) -> int:
        return max(self.lengths)

    @cached_property
    def equal_length_runs(self) -> list[tuple[int, int]]:
        """Returns groups of adjacent rows with equal length, as pairs (number of rows, tokens per row)."""
        return [(len(list(same)), length) for length, same in groupby(self.lengths)]

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.padded_index_T, self.positions_T, self.cu_seqlens

    def with_tensors(self, padded_index_T: Tensor, positions_T: Tensor, cu_seqlens: Tensor) -> "Pack":
        """Returns the layout with these tensors, which are copies of `tensors` on another device."""
        return replace(self, padded_index_T=padded_index_T, positions_T=positions_T, cu_seqlens=cu_seqlens)

    def to(self, device: torch.device | str) -> "Pack":
        return self.with_tensors(*(tensor.to(device) for tensor in self.tensors))

    def with_filler_row(self, num_tokens: int) -> "Pack":
        """Returns the layout with an additional row of `num_tokens` filler tokens at the end. 0 tokens add no row.
        Values of the filler tokens must be removed before `unpack`.
        """
        if not num_tokens:
            return self
        return replace(
            self,
            lengths=(*self.lengths, num_tokens),
            positions_T=torch.cat([self.positions_T, torch.arange(num_tokens, device=self.positions_T.device)]),
            cu_seqlens=torch.cat([self.cu_seqlens, self.cu_seqlens[-1:] + num_tokens]),
        )

    def pack(self, rows_BL: Tensor) -> Tensor:
        """Converts padded rows [B, L, ...] to one packed row [1, T, ...]."""
        return rows_BL.flatten(0, 1)[self.padded_index_T][None]

    def unpack(self, values_1T: Tensor, shape: torch.Size) -> Tensor:
        """Converts a packed row [1, T, ...] to padded rows [B, L, ...]. `shape` is [B, L]. Padding is 0."""
        empty = values_1T.new_zeros(shape.numel(), *values_1T.shape[2:])
        return empty.index_copy(0, self.padded_index_T, values_1T.squeeze(0)).unflatten(0, shape)


def pack_rows(lengths: Iterable[int]) -> Pack:
    """Returns the packed layout of rows with these lengths, on the CPU. The padded rows have the length of the longest
    row.
    """
    lengths_B = torch.tensor(list(lengths), dtype=torch.int64)
    mask_BL = row_positions(lengths_B)
    cu_seqlens = torch.nn.functional.pad(lengths_B.cumsum(0), (1, 0)).to(torch.int32)
    positions_BL = torch.arange(mask_BL.shape[1]).expand(mask_BL.shape)
    return Pack(tuple(lengths_B.tolist()), mask_BL.flatten().nonzero().squeeze(1), positions_BL[mask_BL], cu_seqlens)


def find_attention(auto: Any, config: PreTrainedConfig) -> str:
    """Returns the attention implementation with which a model is loaded: torch's "sdpa", or "eager" if the family does
    not support it.

    `auto`: one of transformers' Auto classes, which share no typed base.
    """
    mapping = auto._model_mapping
    supports = type(config) not in mapping or _get_model_class(config, mapping)._supports_sdpa
    return "sdpa" if supports else "eager"


def packing_obstacle(model: PreTrainedModel) -> str | None:
    """Returns the feature of a model that prevents packed rows. Returns None if the model supports packing.

    Packing requires that tokens interact only in attention, and that attention goes through `AttentionInterface`.
    """
    settings = model.config.get_text_config().to_dict()
    other = sorted(set(settings.get("layer_types") or ()) - {"full_attention", "sliding_attention"})
    if other:
        return f"{other[0]} layers"
    if model._is_stateful:
        return "stateful layers"
    if settings.get("use_bidirectional_attention"):
        return "bidirectional attention"
    if not (model._supports_attention_backend and model._supports_sdpa and model._supports_flash_attn):
        return "custom attention"
    return None


def pack_arguments(model: PreTrainedModel, pack: Pack) -> dict[str, Any]:  # Any: as the attention takes them
    """Returns the keyword arguments that pass a pack to the model's attention implementation."""
    if model.config._attn_implementation != FLASH:
        return {"pack": pack}
    return {
        "cu_seq_lens_q": pack.cu_seqlens,
        "cu_seq_lens_k": pack.cu_seqlens,
        "max_length_q": pack.max_length,
        "max_length_k": pack.max_length,
    }


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    pack: Pack | None,
    scaling: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Computes causal attention over padded rows, or within each row of a packed row.

    Args:
        query: [B, H, L, E], or [1, H, T, E] for a packed row.
        key: same shape as `query`, except for the number of heads, which divides H.
        value: same shape as `key`, except for the head size, which may differ.
        pack: layout of the packed row. None for padded rows.
        scaling: factor of the attention logits. None means 1 / sqrt(E).
        window: number of tokens in the sliding window. None disables the window.
        softcap: bound c of the attention logits x, which become c tanh(x / c). None disables the softcap.
    Returns: [B, L, H, E], or [1, T, H, E] for a packed row.
    """
    if pack is None:
        return _attend_rows(query, key, value, scaling, window, softcap)
    return _attend_pack(query, key, value, pack, scaling, window, softcap)  # pyright: ignore[reportCallIssue] (the decorator hides the signature)


@torch.compiler.disable  # A compiled function would be recompiled for the row lengths of each micro-batch.
def _attend_pack(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pack: Pack,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    dtype = _kernel_dtype(query)
    if softcap is None and _has_varlen_kernel(query, value, dtype):
        return _attend_varlen(query.to(dtype), key.to(dtype), value.to(dtype), pack, scaling, window)
    sizes = [num_rows * length for num_rows, length in pack.equal_length_runs]
    attended = []
    # `split` instead of slices: the backward pass of `split` is one concatenation, but each slice would allocate a
    # full-size gradient of zeros.
    runs = [states.squeeze(0).split(sizes, 1) for states in (query, key, value)]
    for (num_rows, _), *run in zip(pack.equal_length_runs, *runs, strict=True):
        query, key, value = (states.unflatten(1, (num_rows, -1)).transpose(0, 1) for states in run)
        attended.append(_attend_rows(query, key, value, scaling, window, softcap).flatten(0, 1))
    return torch.cat(attended)[None]


def has_grouped_kernel(device_type: str, dtype: torch.dtype) -> bool:
    """Returns whether the memory of torch's grouped-query attention grows linearly with the row length.

    In float32 on a GPU, torch falls back to separate operations, which save the attention weights [B, H, L, L].
    """
    return device_type != "cuda" or dtype in _HALF_PRECISION


def _kernel_dtype(query: Tensor) -> torch.dtype:
    """Returns the dtype in which torch computes attention: the autocast dtype inside autocast, otherwise the dtype of
    the query.
    """
    device_type = query.device.type
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else query.dtype


def _has_varlen_kernel(query: Tensor, value: Tensor, dtype: torch.dtype) -> bool:
    """Returns whether torch's variable-length attention (FlashAttention 2, arXiv 2307.08691) supports these inputs."""
    width = query.shape[-1]
    return (
        query.is_cuda
        and dtype in _HALF_PRECISION
        and width == value.shape[-1]
        and width <= 256
        and width % 8 == 0
        and (get_device(query.device).capability or (0, 0)) >= (8, 0)
    )


def _attend_varlen(
    query: Tensor, key: Tensor, value: Tensor, pack: Pack, scaling: float | None, window: int | None
) -> Tensor:
    grouped: dict[str, Any] = _GROUPED if query.shape[1] != key.shape[1] else {}  # Any: the kernel's arguments
    query, key, value = (states.squeeze(0).transpose(0, 1) for states in (query, key, value))
    attended = varlen_attn(
        query,
        key,
        value,
        pack.cu_seqlens,
        pack.cu_seqlens,
        pack.max_length,
        pack.max_length,
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),
        **grouped,
    )
    assert isinstance(attended, Tensor)
    return attended[None]


def _attend_rows(
    query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None, softcap: float | None
) -> Tensor:
    mask_LL = None if window is None or window >= query.shape[2] else _window_mask(query.shape[2], window, query.device)
    if softcap is not None:
        bias_LL = None
        if mask_LL is not None:
            bias_LL = torch.zeros_like(mask_LL, dtype=query.dtype).masked_fill_(~mask_LL, -math.inf)[None, None]
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        return capped_attention(query * scale, key, value, bias_LL, softcap)
    # Kernels with a mask do not support grouped-query attention.
    if mask_LL is not None or not has_grouped_kernel(query.device.type, _kernel_dtype(query)):
        key, value = repeat_heads(query, key, value)
    attended = nn.functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask_LL,
        is_causal=mask_LL is None,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return attended.transpose(1, 2)


def capped_attention(
    query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, softcap: float
) -> Tensor:
    """Computes attention with softcapped logits: a logit x becomes softcap tanh(x / softcap).

    Args:
        query: [B, H x G, L, E], already scaled. G queries share a key-value head.
        key: [B, H, C, E].
        value: [B, H, C, E].
        attention_mask: additive mask [B, 1, L, C]. None means a causal mask.
        softcap: bound of the logits.
    Returns: [B, L, H x G, E].
    """
    length = query.shape[2]
    query_BHGLE = query.unflatten(1, (key.shape[1], -1))
    logits_BHGLC = torch.matmul(query_BHGLE, key.transpose(2, 3)[:, :, None])
    logits_BHGLC = torch.tanh(logits_BHGLC / softcap) * softcap
    if attention_mask is None:
        future_LC = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
        logits_BHGLC = logits_BHGLC.masked_fill(future_LC, -math.inf)
    else:
        logits_BHGLC = logits_BHGLC + attention_mask[:, :, None]
    dtype = torch.promote_types(logits_BHGLC.dtype, torch.float32)
    attended = torch.matmul(logits_BHGLC.softmax(-1, dtype=dtype).to(value.dtype), value[:, :, None])
    return attended.flatten(1, 2).transpose(1, 2)


def _window_mask(length: int, window: int, device: torch.device) -> Tensor:
    """Returns the bool mask [L, L] of causal sliding-window attention."""
    causal_LL = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    return causal_LL.triu(1 - window)


def repeat_heads(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    repeats = query.shape[1] // key.shape[1]
    if repeats == 1:
        return key, value
    return key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)


def rows_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    pack: Pack | None = None,
    **others: Any,  # Any: transformers passes further arguments to every attention
) -> tuple[Tensor, None]:
    """Calls `attend` with the signature that transformers' `AttentionInterface` requires."""
    assert attention_mask is None, "attention within rows is causal and takes no mask"
    assert others.get("s_aux") is None and others.get("position_bias") is None, "excluded by packing_obstacle"
    attended = attend(query, key, value, pack=pack, scaling=scaling, window=sliding_window, softcap=softcap)
    return attended.contiguous(), None


# No mask function is registered, so transformers creates no masks. Creating a mask would read the positions from the
# device in each forward pass.
AttentionInterface.register(ROWS, rows_attention)
