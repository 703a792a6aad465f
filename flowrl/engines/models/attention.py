"""Causal attention within rows, padded or packed, in the form that transformers calls.

Shape suffixes: B rows, H heads, L tokens of the longest row, T tokens of a pack, E of a head.

Attention over a pack never looks across rows, and its time and memory are those of the rows: on a GPU in half precision
by torch's kernel for rows of any lengths, elsewhere by one call for each run of rows of the same length, of which T
tokens have at most the square root of 2 T.
"""

import inspect
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from flowrl.engines.models.packing import Pack

ROWS = "flowrl_rows"
"""Name of this attention in transformers."""

FLASH = "flash_attention_2"

_GROUPED = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else None
"""How torch's kernel is told of fewer heads of keys than of queries; None where its version has no word for it."""


def why_padded(model: PreTrainedModel) -> str | None:
    """What a model has that does not run on packed rows; None where nothing keeps it from them.

    Tokens of a pack may meet in attention only, and there by what `AttentionInterface` is handed.
    """
    settings = model.config.get_text_config().to_dict()
    other = sorted(set(settings.get("layer_types") or ()) - {"full_attention", "sliding_attention"})
    if other:
        return f"{other[0]} layers"
    if model._is_stateful:
        return "layers with a state"
    if settings.get("use_bidirectional_attention"):
        return "attention to later tokens"
    if not (model._supports_attention_backend and model._supports_sdpa and model._supports_flash_attn):
        return "attention of its own"
    return None


def pack_arguments(model: PreTrainedModel, pack: Pack) -> dict[str, Any]:  # Any: as the attention takes them
    """What a model's attention must be told of a pack."""
    if model.config._attn_implementation != FLASH:
        return {"pack": pack}
    return {
        "cu_seq_lens_q": pack.bounds,
        "cu_seq_lens_k": pack.bounds,
        "max_length_q": pack.longest,
        "max_length_k": pack.longest,
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
    """Causal attention of padded rows, or within the rows of a pack.

    Args:
        query: [B, H, L, E], or [1, H, T, E] of a pack.
        key: the same with a number of heads that divides H; so is `value`, whose E may differ.
        pack: what the row holds; None is rows as they are.
        scaling: of the products of queries and keys; None is 1 / sqrt(E).
        window: tokens that a token sees, itself included; None is all before it.
        softcap: bound of the products, softly: softcap tanh(products / softcap).
    Returns: [B, L, H, E], or [1, T, H, E].
    """
    if pack is None:
        return _attend_rows(query, key, value, scaling, window, softcap)
    return _attend_pack(query, key, value, pack, scaling, window, softcap)  # pyright: ignore[reportCallIssue] (torch's decorator hides it)


@torch.compiler.disable  # The lengths of every micro-batch would be compiled in.
def _attend_pack(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pack: Pack,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    dtype = query.dtype
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
    if softcap is None and _has_kernel(query, value, dtype):
        return _attend_on_gpu(query.to(dtype), key.to(dtype), value.to(dtype), pack, scaling, window)
    sizes = [rows * length for rows, length in pack.runs]
    found = []
    # One split whose backward pass is one concatenation; a slice's would be a whole tensor of zeros for each run.
    parts = [states.squeeze(0).split(sizes, 1) for states in (query, key, value)]
    for (rows, _), *run in zip(pack.runs, *parts, strict=True):
        query, key, value = (part.unflatten(1, (rows, -1)).transpose(0, 1) for part in run)
        found.append(_attend_rows(query, key, value, scaling, window, softcap).flatten(0, 1))
    return torch.cat(found)[None]


def _has_kernel(query: Tensor, value: Tensor, dtype: torch.dtype) -> bool:
    """Whether torch's attention over rows of any lengths runs here: it is FlashAttention 2 (Dao 2023,
    https://arxiv.org/abs/2307.08691)."""
    width = query.shape[-1]
    return (
        query.is_cuda
        and dtype in (torch.bfloat16, torch.float16)
        and width == value.shape[-1]
        and width <= 256
        and width % 8 == 0
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
    )


def _attend_on_gpu(
    query: Tensor, key: Tensor, value: Tensor, pack: Pack, scaling: float | None, window: int | None
) -> Tensor:
    grouped: dict[str, Any] = {}  # Any: as the kernel takes them
    if query.shape[1] != key.shape[1]:
        if _GROUPED is None:
            key, value = _for_each_query(query, key, value)
        else:
            grouped = _GROUPED
    query, key, value = (states.squeeze(0).transpose(0, 1) for states in (query, key, value))
    attended = varlen_attn(
        query,
        key,
        value,
        pack.bounds,
        pack.bounds,
        pack.longest,
        pack.longest,
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),
        **grouped,
    )
    assert isinstance(attended, Tensor), "nothing besides was asked for"
    return attended[None]


def _attend_rows(
    query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None, softcap: float | None
) -> Tensor:
    """[B, H, L, E] -> [B, L, H, E]."""
    is_seen_LL = None if window is None or window >= query.shape[2] else _band(query.shape[2], window, query.device)
    if softcap is not None:
        mask_LL = None
        if is_seen_LL is not None:
            mask_LL = torch.zeros_like(is_seen_LL, dtype=query.dtype).masked_fill_(~is_seen_LL, -math.inf)[None, None]
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        return capped_attention(query * scale, key, value, mask_LL, softcap)
    if is_seen_LL is not None:
        # With a mask, kernels take no fewer heads of keys.
        key, value = _for_each_query(query, key, value)
    attended = nn.functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=is_seen_LL,
        is_causal=is_seen_LL is None,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return attended.transpose(1, 2)


def capped_attention(
    query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, softcap: float
) -> Tensor:
    """Attention whose logits are bounded by `softcap`, softly: queries [B, H x G, L, E], scaled already, over keys and
    values [B, H, C, E]; causal, or by an additive mask [B, 1, L, C]. Gives [B, L, H x G, E]."""
    length = query.shape[2]
    query_BHGLE = query.unflatten(1, (key.shape[1], -1))
    logits_BHGLC = torch.matmul(query_BHGLE, key.transpose(2, 3)[:, :, None])
    logits_BHGLC = torch.tanh(logits_BHGLC / softcap) * softcap
    if attention_mask is None:
        unseen_LC = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
        logits_BHGLC = logits_BHGLC.masked_fill(unseen_LC, -math.inf)
    else:
        logits_BHGLC = logits_BHGLC + attention_mask[:, :, None]
    dtype = torch.promote_types(logits_BHGLC.dtype, torch.float32)
    attended = torch.matmul(logits_BHGLC.softmax(-1, dtype=dtype).to(value.dtype), value[:, :, None])
    return attended.flatten(1, 2).transpose(1, 2)


def _band(length: int, window: int, device: torch.device) -> Tensor:
    """bool [L, L], true where a token of a row sees one of the last `window`."""
    causal_LL = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    return causal_LL.triu(1 - window)


def _for_each_query(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values, once per head of the queries that share them."""
    times = query.shape[1] // key.shape[1]
    return key.repeat_interleave(times, dim=1), value.repeat_interleave(times, dim=1)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    pack: Pack | None = None,
    **others: Any,  # Any: what transformers hands to every kind of attention
) -> tuple[Tensor, None]:
    """The form that transformers calls."""
    assert attention_mask is None, "causal attention within rows takes no mask"
    assert others.get("s_aux") is None and others.get("position_bias") is None, "why_padded lets no such model in"
    attended = attend(query, key, value, pack=pack, scaling=scaling, window=sliding_window, softcap=softcap)
    return attended.contiguous(), None


def no_mask(**_: Any) -> None:
    """Causal attention needs none; transformers asks each kind of attention for its own."""
    return


AttentionInterface.register(ROWS, _attention)
AttentionMaskInterface.register(ROWS, no_mask)
