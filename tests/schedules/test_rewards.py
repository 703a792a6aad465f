"""The limits of the user's functions, and the scores of rewards that have models."""

import math
from typing import Any, cast

import pytest
import torch

from flowrl.config import EnvironmentConfig, RewardConfig
from flowrl.data.batch.batch import Batch
from flowrl.data.batch.tensordicts import make_tensordict, objects
from flowrl.rewards.pool import PoolLimits
from flowrl.rewards.reward_function import RewardError
from flowrl.schedules.rewards import EnvironmentScoring, Rewards, combine_scores, measure_rewards
from tests.errors import rejects


def test_the_limits_are_those_of_the_reward() -> None:
    own = {"workers": 3, "timeout_s": 1.5, "retries": 2, "memory_mb": 900.0, "network": True, "max_concurrent": 5}
    config = RewardConfig.model_validate({"function": "flowrl.rewards.gsm8k:score", **own})
    expected = PoolLimits(3, 1.5, retries=2, memory_mb=900.0, allow_network=True, max_concurrent=5)
    assert Rewards(config, {}, "reward").limits == expected


def test_the_limits_are_those_of_the_environment() -> None:
    own = {"workers": 2, "timeout_s": 1.5, "memory_mb": 900.0, "network": True}
    config = EnvironmentConfig.model_validate({"name": "flowrl.rewards.gsm8k:score", **own})
    unused = cast(Any, None)  # a group, which the limits do not need
    limits = EnvironmentScoring(config, unused, max_prompt_tokens=8).limits
    assert limits == PoolLimits(2, 1.5, memory_mb=900.0, allow_network=True)


def test_an_environment_does_not_score_responses_after_generation() -> None:
    config = EnvironmentConfig.model_validate({"name": "flowrl.rewards.gsm8k:score"})
    with rejects("reward.score", "environment", "run.rollouts"):
        EnvironmentScoring(config, cast(Any, None), max_prompt_tokens=8).score(Batch.from_columns({"x": [1]}))


def test_the_metrics_of_a_reward_are_means_over_the_rows_of_its_data_sources() -> None:
    """The reward `bonus` does not apply to the second row, and fails for the third."""

    def call(score: float | None, failure: str | None = None) -> dict[str, Any]:
        return {"score": score, "failure": failure, "message": "crashed", "seconds": None}

    calls = [
        {"size": call(2.0), "bonus": call(3.0)},
        {"size": call(5.0)},
        {"size": call(8.0), "bonus": call(None, "x")},
    ]
    failed = torch.tensor([False, False, True])
    metrics = measure_rewards(make_tensordict({"reward_failed": failed, "reward_calls": calls}))
    assert {name: metric.result() for name, metric in metrics.items()} == {
        "reward_failed_fraction": 1 / 3,
        "rewards/size": 5.0,
        "rewards/size/failed_fraction": 0.0,
        "rewards/bonus": 3.0,
        "rewards/bonus/failed_fraction": 0.5,
    }


# Scores of models.


def config_of(on_failure: str) -> RewardConfig:
    """Returns a reward with a function, and a model with weight 0.5 that does not score the data source `c`."""
    model = {"name": "pref", "model": {"path": "rm"}, "weight": 0.5, "data_sources": ["a"]}
    components = [{"name": "task", "function": "m:f"}, model]
    return RewardConfig.model_validate({"components": components, "on_failure": on_failure})


MODEL_SCORES = [2.0, math.nan, math.inf, math.nan]


def table(last_source: str = "c") -> Any:
    """Returns rows with the scores `MODEL_SCORES` of the models. The last row has the data source `last_source`."""
    return make_tensordict(
        {
            "task": torch.tensor([1.0, 0.0, 1.0, 1.0]),
            "pref/scores": torch.tensor(MODEL_SCORES),
            "reward_failed": torch.zeros(4, dtype=torch.bool),
            "reward_calls": [{} for _ in MODEL_SCORES],
            "data_source": ["a", "a", "a", last_source],
        }
    )


@pytest.mark.parametrize("on_failure", ["zero", "drop"])
def test_a_score_of_a_model_that_is_no_finite_number_is_a_failure(on_failure: str) -> None:
    combined = combine_scores(table(), config_of(on_failure))
    assert combined["rows", "scores"].tolist() == [2.0, 0.0, 1.0, 1.0]
    assert combined["rows", "reward_failed"].tolist() == [False, True, True, False]
    assert combined["rows", "pref"].tolist() == pytest.approx([2.0, 0.0, 0.0, math.nan], nan_ok=True)
    calls = [row.get("pref") for row in objects(combined, "reward_calls")]
    assert [call and (call["score"], call["failure"]) for call in calls] == [
        (2.0, None), (None, "invalid"), (None, "invalid"), None
    ]  # fmt: skip
    assert "nan" in calls[1]["message"] and "inf" in calls[2]["message"]


def test_such_a_score_ends_the_run_with_stop() -> None:
    with pytest.raises(RewardError, match=r"rm.* nan.*reward\.on_failure"):
        combine_scores(table(), config_of("stop"))


def test_a_single_reward_model_has_the_policy_of_a_list() -> None:
    config = RewardConfig.model_validate({"model": {"path": "rm"}, "on_failure": "drop"})
    rows = {"reward/scores": torch.tensor(MODEL_SCORES), "reward/reward_truncated": torch.tensor([True] + [False] * 3)}
    combined = combine_scores(make_tensordict(rows), config)
    assert set(combined["rows"].keys()) - {"length"} == {"scores", "reward_truncated", "reward_failed", "reward_calls"}
    assert combined["rows", "scores"].tolist() == [2.0, 0.0, 0.0, 0.0]
    assert combined["rows", "reward_failed"].tolist() == [False, True, True, True]
    assert combined["rows", "reward_truncated"].tolist() == [True, False, False, False]
