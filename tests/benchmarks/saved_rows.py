"""Measures what the saved rows of `rollouts/` cost per step of a run.

    python -m tests.benchmarks.saved_rows [--backend inline] [--steps N] [--repeats N] [--response-tokens N]

First measures the CPU time of converting and writing the rows of a batch of 512 responses with 1,000 tokens.

Then runs GRPO with an untrained model of the quickstart, in turn without saved rows, with the default settings, and
with all rows and their tokens. Prints per step: the median duration without step 1, the time of the driver for saved
rows (submission, waiting and writing), the time of all calls of the task worker, which works beside the devices, and
the size of the rows. With `--backend inline`, the driver also converts the rows.
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

import torch

from flowrl import Batch
from flowrl.config import RolloutLogConfig
from flowrl.data.chat import ChatTokenizer
from flowrl.report.chrome_trace import read_trace
from flowrl.report.rollout_log import RolloutLog
from flowrl.run.rollout_rows import RolloutSaver, collect_training_rows
from recipes.grpo.config import GRPOConfig
from recipes.grpo.train import train
from recipes.quickstart.prepare import prepare
from tests.benchmarks.measure import read_arguments

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


def run_once(
    folder: Path, output: Path, rollouts: dict[str, Any] | None, arguments: argparse.Namespace
) -> dict[str, float]:
    """Runs GRPO. Returns medians and means per step, in milliseconds."""
    roles = ("actor", "rollout", "reference", "reward")
    config = GRPOConfig.model_validate(
        {
            "output": output,
            "threads": 1,
            "backend": arguments.backend,
            "steps": arguments.steps,
            "evaluate_every": 0,
            "placement": {"device": "cpu", "pools": {"main": [1]}, "roles": dict.fromkeys(roles, "main")},
            "actor": {
                "model": {"path": folder / "model"},
                "optimizer": {"lr": 1e-5},
                "kl_loss_coef": 0.01,
                "old_logprobs": "recompute",
            },
            "reward": {"function": "recipes.quickstart.task:score"},
            "rollout": {"max_response_tokens": arguments.response_tokens},
            "algorithm": {"estimator": "grpo"},
            "data": {"train": folder / "train.jsonl", "max_prompt_tokens": 16},
            "batch_size": BATCH_SIZE,
            "minibatch_size": BATCH_SIZE // 2,
            "samples_per_prompt": 8,
            "report": {"tensorboard": False, "rollouts": rollouts},
        }
    )
    driver = DriverTime()
    methods = {name: getattr(RolloutSaver, name) for name in ("save_training", "step_done")}
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
        "driver": driver.seconds / arguments.steps * 1e3,
        "task worker": tasks_ns / arguments.steps / 1e6,
        "kB": sum(path.stat().st_size for path in shards) / arguments.steps / 1e3,
    }


def measure_conversion(tokenizer: Path, folder: Path, rollouts: dict[str, Any]) -> str:
    """Returns the CPU times of converting and writing rows of a batch of 512 responses with 1,000 tokens."""
    num_rows, prompt, response = 512, 100, 1000
    count = num_rows * (prompt + response)
    ids = ChatTokenizer(tokenizer).encode("12+34=46 " * response)[:response]
    rows = {"prompt": ["p" * prompt] * num_rows, "response": ["r" * 4 * response] * num_rows}
    tokens = {
        "input_ids": torch.tensor((ids[:prompt] + ids) * num_rows),
        "response_mask": torch.tensor(([False] * prompt + [True] * response) * num_rows),
        "weight_version": torch.zeros(count, dtype=torch.int32),
    }
    names = ("old_logprobs", "rollout_logprobs", "ref_logprobs", "values", "advantages")
    tokens |= {name: torch.randn(count) for name in names}
    batch = Batch.from_columns(rows, tokens, [prompt + response] * num_rows)
    settings = RolloutLogConfig.model_validate(rollouts)
    log = RolloutLog(folder, settings)
    start_s = time.process_time()
    encoded = collect_training_rows(batch, settings, 1, version=0, tokenizer=str(tokenizer)).get()
    converted_s = time.process_time()
    log.write_encoded(encoded)
    written_s = time.process_time()
    times = f"{(converted_s - start_s) * 1e3:.0f} | {(written_s - converted_s) * 1e3:.2f}"
    return f"{times} | {len(encoded.lines) / 1e6:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=21)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--backend", choices=("ray", "inline"), default="ray")
    parser.add_argument("--response-tokens", type=int, default=48)
    arguments = read_arguments(parser, steps=2, repeats=1, backend="inline")
    results: defaultdict[str, list[dict[str, float]]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder / "data", seed=0)
        sys.stdout.write(f"| settings | task worker ms | driver ms | MB |\n{'|---' * 4}|\n")
        for number, (label, rollouts) in enumerate(SETTINGS.items()):
            if rollouts is not None:
                measured = measure_conversion(folder / "data/model", folder / f"rows-{number}", rollouts)
                sys.stdout.write(f"| {label} | {measured} |\n")
        sys.stdout.flush()
        for repeat in range(arguments.repeats):
            for number, (label, rollouts) in enumerate(SETTINGS.items()):
                output = folder / f"run-{repeat}-{number}"
                results[label].append(run_once(folder / "data", output, rollouts, arguments))
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
