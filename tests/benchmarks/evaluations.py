"""Measures the step time of `schedule: async` with evaluations: `python -m tests.benchmarks.evaluations`.

Workers sleep in their own processes, as in `tests.benchmarks.schedules`. An evaluation of 32 prompts is due every 5
steps. It runs alongside training, training waits for it, or the idle time of the replicas decides
(`schedule.concurrent_evaluation`). The table is in docs/benchmarks.md.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from flowrl.data.batch.batch import Batch
from flowrl.data.chat import ChatTokenizer
from flowrl.data.prompts import PromptStream, read_conversations
from flowrl.rewards.pool import PoolLimits
from flowrl.run.evaluation import evaluate
from flowrl.run.loop import Run
from flowrl.schedules.rewards import GenerateAlongside, HeldOutResponses
from recipes.quickstart.prepare import prepare
from tests.benchmarks.measure import read_arguments
from tests.benchmarks.schedules import PROMPTS, REPLICAS, SLOTS, Case
from tests.run.sleeping_run import SleepingConfig, sleeping_config
from tests.schedules.sleeping_replicas import SleepingActor, SleepingRollout

CASES = [Case("1:3", 0.5, 1.5), Case("equal", 1.2, 1.2), Case("3:1", 1.5, 0.5)]
SMOKE = Case("1:3", 0.05, 0.15)
MODES: dict[str, bool | Literal["auto"] | None] = {
    "none": None,
    "training waits": False,
    "alongside": True,
    "by idle time": "auto",
}
"""Label -> `schedule.concurrent_evaluation`, or None without evaluations."""

EVERY, ROWS, STEPS, WARMUP = 5, 32, 24, 4


class ConstantScores:
    """Scores every response with 1, without workers."""

    has_models = False
    generate_arguments: dict[str, Any] = {}  # noqa: RUF012 (never changed)
    alongside: GenerateAlongside | None = None
    limits = PoolLimits(workers=1, timeout_s=None)

    def connect(self, rollout: Any) -> None: ...

    def add_model_scores(self, batch: Batch) -> Batch:
        return batch

    def score(self, batch: Batch, evaluation: bool = False) -> Batch:
        return Batch.from_rows([{"scores": 1.0} for _ in range(len(batch))])

    def generate_scored(self, rollout: Any, batch: Batch, temperature: float) -> Batch | HeldOutResponses:
        def finish(generated: Batch) -> Batch:
            return generated.union(self.score(generated))

        pending = None if self.alongside is None else self.alongside(batch, temperature, (), finish)
        return pending or finish(batch.union(rollout.generate.submit(batch, temperature=temperature)))


def measure(case: Case, mode: bool | Literal["auto"] | None, task: Path, output: Path) -> float:
    """Returns the mean seconds per step, with evaluations, without the start and the end of the run."""
    config = sleeping_config(
        task,
        output,
        num_replicas=REPLICAS,
        steps=STEPS,
        batch_size=PROMPTS,
        minibatch_size=PROMPTS,
        rollout={"max_response_tokens": 1, "max_num_seqs": SLOTS},
        schedule={"kind": "async", "max_staleness": 2, "concurrent_evaluation": "auto" if mode is None else mode},
        report={"tensorboard": False, "rollouts": None},
    )
    train(config, case, is_evaluated=mode is not None)
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    elapsed_s = {line["step"]: line["elapsed_s"] for line in lines if "elapsed_s" in line}
    # A whole number of intervals, which ends before the last evaluation.
    return (elapsed_s[WARMUP + 3 * EVERY] - elapsed_s[WARMUP]) / (3 * EVERY)


def train(config: SleepingConfig, case: Case, *, is_evaluated: bool) -> None:
    tokenizer = ChatTokenizer(config.actor.model.path)
    prompts = PromptStream(read_conversations(config.data.train)[:64], tokenizer, seed=0, max_prompt_tokens=16)
    held_out, scoring = Batch.from_rows(prompts.evaluation_rows(ROWS)), ConstantScores()
    with Run(config) as run:
        actor: Any = run.group("actor", SleepingActor, case.train_s / PROMPTS)
        rollout: Any = run.group("rollout", SleepingRollout, case.durations(), SLOTS)
        for batch in run.rollouts(rollout, prompts, policy=actor, reward=scoring):
            run.log(actor.update(batch))
            run.sync_weights(actor, rollout)
            if is_evaluated and run.due(EVERY):
                run.log(evaluate(rollout, scoring, held_out))
        run.finish()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=1)
    arguments = read_arguments(parser)
    table = Table(title="seconds per step")
    ratios = [f"{mode.split()[-1]} / none" for mode in MODES if mode != "none"]
    for heading in ("generate : train", *MODES, *ratios):
        table.add_column(heading, justify="right")
    with tempfile.TemporaryDirectory() as name:
        task = Path(name) / "task"
        prepare(task, seed=0)
        for case in [SMOKE] if arguments.smoke else CASES:
            runs = {
                mode: [
                    measure(case, value, task, Path(name) / f"{case.name.replace(':', 'to')}-{i}-{mode.split()[0]}")
                    for i in range(arguments.repeat)
                ]
                for mode, value in MODES.items()
            }
            none, *others = (statistics.median(runs[mode]) for mode in MODES)
            values = [f"{seconds:.3f}" for seconds in (none, *others)]
            table.add_row(case.name, *values, *(f"{seconds / none:.2f}" for seconds in others))
    Console().print(table)


if __name__ == "__main__":
    main()
