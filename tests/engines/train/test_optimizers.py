"""Optimizers, learning rate schedules, and the loss scale of float16."""

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from flowrl.config import OptimizerConfig
from flowrl.config.model import OPTIMIZERS
from flowrl.engines.train.optimizers import BUILDERS, LossScale, ParameterGroup, build_optimizer, learning_rate
from tests.errors import rejects

OWN = "tests.engines.train.test_optimizers"


def build_sgd(groups: Sequence[ParameterGroup], config: OptimizerConfig) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=config.lr, momentum=float(config.options["momentum"] or 0))


def build_nothing(groups: Sequence[ParameterGroup], config: OptimizerConfig) -> None:
    return None


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


def test_a_function_that_builds_no_optimizer_is_rejected() -> None:
    with rejects("build_nothing", "NoneType", "torch.optim.Optimizer"):
        build_optimizer(parameters(), OptimizerConfig(lr=0.1, kind=f"{OWN}:build_nothing"))


@pytest.mark.parametrize(
    ("settings", "facts"),
    [({"kind": "adam"}, ("adam", "adamw")), ({"options": {"momentum": 0.5}}, ("momentum", "adamw", "kind"))],
)
def test_an_unknown_optimizer_or_option_is_rejected(settings: dict, facts: tuple[str, ...]) -> None:
    with rejects(*facts, error=ValueError):
        OptimizerConfig.model_validate({"lr": 0.1} | settings)


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]), ("linear", [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0])],
)
def test_the_learning_rate_rises_over_the_warmup_and_then_follows_the_schedule(schedule, rates: list[float]):
    config = OptimizerConfig(lr=1.0, warmup_steps=2, schedule=schedule, total_steps=6)
    assert [learning_rate(config, step) for step in range(7)] == pytest.approx(rates)


def test_a_cosine_schedule_is_at_half_in_the_middle_and_stays_at_zero():
    config = OptimizerConfig(lr=1.0, schedule="cosine", total_steps=4)
    assert [learning_rate(config, step) for step in (0, 2, 4, 9)] == pytest.approx([1.0, 0.5, 0.0, 0.0])


def test_a_schedule_without_an_end_is_rejected():
    with rejects("linear", "optimizer.total_steps", error=ValueError):
        learning_rate(OptimizerConfig(lr=1.0, schedule="linear"), 0)


def test_an_overflow_halves_the_factor_and_resets_the_count():
    assert LossScale(1024.0, good_steps=7).after(overflowed=True) == LossScale(512.0, good_steps=0)


def test_the_factor_never_falls_below_one():
    assert LossScale(1.0).after(overflowed=True).factor == 1.0


def test_two_thousand_finite_steps_double_the_factor():
    scale = LossScale(8.0)
    for _ in range(1999):
        scale = scale.after(overflowed=False)
    assert scale == LossScale(8.0, good_steps=1999)
    assert scale.after(overflowed=False) == LossScale(16.0, good_steps=0)
