"""Optimizers, their learning rate schedules, and the loss scale of float16."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer

from flowrl.config import OptimizerConfig, UserError, import_function

_GROWTH, _GROWTH_STEPS, _BACKOFF = 2.0, 2000, 0.5

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
    groups: dict[tuple[bool, object], list[nn.Parameter]] = {}
    for parameter in parameters:
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        groups.setdefault((parameter.ndim >= 2, mesh), []).append(parameter)
    decayed = [
        {"params": params, "weight_decay": config.weight_decay if is_matrix else 0.0}
        for (is_matrix, _), params in groups.items()
    ]
    build = BUILDERS.get(config.kind) or import_function(config.kind)
    optimizer = build(decayed, config)
    if not isinstance(optimizer, Optimizer):
        raise UserError(
            f"the optimizer {config.kind} returned a {type(optimizer).__name__}: it must return a torch.optim.Optimizer"
        )
    return optimizer


def _build_adamw(groups: Sequence[ParameterGroup], config: OptimizerConfig) -> AdamW:
    return AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


BUILDERS: Mapping[str, OptimizerBuilder] = {"adamw": _build_adamw}
"""Name -> function that builds an included optimizer. `flowrl.config.model.OPTIMIZERS` has the names."""


def learning_rate(config: OptimizerConfig, step: int) -> float:
    """Returns the learning rate of optimizer step `step`, counted from 0.

    The learning rate rises linearly to `lr` over `warmup_steps`. Afterwards it is constant, or decays to 0 at
    `total_steps`, linearly or along a half cosine. Raises ValueError if the schedule has no end.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    if config.total_steps is None:
        raise ValueError(f"optimizer.schedule {config.schedule} needs an end: set optimizer.total_steps")
    progress = min(1.0, (step - config.warmup_steps) / (config.total_steps - config.warmup_steps))
    return config.lr * (1 - progress if config.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2)


@dataclass(frozen=True)
class LossScale:
    """Dynamic loss scale of float16, which keeps small gradients from underflowing to 0.

    As in torch and Apex, the scale doubles after 2,000 steps without an overflow. After an overflow, the step is
    skipped and the scale halves. Micikevicius et al. 2018, https://arxiv.org/abs/1710.03740, section 3.2.
    """

    factor: float = 2.0**16
    """Loss scale. The loss is multiplied by it before the backward pass, and the gradients are divided by it
    afterwards.
    """
    good_steps: int = 0
    """Number of steps without an overflow since the last change of the scale."""

    def after(self, *, overflowed: bool) -> "LossScale":
        if overflowed:
            return LossScale(max(self.factor * _BACKOFF, 1.0))
        if self.good_steps + 1 == _GROWTH_STEPS:
            return LossScale(self.factor * _GROWTH)
        return replace(self, good_steps=self.good_steps + 1)
