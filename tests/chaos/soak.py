"""A long asynchronous GRPO run whose processes are killed at random, and an account of all its prompts.

    python -m tests.chaos.soak --scores reward --steps 500
    python -m tests.chaos.soak --scores environment --steps 500

Kills scoring or environment processes, their workers, and rollout replicas every few seconds. Afterwards, the saved
rows, the last checkpoint and the summary show whether every prompt was trained once or dropped with a counted reason,
and whether a trained group had equal scores. Prints the account as JSON. The exit code is 0 if it has no problem.
"""

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from flowrl.checkpoints.checkpoints import Checkpoints
from flowrl.checkpoints.run_folder import RunFolder
from flowrl.report.rollout_log import read_rows, saved_steps
from recipes.grpo.config import GRPOConfig
from tests.chaos.program import Program, last_step
from tests.chaos.variants import MANY_RESTARTS, write_config
from tests.configs import NO_REPORT, quickstart_settings
from tests.small_task import prepare_small

Scores = Literal["reward", "environment"]
SAMPLES, PROMPTS = 4, 4
"""Responses per prompt, and prompts per step."""

REPLICAS, WORKERS, PROCESSES = 2, 2, 4
"""Rollout replicas, workers that score, and their processes in total."""

CHECKPOINT_EVERY = 5
KILL_EVERY_S = (1.0, 5.0)
"""Range of the time between two kills. It is random."""


@dataclass
class Account:
    """What a run has done with its prompts."""

    steps: int = 0
    minutes: float = 0.0
    exit_code: int | None = None
    kills: dict[str, int] = field(default_factory=dict)
    """Number of kills per kind of process."""
    restarts: int = 0
    """Number of times that the program started again from a checkpoint."""
    drawn: int = 0
    """Prompts that the run has drawn from its data."""
    trained: int = 0
    pending: int = 0
    """Prompts of the last checkpoint that are neither trained nor dropped."""
    dropped: dict[str, int] = field(default_factory=dict)
    """Number of dropped prompts per reason."""
    failed_rows: float = 0.0
    """Number of responses whose reward failed."""
    problems: list[str] = field(default_factory=list)


def soak_config(task: Path, output: Path, scores: Scores, steps: int) -> GRPOConfig:
    """Returns the config of the run. `task` is a folder written by `prepare_small`."""
    roles = {"actor": 1, "rollout": REPLICAS, scores: WORKERS}
    limits = {"workers": PROCESSES, "on_failure": "drop", "max_failure_rate": 1.0, "timeout_s": 20.0}
    sources: dict[Scores, dict[str, Any]] = {
        "reward": {"reward": {"function": "tests.chaos.soak_scores:parity", **limits}},
        "environment": {"reward": None, "environment": {"name": "tests.chaos.soak_scores:Parity", **limits}},
    }
    settings = quickstart_settings(task, output, steps=steps, batch_size=SAMPLES * PROMPTS, samples_per_prompt=SAMPLES)
    settings |= {
        "recipe": "recipes.grpo.config:GRPOConfig",
        "backend": "ray",
        "placement": {
            "device": "cpu",
            "pools": {role: [count] for role, count in roles.items()},
            "roles": {role: role for role in roles},
        },
        "reference": None,
        "algorithm": {"estimator": "grpo"},
        "minibatch_size": SAMPLES * PROMPTS,
        "rollout": {"max_response_tokens": 24 if scores == "environment" else 6, "max_num_seqs": 16},
        "schedule": {"kind": "async", "max_staleness": 2},
        "dynamic_sampling": {"max_rounds": 20},
        "evaluate_every": 0,
        "report": NO_REPORT | {"rollouts": {"every": 1, "rows": SAMPLES * PROMPTS, "max_mb": None}},
        "checkpoint": {"every": CHECKPOINT_EVERY},
        "restarts": MANY_RESTARTS,
    }
    settings["actor"] |= {"optimizer": {"lr": 1e-4}}
    return GRPOConfig.model_validate(settings | sources[scores])


def soak(folder: Path, scores: Scores, steps: int, seed: int = 0, limit_s: float = 3600.0) -> Account:
    """Runs the program in `folder`, kills its processes, and returns the account of its prompts."""
    prepare_small(folder / "task")
    config = soak_config(folder / "task", folder / "run", scores, steps)
    program = Program(folder, write_config(config, folder / "config.yaml"), module="tests.chaos.soak_training")
    try:
        kills = kill_randomly(program, config.output, scores, random.Random(seed), limit_s)
        left = program.wait_for_end() if program.code is not None else ["the program"]
    finally:
        program.kill()
    account = Account(steps=last_step(config.output), exit_code=program.code, kills=dict(kills))
    account.minutes = round((time.monotonic() - program.started_s) / 60, 1)
    account.restarts = sum(line.startswith("restart ") for _, line in program.lines)
    account.problems += [f"left behind: {name}" for name in left]
    if program.code != 0:
        account.problems += [line for _, line in program.lines[-5:]]
        return account
    add_prompts(account, config)
    return account


def kill_randomly(
    program: Program, output: Path, scores: Scores, generator: random.Random, limit_s: float
) -> Counter[str]:
    """Kills random processes until the program ends. Returns the number of kills per kind."""
    kills: Counter[str] = Counter()
    kinds = (f"{scores} process", f"{scores} worker", "rollout replica")
    while program.code is None and time.monotonic() < program.started_s + limit_s:
        time.sleep(generator.uniform(*KILL_EVERY_S))
        kind = generator.choice(kinds)
        role = "rollout" if kind == "rollout replica" else scores
        workers = [process for (own, _), (process, _) in program.current_methods().items() if own == role]
        if last_step(output) < 1 or not workers:
            continue
        victim = generator.choice(workers)
        if kind == kinds[0]:
            processes = program.scoring_processes(victim)
            if not processes:
                continue
            victim = generator.choice(processes)
        with suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)
            kills[kind] += 1
    return kills


def add_prompts(account: Account, config: GRPOConfig) -> None:
    """Adds the prompts of a complete run to its account, and the problems that they show."""
    steps_of: defaultdict[int, set[int]] = defaultdict(set)
    scores_of: defaultdict[int, list[float]] = defaultdict(list)
    rollouts = RunFolder(config.output).rollouts
    for step in saved_steps(rollouts, "training"):
        for row in read_rows(rollouts, "training", step):
            steps_of[row["prompt_id"]].add(step)
            scores_of[row["prompt_id"]].append(row["score"])
    queue = Checkpoints(config.output).read(config.steps).driver()["objects"]["prompts"]
    groups = json.loads((config.output / "summary.json").read_text())["groups"]
    lines = [json.loads(line) for line in (config.output / "metrics.jsonl").read_text().splitlines()]
    records = {line["step"]: line for line in lines if line["step"]}
    account.drawn, account.pending = queue["drawn"], len(queue["untrained"])
    account.trained, account.dropped = len(steps_of), groups["dropped"]
    absent = set(range(account.drawn)) - steps_of.keys() - set(queue["untrained"])
    rates = [(line["reward_failed_fraction"], line["trained_groups"] + line["dropped_groups"]) for line in records.values()]
    account.failed_rows = round(sum(rate * groups * SAMPLES for rate, groups in rates))
    expected = range(1, config.steps + 1)
    problems = {
        "steps without rows": [step for step in expected if step not in saved_steps(rollouts, "training")],
        "prompts trained in several steps": [prompt for prompt, steps in steps_of.items() if len(steps) > 1],
        "prompts with more rows than samples": [p for p, scores in scores_of.items() if len(scores) > SAMPLES],
        "trained groups with equal scores": [p for p, scores in scores_of.items() if len(set(scores)) < 2],
        "trained prompts that were not drawn": [prompt for prompt in steps_of if prompt >= account.drawn],
        "trained prompts that are pending": sorted(steps_of.keys() & set(queue["untrained"])),
    }
    account.problems += [f"{name}: {found[:10]}" for name, found in problems.items() if found]
    if len(absent) != sum(account.dropped.values()):
        account.problems.append(f"{len(absent)} prompts are missing, but {account.dropped} are counted")
    if groups["trained"] != account.trained:
        account.problems.append(f"{groups['trained']} groups are counted as trained, but {account.trained} are saved")
    logged = Counter[str]()
    for line in records.values():
        logged.update({reason: line[f"dropped_{reason}"] for reason in account.dropped})
    if any(logged[reason] > count for reason, count in account.dropped.items()):
        account.problems.append(f"the steps log {dict(logged)}, but the summary counts {account.dropped}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.soak", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--scores", choices=("reward", "environment"), default="reward", help="source of the scores")
    parser.add_argument("--steps", type=int, default=500, help="a multiple of 5, so that the last step is saved")
    parser.add_argument("--seed", type=int, default=0, help="seed of the kills")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="sk", dir="/tmp"))  # Ray's sockets need a short path
    account = soak(folder, options.scores, options.steps, options.seed)
    sys.stdout.write(json.dumps(asdict(account), indent=1) + "\n")
    if account.problems:
        sys.stderr.write(f"the run is in {folder}\n")
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
