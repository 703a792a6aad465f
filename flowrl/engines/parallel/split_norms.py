"""Norms and residuals of tensor-parallel peers, each for a stretch of the row.

Korthikanti et al. 2022, https://arxiv.org/abs/2205.05198: between a layer's matrices everything sees one token at a
time, so that what all peers would compute and keep alike each does for its own stretch. Attention and MLP are handed
whole rows, put together from the stretches, and what their last matrices give is summed and split in one operation.

Shape suffixes: B rows, L tokens of the longest row, l of a stretch, D hidden size.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module
from transformers import PreTrainedModel

from flowrl.config import UserError
from flowrl.engines.models.attention import why_padded

ROW = Shard(1)
"""How states [B, L, D] are split over peers."""


class NormsError(UserError):
    """A model is not made of norms beside attention and MLP, as sharing its norms would need."""


def split_norms(model: PreTrainedModel, peers: DeviceMesh, rowwise: Collection[str]) -> None:
    """Has a model's layers take and give stretches [B, l, D] of rows, in place.

    Their norms have the same weights on all peers, whose gradients are summed over them.

    Args:
        model: in which the tensor-parallel plan's matrices are cut.
        peers: the tensor-parallel ranks.
        rowwise: names of the matrices that end attention and MLP; their outputs are stretches already.
    Raises:
        NormsError: there is something in the model that might need to see more than a token.
    """
    why = why_padded(model)
    if why is not None:
        raise _unfit(model, f"it has {why}")
    norms, whole = _parts(model, rowwise)
    for norm in norms:
        parallelize_module(norm, peers, SequenceParallel(use_local_output=True))
    for part in whole:
        _gather_inputs(part, peers)


def split_adapter(matrix: nn.Module, peers: DeviceMesh, *, by_outputs: bool) -> None:
    """The matrix of an adapter that is not cut, beside a layer that is cut by its outputs, or else by its inputs.

    The first makes rank numbers of each token of whole rows, the second takes those of a stretch.
    """
    if by_outputs:
        distribute_module(matrix, peers)
    else:
        parallelize_module(matrix, peers, SequenceParallel(use_local_output=True))


def _parts(model: PreTrainedModel, rowwise: Collection[str]) -> tuple[list[nn.Module], list[nn.Module]]:
    """The norms between a model's layers and in them, and what in them is handed whole rows."""
    names = {module: name for name, module in model.named_modules()}
    ends = {name.rpartition(".")[0] for name in rowwise}
    blocks = set(model._no_split_modules or ())
    norms, whole = [], []
    for child in _with_weights(model.base_model):
        if isinstance(child, nn.ModuleList) and {type(block).__name__ for block in child} <= blocks:
            for part in (part for block in child for part in _with_weights(block)):
                if _is_norm(part):
                    norms.append(part)
                elif names[part] in ends:
                    whole.append(part)
                else:
                    raise _unfit(model, f"{names[part]} is neither a norm nor cut by the tensor-parallel plan")
        elif _is_norm(child):
            norms.append(child)
        elif child is not model.get_input_embeddings():
            raise _unfit(model, f"{names[child]} is neither a norm, nor the embeddings, nor layers")
    return norms, whole


def _with_weights(module: nn.Module) -> Iterator[nn.Module]:
    return (child for child in module.children() if next(child.parameters(), None) is not None)


def _is_norm(module: nn.Module) -> bool:
    return not any(module.children()) and all(weight.ndim == 1 for weight in module.parameters())


def _unfit(model: PreTrainedModel, why: str) -> NormsError:
    return NormsError(
        f"{type(model).__name__} cannot run with engine.sequence_parallel_norms: {why}; set it to false for this role"
    )


def _gather_inputs(part: nn.Module, peers: DeviceMesh) -> None:
    """Hands a module whole rows. They stay known as whole to the matrices that take them, so that the gradients of all
    these are added before they are summed over peers and split, once."""

    def whole(states_BlD: Tensor) -> Tensor:
        return DTensor.from_local(states_BlD, peers, [ROW], run_check=False).redistribute(placements=[Replicate()])

    def before(
        _: nn.Module, arguments: tuple[Any, ...], named: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if arguments:
            return (whole(arguments[0]), *arguments[1:]), dict(named)
        return (), {**named, "hidden_states": whole(named["hidden_states"])}

    part.register_forward_pre_hook(before, with_kwargs=True)
