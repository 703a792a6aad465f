"""Parameters: names of tied weights, full tensors of sharded weights, and a check of loaded weights."""

import logging
import math
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from flowrl.config import UserError

# torch warns about the two all-gathers of every weight that both tensor parallelism and FSDP shard.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


def unique_parameters(model: nn.Module) -> list[tuple[list[str], nn.Parameter]]:
    """Returns every parameter once, with the list of its names, in the order of the layers. A tied weight has several
    names.
    """
    unique: dict[int, tuple[list[str], nn.Parameter]] = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        unique.setdefault(id(weight), ([], weight))[0].append(name)
    return list(unique.values())


def set_parameter(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    owner, _, leaf = name.rpartition(".")
    model.get_submodule(owner)._parameters[leaf] = parameter


def replace_parameter(model: nn.Module, name: str, value: Tensor) -> None:
    """Replaces a parameter by a new parameter with this value. A tied weight is replaced under all of its names."""
    old = model.get_parameter(name)
    new = nn.Parameter(value, requires_grad=old.requires_grad)
    for tied in [n for n, weight in model.named_parameters(remove_duplicate=False) if weight is old]:
        set_parameter(model, tied, new)


def to_full_tensor(weight: Tensor) -> Tensor:
    """Returns the full tensor of a weight. All ranks of a sharded model must call this together."""
    return weight.full_tensor().detach() if isinstance(weight, DTensor) else weight.detach()


def check_finite(weight: Tensor, name: str, source: Path | str) -> None:
    """Raises UserError if a weight has NaN or infinite values, which would make all results of the model NaN.

    Args:
        weight: the loaded weight.
        name: name of the weight in the file.
        source: the file or the folder of the model, for the message.
    """
    with torch.no_grad():
        # A fast test that needs no memory: a finite sum has only finite terms. The sum of very large finite values can
        # overflow.
        if math.isfinite(weight.sum(dtype=torch.float32).item()):
            return
        count = int(weight.isfinite().logical_not().sum())
    if count:
        raise UserError(
            f"{source}: the weight {name} has {count:,} NaN or infinite values: use another checkpoint of the model"
        )
