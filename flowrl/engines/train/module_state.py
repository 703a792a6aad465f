"""Saves and restores the tensors of a module and its optimizer by name, also if they are sharded."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from flowrl.engines.models.parameters import unique_parameters

MODEL, OPTIMIZER = "model.", "optimizer."
"""Prefixes of the names of weights and of optimizer tensors."""


def module_state(model: nn.Module, optimizer: Optimizer | None) -> dict[str, Tensor]:
    """Returns the trained weights of a module and the tensors of its optimizer, which are created if they are missing.

    A tied weight appears only under the first of its names.
    """
    tied = {name for names, _ in unique_parameters(model) for name in names[1:]}
    weights = get_model_state_dict(model, options=StateDictOptions(ignore_frozen_params=True))
    state: dict[str, Any] = {MODEL + name: weight for name, weight in weights.items() if name not in tied}
    if optimizer is not None:
        # Any: torch's type also covers flattened dictionaries.
        moments: Any = get_optimizer_state_dict(model, optimizer)["state"]
        state |= {f"{OPTIMIZER}{n}.{key}": value for n, own in moments.items() for key, value in own.items()}
    return state


def load_module_state(model: nn.Module, optimizer: Optimizer | None, tensors: Mapping[str, Tensor]) -> None:
    """Copies the tensors of `module_state` into a module and its optimizer. Optimizer tensors may be missing.

    The call is also required for tensors that were overwritten in place, because `module_state` returns copies of some
    of them.
    """
    weights: dict[str, Any] = {  # Any: torch's type also covers other state
        name.removeprefix(MODEL): value for name, value in tensors.items() if name.startswith(MODEL)
    }
    # Not strict, because frozen weights and the other names of tied weights are missing.
    set_model_state_dict(model, weights, options=StateDictOptions(strict=False))
    if optimizer is None or not any(name.startswith(OPTIMIZER) for name in tensors):
        return
    state: Any = get_optimizer_state_dict(model, optimizer)
    for name, own in state["state"].items():
        own |= {key: tensors[f"{OPTIMIZER}{name}.{key}"] for key in own}
    set_optimizer_state_dict(model, optimizer, state)


def describe_module(model: nn.Module) -> str:
    """Returns the class of a module and its number of parameters."""
    return f"{type(model).__name__}, {sum(parameter.numel() for parameter in model.parameters()):,} parameters"
