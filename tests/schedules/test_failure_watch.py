"""A run in which too many rewards fail has a reason to end."""

from collections.abc import Callable

import numpy as np
import pytest

from flowrl.data.batch.batch import Batch
from flowrl.rewards.row_scores import CALLS, FAILED
from flowrl.schedules.failure_watch import FailureWatch
from flowrl.schedules.rewards import reward_metrics
from recipes.grpo.config import GRPOConfig
from tests.configs import grpo_settings
from tests.errors import missing_facts


def watch(notify: Callable[[str], None] = print, **reward: object) -> FailureWatch:
    settings = grpo_settings(reward={"function": "rewards:score"} | reward)
    return FailureWatch(GRPOConfig.model_validate(settings), notify)


def values(failed: float) -> dict[str, float]:
    return {"reward_failed_fraction": failed, "rewards/a/failed_fraction": failed, "rewards/b/failed_fraction": 0.0}


@pytest.mark.parametrize(("rate", "failed", "ends"), [(0.25, 0.25, False), (0.25, 0.5, True), (0.0, 0.125, True)])
def test_a_run_ends_above_the_failure_rate(rate: float, failed: float, ends: bool) -> None:
    limited = watch(on_failure="zero", max_failure_rate=rate)
    limited.check_step(3, values(failed))
    assert (limited.error is not None) == ends


def test_the_reason_is_the_first_step_above_the_rate() -> None:
    limited = watch(on_failure="drop")
    for step, failed in enumerate((0.0, 0.5, 0.75), start=1):
        limited.check_step(step, values(failed))
    assert limited.error is not None
    for fact in ("reward a ", "step 2", "50%", "reward.max_failure_rate", "0.1", "reward_failures"):
        assert fact in limited.error


def test_failed_episodes_name_the_setting_of_the_environment() -> None:
    own = {"name": "games:Game", "on_failure": "zero"}
    limited = FailureWatch(GRPOConfig.model_validate(grpo_settings(reward=None, environment=own)), print)
    limited.check_step(1, {"reward_failed_fraction": 0.5, "rewards/environment/failed_fraction": 0.5})
    assert limited.error is not None and "environment.max_failure_rate" in limited.error


def test_a_step_without_scores_is_not_checked() -> None:
    limited = watch(on_failure="zero")
    limited.check_step(1, {"reward": 1.0})
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
        limited.check_step(step, values(0.5) | {"reward_min": lowest})
    assert len(messages) == num_messages and limited.error is None
    assert all(not missing_facts(message, 2, 50, "reward.on_failure", "drop") for message in messages)


def test_failures_that_end_the_run_at_once_have_no_rate() -> None:
    limited = watch(on_failure="stop")
    limited.check_step(1, values(1.0))
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
