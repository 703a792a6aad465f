"""Seconds of a training step with a reward that sleeps, per schedule, next to a reward that returns at once.

python -m tests.benchmarks.reward_overlap [--sleep SECONDS] [--steps N]
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from recipes.grpo.config import GRPOConfig
from recipes.grpo.train import train
from tests.benchmarks.measure import Figure, machine, read_arguments, table
from tests.configs import grpo_settings, quickstart_settings
from tests.small_task import prepare_small

ROLES = {"actor": "train", "reward": "train", "rollout": "generate"}
SCHEDULES: dict[str, dict[str, Any]] = {
    "sync": {"kind": "sync"},
    "one_step_off": {"kind": "one_step_off"},
    "async": {"kind": "async", "max_staleness": 2},
}


async def score(response: str, sleep_s: float) -> float:
    await asyncio.sleep(sleep_s)
    return float(len(response) % 7)


def step_seconds(task: Path, output: Path, schedule: str, sleep_s: float, steps: int) -> float:
    """Returns the median seconds of the steps after the second one."""
    reward = {
        "components": [{"name": "slow", "function": f"{__spec__.name}:score", "options": {"sleep_s": sleep_s}}],
        "max_concurrent": 512,
        "workers": 1,
    }
    settings = quickstart_settings(task, output) | {
        "backend": "ray",
        "placement": {"device": "cpu", "pools": {"train": [1], "generate": [1]}, "roles": ROLES},
        "schedule": SCHEDULES[schedule],
        "reward": reward,
        "reference": None,
        "steps": steps,
        "batch_size": 512,
        "minibatch_size": 512,
        "samples_per_prompt": 8,
        "rollout": {"max_response_tokens": 40, "max_num_seqs": 64},
        "evaluate_every": 0,
    }
    train(GRPOConfig.model_validate(grpo_settings() | settings))
    records = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return statistics.median(record["seconds"] for record in records if record["step"] > 2)


def main() -> None:
    """Prints the medians and their ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sleep", type=float, default=1.0)
    parser.add_argument("--schedules", nargs="+", default=list(SCHEDULES), choices=list(SCHEDULES))
    parser.add_argument("--steps", type=int, default=8)
    arguments = read_arguments(parser, sleep=0.05, steps=3, schedules=["sync"])
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory() as folder:
        task = Path(folder) / "task"
        prepare_small(task)
        for schedule in arguments.schedules:
            slow_s, fast_s = (
                step_seconds(task, Path(folder) / f"{schedule}{sleep_s}", schedule, sleep_s, arguments.steps)
                for sleep_s in (arguments.sleep, 0.0)
            )
            what = f"{schedule}: step with a reward of {arguments.sleep:g} s per row"
            figures.append(Figure(what=what, unit="s", ours=slow_s, raw=fast_s, ratio=round(slow_s / fast_s, 2)))
    ran_on = "\n".join(f"{name}: {value}" for name, value in machine().items())
    sys.stdout.write(f"{ran_on}\n\n{table(figures)}\n")


if __name__ == "__main__":
    main()
