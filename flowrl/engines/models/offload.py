"""Where weights and optimizer state lie: in parts on ranks; on the device, or on the CPU while others need that one."""

import logging

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

# A weight that both tensor parallelism and fsdp cut takes two gathers, and torch would say so for every kind of weight.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


def move_model(model: nn.Module, device: torch.device) -> None:
    """Moves weights and buffers in place; whoever holds the model sees them there."""
    if any(tensor.device != device for tensor in model.state_dict().values()):
        model.to(device)


def named_weights(model: nn.Module) -> list[tuple[list[str], nn.Parameter]]:
    """Every weight once, with all its names: a tied one has several. Layers' own order, as FSDP2's."""
    found: dict[int, tuple[list[str], nn.Parameter]] = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(weight), ([], weight))[0].append(name)
    return list(found.values())


def whole_tensor(weight: Tensor) -> Tensor:
    """A weight that ranks hold in parts, put together on each of them, who all call it; another one as it is."""
    return weight.full_tensor().detach() if isinstance(weight, DTensor) else weight.detach()


def move_optimizer(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Moves the running means and squares of each weight; step counts stay where they are."""
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.ndim:
                state[name] = value.to(device)  # of a DTensor this rank's part, which may leave its mesh's device
