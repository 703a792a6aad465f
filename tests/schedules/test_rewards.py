"""The limits of the user's functions, which evaluations apply to the function that extracts answers."""

from typing import Any, cast

from flowrl.config import EnvironmentConfig, RewardConfig
from flowrl.rewards.processes.pool_settings import PoolLimits
from flowrl.schedules.rewards import EnvironmentScoring, Rewards


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
