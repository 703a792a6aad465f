"""Sequence parallelism: each rank runs a stretch of every row, and in attention some heads of whole rows.

Jacobs et al. 2023 (Ulysses), https://arxiv.org/abs/2309.14509. Everything but attention sees one token at a time, so a
rank can do it for its own stretch; before attention ranks exchange stretches for heads, and after it heads for
stretches.

Shape suffixes: B rows, L tokens of the longest row, l of a stretch, D hidden size, H heads, h of a rank, E of a head.
"""

import math
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, distributed, nn
from torch.distributed import ProcessGroup
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from flowrl.config import UserError
from flowrl.engines.attention import attend, no_mask, pack_arguments
from flowrl.engines.pack import Pack

_ATTENTION = "flowrl_sequence_parallel"


_groups: WeakKeyDictionary[nn.Module, ProcessGroup] = WeakKeyDictionary()
"""Layer -> its ranks. Not an attribute of the layer, which copies of the model would copy."""


class SharesRows(nn.Module):
    """A model whose rows several ranks can share: it runs its backbone with `run_backbone`."""

    sequence: ProcessGroup | None = None
    """Those ranks."""


class SequenceError(UserError):
    """A model's attention cannot be shared by sequence-parallel ranks."""


def share_attention(model: PreTrainedModel, group: ProcessGroup) -> None:
    """Has a model's attention layers exchange stretches for heads. Every rank of the group calls it.

    Raises:
        SequenceError: the number of heads does not divide, or a layer does more than causal attention over all tokens.
    """
    settings = model.config.get_text_config()
    name, sp, heads = type(model).__name__, group.size(), settings.num_attention_heads
    kv_heads = getattr(settings, "num_key_value_heads", None) or heads
    if heads % sp or (kv_heads % sp and sp % kv_heads):
        raise SequenceError(
            f"{name} has {heads} attention heads and {kv_heads} of keys, which sp {sp} does not divide: set sp to a "
            f"divisor of both"
        )
    found = ", ".join(_not_plain(settings.to_dict()))
    if found:
        raise SequenceError(f"{name} has {found}, which sp {sp} cannot share over ranks: set sp: 1 for this role")
    _groups.update(dict.fromkeys(model.modules(), group))
    model.set_attn_implementation(_ATTENTION)


def _not_plain(settings: dict[str, Any]) -> list[str]:  # Any: as transformers' configs are
    """What a model's attention does besides causal attention over all tokens."""
    layer_types = settings.get("layer_types") or []
    found = sorted(f"{kind} layers" for kind in set(layer_types) - {"full_attention"})
    window = settings.get("sliding_window")
    if not layer_types and window is not None and window < (settings.get("max_position_embeddings") or math.inf):
        found.append(f"attention to the last {window} tokens only")
    if settings.get("attn_logit_softcapping"):
        found.append("a cap on its attention's logits")
    return found


def run_backbone(
    backbone: nn.Module, input_ids_BL: Tensor, group: ProcessGroup | None, pack: Pack | None = None
) -> Tensor:
    """The hidden states [B, l, D] of this rank's stretch of every row; of whole rows where there is no group.

    Rows are filled up to a length that the ranks divide; causal attention keeps that from what is real. A pack is one
    row [1, T] of many, and attention keeps those apart.
    """
    packed: dict[str, Any] = {}  # Any: what kinds of attention take
    if pack is not None:
        assert isinstance(backbone, PreTrainedModel), "packs are for models that transformers can tell of them"
        packed = pack_arguments(backbone, pack)
    if group is None:
        if pack is not None:
            packed["position_ids"] = pack.positions_T[None]
        return backbone(input_ids=input_ids_BL, use_cache=False, **packed).last_hidden_state
    stretch = _stretch(input_ids_BL, group)
    filling = (0, stretch * group.size() - input_ids_BL.shape[1])
    padded_BL = nn.functional.pad(input_ids_BL, filling)
    places_l = torch.arange(stretch, device=padded_BL.device) + group.rank() * stretch
    positions_l = places_l if pack is None else nn.functional.pad(pack.positions_T, filling)[places_l]
    output = backbone(
        input_ids=padded_BL[:, places_l],
        position_ids=positions_l.expand(len(padded_BL), -1),
        use_cache=False,
        **packed,
    )
    return output.last_hidden_state


def own_targets(values_BL: Tensor, group: ProcessGroup) -> Tensor:
    """What stands at a rank's stretch and one place after it, [B, l + 1]; 0 beyond the row."""
    stretch = _stretch(values_BL, group)
    padded_BL = nn.functional.pad(values_BL, (0, stretch * group.size() + 1 - values_BL.shape[1]))
    return padded_BL[:, group.rank() * stretch : (group.rank() + 1) * stretch + 1]


def whole_rows(values_Bl: Tensor, length: int, group: ProcessGroup | None) -> Tensor:
    """Every rank's stretch, side by side: [B, length]. The gradient of each rank's stretch goes to that rank, so all
    ranks must go on to the same loss."""
    if group is None:
        return values_Bl[:, :length]
    return _Gather.apply(values_Bl, group)[:, :length]


def _stretch(input_ids_BL: Tensor, group: ProcessGroup) -> int:
    return -(-input_ids_BL.shape[1] // group.size())


class _Context(Protocol):
    group: ProcessGroup


class _Exchange(torch.autograd.Function):
    """Part i of the first dimension to rank i; its gradient goes back the same way."""

    @staticmethod
    def forward(ctx: _Context, parts: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_to_all(parts, group)

    @staticmethod
    def backward(ctx: _Context, gradient: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride] (torch leaves the arguments open)
        return _all_to_all(gradient, ctx.group), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, values_Bl: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        found = [torch.empty_like(values_Bl) for _ in range(group.size())]
        distributed.all_gather(found, values_Bl.contiguous(), group=group)
        return torch.cat(found, dim=1)

    @staticmethod
    def backward(ctx: _Context, gradient_BL: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride] (as above)
        return gradient_BL.chunk(ctx.group.size(), dim=1)[ctx.group.rank()], None


def _all_to_all(parts: Tensor, group: ProcessGroup) -> Tensor:
    parts = parts.contiguous()
    received = torch.empty_like(parts)
    distributed.all_to_all_single(received, parts, group=group)
    return received


def _heads_of_whole_rows(states_BHlE: Tensor, group: ProcessGroup) -> Tensor:
    """[B, H, l, E] -> [B, h, L, E]."""
    parts = states_BHlE.unflatten(1, (group.size(), -1)).movedim(1, 0)
    return _Exchange.apply(parts, group).movedim(0, 2).flatten(2, 3)


def _stretches_of_all_heads(states_BhLE: Tensor, group: ProcessGroup) -> Tensor:
    """[B, h, L, E] -> [B, H, l, E]."""
    parts = states_BhLE.unflatten(2, (group.size(), -1)).movedim(2, 0)
    return _Exchange.apply(parts, group).movedim(0, 1).flatten(1, 2)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    pack: Pack | None = None,
    **_: Any,  # Any: what transformers hands to every kind of attention
) -> tuple[Tensor, None]:
    """Causal attention in the form that transformers calls: [B, H, l, E] in, [B, l, H, E] out."""
    group = _groups[module]
    # Fewer heads of keys than ranks: peers then hold the same ones.
    repeats = max(1, group.size() // key.shape[1])
    key, value = (states.repeat_interleave(repeats, dim=1) for states in (key, value))
    query, key, value = (_heads_of_whole_rows(states, group) for states in (query, key, value))
    real = query.shape[2] if pack is None else len(pack.positions_T)
    rows = (query[:, :, :real], key[:, :, :real], value[:, :, :real])
    attended_BLhE = attend(*rows, pack=pack, scaling=scaling)
    attended_BhLE = nn.functional.pad(attended_BLhE.transpose(1, 2), (0, 0, 0, query.shape[2] - real))
    return _stretches_of_all_heads(attended_BhLE, group).transpose(1, 2).contiguous(), None


AttentionInterface.register(_ATTENTION, _attend)
AttentionMaskInterface.register(_ATTENTION, no_mask)
