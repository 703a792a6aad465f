"""A run that saves after every step, killed at random moments; and what goes on from what it has left.

The run is a real one with `resume: auto`: an engine that writes beside the next steps, and two ranks of a role with
files of their own. In a checkpoint every weight and every file says the number of its step.
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
from flowrl.config import EngineConfig, OptimizerConfig, RunConfig
from flowrl.data.batch.batch import Batch
from flowrl.engines.checkpoint.engine_checkpoint import load
from flowrl.engines.train.engine import TrainEngine
from flowrl.run.loop import Run
from flowrl.workers.model_worker import TrainedWorker


def engine() -> TrainEngine:
    return TrainEngine(nn.Linear(400, 400), OptimizerConfig(lr=1e-3), EngineConfig())


def is_filled(trained: TrainEngine, step: int) -> bool:
    return all(bool((parameter == step).all()) for parameter in trained.model.parameters())


class Filled(TrainedWorker):
    """An engine whose weights are the number of the step."""

    def __init__(self) -> None:
        self.engine = engine()

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def fill(self, step: int) -> None:
        assert step == 1 or is_filled(self.engine, step - 1), "it goes on from another step"
        with torch.no_grad():
            for parameter in self.engine.model.parameters():
                parameter.fill_(float(step))


class Noted(Worker):
    """Ranks that each write the number of the step."""

    def __init__(self) -> None:
        self.step = 0

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def fill(self, step: int) -> None:
        assert step == self.step + 1, "it goes on from another step"
        self.step = step

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def save_checkpoint(self, folder: Path, asynchronous: bool) -> None:
        (folder / f"step-{self.rank}").write_text(str(self.step))

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def load_checkpoint(self, folder: Path) -> None:
        self.step = int((folder / f"step-{self.rank}").read_text())


class SavingConfig(RunConfig):
    roles = ("actor", "critic")


def save_without_end(output: Path, told: int, asynchronous: bool) -> None:
    """Goes on with the run, and writes the number of every checkpoint that it adds into the pipe `told`."""
    begun = Checkpoints(output).steps()
    placement = Placement(device="cpu", pools={"main": [1], "two": [2]}, roles={"actor": "main", "critic": "two"})
    settings = {"every": 1, "keep_last": 2, "asynchronous": asynchronous}
    config = SavingConfig.model_validate(
        {"output": output, "backend": "inline", "threads": 1, "steps": 10**9, "resume": "auto"}
        | {"placement": placement, "checkpoint": settings}
    )
    with Run(config) as run:
        groups = run.group("actor", Filled), run.group("critic", Noted)
        run.add_checkpointable(*groups)
        batches: Iterator[Batch] = repeat(Batch.from_rows([{"x": 0}]))
        for step, _ in run.batches(batches):
            for group in groups:
                group.fill(step)
            saved = Checkpoints(output).steps()
            if saved[-1:] > begun[-1:]:
                os.write(told, saved[-1].to_bytes(8, "little"))


def start(output: Path, told: int, asynchronous: bool) -> int:
    """A process that does so; returns its id."""
    child = os.fork()
    if child == 0:
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the run's progress
            save_without_end(output, told, asynchronous)
        except BaseException:
            traceback.print_exc()
            raise
        finally:
            os._exit(1)
    return child


def check(newest: Checkpoint) -> int:
    """The step of a checkpoint, after every weight and file of it was looked at."""
    step, trained = newest.manifest.step, engine()
    load(trained, newest.role("actor"))
    noted = [(newest.role("critic") / f"step-{rank}").read_text() for rank in (0, 1)]
    assert is_filled(trained, step) and noted == [str(step)] * 2 and newest.driver()["step"] == step
    return step


def main(output: Path, num_kills: int) -> int:
    """Kills `num_kills` such processes; what one said that it had saved is never lost."""
    torch.set_num_threads(1)
    random.seed()
    lost = last = unfinished = 0
    for number in range(num_kills):
        heard, told = os.pipe()
        child = start(output, told, asynchronous=bool(number % 2))
        os.close(told)
        first = os.read(heard, 8)  # it has come so far at least; then at any moment of a save
        assert first, "the run has ended"
        time.sleep(random.uniform(0, 0.06))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        with os.fdopen(heard, "rb") as rest:
            last = int.from_bytes((first + rest.read())[-8:], "little")
        checkpoints = Checkpoints(output)
        newest = checkpoints.newest()
        step = 0 if newest is None else check(newest)
        lost += step < last
        unfinished += checkpoints.folder(step + 1).exists()
    sys.stdout.write(f"{num_kills} kills, {lost} lost, {unfinished} while saving, {last} saved\n")
    return lost


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
