"""Sequence-parallel norms and residuals for tensor parallelism (Megatron).

Outside attention and MLP, each tensor-parallel rank processes only its sequence shard. The inputs of attention and MLP
are all-gathered, and their outputs are reduce-scattered. Korthikanti et al. 2022, https://arxiv.org/abs/2205.05198.

Shape suffixes: B rows, L tokens of the longest row, l tokens of a sequence shard, D hidden size.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module
from transformers import PreTrainedModel

from flowrl.config import UserError
from flowrl.engines.models.attention import packing_obstacle

SEQUENCE = Shard(1)
"""DTensor placement of hidden states [B, L, D] that are sharded by sequence."""


class NormsError(UserError):
    """Raised if norms cannot be sharded by sequence, because a model has layers other than norms, attention and MLP."""


def shard_norms(model: PreTrainedModel, tp_mesh: DeviceMesh, rowwise: Collection[str]) -> None:
    """Shards the hidden states between a model's layers by sequence. Each rank then has [B, l, D].

    Norm weights are replicated, and their gradients are summed over the ranks.

    Args:
        model: model whose matrices are already sharded by the tensor-parallel plan. It is changed in place.
        tp_mesh: the tensor-parallel ranks.
        rowwise: names of the last matrices of attention and MLP. Their outputs are already sharded by sequence.
    Raises NormsError if a module other than attention and MLP may combine tokens.
    """
    obstacle = packing_obstacle(model)
    if obstacle is not None:
        raise _norms_error(model, f"it has {obstacle}")
    norms, full_sequence = _classify_modules(model, rowwise)
    for norm in norms:
        parallelize_module(norm, tp_mesh, SequenceParallel(use_local_output=True))
    for module in full_sequence:
        replicate_inputs(module, tp_mesh, SEQUENCE)


def shard_adapter(matrix: nn.Module, tp_mesh: DeviceMesh, *, by_outputs: bool) -> None:
    """Makes the replicated matrix of an adapter accept hidden states that are a DTensor: replicates A as a DTensor, or
    shards the inputs of B by sequence.

    Args:
        matrix: the replicated matrix, which is A for a column-wise sharded layer and B for a row-wise sharded layer.
        tp_mesh: the tensor-parallel ranks.
        by_outputs: whether the layer is sharded column-wise.
    """
    if by_outputs:
        distribute_module(matrix, tp_mesh)
    else:
        parallelize_module(matrix, tp_mesh, SequenceParallel(use_local_output=True))


def _classify_modules(model: PreTrainedModel, rowwise: Collection[str]) -> tuple[list[nn.Module], list[nn.Module]]:
    """Returns the norms of a model, and the modules (attention, MLP) that need full sequences."""
    names = {module: name for name, module in model.named_modules()}
    ends = {name.rpartition(".")[0] for name in rowwise}
    blocks = set(model._no_split_modules or ())
    norms, full_sequence = [], []
    for child in _children_with_weights(model.base_model):
        if isinstance(child, nn.ModuleList) and {type(block).__name__ for block in child} <= blocks:
            for module in (module for block in child for module in _children_with_weights(block)):
                if _is_norm(module):
                    norms.append(module)
                elif names[module] in ends:
                    full_sequence.append(module)
                else:
                    raise _norms_error(model, f"{names[module]} is neither a norm nor in the tensor-parallel plan")
        elif _is_norm(child):
            norms.append(child)
        elif child is not model.get_input_embeddings():
            raise _norms_error(model, f"{names[child]} is neither a norm, nor the embeddings, nor layers")
    return norms, full_sequence


def _children_with_weights(module: nn.Module) -> Iterator[nn.Module]:
    return (child for child in module.children() if next(child.parameters(), None) is not None)


def _is_norm(module: nn.Module) -> bool:
    return not any(module.children()) and all(weight.ndim == 1 for weight in module.parameters())


def _norms_error(model: PreTrainedModel, reason: str) -> NormsError:
    return NormsError(
        f"{type(model).__name__} does not support engine.sequence_parallel_norms: {reason}; set it to false for this "
        f"role"
    )


def replicate_inputs(module: nn.Module, tp_mesh: DeviceMesh, placement: Placement) -> None:
    """Passes the hidden states that enter a module as a replicated DTensor, and gathers them if they are sharded.

    A single collective then sums the gradients of all matrices that read them. `placement` is that of the hidden states
    before.
    """

    def gather(states: Tensor) -> Tensor:
        return DTensor.from_local(states, tp_mesh, [placement], run_check=False).redistribute(placements=[Replicate()])

    def before(
        _: nn.Module, arguments: tuple[Any, ...], named: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if arguments:
            return (gather(arguments[0]), *arguments[1:]), dict(named)
        return (), {**named, "hidden_states": gather(named["hidden_states"])}

    module.register_forward_pre_hook(before, with_kwargs=True)
