"""Learning rate schedules, and the loss scale of float16. fsdp/test_train_step.py tests optimizer steps."""

import pytest

from flowrl.config import OptimizerConfig
from flowrl.engines.train.steps import LossScale, learning_rate
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
