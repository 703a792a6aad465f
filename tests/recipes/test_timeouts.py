"""GRPO with tools and environments that hang: the observation states the timeout, and the run counts it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flowrl.config import Placement
from recipes.grpo.config import GRPOConfig
from recipes.grpo.train import train
from tests.calling_policy import call_of, save_calling_policy
from tests.recipes.hanging import hangs_for
from tests.recipes.test_numbers import metrics_of
from tests.recipes.test_rewards import ALL_ROWS, SCHEDULES, saved_rows
from tests.recipes.test_schedules import ALIKE

HERE = "tests.recipes.hanging"
TOOLS = {"look_up": "seven", "look_up_async": "eight"}
"""Name of a tool -> its result."""

APART = Placement.model_validate({**ALIKE, "roles": {**ALIKE["roles"], "environment": "train"}})
GrpoConfigs = Callable[..., GRPOConfig]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy") / "model"
    save_calling_policy(folder, list(TOOLS))
    return folder


def train_with(grpo_config: GrpoConfigs, policy: Path, schedule: str, **environment: Any) -> GRPOConfig:
    changes: dict[str, Any] = {
        "schedule": SCHEDULES[schedule],
        "placement": APART,
        "reward": None,
        "reference": None,
        "actor": {"model": {"path": policy}, "optimizer": {"lr": 1e-5}},  # so that the policy still calls tools
        "rollout": {"max_response_tokens": 256},
        "environment": environment,
        **ALL_ROWS,
    }
    config = grpo_config(**changes)
    train(config)
    return config


def count_metric(config: GRPOConfig, name: str) -> float:
    return sum(line.get(name, 0) for line in metrics_of(config))


@pytest.mark.slow
@pytest.mark.parametrize(
    "schedule", ["async", *(pytest.param(name, marks=pytest.mark.slow) for name in ("sync", "one_step_off"))]
)
def test_a_hung_tool_gives_an_observation_and_is_counted(grpo_config: GrpoConfigs, policy: Path, schedule: str) -> None:
    options = {
        "tools": [f"{HERE}:{tool}" for tool in TOOLS],
        "reward": "recipes.quickstart.task:score",
        "max_turns": 2,
        "tool_timeout_s": 1.0,
        "columns": ["prompt"],
    }
    name = "flowrl.environments.tool_environment:ToolEnvironment"
    config = train_with(grpo_config, policy, schedule, name=name, options=options)
    rows = [row for step in saved_rows(config) for row in step]
    assert len(rows) == config.steps * config.batch_size
    num_timeouts = 0
    for tool, result in TOOLS.items():
        message = f"Error: {tool} did not return within 1 s."
        called = [row for row in rows if row["response"].startswith(call_of(tool)) and row["environment_length"]]
        hung = [row for row in called if hangs_for(row["prompt"])]
        assert hung and len(hung) < len(called)
        for row in hung:
            assert message in row["response"] and not row["reward_failures"]
        for row in called:
            if not hangs_for(row["prompt"]):
                assert f"<tool_response>{result}</tool_response>" in row["response"] or message in row["response"]
        num_timeouts += sum(row["response"].count(message) for row in rows)
    assert num_timeouts == count_metric(config, "environment/tool_timeout")
    assert count_metric(config, "reward_failed_fraction") == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "name"),
    [
        ("sync", "Hanging"),
        *(pytest.param(schedule, "HangingInThreads", marks=pytest.mark.slow) for schedule in SCHEDULES),
    ],
)
def test_a_hung_step_gives_an_observation_and_is_counted(
    grpo_config: GrpoConfigs, policy: Path, schedule: str, name: str
) -> None:
    limits = {"timeout_s": 2.0, "max_timeouts": 5}
    config = train_with(grpo_config, policy, schedule, name=f"{HERE}:{name}", **limits)
    message = "The environment did not respond within 2 s."
    rows = [row for step in saved_rows(config) for row in step]
    assert len(rows) == config.steps * config.batch_size
    hung = [row for row in rows if hangs_for(row["prompt"])]
    assert 0 < len(hung) < len(rows)
    assert all(message in row["response"] for row in hung)
    num_timeouts = sum(row["response"].count(message) for row in rows)
    assert num_timeouts == count_metric(config, "environment/timeout")
    assert count_metric(config, "reward_failed_fraction") == 0
