"""Optimizers: the included ones, and functions of the user."""

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from flowrl.config import OptimizerConfig
from flowrl.config.model import OPTIMIZERS
from flowrl.engines.train.optimizers import BUILDERS, ParameterGroup, build_optimizer
from tests.errors import rejects

OWN = "tests.engines.train.test_optimizers"


def build_sgd(groups: Sequence[ParameterGroup], config: OptimizerConfig) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=config.lr, momentum=float(config.options["momentum"] or 0))


def build_nothing(groups: Sequence[ParameterGroup], config: OptimizerConfig) -> None:
    return None


def build_for_another_weight(groups: Sequence[ParameterGroup], config: OptimizerConfig) -> torch.optim.Optimizer:
    return torch.optim.SGD([groups[0]["params"][0], nn.Parameter(torch.ones(1))], lr=config.lr)


def build_without_settings(groups: Sequence[ParameterGroup]) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups)


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(2))]


def test_every_named_optimizer_has_a_builder() -> None:
    assert set(BUILDERS) == set(OPTIMIZERS)


def test_weight_decay_applies_to_matrices() -> None:
    optimizer = build_optimizer(parameters(), OptimizerConfig(lr=0.1, weight_decay=0.5))
    assert isinstance(optimizer, torch.optim.AdamW)
    assert [(group["params"][0].ndim, group["weight_decay"]) for group in optimizer.param_groups] == [(2, 0.5), (1, 0)]


def test_a_users_function_builds_the_optimizer() -> None:
    """Two steps with gradient 1 and momentum 0.5: 1 - 0.1 - 0.1 * 1.5."""
    config = OptimizerConfig(lr=0.1, kind=f"{OWN}:build_sgd", options={"momentum": 0.5})
    weights = parameters()
    optimizer = build_optimizer(weights, config)
    for _ in range(2):
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert all(weight.flatten().tolist() == pytest.approx([0.75] * weight.numel()) for weight in weights)


@pytest.mark.parametrize(
    ("function", "facts"),
    [
        ("build_nothing", ("NoneType", "torch.optim.Optimizer")),
        ("build_without_settings", ("TypeError",)),
        ("build_sgd", ("KeyError", __file__)),
        ("build_for_another_weight", (1, 2)),
    ],
)
def test_a_function_that_builds_no_optimizer_of_the_weights_is_rejected(
    function: str, facts: tuple[object, ...]
) -> None:
    with rejects("optimizer.kind", OWN, *facts):
        build_optimizer(parameters(), OptimizerConfig(lr=0.1, kind=f"{OWN}:{function}"))


@pytest.mark.parametrize(
    ("settings", "facts"),
    [
        ({"kind": "adam"}, ("adam", "adamw")),
        ({"options": {"momentum": 0.5}}, ("momentum", "adamw", "kind")),
    ],
)
def test_an_unknown_optimizer_or_option_is_rejected(settings: dict, facts: tuple[str, ...]) -> None:
    with rejects(*facts, error=ValueError):
        OptimizerConfig.model_validate({"lr": 0.1} | settings)
