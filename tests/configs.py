"""Builds the settings of on-policy configs for tests; `model_validate` of a config class turns them into a config."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from flowrl.config.run import RunConfig
from flowrl.controller.placement.plan import Plan
from flowrl.run.checks.check_list import check_placement
from flowrl.run.checks.checked_run import CheckedRun

AnyConfig = TypeVar("AnyConfig", bound=RunConfig)

NO_REPORT = {"tensorboard": False}
"""Report settings of test runs, which otherwise spend most of their time on figures."""


def on_policy_settings(*, model: Path | str = "model", lr: float = 1e-4, **changes: Any) -> dict[str, Any]:
    """Returns the settings that all on-policy recipes share, without `algorithm`. Files do not have to exist.

    Args:
        model: folder of the actor's and the reference's model.
        lr: learning rate of the actor.
        changes: top-level settings to replace or add.
    """
    settings: dict[str, Any] = {
        "output": "runs/test",
        "steps": 1,
        "batch_size": 8,
        "minibatch_size": 4,
        "samples_per_prompt": 2,
        "actor": {"model": {"path": model}, "optimizer": {"lr": lr}},
        "reference": {"model": {"path": model}},
        "reward": {"function": "rewards:score"},
        "rollout": {"max_response_tokens": 8},
        "data": {"train": "train.jsonl", "max_prompt_tokens": 8},
        "report": NO_REPORT,
    }
    return settings | changes


def grpo_settings(**changes: Any) -> dict[str, Any]:
    """Returns settings of the GRPO recipe; arguments as of `on_policy_settings`."""
    defaults: dict[str, Any] = {"algorithm": {"estimator": "grpo"}}
    return on_policy_settings(**defaults | changes)


def ppo_settings(**changes: Any) -> dict[str, Any]:
    """Returns settings of the PPO recipe; arguments as of `on_policy_settings`."""
    defaults: dict[str, Any] = {"algorithm": {"estimator": "gae"}}
    settings = on_policy_settings(**defaults | changes)
    return {"critic": {"model": settings["actor"]["model"], "optimizer": {"lr": 1e-4}}} | settings


def quickstart_settings(task: Path, output: Path, **changes: Any) -> dict[str, Any]:
    """Returns on-policy settings that read the quickstart's data and model, for an inline run.

    Args:
        task: folder that `recipes.quickstart.prepare` wrote.
    """
    settings = {
        "output": output,
        "backend": "inline",
        "threads": 1,
        "data": {
            "train": task / "train.jsonl",
            "test": task / "test.jsonl",
            "max_prompt_tokens": 16,
            "evaluation_rows": 8,
        },
    }
    return on_policy_settings(model=task / "model", lr=1e-3, **settings | changes)


def with_float64_models(config: AnyConfig) -> AnyConfig:
    """Returns the config with float64 models in all roles, for runs that differ in summation order only."""
    settings = config.model_dump()
    if settings.get("actor", {}).get("old_logprobs") == "rollout":
        settings["actor"]["old_logprobs"] = "auto"  # the rollout stores float32
    for group in (settings, *settings.values()):
        if isinstance(group, dict) and isinstance(group.get("model"), dict):
            group["model"]["dtype"] = "float64"
    return type(config).model_validate(settings)


def plan_run(config: RunConfig, devices: Sequence[int] | None = None) -> Plan:
    """Returns the placement plan of a run, after the checks of the plan. `devices`: number per node."""
    return check_placement(CheckedRun(config, devices))
