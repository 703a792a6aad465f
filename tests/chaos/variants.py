"""Settings of the runs: one schedule, engine and number of ranks each."""

import json
from pathlib import Path
from typing import Any

from flowrl.config import RunConfig, to_yaml
from recipes.ppo.config import PPOConfig
from tests.configs import NO_REPORT
from tests.recipes.conftest import build_ppo_config

EPISODES, VLLM_EPISODES = "episodes", "vllm_episodes"
"""Variants whose responses an environment scores, in episodes of two turns, instead of reward functions. The first one
generates with `hf`.
"""

ROLES = PPOConfig.possible_roles()
"""Roles of all runs. A run has either a reward or an environment."""

SCHEDULES: dict[str, dict[str, Any]] = {
    "sync": {"kind": "sync"},
    "one_step_off": {"kind": "one_step_off"},
    "async": {"kind": "async", "max_staleness": 2},
}
ENGINES = ("hf", "vllm", "fsdp", EPISODES, VLLM_EPISODES)
"""`hf` and `vllm` generate; the actor of `fsdp` has two sharded ranks. `fsdp` generates with `hf`."""

TIMINGS = ("seconds", "elapsed_s", "tokens_per_s", "memory_mb", "idle_", "wait_", "usage/")
"""Prefixes of metrics that depend on the clock or on the memory of the machine."""
CALL_SECONDS, RESTARTS = "/seconds", "environment/restarts"
"""End of the names of metrics with the duration of rewards, and the metric that counts episodes that started again."""

BATCH_SIZE, CHECKPOINT_EVERY, EVALUATE_EVERY = 8, 3, 4
ALL_ROWS = {"every": 1, "rows": BATCH_SIZE, "max_mb": None}
"""Settings of `report.rollouts` that keep all rows of all steps, so that every trained prompt is known."""
CALL_TIMEOUT_S = 15.0
REWARD_TIMEOUT_S, ENVIRONMENT_TIMEOUT_S = 6.0, 4.0
"""Timeouts of reward functions and environments. They are shorter, so that a late call is attributed to them."""
MANY_RESTARTS = 1_000_000
"""A run takes many faults, so the number of restarts is not what ends it."""


def has_episodes(engine: str) -> bool:
    """Returns whether an environment scores the responses of a variant."""
    return engine in (EPISODES, VLLM_EPISODES)


def has_vllm(engine: str) -> bool:
    """Returns whether vLLM generates the responses of a variant."""
    return engine in ("vllm", VLLM_EPISODES)


def get_roles(engine: str) -> tuple[str, ...]:
    """Returns the roles of a variant, each of which has its own processes."""
    return tuple(role for role in ROLES if role != ("reward" if has_episodes(engine) else "environment"))


def scoring_settings(engine: str, records: Path) -> dict[str, Any]:
    """Returns the settings `reward` or `environment` of a variant. `records` is the folder of the misbehavior requests.

    One process scores, so that a stopped process receives the next call.
    """
    if has_episodes(engine):
        environment = {"name": "tests.recipes.turns:TwoTurns", "workers": 1, "timeout_s": ENVIRONMENT_TIMEOUT_S}
        return {"reward": None, "environment": environment}
    limits = {"workers": 1, "timeout_s": REWARD_TIMEOUT_S}
    function = {"function": "tests.chaos.misbehavior:score", "options": {"folder": str(records)}}
    return {"reward": {**function, "evaluation": "recipes.quickstart.task:exact", **limits}}


def variant_config(
    task: Path, output: Path, schedule: str, engine: str, steps: int, *, records: Path, **changes: Any
) -> PPOConfig:
    """Returns the config of a run in which every role has its own process.

    Args:
        task: folder written by `recipes.quickstart.prepare`.
        records: folder in which the reward function looks for misbehavior requests.
    """
    num_replicas = 2 if schedule == "async" and not has_vllm(engine) else 1
    counts = {"actor": 2 if engine == "fsdp" else 1, "rollout": num_replicas}
    roles = get_roles(engine)
    base = build_ppo_config(task, output)
    actor = base.actor.model_dump(exclude_unset=True)
    settings: dict[str, Any] = {
        "recipe": "recipes.ppo.config:PPOConfig",
        "backend": "ray",
        "placement": {
            "device": "cpu",
            "pools": {role: [counts.get(role, 1)] for role in roles},
            "roles": {role: role for role in roles},
        },
        "actor": actor | ({"engine": {"strategy": "fsdp"}} if engine == "fsdp" else {}),
        **scoring_settings(engine, records),
        "rollout": {"max_response_tokens": 24 if has_episodes(engine) else 6} | (VLLM if has_vllm(engine) else {}),
        "batch_size": BATCH_SIZE,
        "minibatch_size": 4,
        "steps": steps,
        "evaluate_every": EVALUATE_EVERY,
        "report": NO_REPORT | {"rollouts": ALL_ROWS},
        "checkpoint": {"every": CHECKPOINT_EVERY},
        "schedule": SCHEDULES[schedule],
        "restarts": MANY_RESTARTS,
        "call_timeout_s": CALL_TIMEOUT_S,
        "resume": "auto",
    }
    return build_ppo_config(task, output, **settings | changes)


VLLM = {"engine": "vllm", "transfer": {"bucket_mb": 0.5}}


def write_config(config: RunConfig, path: Path) -> Path:
    path.write_text(to_yaml(config))
    return path


def read_metrics(output: Path) -> list[dict[str, float]]:
    """Returns the log records without timings and without repeated episodes. The last line may be incomplete."""
    path = output / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    records = [json.loads(line) for line in lines]
    return [{name: value for name, value in record.items() if not _depends_on_faults(name)} for record in records]


def _depends_on_faults(metric: str) -> bool:
    return metric.startswith(TIMINGS) or metric.endswith(CALL_SECONDS) or metric == RESTARTS
