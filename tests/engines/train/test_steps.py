"""Learning rates of schedules and groups, and loss scales of float16. fsdp/test_train_step.py tests optimizer steps."""

from collections.abc import Sequence

import pytest
import torch

from flowrl.config import OptimizerConfig
from flowrl.engines.parallel.gradients import ReplicatedGradients
from flowrl.engines.parallel.rank_mesh import SINGLE_PROCESS
from flowrl.engines.train.base import Denominators
from flowrl.engines.train.optimizers import ParameterGroup
from flowrl.engines.train.steps import LossScale, OptimizerSteps, learning_rate
from tests.engines.losses import Bigram
from tests.errors import rejects


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


@pytest.mark.parametrize(
    ("schedule", "rates"), [("linear", [1.0, 0.775, 0.55, 0.1, 0.1]), ("cosine", [1.0, 0.868198, 0.55, 0.1, 0.1])]
)
def test_a_schedule_ends_at_the_minimum_rate(schedule, rates: list[float]):
    config = OptimizerConfig(lr=1.0, min_lr=0.1, schedule=schedule, total_steps=4)
    assert [learning_rate(config, step) for step in (0, 1, 2, 4, 9)] == pytest.approx(rates)


@pytest.mark.parametrize(
    ("settings", "facts"),
    [({"min_lr": 0.1}, ("min_lr", "constant")), ({"min_lr": 2.0, "schedule": "linear"}, ("min_lr", 2, 1))],
)
def test_a_minimum_rate_without_effect_is_rejected(settings: dict, facts: tuple[object, ...]):
    with rejects(*facts, error=ValueError):
        OptimizerConfig.model_validate({"lr": 1.0} | settings)


def test_a_group_has_its_own_rate_on_the_same_schedule():
    """SGD with gradient 1 and rates 1 and 0.5, then at the end of the schedule 0.1 and 0.05."""
    groups = {"head": {"weights": ["output.*"], "lr": 0.5}}
    config = OptimizerConfig.model_validate(
        {
            "kind": f"{__name__}:build_sgd",
            "lr": 1.0,
            "min_lr": 0.1,
            "schedule": "linear",
            "total_steps": 1,
            "max_grad_norm": None,
            "groups": groups,
        }
    )
    model = Bigram(4, 3)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    gradients = ReplicatedGradients(list(model.parameters()), SINGLE_PROCESS)
    steps = OptimizerSteps(model, gradients, config)
    reports = []
    for _ in range(2):
        steps.begin_loss(Denominators(1, 1))
        for weight in model.parameters():
            assert weight.grad is not None
            weight.grad.fill_(1.0)
        reports.append({name: metric.result() for name, metric in steps.take().items() if "lr" in name})
    assert reports == [{"lr": 1.0, "lr/head": 0.5}, {"lr": 0.1, "lr/head": 0.05}]
    for name, weight in model.named_parameters():
        moved = (before[name] - weight.detach()).flatten().tolist()
        assert moved == pytest.approx([0.55 if name.startswith("output.") else 1.1] * weight.numel())


def build_sgd(groups: Sequence[ParameterGroup], config: OptimizerConfig) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=config.lr)


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
