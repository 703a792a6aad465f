"""Optimizers: the included ones, and functions of the user."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer

from flowrl.config import OptimizerConfig, UserError, import_function
from flowrl.config.user_errors import convert_errors, describe_exception

ParameterGroup = dict[str, Any]
"""Weights (`params`) and their `weight_decay`, as torch's optimizers receive them."""

OptimizerBuilder = Callable[[Sequence[ParameterGroup], OptimizerConfig], Optimizer]
"""Type of a function that returns an optimizer for groups of weights. `lr` is set before each step."""


def build_optimizer(parameters: Sequence[nn.Parameter], config: OptimizerConfig) -> Optimizer:
    """Returns the optimizer that `config.kind` selects.

    Weight decay applies to matrices only, because it would pull outputs towards 0 on biases and norm scales. Raises
    UserError if a user's function raises an error, or does not return an optimizer of these weights.
    """
    # A fused update requires parameters of one device mesh.
    parts: dict[tuple[bool, object], list[nn.Parameter]] = {}
    for parameter in parameters:
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        parts.setdefault((parameter.ndim >= 2, mesh), []).append(parameter)
    groups = [
        {"params": params, "weight_decay": config.weight_decay if is_matrix else 0.0}
        for (is_matrix, _), params in parts.items()
    ]
    if (build := BUILDERS.get(config.kind)) is not None:
        return build(groups, config)
    owner = f"optimizer.kind {config.kind}"
    build = import_function(config.kind)
    with convert_errors(lambda error: UserError(describe_exception(error, owner))):
        optimizer = build(groups, config)
    if not isinstance(optimizer, Optimizer):
        raise UserError(f"{owner} returned a {type(optimizer).__name__}: it must return a torch.optim.Optimizer")
    given, own = ({id(p) for group in each for p in group["params"]} for each in (groups, optimizer.param_groups))
    if given != own:
        raise UserError(
            f"{owner} returned an optimizer of other weights ({len(given - own)} of the {len(given)} weights of the "
            f"model are missing): build it from the groups that the function receives"
        )
    return optimizer


def _build_adamw(groups: Sequence[ParameterGroup], config: OptimizerConfig) -> AdamW:
    return AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


BUILDERS: Mapping[str, OptimizerBuilder] = {"adamw": _build_adamw}
"""Name -> function that builds an included optimizer. `flowrl.config.model.OPTIMIZERS` has the names."""
