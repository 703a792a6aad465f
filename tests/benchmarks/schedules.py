"""Measures the throughput of schedules against bounds: `python -m tests.benchmarks.schedules`.

Workers sleep in their own processes, so the duration of each stage is known. `--model` also trains GRPO with a small
model. The tables are in docs/benchmarks.md.

t is the training time of a step and g_k the generation time of step k. The bounds in steps per second are
1 / mean(g_k + t) for sync, 1 / mean(max(g_k, t)) for one_step_off and 1 / max(mean g_k, t) for async. A streaming
replica does not wait for the slowest response of a step. With g, the mean generation time of a step on busy replicas,
1 / max(g, t) bounds every schedule. For the model, g and t are measured with sync.
"""

import argparse
import json
import math
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from flowrl.config import OnPolicyConfig
from recipes.grpo.config import GRPOConfig
from recipes.grpo.train import train as train_grpo
from recipes.quickstart.prepare import prepare
from tests.benchmarks.measure import read_arguments
from tests.run.sleeping_run import sleeping_config, train
from tests.schedules.sleeping_replicas import Durations

REPLICAS, SLOTS, PROMPTS = 2, 8, 16
WARMUP, LAST = 4, 3
"""Steps at the start and at the end that are not measured: start-up, and the end of generation."""


@dataclass(frozen=True)
class Case:
    """Durations per step without waiting."""

    name: str
    generate_s: float
    train_s: float
    sigma: float = 0.0

    def durations(self) -> Durations:
        return Durations(self.generate_s * REPLICAS * SLOTS / PROMPTS, self.sigma)


CASES = [
    Case("equal", 1.2, 1.2),
    Case("1:3", 0.5, 1.5),
    Case("3:1", 1.5, 0.5),
    Case("equal, long tails", 1.2, 1.2, 0.8),
    Case("1:3, long tails", 0.5, 1.5, 0.8),
    Case("3:1, long tails", 1.5, 0.5, 0.8),
]
SMOKE = Case("shortest", 0.05, 0.05)
SCHEDULES = {
    "sync": {"kind": "sync"},
    "one_step_off": {"kind": "one_step_off"},
    "async, 2": {"kind": "async", "max_staleness": 2},
    "async, 8": {"kind": "async", "max_staleness": 8},
}
"""Table label -> schedule; the number is `max_staleness`."""


@dataclass(frozen=True)
class Figure:
    """One row of the table. `bound` is the schedule's bound and `limit` the bound of every schedule, in steps/s."""

    case: str
    schedule: str
    rate: float
    bound: float
    limit: float
    idle_replicas: float
    idle_trainers: float
    staleness: float


def measure(case: Case, schedule: str, task: Path, folder: Path, steps: int) -> Figure:
    config = sleeping_config(
        task,
        folder / f"{case.name}-{schedule}".replace(" ", "").replace(":", "to").replace(",", "-"),
        num_replicas=REPLICAS,
        steps=steps,
        batch_size=PROMPTS,
        minibatch_size=PROMPTS,
        rollout={"max_response_tokens": 1, "max_num_seqs": SLOTS},
        schedule=SCHEDULES[schedule],
    )
    _, trained = train(config, case.durations(), case.train_s / PROMPTS)
    return figure(config, case.name, schedule, *bounds(case, schedule, trained))


def figure(config: OnPolicyConfig, case: str, schedule: str, bound: float, limit: float) -> Figure:
    lines = [json.loads(line) for line in (config.output / "metrics.jsonl").read_text().splitlines()]
    counted = [line for line in lines if line["step"] > WARMUP][:-LAST]
    seconds = sum(line["seconds"] for line in counted)

    def mean(name: str) -> float:
        return statistics.mean(line.get(name, 0.0) for line in counted)

    idle = mean("idle_rollout"), mean("idle_actor")
    return Figure(case, schedule, len(counted) / seconds, bound, limit, *idle, mean("staleness"))


def with_model(schedules: Sequence[str], task: Path, folder: Path, steps: int) -> list[Figure]:
    """Measures GRPO with a randomly initialized model; one replica and one trainer with one core each."""
    sync = train_model("sync", task, folder, steps)
    seconds = 1 / sync.rate
    generate_s = (1 - sync.idle_replicas) * seconds
    limit = 1 / max(generate_s, seconds - generate_s)
    others = [train_model(schedule, task, folder, steps) for schedule in schedules if schedule != "sync"]
    return [replace(sync, bound=sync.rate, limit=limit), *(replace(f, bound=limit, limit=limit) for f in others)]


def train_model(schedule: str, task: Path, folder: Path, steps: int) -> Figure:
    model = {"path": task / "model"}
    roles = dict.fromkeys(GRPOConfig.possible_roles(), "train") | {"rollout": "make"}
    config = GRPOConfig.model_validate(
        {
            "output": folder / f"model-{schedule}".replace(", ", "-"),
            "threads": 1,
            "placement": {"device": "cpu", "pools": {"train": [1], "make": [1]}, "roles": roles},
            "steps": steps,
            "batch_size": 128,
            "samples_per_prompt": 8,
            "minibatch_size": 64,
            "actor": {"model": model, "optimizer": {"lr": 1e-5}, "kl_loss_coef": 0.01},
            "reference": {"model": model},
            "reward": {"function": "recipes.quickstart.task:score"},
            "rollout": {"max_response_tokens": 48},
            "algorithm": {"estimator": "grpo"},
            "data": {"train": task / "train.jsonl", "max_prompt_tokens": 6},
            "schedule": SCHEDULES[schedule],
        }
    )
    train_grpo(config)
    return figure(config, "GRPO, a model", schedule, math.nan, math.nan)


def bounds(case: Case, schedule: str, trained: Sequence[Sequence[int]]) -> tuple[float, float]:
    """Returns the bound of the schedule and the bound of every schedule, in steps/s, for the measured steps."""
    durations = case.durations()
    per_replica = PROMPTS // REPLICAS
    together = [
        max(durations.batch_seconds(prompts[i * per_replica : (i + 1) * per_replica], SLOTS) for i in range(REPLICAS))
        for prompts in trained
    ]
    together = together[WARMUP:-LAST]
    alone = statistics.mean(
        sum(map(durations.seconds, prompts)) / (REPLICAS * SLOTS) for prompts in trained[WARMUP:-LAST]
    )
    limit = 1 / max(alone, case.train_s)
    if schedule == "sync":
        return 1 / statistics.mean(g + case.train_s for g in together), limit
    if schedule == "one_step_off":
        return 1 / statistics.mean(max(g, case.train_s) for g in together), limit
    return 1 / max(statistics.mean(together), case.train_s), limit


def show(figures: Sequence[Figure]) -> None:
    columns = ("steps/s", "bound", "ratio", "to the limit", "replicas idle", "trainer idle", "staleness")
    table = Table("generate : train", "schedule", *columns)
    for f in figures:
        numbers = (f"{f.rate:.3f}", f"{f.bound:.3f}", f"{f.rate / f.bound:.3f}", f"{f.rate / f.limit:.3f}")
        shares = (f"{f.idle_replicas:.2f}", f"{f.idle_trainers:.2f}", f"{f.staleness:.2f}")
        table.add_row(f.case, f.schedule, *numbers, *shares)
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--cases", nargs="*", default=[case.name for case in CASES])
    parser.add_argument("--model", action="store_true")
    parser.add_argument("--schedules", nargs="*", default=list(SCHEDULES))
    arguments = read_arguments(parser, steps=WARMUP + LAST + 2, cases=[SMOKE.name], schedules=["sync"])
    with tempfile.TemporaryDirectory() as folder:
        task = Path(folder) / "task"
        prepare(task, seed=0)
        chosen = [case for case in [*CASES, SMOKE] if case.name in arguments.cases]
        figures = [
            measure(case, schedule, task, Path(folder), arguments.steps)
            for case in chosen
            for schedule in arguments.schedules
        ]
        if arguments.model:
            figures += with_model(arguments.schedules, task, Path(folder), arguments.steps)
    show(figures)


if __name__ == "__main__":
    main()
