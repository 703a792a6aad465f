"""A long asynchronous GRPO run whose processes are killed at random, and an account of all its prompts.

    python -m tests.chaos.soak --scores reward --steps 500
    python -m tests.chaos.soak --scores environment --steps 500

Kills scoring or environment processes, their workers, and rollout replicas every few steps. Afterwards, the saved
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
from collections.abc import Mapping, Sequence
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
STEPS_BETWEEN_KILLS = 1, 4
"""Range of the number of steps between two kills."""

SOON = 0.1
"""Probability of a kill without steps after the previous one."""

KILL_DELAY_S = 0.1, 1.0
"""Range of the time between a step and a kill."""


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
    failed_rows: int = 0
    """Number of responses whose reward failed."""
    problems: list[str] = field(default_factory=list)


def soak_config(task: Path, output: Path, scores: Scores, steps: int) -> GRPOConfig:
    """Returns the config of the run. `task` is a folder written by `prepare_small`."""
    roles = {"actor": 1, "rollout": REPLICAS, scores: WORKERS}
    limits = {"workers": PROCESSES, "on_failure": "drop", "max_failure_rate": 1.0, "timeout_s": 20.0}
    sources: dict[Scores, dict[str, Any]] = {
        "reward": {"reward": {"function": "tests.chaos.soak_scores:score", **limits}},
        "environment": {"reward": None, "environment": {"name": "tests.chaos.soak_scores:AskTwice", **limits}},
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
    settings["actor"] |= {"optimizer": {"lr": 1e-5}}
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
    """Kills random processes until the program ends. Returns the number of kills per kind.

    The next kill is some steps after the previous one, or soon after it, so that it may hit the recovery.
    """
    kills: Counter[str] = Counter()
    kinds = (f"{scores} process", f"{scores} worker", "rollout replica")
    next_step, until_s = 1, program.started_s + limit_s
    while program.code is None and time.monotonic() < until_s:
        time.sleep(generator.uniform(*KILL_DELAY_S))
        kind = generator.choice(kinds)
        role = "rollout" if kind == "rollout replica" else scores
        workers = [process for (own, _), (process, _) in program.current_methods().items() if own == role]
        step = last_step(output)
        if step < next_step or not workers:
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
            next_step = step if generator.random() < SOON else step + generator.randint(*STEPS_BETWEEN_KILLS)
    return kills


def add_prompts(account: Account, config: GRPOConfig) -> None:
    """Adds the prompts of a complete run to its account, and the problems that they show."""
    rollouts = RunFolder(config.output).rollouts
    rows = {step: read_rows(rollouts, "training", step) for step in saved_steps(rollouts, "training")}
    queue = Checkpoints(config.output).read(config.steps).driver()["objects"]["prompts"]
    groups = json.loads((config.output / "summary.json").read_text())["groups"]
    lines = [json.loads(line) for line in (config.output / "metrics.jsonl").read_text().splitlines()]
    records = {line["step"]: line for line in lines if line["step"]}
    account.drawn, account.pending, account.dropped = queue["drawn"], len(queue["untrained"]), groups["dropped"]
    account.trained = len({row["prompt_id"] for step in rows.values() for row in step})
    for line in records.values():
        num_rows = (line["trained_groups"] + line["dropped_groups"]) * config.samples_per_prompt
        account.failed_rows += round(line["reward_failed_fraction"] * num_rows)
    if rows.keys() != {*range(1, config.steps + 1)}:
        account.problems.append(f"rows of {len(rows)} steps are saved")
    account.problems += find_problems(rows, account.drawn, queue["untrained"], account.dropped)
    if groups["trained"] != account.trained:
        account.problems.append(f"{groups['trained']} groups are counted as trained, but {account.trained} are saved")
    logged = {reason: sum(line[f"dropped_{reason}"] for line in records.values()) for reason in account.dropped}
    if any(logged[reason] > count for reason, count in account.dropped.items()):
        account.problems.append(f"the steps log {logged}, but the summary counts {account.dropped}")


def find_problems(
    rows: Mapping[int, Sequence[Mapping[str, Any]]], drawn: int, pending: Sequence[int], dropped: Mapping[str, int]
) -> list[str]:
    """Returns what is wrong with the prompts of a run.

    Args:
        rows: trained rows of each step.
        drawn: number of prompts that the run has drawn.
        pending: prompts that are neither trained nor dropped.
        dropped: number of dropped prompts per reason.
    """
    steps_of: defaultdict[int, set[int]] = defaultdict(set)
    scores_of: defaultdict[int, dict[int, float]] = defaultdict(dict)
    repeated = []
    for step, own in rows.items():
        for row in own:
            prompt, sample = row["prompt_id"], row["sample"]
            if sample in scores_of[prompt]:
                repeated.append(prompt)
            steps_of[prompt].add(step)
            scores_of[prompt][sample] = row["score"]
    found = {
        "prompts trained in several steps": [prompt for prompt, steps in steps_of.items() if len(steps) > 1],
        "prompts with a repeated sample": repeated,
        "trained groups with equal scores": [p for p, own in scores_of.items() if len({*own.values()}) < 2],
        "trained prompts that were not drawn": [prompt for prompt in steps_of if prompt >= drawn],
        "trained prompts that are pending": [prompt for prompt in pending if prompt in steps_of],
    }
    problems = [f"{name}: {prompts[:10]}" for name, prompts in found.items() if prompts]
    absent = set(range(drawn)) - steps_of.keys() - set(pending)
    if len(absent) != sum(dropped.values()):
        problems.append(f"{len(absent)} prompts are absent, but {dict(dropped)} are counted as dropped")
    return problems


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
