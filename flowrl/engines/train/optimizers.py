"""Optimizers: the included ones, and functions of the user."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer

from flowrl.config import OptimizerConfig, UserError, import_function

ParameterGroup = dict[str, Any]
"""Weights (`params`) and their `weight_decay`, as torch's optimizers receive them."""

OptimizerBuilder = Callable[[Sequence[ParameterGroup], OptimizerConfig], Optimizer]
"""Type of a function that returns an optimizer for groups of weights. `lr` is set before each step."""


def build_optimizer(parameters: Sequence[nn.Parameter], config: OptimizerConfig) -> Optimizer:
    """Returns the optimizer that `config.kind` selects.

    Weight decay applies to matrices only, because it would pull outputs towards 0 on biases and norm scales. Raises
    UserError if a user's function does not return an optimizer.
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
    build = BUILDERS.get(config.kind) or import_function(config.kind)
    optimizer = build(groups, config)
    if not isinstance(optimizer, Optimizer):
        raise UserError(
            f"the optimizer {config.kind} returned a {type(optimizer).__name__}: it must return a torch.optim.Optimizer"
        )
    return optimizer


def _build_adamw(groups: Sequence[ParameterGroup], config: OptimizerConfig) -> AdamW:
    return AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


BUILDERS: Mapping[str, OptimizerBuilder] = {"adamw": _build_adamw}
"""Name -> function that builds an included optimizer. `flowrl.config.model.OPTIMIZERS` has the names."""
