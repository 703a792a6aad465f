"""Measures what the saved rows of `rollouts/` cost per step of a run.

    python -m tests.benchmarks.saved_rows [--steps N] [--repeats N] [--response-tokens N]

Runs GRPO with an untrained model of the quickstart, in turn without saved rows, with the default settings, and with all
rows and their tokens. Prints per step: the median duration without step 1, the time of the driver for saved rows
(submission, waiting and writing), the time of all calls of the task worker, which works beside the devices, and the
size of the rows.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

from flowrl.report.chrome_trace import read_trace
from flowrl.run.rollout_rows import RolloutSaver
from recipes.grpo.config import GRPOConfig
from recipes.grpo.train import train
from recipes.quickstart.prepare import prepare

BATCH_SIZE = 64
SETTINGS: dict[str, dict[str, Any] | None] = {
    "`rollouts: null`": None,
    "default": {},
    "default, `every: 1`": {"every": 1},
    "`every: 1, rows: all, token_rows: 64`": {"every": 1, "rows": "all", "token_rows": BATCH_SIZE},
}


class DriverTime:
    """Measures the time that the driver spends in methods of RolloutSaver."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def measure(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def measured(*args: Any) -> Any:
            start_s = time.perf_counter()
            result = method(*args)
            self.seconds += time.perf_counter() - start_s
            return result

        return measured


def run_once(folder: Path, output: Path, rollouts: dict[str, Any] | None, steps: int, length: int) -> dict[str, float]:
    """Runs GRPO. Returns medians and means per step, in milliseconds."""
    roles = ("actor", "rollout", "reference", "reward")
    config = GRPOConfig.model_validate(
        {
            "output": output,
            "threads": 1,
            "steps": steps,
            "evaluate_every": 0,
            "placement": {"device": "cpu", "pools": {"main": [1]}, "roles": dict.fromkeys(roles, "main")},
            "actor": {
                "model": {"path": folder / "model"},
                "optimizer": {"lr": 1e-5},
                "kl_loss_coef": 0.01,
                "old_logprobs": "recompute",
            },
            "reward": {"function": "recipes.quickstart.task:score"},
            "rollout": {"max_response_tokens": length},
            "algorithm": {"estimator": "grpo"},
            "data": {"train": folder / "train.jsonl", "max_prompt_tokens": 16},
            "batch_size": BATCH_SIZE,
            "minibatch_size": BATCH_SIZE // 2,
            "samples_per_prompt": 8,
            "report": {"plots": False, "tensorboard": False, "rollouts": rollouts},
        }
    )
    driver = DriverTime()
    methods = {name: getattr(RolloutSaver, name) for name in ("save_training", "write_training")}
    for name, method in methods.items():
        setattr(RolloutSaver, name, driver.measure(method))
    try:
        with redirect_stdout(StringIO()):
            train(config)
    finally:
        for name, method in methods.items():
            setattr(RolloutSaver, name, method)
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    events = [event for event in read_trace(output / "trace.json").events if event.role == "tasks"]
    tasks_ns = sum(event.ended_ns - event.started_ns for event in events)
    shards = list((output / "rollouts").glob("training-*"))
    return {
        "step": statistics.median(line["seconds"] for line in lines if line["step"] > 1) * 1e3,
        "driver": driver.seconds / steps * 1e3,
        "task worker": tasks_ns / steps / 1e6,
        "kB": sum(path.stat().st_size for path in shards) / steps / 1e3,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=21)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--response-tokens", type=int, default=64)
    arguments = parser.parse_args()
    results: defaultdict[str, list[dict[str, float]]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder / "data", seed=0)
        for repeat in range(arguments.repeats):
            for number, (label, rollouts) in enumerate(SETTINGS.items()):
                output = folder / f"run-{repeat}-{number}"
                measured = run_once(folder / "data", output, rollouts, arguments.steps, arguments.response_tokens)
                results[label].append(measured)
    sys.stdout.write(
        "| settings | step ms | driver ms | of a step | task worker ms | kB |\n|---|---|---|---|---|---|\n"
    )
    for label, runs in results.items():
        own = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        share = f"{own['driver'] / own['step']:.2%}"
        sys.stdout.write(
            f"| {label} | {own['step']:.0f} | {own['driver']:.2f} | {share} | {own['task worker']:.1f} | "
            f"{own['kB']:.1f} |\n"
        )


if __name__ == "__main__":
    main()
