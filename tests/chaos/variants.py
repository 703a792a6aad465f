"""Settings of the runs: one schedule, engine and number of ranks each."""

import json
from pathlib import Path
from typing import Any

from flowrl.config import to_yaml
from recipes.ppo.config import PPOConfig
from tests.configs import NO_REPORT
from tests.recipes.conftest import build_ppo_config

ROLES = tuple(role for role in PPOConfig.possible_roles() if role != "environment")
"""Roles of the runs. A reward scores the responses, so there is no environment."""

SCHEDULES: dict[str, dict[str, Any]] = {
    "sync": {"kind": "sync"},
    "one_step_off": {"kind": "one_step_off"},
    "async": {"kind": "async", "max_staleness": 2},
}
ENGINES = ("hf", "vllm", "fsdp")
"""`hf` and `vllm` generate; the actor of `fsdp` has two sharded ranks, and its rollout is `hf`."""

TIMINGS = ("seconds", "elapsed_s", "tokens_per_s", "memory_mb", "idle_", "wait_")
"""Prefixes of metrics that depend on the clock or on the memory of the machine."""

BATCH_SIZE, CHECKPOINT_EVERY, EVALUATE_EVERY = 8, 3, 4
ALL_ROWS = {"every": 1, "rows": BATCH_SIZE, "max_mb": None}
"""Settings of `report.rollouts` that keep all rows of all steps, so that every trained prompt is known."""
CALL_TIMEOUT_S = 15.0
MANY_RESTARTS = 1_000_000
"""A run takes many faults, so the number of restarts is not what ends it."""


def variant_config(task: Path, output: Path, schedule: str, engine: str, steps: int, **changes: Any) -> PPOConfig:
    """Returns the config of a run in which every role has its own process.

    `task` is a folder written by `recipes.quickstart.prepare`.
    """
    num_replicas = 2 if schedule == "async" and engine != "vllm" else 1
    counts = {"actor": 2 if engine == "fsdp" else 1, "rollout": num_replicas}
    base = build_ppo_config(task, output)
    actor = base.actor.model_dump(exclude_unset=True)
    settings: dict[str, Any] = {
        "recipe": "recipes.ppo.config:PPOConfig",
        "backend": "ray",
        "placement": {
            "device": "cpu",
            "pools": {role: [counts.get(role, 1)] for role in ROLES},
            "roles": {role: role for role in ROLES},
        },
        "actor": actor | ({"engine": {"strategy": "fsdp"}} if engine == "fsdp" else {}),
        "reward": {"function": "tests.chaos.workers:score", "evaluation": "recipes.quickstart.task:exact"},
        "rollout": {"max_response_tokens": 6} | (VLLM if engine == "vllm" else {}),
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


def write_config(config: PPOConfig, path: Path) -> Path:
    path.write_text(to_yaml(config))
    return path


def read_metrics(output: Path) -> list[dict[str, float]]:
    """Returns the log records without timings. The last line may be incomplete."""
    path = output / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    records = [json.loads(line) for line in lines]
    return [{name: value for name, value in record.items() if not name.startswith(TIMINGS)} for record in records]
