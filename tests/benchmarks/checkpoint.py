"""Cost of a checkpoint for its training step, compared with `torch.save` of the same tensors.

`python -m tests.benchmarks.checkpoint [--table]` trains one step of a stack of linear layers with AdamW, saves it in
turn synchronously, asynchronously and with `torch.save`, each through to the disk, and takes medians. The bytes of a
save are weights and both moments in float32. Files of an earlier save are removed before the clock runs.
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import nn

from flowrl.config import EngineConfig, OptimizerConfig
from flowrl.engines.checkpoint.engine_checkpoint import EngineCheckpoints
from flowrl.engines.train.engine import TrainEngine
from tests.benchmarks.measure import Figure, alone, machine, table

LAYERS = 144
"""Twice as many tensors, about what a model of 100 million parameters has."""

STALL_BOUND = 0.25
"""An asynchronous save holds up the step for this share of `torch.save` at most."""


def engine(num_parameters: float) -> TrainEngine:
    """Returns a stack of square layers after one optimizer step."""
    width = round((num_parameters / LAYERS) ** 0.5)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(LAYERS)))
    trained = TrainEngine(model, OptimizerConfig(lr=1e-4), EngineConfig())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    assert trained.optimizer is not None
    trained.optimizer.step()
    trained.optimizer.zero_grad(set_to_none=True)
    return trained


class Saves:
    """Ways to save an engine. Each returns the seconds until its caller continues, and until the save is complete."""

    def __init__(self, trained: TrainEngine, folder: Path) -> None:
        self._engine, self._folder = trained, folder
        self._checkpoints = EngineCheckpoints(trained)
        assert trained.optimizer is not None
        moments = [value for of in trained.optimizer.state.values() for value in of.values()]
        self._tensors = [tensor.detach().numpy() for tensor in [*trained.model.parameters(), *moments]]
        self._copies = [tensor.copy() for tensor in self._tensors]

    def empty(self) -> Path:
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir()
        os.sync()
        return self._folder

    def synchronous(self) -> tuple[float, float]:
        folder, start_s = self.empty(), time.perf_counter()
        self._checkpoints.save(folder)
        self._checkpoints.result()
        done_s = time.perf_counter() - start_s
        return done_s, done_s

    def asynchronous(self) -> tuple[float, float]:
        folder, start_s = self.empty(), time.perf_counter()
        self._checkpoints.save(folder, asynchronous=True)
        stall_s = time.perf_counter() - start_s
        self._checkpoints.result()
        return stall_s, time.perf_counter() - start_s

    def raw(self) -> tuple[float, float]:
        assert self._engine.optimizer is not None
        path, start_s = self.empty() / "raw.pt", time.perf_counter()
        state = {"model": self._engine.model.state_dict(), "optimizer": self._engine.optimizer.state_dict()}
        with path.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        done_s = time.perf_counter() - start_s
        return done_s, done_s

    def copy(self) -> tuple[float, float]:
        """Copies the state into used memory, which is the minimal cost of a snapshot."""
        self.empty()
        start_s = time.perf_counter()
        for copy, tensor in zip(self._copies, self._tensors, strict=True):
            np.copyto(copy, tensor)
        done_s = time.perf_counter() - start_s
        return done_s, done_s


def measured(ways: dict[str, Callable[[], tuple[float, float]]], repeats: int) -> dict[str, list[tuple[float, float]]]:
    """Runs every way once per round in rotating order. The first round is a warm-up."""
    times: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    names = list(ways)
    for number in range(repeats + 1):
        first = number % len(names)
        for name in (*names[first:], *names[:first]):
            times[name].append(ways[name]())
    return times


def figures(num_parameters: float, repeats: int, bounded: bool) -> list[Figure]:
    trained = engine(num_parameters)
    parameters = sum(parameter.numel() for parameter in trained.model.parameters())
    gigabytes = parameters * 12 / 1e9
    with tempfile.TemporaryDirectory() as name:
        saves = Saves(trained, Path(name) / "save")
        ways = {
            "synchronous": saves.synchronous,
            "asynchronous": saves.asynchronous,
            "torch.save": saves.raw,
            "copy": saves.copy,
        }
        times = measured(ways, repeats)
    first_s, _ = times["asynchronous"][0]
    times = {name: taken[1:] for name, taken in times.items()}
    raw_s = statistics.median(done for _, done in times["torch.save"])
    found = []
    for way, bound in (("synchronous", None), ("asynchronous", STALL_BOUND)):
        stall_s = statistics.median(stall for stall, _ in times[way])
        ratios = [ours / raw for (ours, _), (raw, _) in zip(times[way], times["torch.save"], strict=True)]
        what = f"{gigabytes:.2f} GB, {way} save: what the step waits"
        figure = Figure(what=what, unit="ms", ours=round(stall_s * 1e3, 1), raw=round(raw_s * 1e3, 1))
        figure["ratio"] = round(statistics.median(ratios), 3)
        if bound is not None and bounded:
            figure["bound"] = bound
        found.append(figure)
    found.append(alone("the first asynchronous save, into new memory", "ms", first_s * 1e3))
    for way in ("synchronous", "asynchronous", "torch.save"):
        done_s = statistics.median(done for _, done in times[way])
        found.append(alone(f"{way}: until it is on the disk", "GB/s", gigabytes / done_s))
    copy_s = statistics.median(done for _, done in times["copy"])
    found.append(alone("the same bytes copied in memory", "ms", copy_s * 1e3))
    return found


def main() -> None:
    """Measures one size; bounds are those of 100 million parameters."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--parameters", type=float, default=100e6)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--table", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    ran_on = machine()
    found = figures(arguments.parameters, arguments.repeats, arguments.parameters == 100e6)
    text = table(found).replace("raw Ray", "torch.save") if arguments.table else None
    sys.stdout.write(f"{text or json.dumps({'machine': ran_on, 'figures': found}, indent=2)}\n")


if __name__ == "__main__":
    main()
