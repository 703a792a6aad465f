"""Runs with recorded steps for the tests of `flowrl replay`: one per recipe and schedule."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowrl.config import RunConfig
from recipes.distillation.train import train as train_distillation
from recipes.dpo.train import train as train_dpo
from recipes.grpo.config import GRPOConfig
from recipes.grpo.train import train as train_grpo
from recipes.ppo.train import train as train_ppo
from recipes.rejection_sampling.train import train as train_rejection
from recipes.sft.config import SFTConfig
from recipes.sft.train import train as train_sft
from tests.configs import quickstart_settings
from tests.recipes.conftest import build_ppo_config
from tests.recipes.preference_configs import dpo_config
from tests.recipes.rollout_configs import distillation_config, rejection_config

RECORDED = (1, 2)
"""Steps that the runs record. A recording of step 1 has no optimizer state, and step 2 trains on its results."""


@dataclass(frozen=True)
class Case:
    """A run of two steps."""

    build: Callable[..., RunConfig]
    """Returns the config, given the folder of the task, the output folder, and changes of settings."""
    train: Callable[..., object]
    """The training function of the recipe."""


def grpo_config(task: Path, output: Path, **changes: Any) -> GRPOConfig:
    settings = quickstart_settings(task, output, batch_size=16, minibatch_size=8, samples_per_prompt=4)
    settings["actor"] |= {"kl_loss_coef": 0.02, "old_logprobs": "recompute"}
    settings |= {
        "algorithm": {"estimator": "grpo"},
        "reward": {"function": "recipes.quickstart.task:score"},
        "rollout": {"max_response_tokens": 6},
        "ppo_epochs": 2,
        "recipe": "recipes.grpo.config:GRPOConfig",
    }
    settings["data"] = {"train": task / "train.jsonl", "max_prompt_tokens": 16}
    return GRPOConfig.model_validate(settings | changes)


def ppo_config(task: Path, output: Path, **changes: Any) -> RunConfig:
    return build_ppo_config(task, output, recipe="recipes.ppo.config:PPOConfig", **changes)


def adapter_config(task: Path, output: Path, **changes: Any) -> RunConfig:
    """Returns GRPO settings with an adapter and with text for PTX, whose position is part of the driver's state."""
    settings = grpo_config(task, output, **changes).model_dump()
    settings["actor"] |= {"lora": {"rank": 2}}
    settings["ptx"] = {"data": task / "sft.jsonl", "coef": 0.5, "batch_size": 4, "max_tokens": 16}
    return GRPOConfig.model_validate(settings)


def environment_config(task: Path, output: Path, **changes: Any) -> RunConfig:
    environment = {"name": "tests.recipes.turns:OneTurn"}
    return grpo_config(task, output, reward=None, environment=environment, **changes)


def one_step_off_config(task: Path, output: Path, **changes: Any) -> RunConfig:
    return grpo_config(task, output, schedule={"kind": "one_step_off"}, **changes)


def async_config(task: Path, output: Path, **changes: Any) -> RunConfig:
    """Returns settings whose results depend on the timing of generation, so that two runs differ."""
    roles = dict.fromkeys(("actor", "reference", "reward"), "train") | {"rollout": "make"}
    placement = {"device": "cpu", "pools": {"train": [1], "make": [1]}, "roles": roles}
    schedule = {"kind": "async", "max_staleness": 1}
    return grpo_config(task, output, schedule=schedule, placement=placement, **changes)


def sft_config(task: Path, output: Path, **changes: Any) -> SFTConfig:
    settings = quickstart_settings(task, output, batch_size=16)
    kept = ("output", "backend", "threads", "report", "actor", "batch_size")
    own = {name: settings[name] for name in kept}
    own |= {"data": {"train": task / "sft.jsonl", "max_prompt_tokens": 16}, "epochs": 1, "steps": 2}
    return SFTConfig.model_validate(own | changes)


def scored_distillation_config(task: Path, output: Path, **changes: Any) -> RunConfig:
    """Returns settings of a recipe that computes scores in its loop. The teacher is the initial student."""
    reward = {"function": "recipes.quickstart.task:score"}
    recipe = "recipes.distillation.config:DistillationConfig"
    return distillation_config(task, output, task / "model", reward=reward, recipe=recipe, **{"steps": 2} | changes)


PPO = Case(ppo_config, train_ppo)

CASES = {
    "grpo": Case(grpo_config, train_grpo),
    "adapter": Case(adapter_config, train_grpo),
    "environment": Case(environment_config, train_grpo),
    "one_step_off": Case(one_step_off_config, train_grpo),
    "async": Case(async_config, train_grpo),
    "rejection": Case(rejection_config, train_rejection),
    "distillation": Case(scored_distillation_config, train_distillation),
    "sft": Case(sft_config, train_sft),
    "dpo": Case(dpo_config, train_dpo),
}


def metrics_without_clock(output: Path) -> list[dict[str, float]]:
    """Returns the metrics of all steps, without times, sizes of memory and idle shares."""
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    clock = (
        "seconds",
        "elapsed_s",
        "tokens_per_s",
        "memory_mb",
        "wait_",
        "idle_",
        "usage/",
        "rewards/",
        "environment/",
    )
    return [{name: value for name, value in line.items() if not name.startswith(clock)} for line in lines]
