"""Kills a run that saves after every step at random moments, and checks that every resume is consistent.

It is a real run with `resume: auto`, an engine that writes asynchronously, and a role of two ranks that each write a
file. In a checkpoint, all weights and files contain the number of the step. Every step up to a checkpoint has one saved
row of generated text, which also contains the number of the step.
"""

import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from itertools import repeat
from pathlib import Path

import torch
from torch import nn

from flowrl import Dispatch, Placement, Worker, register
from flowrl.checkpoints.checkpoints import Checkpoint, Checkpoints
from flowrl.config import EngineConfig, OptimizerConfig, RoleConfig, RunConfig
from flowrl.data.batch.batch import Batch
from flowrl.engines.checkpoint.engine_checkpoint import load
from flowrl.engines.train.fsdp.engine import FsdpEngine
from flowrl.report.rollout_log import read_rows, saved_steps
from flowrl.run.loop import Run
from flowrl.workers.model_worker import TrainedWorker


def _no_outputs(*_: object) -> dict[str, torch.Tensor]:
    raise AssertionError("this loop only saves")


def engine() -> FsdpEngine:
    return FsdpEngine(nn.Linear(400, 400), _no_outputs, OptimizerConfig(lr=1e-3), EngineConfig())


def is_filled(trained: FsdpEngine, step: int) -> bool:
    return all(bool((parameter == step).all()) for parameter in trained.model.parameters())


class Filled(TrainedWorker):
    """An engine whose weights are all set to the step."""

    engine: FsdpEngine

    def __init__(self) -> None:
        self.engine = engine()

    def description(self) -> dict[str, bytes]:
        return {}

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def fill(self, step: int) -> None:
        assert step == 1 or is_filled(self.engine, step - 1), "resumed from another step"
        with torch.no_grad():
            for parameter in self.engine.model.parameters():
                parameter.fill_(float(step))


class Noted(Worker):
    """Ranks that each write the step to a file."""

    def __init__(self) -> None:
        self.step = 0

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def fill(self, step: int) -> None:
        assert step == self.step + 1, "resumed from another step"
        self.step = step

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def save_checkpoint(self, folder: Path, asynchronous: bool) -> None:
        (folder / f"step-{self.rank}").write_text(str(self.step))

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def load_checkpoint(self, folder: Path) -> None:
        self.step = int((folder / f"step-{self.rank}").read_text())


class SavingConfig(RunConfig):
    actor: RoleConfig = RoleConfig()
    critic: RoleConfig = RoleConfig()


def save_without_end(output: Path, pipe: int, asynchronous: bool) -> None:
    """Runs without end, and writes the step of every new checkpoint to the file descriptor `pipe`."""
    begun = Checkpoints(output).steps()
    placement = Placement(device="cpu", pools={"main": [1], "two": [2]}, roles={"actor": "main", "critic": "two"})
    settings = {"every": 1, "keep_last": 2, "asynchronous": asynchronous}
    config = SavingConfig.model_validate(
        {"output": output, "backend": "inline", "threads": 1, "steps": 10**9, "resume": "auto"}
        | {"placement": placement, "checkpoint": settings, "report": {"rollouts": {"every": 1}}}
    )
    with Run(config) as run:
        groups = run.group("actor", Filled), run.group("critic", Noted)
        run.add_checkpointable(*groups)
        batches: Iterator[Batch] = repeat(Batch.from_rows([{"x": 0}]))
        for _ in run.batches(batches, policy=groups[0]):
            for group in groups:
                group.fill(run.step)
            run.save_rollouts(Batch.from_rows([{"prompt": "x", "response": str(run.step)}]))
            saved = Checkpoints(output).steps()
            if saved[-1:] > begun[-1:]:
                os.write(pipe, saved[-1].to_bytes(8, "little"))


def start(output: Path, pipe: int, asynchronous: bool) -> int:
    """Starts `save_without_end` in a process and returns its id."""
    child = os.fork()
    if child == 0:
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the run's progress
            save_without_end(output, pipe, asynchronous)
        except BaseException:
            traceback.print_exc()
            raise
        finally:
            os._exit(1)
    return child


def check(newest: Checkpoint) -> int:
    """Checks all weights and files of a checkpoint, and returns its step."""
    step, trained = newest.manifest.step, engine()
    load(trained, newest.role("actor"))
    noted = [(newest.role("critic") / f"step-{rank}").read_text() for rank in (0, 1)]
    assert is_filled(trained, step) and noted == [str(step)] * 2 and newest.driver()["step"] == step
    return step


def check_rows(output: Path, newest_step: int) -> None:
    """Checks that the saved rows have no gap up to `newest_step`, and that all shards are complete."""
    steps = saved_steps(output / "rollouts", "training")
    assert steps == list(range(1, len(steps) + 1)) and len(steps) >= newest_step
    for step in steps:
        (row,) = read_rows(output / "rollouts", "training", step)
        assert (row["step"], row["response"]) == (step, str(step))


def main(output: Path, num_kills: int) -> int:
    """Kills `num_kills` processes and counts checkpoints that were reported as saved and are lost."""
    torch.set_num_threads(1)
    random.seed()
    lost = last = unfinished = 0
    for number in range(num_kills):
        reader, pipe = os.pipe()
        child = start(output, pipe, asynchronous=bool(number % 2))
        os.close(pipe)
        first = os.read(reader, 8)  # at least one checkpoint; the kill then comes at any moment of a save
        assert first, "the run ended"
        time.sleep(random.uniform(0, 0.06))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        with os.fdopen(reader, "rb") as rest:
            last = int.from_bytes((first + rest.read())[-8:], "little")
        checkpoints = Checkpoints(output)
        newest = checkpoints.newest()
        step = 0 if newest is None else check(newest)
        check_rows(output, step)
        lost += step < last
        unfinished += checkpoints.folder(step + 1).exists()
    sys.stdout.write(f"{num_kills} kills, {lost} lost, {unfinished} while saving, {last} saved\n")
    return lost


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
