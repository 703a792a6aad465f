"""A process that saves without end, killed at random moments; and what goes on from what it has left.

Every process first goes on from the newest checkpoint, in which all weights are the number of its step.
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn

from flowrl.config import EngineConfig, OptimizerConfig
from flowrl.data.files import write_json_summed
from flowrl.engines.checkpoint import EngineCheckpoints, load
from flowrl.engines.train import TrainEngine
from flowrl.run.checkpoints import MANIFEST, Checkpoints, Role, new_manifest


def engine() -> TrainEngine:
    return TrainEngine(nn.Linear(400, 400), OptimizerConfig(lr=1e-3), EngineConfig())


def fill(trained: TrainEngine, step: int) -> None:
    with torch.no_grad():
        for parameter in trained.model.parameters():
            parameter.fill_(float(step))


def resumed(run: Path, trained: TrainEngine) -> int:
    """The step that was gone on from, after every weight of it was looked at; 0 without one."""
    newest = Checkpoints(run).newest()
    if newest is None:
        return 0
    load(trained, newest.role("actor"))
    step = newest.driver()["step"]
    assert newest.manifest.step == step
    assert all(bool((parameter == step).all()) for parameter in trained.model.parameters())
    return step


def save_without_end(run: Path, told: int) -> None:
    """Writes the number of every checkpoint into the pipe `told` once it exists."""
    trained, checkpoints = engine(), Checkpoints(run)
    writer, step = EngineCheckpoints(trained), resumed(run, trained)
    while True:
        step += 1
        fill(trained, step)
        folder = checkpoints.begin(step, ["actor"])
        writer.save(folder / "actor", asynchronous=bool(step % 2))
        files = {"driver.json": write_json_summed(folder / "driver.json", {"step": step})}
        saved = writer.saved()
        assert saved is not None
        files |= {f"actor/{name}": file for name, file in saved.files.items()}
        checkpoints.commit(step, new_manifest(step, None, {"actor": Role(1, "")}, {}, files))
        os.write(told, step.to_bytes(8, "little"))
        checkpoints.prune(2, 0)


def main(run: Path, num_kills: int) -> int:
    """Kills `num_kills` such processes; what one said that it had saved is never lost."""
    torch.set_num_threads(1)
    random.seed()
    lost = last = unfinished = 0
    for _ in range(num_kills):
        heard, told = os.pipe()
        child = os.fork()
        if child == 0:
            save_without_end(run, told)
        os.close(told)
        first = os.read(heard, 8)  # it has come so far at least; then at any moment of a save
        time.sleep(random.uniform(0, 0.06))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        with os.fdopen(heard, "rb") as rest:
            last = int.from_bytes((first + rest.read())[-8:], "little")
        unfinished += any(not (path / MANIFEST).exists() for path in Checkpoints(run).path.iterdir())
        lost += resumed(run, engine()) < last
    sys.stdout.write(f"{num_kills} kills, {lost} lost, {unfinished} while saving, {last} saved\n")
    return lost


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
