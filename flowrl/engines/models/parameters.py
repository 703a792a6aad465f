"""Parameters and optimizer state: dtype names, tied names, device moves, and full tensors of sharded weights."""

import logging

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

# A weight that both tensor parallelism and FSDP shard takes two all-gathers, about which torch warns per weight.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


def move_model(model: nn.Module, device: torch.device) -> None:
    """Moves weights and buffers to a device in place, so that other holders of the model see the move."""
    if any(tensor.device != device for tensor in model.state_dict().values()):
        model.to(device)


def unique_parameters(model: nn.Module) -> list[tuple[list[str], nn.Parameter]]:
    """Returns every parameter once, with all its names. Tied parameters have several names.

    The order is that of the model's layers, as in FSDP2.
    """
    unique: dict[int, tuple[list[str], nn.Parameter]] = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        unique.setdefault(id(weight), ([], weight))[0].append(name)
    return list(unique.values())


def set_parameter(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Replaces the parameter of this name."""
    owner, _, leaf = name.rpartition(".")
    model.get_submodule(owner)._parameters[leaf] = parameter


def to_full_tensor(weight: Tensor) -> Tensor:
    """Returns the full tensor of a sharded weight, or an unsharded weight itself. Collective if it is sharded."""
    return weight.full_tensor().detach() if isinstance(weight, DTensor) else weight.detach()


def move_optimizer(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Moves Adam's moments to a device. Step counts stay where they are."""
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.ndim:
                state[name] = value.to(
                    device
                )  # moves the local shard of a DTensor, whose mesh may be of another device
