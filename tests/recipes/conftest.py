"""Provides the quickstart's task on disk and configs of the recipes that read it."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from recipes.grpo.config import GRPOConfig
from recipes.ppo.config import PPOConfig
from tests.configs import quickstart_settings
from tests.small_task import prepare_small

TASK = "recipes.quickstart.task"


@pytest.fixture(scope="session")
def task_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes the quickstart's data, tokenizer and untrained model; returns their folder."""
    folder = tmp_path_factory.mktemp("task") / "data"
    prepare_small(folder)
    return folder


def settings(folder: Path, output: Path) -> dict[str, Any]:
    """Returns the settings that PPO and GRPO share: three inline steps of 32 rows."""
    base = quickstart_settings(folder, output, steps=3, batch_size=32, minibatch_size=16, samples_per_prompt=1)
    base["actor"] |= {"optimizer": {"lr": 1e-3, "warmup_steps": 2}, "entropy_coef": 0.01}
    base["reward"] = {"function": f"{TASK}:score", "evaluation": f"{TASK}:exact"}
    base["rollout"] = {"max_response_tokens": 6}
    return base


def build_ppo_config(folder: Path, run_folder: Path, **changes: Any) -> PPOConfig:
    """Returns a PPO config with the data of `folder`; `changes` replace settings."""
    base = settings(folder, run_folder)
    critic = {"model": {"path": folder / "model"}, "optimizer": {"lr": 1e-3}}
    algorithm = {"estimator": "gae", "lam": 0.95, "whiten": True, "kl_coef": 0.05}
    return PPOConfig.model_validate(base | {"critic": critic, "algorithm": algorithm} | changes)


@pytest.fixture
def ppo_config(task_folder: Path, tmp_path: Path) -> Callable[..., PPOConfig]:
    """Returns a function that builds PPO configs; keyword arguments replace settings."""

    return partial(build_ppo_config, task_folder, tmp_path / "run")


def build_grpo_config(folder: Path, run_folder: Path, **changes: Any) -> GRPOConfig:
    """Returns a GRPO config with the data of `folder`; `changes` replace settings."""
    base = settings(folder, run_folder)
    actor = base["actor"] | {"kl_loss_coef": 0.02}
    extra = {"algorithm": {"estimator": "grpo"}, "samples_per_prompt": 4, "actor": actor}
    return GRPOConfig.model_validate(base | extra | changes)


@pytest.fixture
def grpo_config(task_folder: Path, tmp_path: Path) -> Callable[..., GRPOConfig]:
    """Returns a function that builds GRPO configs; keyword arguments replace settings."""

    return partial(build_grpo_config, task_folder, tmp_path / "run")
