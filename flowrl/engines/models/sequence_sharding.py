"""Sequence parallelism: each rank runs a stretch of every row, and in attention some heads of whole rows.

Jacobs et al. 2023 (Ulysses), https://arxiv.org/abs/2309.14509. Everything but attention sees one token at a time, so a
rank can do it for its own stretch; before attention ranks exchange stretches for heads, and after it heads for
stretches. Tensor-parallel ranks may share what is between a layer's matrices in the same way
(`flowrl.engines.parallel.split_norms`).

Shape suffixes: B rows, L tokens of the longest row, l of a stretch, D hidden size, H heads, h of a rank, E of a head.
"""

import math
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, distributed, nn
from torch.distributed import ProcessGroup
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from flowrl.config import UserError
from flowrl.engines.models.attention import attend, no_mask, pack_arguments
from flowrl.engines.models.packing import Pack

_ATTENTION = "flowrl_sequence_parallel"


_groups: WeakKeyDictionary[nn.Module, ProcessGroup] = WeakKeyDictionary()
"""Layer -> its ranks. Not an attribute of the layer, which copies of the model would copy."""


@dataclass(frozen=True)
class Stretches:
    """Ranks that share rows: each of them ends with the hidden states of one stretch, in the order of its ranks."""

    everyone: ProcessGroup
    peers: ProcessGroup | None
    """Tensor-parallel ones among them, next to each other, who put their stretches together for each layer's matrices.
    The others exchange stretches for heads in attention only."""

    def length(self, rows_BL: Tensor) -> int:
        """Of a stretch of these rows."""
        return -(-rows_BL.shape[1] // self.everyone.size())


class SharesRows(nn.Module):
    """A model whose rows several ranks can share: it runs its backbone with `run_backbone`."""

    shared: Stretches | None = None
    """How they do; None where each has rows of its own."""


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
    backbone: nn.Module, input_ids_BL: Tensor, shared: Stretches | None, pack: Pack | None = None
) -> Tensor:
    """The hidden states [B, l, D] of this rank's stretch of every row; of whole rows where no others share them.

    Rows are filled up to a length that the ranks divide; causal attention keeps that from what is real. A pack is one
    row [1, T] of many, and attention keeps those apart.
    """
    filling = 0 if shared is None else -input_ids_BL.shape[1] % shared.everyone.size()
    packed: dict[str, Any] = {}  # Any: what kinds of attention take
    if pack is not None:
        assert isinstance(backbone, PreTrainedModel), "packs are for models that transformers can tell of them"
        pack = pack.filled(filling)
        packed = pack_arguments(backbone, pack)
    if shared is None:
        if pack is not None:
            packed["position_ids"] = pack.positions_T[None]
        return backbone(input_ids=input_ids_BL, use_cache=False, **packed).last_hidden_state
    padded_BL = nn.functional.pad(input_ids_BL, (0, filling))
    # Of a row that peers share, all of them have the positions: their attention sees it whole.
    num_peers = 1 if shared.peers is None else shared.peers.size()
    places_l = torch.arange(shared.length(padded_BL) * num_peers, device=padded_BL.device)
    places_l += shared.everyone.rank() // num_peers * len(places_l)
    positions_l = places_l if pack is None else pack.positions_T[places_l]
    own_Bl = padded_BL[:, places_l]
    if shared.peers is None:
        packed["input_ids"] = own_Bl
    else:
        assert isinstance(backbone, PreTrainedModel), "peers share models of transformers"
        packed["inputs_embeds"] = _Own.apply(backbone.get_input_embeddings()(own_Bl), shared.peers)
    output = backbone(position_ids=positions_l.expand(len(padded_BL), -1), use_cache=False, **packed)
    return output.last_hidden_state


def run_head(head: nn.Linear, hidden_BlD: Tensor, shared: Stretches | None) -> Tensor:
    """What a head makes of a rank's stretch."""
    return nn.functional.linear(hidden_BlD.to(head.weight.dtype), *head_weights(head, shared))


def head_weights(head: nn.Linear, shared: Stretches | None) -> tuple[Tensor, Tensor | None]:
    """The weight and the bias of a head that a rank runs on its stretch.

    Peers of whom each has a stretch sum their gradients of it: all else that they hold alike has seen whole rows.
    """
    if shared is None or shared.peers is None:
        return head.weight, head.bias
    weight, bias = (None if w is None else _Summed.apply(w, shared.peers) for w in (head.weight, head.bias))
    assert weight is not None, "a linear layer has one"
    return weight, bias


def own_targets(values_BL: Tensor, shared: Stretches) -> Tensor:
    """What stands at a rank's stretch and one place after it, [B, l + 1]; 0 beyond the row."""
    stretch, rank = shared.length(values_BL), shared.everyone.rank()
    padded_BL = nn.functional.pad(values_BL, (0, stretch * shared.everyone.size() + 1 - values_BL.shape[1]))
    return padded_BL[:, rank * stretch : (rank + 1) * stretch + 1]


def whole_rows(values_Bl: Tensor, length: int, shared: Stretches | None) -> Tensor:
    """Every rank's stretch, side by side: [B, length]. The gradient of each rank's stretch goes to that rank, so all
    ranks must go on to the same loss."""
    if shared is None:
        return values_Bl[:, :length]
    return _Gather.apply(values_Bl, shared.everyone)[:, :length]


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
    """Whole rows from each rank's stretch."""

    @staticmethod
    def forward(ctx: _Context, values_Bl: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _side_by_side(values_Bl, group)

    @staticmethod
    def backward(ctx: _Context, gradient_BL: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride] (as above)
        return _own_part(gradient_BL, ctx.group), None


class _Own(torch.autograd.Function):
    """A rank's stretch of rows that all have; each is given the gradient of whole rows."""

    @staticmethod
    def forward(ctx: _Context, values_BL: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        # A copy: a part of the whole would keep all of it.
        return _own_part(values_BL, group).clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: _Context, gradient_Bl: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride] (as above)
        return _side_by_side(gradient_Bl, ctx.group), None


class _Summed(torch.autograd.Function):
    """A weight that ranks have alike, whose gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: _Context, weight: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: _Context, gradient: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride] (as above)
        summed = gradient.clone(memory_format=torch.contiguous_format)
        distributed.all_reduce(summed, group=ctx.group)
        return summed, None


def _side_by_side(values_Bl: Tensor, group: ProcessGroup) -> Tensor:
    found = [torch.empty_like(values_Bl, memory_format=torch.contiguous_format) for _ in range(group.size())]
    distributed.all_gather(found, values_Bl.contiguous(), group=group)
    return torch.cat(found, dim=1)


def _own_part(values_BL: Tensor, group: ProcessGroup) -> Tensor:
    return values_BL.chunk(group.size(), dim=1)[group.rank()]


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
    attended_BLhE = attend(query, key, value, pack=pack, scaling=scaling)
    return _stretches_of_all_heads(attended_BLhE.transpose(1, 2), group).transpose(1, 2).contiguous(), None


AttentionInterface.register(_ATTENTION, _attend)
AttentionMaskInterface.register(_ATTENTION, no_mask)
