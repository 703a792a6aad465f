"""Expert parallelism: the ranks that share a copy of a model each own some of its experts, and exchange tokens.

Without expert parallelism, FSDP2 gathers the weights of all experts of a layer on each rank, although a token needs
only few experts. With expert parallelism, a rank sends each token to the ranks that own the token's experts
(all-to-all), and receives the outputs. The gradients of a rank's own experts then come from the tokens of all ranks, so
FSDP2 neither gathers nor reduces these weights. The weights are sharded as FSDP2 would shard them: rank i owns the i-th
part of the experts. Lepikhin et al. 2020, https://arxiv.org/abs/2006.16668.

Shape suffixes: N tokens of this rank, K experts of a token, S = N x K pairs of a token and an expert, T pairs that this
rank receives, D hidden size, E experts, e experts of this rank, R ranks.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, distributed, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers import PreTrainedModel
from transformers.integrations.moe import ExpertsInterface

from flowrl.config import UserError
from flowrl.devices.device import get_device
from flowrl.engines.models.routing import EXPERT_PARALLEL, is_experts, mixture_of

_groups: WeakKeyDictionary[nn.Module, ProcessGroup] = WeakKeyDictionary()
"""Ranks that share the experts of a layer. The layer has no attribute for this group, because deep copies of a model
cannot copy process groups.
"""


class ExpertError(UserError):
    """Raised if the experts of a model cannot be divided over ranks."""


def shard_experts(model: PreTrainedModel, shards: DeviceMesh, group: ProcessGroup) -> set[nn.Parameter]:
    """Shards the experts of a model over the ranks of `group`, in place. Returns the weights of this rank's experts,
    which FSDP2 must ignore.

    Args:
        model: the same model on every rank, possibly on the meta device.
        shards: device mesh over which FSDP2 shards the other weights. Its last dimension has the ranks of `group`.
        group: the ranks that share a copy of the model.
    Raises ExpertError if the model has no experts of a known family, or if the group size does not divide their number.
    """
    mixture, name = mixture_of(model), type(model).__name__
    if mixture is None:
        raise ExpertError(
            f"engine.expert_parallel is true, but {name} is no mixture of experts of a family in docs/models.md: "
            f"remove it"
        )
    if mixture.num_experts % group.size():
        raise ExpertError(
            f"engine.expert_parallel is true, but the {mixture.num_experts} experts of {name} cannot be divided over "
            f"the {group.size()} ranks of a copy of the model: set engine.shard_ranks to a divisor"
        )
    owned = set()
    for module in filter(is_experts, model.modules()):
        for leaf, weight in list(module.named_parameters(recurse=False)):
            sharded = nn.Parameter(_own_part(weight.detach(), shards), requires_grad=weight.requires_grad)
            module.register_parameter(leaf, sharded)
            owned.add(sharded)
        _groups[module] = group
    model.set_experts_implementation(EXPERT_PARALLEL)
    return owned


def owned_experts(model: nn.Module) -> Iterator[nn.Parameter]:
    """Yields the expert weights that `shard_experts` has left on this rank. Empty without expert parallelism."""
    return (weight for module in model.modules() if module in _groups for weight in module.parameters(recurse=False))


def _own_part(weight: Tensor, shards: DeviceMesh) -> DTensor:
    placements = [*[Replicate()] * (shards.ndim - 1), Shard(0)]
    own = weight.chunk(shards.size(-1))[shards.get_local_rank(-1)]
    return DTensor.from_local(
        own.clone(), shards, placements, run_check=False, shape=weight.shape, stride=weight.stride()
    )


def _run_experts(experts: Any, hidden_ND: Tensor, experts_NK: Tensor, weights_NK: Tensor) -> Tensor:
    """Returns the outputs [N, D] of the experts of each token. Has the signature of `ExpertsInterface`.

    `experts`: transformers' module of the experts of a layer, with sharded weights (Any: it has no typed base).
    """
    group, num_experts = _groups[experts], experts.num_experts
    num_tokens, num_choices = experts_NK.shape
    # The pairs are sorted by expert, and thereby by the rank that owns the expert.
    sorted_S, order_S = experts_NK.flatten().sort(stable=True)
    sent_RE = torch.bincount(sorted_S, minlength=num_experts).view(group.size(), -1)
    received_RE = torch.empty_like(sent_RE)
    distributed.all_to_all_single(received_RE, sent_RE, group=group)
    sent_R, received_R = (counts_RE.sum(1).tolist() for counts_RE in (sent_RE, received_RE))
    tokens_TD = _Exchange.apply(hidden_ND[order_S // num_choices], sent_R, received_R, group)
    # Received tokens are sorted by source rank, then by expert.
    local_e = torch.arange(sent_RE.shape[1], device=tokens_TD.device)
    own_order_T = local_e.repeat(group.size()).repeat_interleave(received_RE.flatten()).argsort(stable=True)
    outputs_TD = _apply_own_experts(experts, tokens_TD[own_order_T], received_RE.sum(0))
    back_TD = torch.empty_like(outputs_TD).index_copy(0, own_order_T, outputs_TD)
    outputs_SD = _Exchange.apply(back_TD, received_R, sent_R, group)
    weighted_SD = torch.empty_like(outputs_SD).index_copy(0, order_S, outputs_SD) * weights_NK.reshape(-1, 1)
    return weighted_SD.view(num_tokens, num_choices, -1).sum(1).to(hidden_ND.dtype)


def _apply_own_experts(experts: Any, tokens_TD: Tensor, counts_e: Tensor) -> Tensor:  # Any: as above
    """Returns the outputs [T, D] of this rank's experts. The tokens are sorted by expert. Expert i has `counts_e[i]`
    tokens.
    """
    hidden = _grouped_linear(tokens_TD, experts.gate_up_proj, counts_e)
    return _grouped_linear(experts._apply_gate(hidden), experts.down_proj, counts_e)


def _grouped_linear(tokens: Tensor, weight: Tensor, counts_e: Tensor) -> Tensor:
    """Multiplies the tokens of each expert with the expert's matrix. `weight` is [e, outputs, inputs] on this rank."""
    assert isinstance(weight, DTensor), "shard_experts has divided it"
    own = weight.to_local().to(tokens.dtype)
    if _has_grouped_kernel(tokens, own):
        offsets_e = counts_e.cumsum(0).to(torch.int32)
        return nn.functional.grouped_mm(tokens, own.transpose(-2, -1), offs=offsets_e)
    parts = tokens.split(counts_e.tolist())
    return torch.cat([nn.functional.linear(part, matrix) for part, matrix in zip(parts, own, strict=True)])


def _has_grouped_kernel(tokens: Tensor, weight: Tensor) -> bool:
    """Returns whether torch's grouped matrix product supports these inputs: bfloat16 on a GPU of compute capability 8.0
    or higher, with row sizes that are multiples of 16 bytes.
    """
    return (
        tokens.is_cuda
        and tokens.dtype == torch.bfloat16
        and all(width % 8 == 0 for width in weight.shape[1:])
        and (get_device(tokens.device).capability or (0, 0)) >= (8, 0)
    )


class _Context(Protocol):
    sent: Sequence[int]
    received: Sequence[int]
    group: ProcessGroup


class _Exchange(torch.autograd.Function):
    """All-to-all of rows: sends the next `sent[i]` rows to rank i, and receives `received[i]` rows from rank i. The
    backward pass sends the gradients back.
    """

    @staticmethod
    def forward(
        ctx: _Context, rows: Tensor, sent: Sequence[int], received: Sequence[int], group: ProcessGroup
    ) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _all_to_all(rows, sent, received, group)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] (torch leaves the arguments open)
        ctx: _Context, gradient: Tensor
    ) -> tuple[Tensor, None, None, None]:
        return _all_to_all(gradient, ctx.received, ctx.sent, ctx.group), None, None, None


def _all_to_all(rows: Tensor, sent: Sequence[int], received: Sequence[int], group: ProcessGroup) -> Tensor:
    result = rows.new_empty(sum(received), rows.shape[1])
    distributed.all_to_all_single(result, rows.contiguous(), list(received), list(sent), group=group)
    return result


ExpertsInterface.register(EXPERT_PARALLEL, _run_experts)
