"""A run in which too many rewards fail has a reason to end."""

from collections.abc import Callable
from dataclasses import asdict

import numpy as np
import pytest

from flowrl.data.batch.batch import Batch
from flowrl.rewards.row_scorer import CALLS, FAILED, RewardCall
from flowrl.run.monitoring.failure_watch import FailureWatch
from flowrl.schedules.rewards import FailedFraction, reward_metrics
from recipes.grpo.config import GRPOConfig
from tests.configs import grpo_settings
from tests.errors import missing_facts


def watch(notify: Callable[[str], None] = print, **reward: object) -> FailureWatch:
    settings = grpo_settings(reward={"function": "rewards:score"} | reward)
    return FailureWatch(GRPOConfig.model_validate(settings), notify)


def check(limited: FailureWatch, step: int, num_failed: int, name: str = "a") -> None:
    """Checks a step of 8 responses, whose last ones fail."""
    failed = [i >= 8 - num_failed for i in range(8)]
    records = [
        {
            name: asdict(RewardCall(None, failure="timeout", message=f"cause-{i}") if failed[i] else RewardCall(1.0)),
            "b": asdict(RewardCall(1.0)),
        }
        for i in range(8)
    ]
    for metrics in reward_metrics([Batch.from_columns(rows={FAILED: np.array(failed), CALLS: records})]):
        limited.follow(metrics)
    limited.check_responses(step)


@pytest.mark.parametrize(("rate", "failed", "ends"), [(0.25, 2, False), (0.25, 4, True), (0.0, 1, True)])
def test_a_run_ends_above_the_failure_rate(rate: float, failed: int, ends: bool) -> None:
    limited = watch(on_failure="zero", max_failure_rate=rate)
    check(limited, 3, failed)
    assert (limited.error is not None) == ends


def test_the_reason_is_the_first_step_above_the_rate() -> None:
    limited = watch(on_failure="drop")
    for step, failed in enumerate((0, 4, 6), start=1):
        check(limited, step, failed)
    assert limited.error is not None
    for fact in ("reward a ", "step 2", "50%", "reward.max_failure_rate", "0.1", "cause-4"):
        assert fact in limited.error


def test_the_first_failures_of_training_below_the_rate_are_reported_once() -> None:
    messages: list[str] = []
    limited = watch(messages.append, on_failure="drop", max_failure_rate=0.5)
    for step, failed in enumerate((0, 2, 3), start=1):
        check(limited, step, failed)
    (message,) = messages
    assert limited.error is None
    assert not missing_facts(message, "a", 2, 25, "cause-6")


def test_failures_of_a_resumed_step_are_checked() -> None:
    limited = watch(on_failure="zero")
    limited.follow({"reward_failed_fraction": FailedFraction(3, 8, "crashed")})
    limited.check_responses(7)
    assert limited.error is not None and not missing_facts(limited.error, 7, 38, "crashed")


def test_merged_fractions_have_the_cause_of_the_first_failure() -> None:
    first, *others = FailedFraction(0, 4), FailedFraction(1, 4, "crashed"), FailedFraction(2, 4, "timeout")
    for other in others:
        first = first.merge(other)
    assert first == FailedFraction(3, 12, "crashed") and first.result() == 0.25


def test_failed_episodes_name_the_setting_of_the_environment() -> None:
    own = {"name": "games:Game", "on_failure": "zero"}
    limited = FailureWatch(GRPOConfig.model_validate(grpo_settings(reward=None, environment=own)), print)
    check(limited, 1, 4, "environment")
    assert limited.error is not None and "environment.max_failure_rate" in limited.error


def test_a_step_without_scores_is_not_checked() -> None:
    limited = watch(on_failure="zero")
    limited.follow({"reward": 1.0})
    limited.check_responses(1)
    assert limited.error is None


@pytest.mark.parametrize(
    ("on_failure", "lowest", "num_messages"), [("zero", -0.5, 1), ("zero", 0.0, 0), ("drop", -0.5, 0)]
)
def test_a_failed_reward_that_is_better_than_others_is_reported_once(
    on_failure: str, lowest: float, num_messages: int
) -> None:
    messages: list[str] = []
    limited = watch(messages.append, on_failure=on_failure, max_failure_rate=1.0)
    limited.check_step(1, {"reward_failed_fraction": 0.0, "reward_min": -1.0})
    for step in (2, 3):
        limited.check_step(step, {"reward_failed_fraction": 0.5, "reward_min": lowest})
    assert len(messages) == num_messages and limited.error is None
    assert all(not missing_facts(message, 2, 50, "reward.on_failure", "drop") for message in messages)


def test_failures_that_end_the_run_at_once_have_no_rate() -> None:
    limited = watch(on_failure="stop")
    check(limited, 1, 8)
    assert limited.error is None


def test_the_responses_of_a_step_are_checked_once() -> None:
    limited = watch(on_failure="drop", max_failure_rate=0.25)
    scored = Batch.from_columns(rows={FAILED: np.array([True, True, False, False]), CALLS: [{}] * 4})
    for metrics in ({"buffer_depth": 1.0}, *reward_metrics([scored])):
        assert limited.follow(metrics) == (metrics,)
    limited.check_responses(5)
    assert limited.error is not None and "step 5" in limited.error and "50%" in limited.error
    limited.error = None
    limited.check_responses(6)
    assert limited.error is None


# Evaluations.


ROWS = [
    {"set": None, "reward_failures": {}},
    {"set": None, "reward_failures": {"style": "style crashed"}},
    {"set": "hard", "reward_failures": {"task": "task crashed"}},
]


def evaluated(share: float, ending: str = "") -> dict[str, float]:
    bounds = {"evaluation/failed_as_worst": 0.25, "evaluation/failed_as_best": 0.75}
    return {f"{name}{ending}": value for name, value in (bounds | {"evaluation/failed_fraction": share}).items()}


def test_the_first_failures_of_evaluations_are_reported_once() -> None:
    messages: list[str] = []
    limited = watch(messages.append, on_failure="zero", max_failure_rate=0.5)
    limited.check_evaluation("of step 1", {"accuracy": 0.5}, ROWS[:1])
    assert not messages
    for step in (2, 3):
        limited.check_evaluation(f"of step {step}", evaluated(0.5), ROWS)
    (message,) = messages
    assert limited.error is None
    assert not missing_facts(message, "style", 50, 2, "0.250", "0.750", "crashed")


@pytest.mark.parametrize(("ending", "facts"), [("", ("style",)), ("/hard", ("task", "hard"))])
def test_each_set_has_the_failure_rate_as_limit(ending: str, facts: tuple[str, ...]) -> None:
    messages: list[str] = []
    limited = watch(messages.append, on_failure="drop", max_failure_rate=0.25)
    limited.check_evaluation("of step 4", evaluated(0.5, ending), ROWS)
    assert limited.error is not None and not messages
    assert not missing_facts(limited.error, 50, 4, "reward.max_failure_rate", "0.25", "crashed", *facts)
