"""Sequence parallelism (Ulysses): each rank computes a sequence shard of every row.

Outside attention, layers process each token separately, so each rank computes only its own shard. Before attention, an
all-to-all gives each rank full rows for some of the heads. After attention, a second all-to-all restores the sequence
shards. Jacobs et al. 2023, https://arxiv.org/abs/2309.14509.

Shape suffixes: B rows, L tokens of the longest row, l tokens of a sequence shard, D hidden size, H heads, h heads of a
rank, E head size.
"""

import math
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, distributed, nn
from torch.distributed import ProcessGroup
from transformers import AttentionInterface, PreTrainedModel

from flowrl.config import UserError
from flowrl.engines.models.attention import Pack, attend, pack_arguments

_ATTENTION = "flowrl_sequence_parallel"

_groups: WeakKeyDictionary[nn.Module, ProcessGroup] = WeakKeyDictionary()
"""Sequence-parallel group of each layer. The layer has no attribute for this group, because deep copies of a model
cannot copy process groups.
"""


@dataclass(frozen=True)
class SequenceSharding:
    """The ranks that share each row. Rank i of the group has the i-th sequence shard of the last hidden states."""

    group: ProcessGroup
    """All ranks that share a row."""
    tp_group: ProcessGroup | None
    """Tensor-parallel ranks of the group, which are adjacent. They all-gather their sequence shards before each layer's
    matrices. None if ranks exchange data only in attention."""

    def shard_length(self, rows_BL: Tensor) -> int:
        """Returns the number of tokens in each sequence shard of these rows."""
        return -(-rows_BL.shape[1] // self.group.size())


class SequenceShardable(nn.Module):
    """Protocol of models that support sequence shards. Such a model calls its backbone through `run_backbone`."""

    sequence_sharding: SequenceSharding | None = None
    """Ranks that share each row. None if each rank has full rows."""


class SequenceError(UserError):
    """Raised if a model's attention does not support sequence parallelism."""


def enable_ulysses_attention(model: PreTrainedModel, group: ProcessGroup) -> None:
    """Replaces a model's attention by sequence-parallel attention. Raises SequenceError for unsupported attention."""
    settings = model.config.get_text_config()
    name, sp, heads = type(model).__name__, group.size(), settings.num_attention_heads
    kv_heads = getattr(settings, "num_key_value_heads", None) or heads
    if heads % sp or (kv_heads % sp and sp % kv_heads):
        raise SequenceError(
            f"{name} has {heads} attention heads and {kv_heads} key-value heads, which sp {sp} does not divide: set "
            f"sp to a divisor of both"
        )
    own = [] if model._supports_attention_backend else ["custom attention"]
    unsupported = ", ".join([*own, *_unsupported_attention(settings.to_dict())])
    if unsupported:
        raise SequenceError(f"{name} has {unsupported}, which sp {sp} does not support: set sp: 1 for this role")
    _groups.update(dict.fromkeys(model.modules(), group))
    model.set_attn_implementation(_ATTENTION)


def _unsupported_attention(settings: dict[str, Any]) -> list[str]:  # Any: as transformers' configs are
    """Returns all attention features of a model that differ from full causal attention."""
    layer_types = settings.get("layer_types") or []
    features = sorted(f"{kind} layers" for kind in set(layer_types) - {"full_attention"})
    window = settings.get("sliding_window")
    if not layer_types and window is not None and window < (settings.get("max_position_embeddings") or math.inf):
        features.append(f"a sliding window of {window} tokens")
    if settings.get("attn_logit_softcapping"):
        features.append("softcapped attention logits")
    return features


def run_backbone(
    backbone: nn.Module, input_ids_BL: Tensor, sharding: SequenceSharding | None, pack: Pack | None = None
) -> Tensor:
    """Returns the hidden states of this rank's sequence shard [B, l, D]. Without sharding, returns the hidden states of
    full rows [B, L, D].

    Rows are right-padded to a multiple of the group size. With causal attention, real tokens never attend to padding.

    Args:
        backbone: model without its head.
        input_ids_BL: right-padded token ids, int64 [B, L]. With a pack, the packed row [1, T].
        sharding: ranks that share each row. None if each rank has full rows.
        pack: layout of the packed row. None for padded rows.
    """
    num_filler = 0 if sharding is None else -input_ids_BL.shape[1] % sharding.group.size()
    arguments: dict[str, Any] = {}  # Any: each attention has its own arguments
    if pack is not None:
        assert isinstance(backbone, PreTrainedModel), "packing needs a transformers model"
        pack = pack.with_filler_row(num_filler)
        arguments = pack_arguments(backbone, pack)
    if sharding is None:
        if pack is not None:
            arguments["position_ids"] = pack.positions_T[None]
        return backbone(input_ids=input_ids_BL, use_cache=False, **arguments).last_hidden_state
    padded_BL = nn.functional.pad(input_ids_BL, (0, num_filler))
    # Attention of a tensor-parallel rank covers all shards of its tp group and needs the positions of all shards.
    tp = 1 if sharding.tp_group is None else sharding.tp_group.size()
    index_l = torch.arange(sharding.shard_length(padded_BL) * tp, device=padded_BL.device)
    index_l += sharding.group.rank() // tp * len(index_l)
    positions_l = index_l if pack is None else pack.positions_T[index_l]
    local_ids_Bl = padded_BL[:, index_l]
    if sharding.tp_group is None:
        arguments["input_ids"] = local_ids_Bl
    else:
        assert isinstance(backbone, PreTrainedModel), "tensor parallelism needs a transformers model"
        embeddings_BlD = backbone.get_input_embeddings()(local_ids_Bl)
        arguments["inputs_embeds"] = _TakeShard.apply(embeddings_BlD, sharding.tp_group)
    output = backbone(position_ids=positions_l.expand(len(padded_BL), -1), use_cache=False, **arguments)
    return output.last_hidden_state


def local_tokens(values_BL: Tensor, sharding: SequenceSharding | None, pack: Pack | None = None) -> Tensor:
    """Selects the values of the tokens that `run_backbone` passes to this rank's backbone. Converts [B, L, ...] to [B,
    l, ...]. Values of filler tokens are 0.
    """
    rows_BL = values_BL if pack is None else pack.pack(values_BL)
    if sharding is None:
        return rows_BL
    assert sharding.tp_group is None, "mixtures of experts reject sequence-parallel norms"
    length, rank = sharding.shard_length(rows_BL), sharding.group.rank()
    num_filler = length * sharding.group.size() - rows_BL.shape[1]
    padded_BL = nn.functional.pad(rows_BL, (*[0, 0] * (rows_BL.dim() - 2), 0, num_filler))
    return padded_BL[:, rank * length : (rank + 1) * length]


def run_head(head: nn.Linear, hidden_BlD: Tensor, sharding: SequenceSharding | None) -> Tensor:
    return nn.functional.linear(hidden_BlD.to(head.weight.dtype), *head_weights(head, sharding))


def head_weights(head: nn.Linear, sharding: SequenceSharding | None) -> tuple[Tensor, Tensor | None]:
    """Returns weight and bias of a replicated head. Their gradients are all-reduced over the tensor-parallel ranks."""
    if sharding is None or sharding.tp_group is None:
        return head.weight, head.bias
    weight, bias = (
        None if w is None else _ReduceGradient.apply(w, sharding.tp_group) for w in (head.weight, head.bias)
    )
    assert weight is not None
    return weight, bias


def local_targets(values_BL: Tensor, sharding: SequenceSharding) -> Tensor:
    """Returns this rank's sequence shard of `values_BL` plus the value of the next token, [B, l + 1, ...]. Positions
    beyond the end of the row are 0.
    """
    length, rank = sharding.shard_length(values_BL), sharding.group.rank()
    num_filler = length * sharding.group.size() + 1 - values_BL.shape[1]
    padded_BL = nn.functional.pad(values_BL, (*[0, 0] * (values_BL.dim() - 2), 0, num_filler))
    return padded_BL[:, rank * length : (rank + 1) * length + 1]


def gather_sequence(values_Bl: Tensor, length: int, sharding: SequenceSharding | None) -> Tensor:
    """Concatenates the sequence shards [B, l, ...] of all ranks to [B, length, ...].

    The backward pass keeps only the gradient of this rank's shard. All ranks must therefore compute the same loss.
    """
    if sharding is None:
        return values_Bl[:, :length]
    return _GatherShards.apply(values_Bl, sharding.group)[:, :length]


class _Context(Protocol):
    group: ProcessGroup


class _Exchange(torch.autograd.Function):
    """All-to-all over the first dimension: slice i is sent to rank i. The backward pass is the same all-to-all."""

    @staticmethod
    def forward(ctx: _Context, slices: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_to_all(slices, group)

    @staticmethod
    def backward(ctx: _Context, gradient: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride] (torch leaves the arguments open)
        return _all_to_all(gradient, ctx.group), None


class _GatherShards(torch.autograd.Function):
    """All-gathers sequence shards to full rows. The backward pass selects this rank's shard of the gradient."""

    @staticmethod
    def forward(ctx: _Context, values_Bl: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_gather_sequence(values_Bl, group)

    @staticmethod
    def backward(ctx: _Context, gradient_BL: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride] (as above)
        return _take_shard(gradient_BL, ctx.group), None


class _TakeShard(torch.autograd.Function):
    """Selects this rank's sequence shard of rows that every rank has. The backward pass all-gathers the gradient."""

    @staticmethod
    def forward(ctx: _Context, values_BL: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        # A copy, because a view would keep the full rows in memory.
        return _take_shard(values_BL, group).clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: _Context, gradient_Bl: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride] (as above)
        return _all_gather_sequence(gradient_Bl, ctx.group), None


class _ReduceGradient(torch.autograd.Function):
    """Returns a replicated weight unchanged. The backward pass all-reduces the gradient of the weight."""

    @staticmethod
    def forward(ctx: _Context, weight: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: _Context, gradient: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride] (as above)
        total = gradient.clone(memory_format=torch.contiguous_format)
        distributed.all_reduce(total, group=ctx.group)
        return total, None


def _all_gather_sequence(values_Bl: Tensor, group: ProcessGroup) -> Tensor:
    shards = [torch.empty_like(values_Bl, memory_format=torch.contiguous_format) for _ in range(group.size())]
    distributed.all_gather(shards, values_Bl.contiguous(), group=group)
    return torch.cat(shards, dim=1)


def _take_shard(values_BL: Tensor, group: ProcessGroup) -> Tensor:
    return values_BL.chunk(group.size(), dim=1)[group.rank()]


def _all_to_all(slices: Tensor, group: ProcessGroup) -> Tensor:
    slices = slices.contiguous()
    received = torch.empty_like(slices)
    distributed.all_to_all_single(received, slices, group=group)
    return received


def _shard_heads(states_BHlE: Tensor, group: ProcessGroup) -> Tensor:
    """Converts a sequence shard with all heads [B, H, l, E] to full rows with this rank's heads [B, h, L, E]."""
    slices = states_BHlE.unflatten(1, (group.size(), -1)).movedim(1, 0)
    return _Exchange.apply(slices, group).movedim(0, 2).flatten(2, 3)


def _shard_sequence(states_BhLE: Tensor, group: ProcessGroup) -> Tensor:
    """Converts full rows with this rank's heads [B, h, L, E] to a sequence shard with all heads [B, H, l, E]."""
    slices = states_BhLE.unflatten(2, (group.size(), -1)).movedim(2, 0)
    return _Exchange.apply(slices, group).movedim(0, 1).flatten(1, 2)


def _ulysses_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    pack: Pack | None = None,
    **_: Any,  # Any: transformers passes further arguments to every attention
) -> tuple[Tensor, None]:
    """Computes causal attention of inputs [B, H, l, E] and returns [B, l, H, E]. Has the signature of
    `AttentionInterface`.
    """
    group = _groups[module]
    # With fewer key-value heads than ranks, several ranks hold the same head.
    repeats = max(1, group.size() // key.shape[1])
    key, value = (states.repeat_interleave(repeats, dim=1) for states in (key, value))
    query, key, value = (_shard_heads(states, group) for states in (query, key, value))
    attended_BLhE = attend(query, key, value, pack=pack, scaling=scaling)
    return _shard_sequence(attended_BLhE.transpose(1, 2), group).transpose(1, 2).contiguous(), None


AttentionInterface.register(_ATTENTION, _ulysses_attention)
