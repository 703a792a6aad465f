"""Provides the quickstart's task on disk, configs of the recipes that read it, and three runs that many tests read."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Generic, NamedTuple

import pytest

from recipes.grpo.config import GRPOConfig
from recipes.grpo.train import train as train_grpo
from recipes.ppo.config import PPOConfig
from recipes.ppo.train import train as train_ppo
from tests.configs import AnyConfig, quickstart_settings
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


# Three runs. A test whose claim holds for one of them reads its folder instead of training.


class FinishedRun(NamedTuple, Generic[AnyConfig]):
    """A run whose folder tests read, and copy before they continue it."""

    config: AnyConfig
    summary: dict[str, Any]


SCORED = "tests.recipes.scored"
SAVED_ROWS: dict[str, Any] = {"tensorboard": False, "rollouts": {"every": 1, "rows": 100}}
DYNAMIC = {"max_rounds": 20, "column": "task"}
REWARDS: dict[str, Any] = {
    "components": [
        {"name": "task", "weight": 2.0, "function": f"{SCORED}:parity"},
        {"name": "size", "weight": -0.25, "function": f"{SCORED}:fails_for_some_responses"},
    ],
    "evaluation": f"{SCORED}:fails_for_some_answers",
    "on_failure": "drop",
    "max_failure_rate": 1.0,
}
"""`task` has equal scores in half of the groups. `size` fails for a quarter of the responses, evaluations for 30 of 64
prompts.
"""
BONUS = {"name": "bonus", "weight": 0.5, "function": f"{SCORED}:length", "data_sources": ["even"]}


def source_of(prompt: str) -> str:
    """Returns the data source of a problem: `even` if its first digit is even, else `odd`."""
    return "odd" if int(prompt[0]) % 2 else "even"


@pytest.fixture(scope="session")
def sync_run(task_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> FinishedRun[PPOConfig]:
    """PPO in one process, in five steps with two updates each.

    It has rewards for data sources, failed rewards, dynamic sampling with a surplus, PTX, checkpoints, and a recording
    of step 2.
    """
    folder = tmp_path_factory.mktemp("sync")
    lines = (task_folder / "train.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    rows = [row | {"data_source": source_of(row["messages"][0]["content"])} for row in rows]
    (folder / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    base = build_ppo_config(task_folder, folder / "run")
    config = build_ppo_config(
        task_folder,
        folder / "run",
        recipe="recipes.ppo.config:PPOConfig",
        steps=5,
        samples_per_prompt=4,
        actor=base.actor.model_dump() | {"old_logprobs": "recompute"},
        reward=REWARDS | {"components": [*REWARDS["components"], BONUS]},
        dynamic_sampling=DYNAMIC | {"oversample": 2.0},
        data=base.data.model_dump() | {"train": folder / "train.jsonl", "evaluation_rows": 64},
        rollout={"max_response_tokens": 12, "check": "strict"},
        ptx={"data": task_folder / "sft.jsonl", "coef": 0.5, "batch_size": 4, "max_tokens": 16},
        checkpoint={"every": 2},
        evaluate_every=2,
        record=[2],
        report=SAVED_ROWS,
    )
    return FinishedRun(config, train_ppo(config))


@pytest.fixture(scope="session")
def one_step_off_run(
    ray_session: None, task_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> FinishedRun[GRPOConfig]:
    """GRPO with one_step_off on Ray, in four steps, with trainer and rollout in their own processes.

    It has episodes of two turns of which some fail, dynamic sampling, compared weights, checkpoints, and a recording
    of step 2.
    """
    roles = dict.fromkeys(("actor", "reference", "environment"), "train") | {"rollout": "make"}
    config = build_grpo_config(
        task_folder,
        tmp_path_factory.mktemp("one_step_off") / "run",
        steps=4,
        backend="ray",
        placement={"device": "cpu", "pools": {"train": [1], "make": [1]}, "roles": roles},
        schedule={"kind": "one_step_off"},
        reward=None,
        environment={
            "name": "tests.recipes.turns:ParityOfTwoTurns",
            "workers": 1,
            "on_failure": "drop",
            "max_failure_rate": 1.0,
        },
        dynamic_sampling={"max_rounds": 20},
        rollout={"max_response_tokens": 24, "check_weights": "complete"},
        checkpoint={"every": 1, "keep_last": None},
        evaluate_every=2,
        record=[2],
        report=SAVED_ROWS,
    )
    return FinishedRun(config, train_grpo(config))


@pytest.fixture(scope="session")
def async_run(
    ray_session: None, task_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> FinishedRun[GRPOConfig]:
    """GRPO with async on Ray, in four steps, with two rollout replicas and two ranks of the trainer.

    It has two rewards of which one fails, dynamic sampling, interrupted responses and checkpoints.
    """
    output = tmp_path_factory.mktemp("async") / "run"
    base = build_grpo_config(task_folder, output)
    roles = dict.fromkeys(("actor", "reference", "reward"), "train") | {"rollout": "make"}
    config = build_grpo_config(
        task_folder,
        output,
        steps=4,
        backend="ray",
        placement={"device": "cpu", "pools": {"train": [2], "make": [2]}, "roles": roles},
        schedule={"kind": "async", "max_staleness": 2, "interrupt": True},
        # With a larger learning rate, the run may learn responses that all fail.
        actor=base.actor.model_dump(exclude={"old_logprobs"}) | {"optimizer": {"lr": 1e-6}},
        reward=REWARDS | {"workers": 1},
        dynamic_sampling=DYNAMIC,
        data=base.data.model_dump() | {"evaluation_rows": 64},
        checkpoint={"every": 2},
        evaluate_every=2,
        report=SAVED_ROWS,
    )
    return FinishedRun(config, train_grpo(config))
