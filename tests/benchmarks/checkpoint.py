"""Cost of a checkpoint for its training step, compared with `torch.save` of the same tensors.

`python -m tests.benchmarks.checkpoint [--table]` trains one step of a stack of linear layers with AdamW, saves it in
turn synchronously, asynchronously and with `torch.save`, and prints medians. Each save ends with `fsync` and contains
weights and both moments in float32. Files of earlier saves are removed before the time measurement.
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
from flowrl.engines.train.fsdp.engine import FsdpEngine
from tests.benchmarks.measure import Figure, alone, machine, read_arguments, table

LAYERS = 144
"""Number of linear layers. With weights and biases, about as many tensors as in a model of 100 million parameters."""

STALL_BOUND = 0.25
"""Largest time that an asynchronous save blocks the step, relative to `torch.save`."""


def unused_outputs(*_: object) -> dict[str, torch.Tensor]:
    raise AssertionError("this benchmark only saves")


def engine(num_parameters: float) -> FsdpEngine:
    """Returns a stack of square layers after one optimizer step."""
    width = round((num_parameters / LAYERS) ** 0.5)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(LAYERS)))
    trained = FsdpEngine(model, unused_outputs, OptimizerConfig(lr=1e-4), EngineConfig())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    assert trained.optimizer is not None
    trained.optimizer.step()
    trained.optimizer.zero_grad(set_to_none=True)
    return trained


class Saves:
    """Methods that save an engine.

    Each returns the seconds until its caller continues, and until the save is complete.
    """

    def __init__(self, trained: FsdpEngine, folder: Path) -> None:
        self._engine, self._folder = trained, folder
        self._checkpoints = EngineCheckpoints(trained)
        assert trained.optimizer is not None
        moments = [value for state in trained.optimizer.state.values() for value in state.values()]
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


def run_rounds(
    methods: dict[str, Callable[[], tuple[float, float]]], repeats: int
) -> dict[str, list[tuple[float, float]]]:
    """Runs every method once per round in rotating order. The first round is a warm-up."""
    times: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    names = list(methods)
    for number in range(repeats + 1):
        first = number % len(names)
        for name in (*names[first:], *names[:first]):
            times[name].append(methods[name]())
    return times


def figures(num_parameters: float, repeats: int, bounded: bool) -> list[Figure]:
    trained = engine(num_parameters)
    parameters = sum(parameter.numel() for parameter in trained.model.parameters())
    gigabytes = parameters * 12 / 1e9
    with tempfile.TemporaryDirectory() as name:
        saves = Saves(trained, Path(name) / "save")
        methods = {
            "synchronous": saves.synchronous,
            "asynchronous": saves.asynchronous,
            "torch.save": saves.raw,
            "copy": saves.copy,
        }
        times = run_rounds(methods, repeats)
    first_s, _ = times["asynchronous"][0]
    times = {name: seconds[1:] for name, seconds in times.items()}
    raw_s = statistics.median(done for _, done in times["torch.save"])
    results = []
    for method, bound in (("synchronous", None), ("asynchronous", STALL_BOUND)):
        stall_s = statistics.median(stall for stall, _ in times[method])
        ratios = [ours / raw for (ours, _), (raw, _) in zip(times[method], times["torch.save"], strict=True)]
        what = f"{gigabytes:.2f} GB, {method} save: time that training is blocked"
        figure = Figure(what=what, unit="ms", ours=round(stall_s * 1e3, 1), raw=round(raw_s * 1e3, 1))
        figure["ratio"] = round(statistics.median(ratios), 3)
        if bound is not None and bounded:
            figure["bound"] = bound
        results.append(figure)
    results.append(alone("first asynchronous save, which allocates the buffers", "ms", first_s * 1e3))
    for method in ("synchronous", "asynchronous", "torch.save"):
        done_s = statistics.median(done for _, done in times[method])
        results.append(alone(f"disk throughput, {method}", "GB/s", gigabytes / done_s))
    copy_s = statistics.median(done for _, done in times["copy"])
    results.append(alone("copy of the same bytes in memory", "ms", copy_s * 1e3))
    return results


def main() -> None:
    """Measures one size. The bound applies to 100 million parameters."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--parameters", type=float, default=100e6)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--table", action="store_true")
    arguments = read_arguments(parser, repeats=1, parameters=1e6)
    torch.set_num_threads(arguments.threads)
    ran_on = machine()
    results = figures(arguments.parameters, arguments.repeats, arguments.parameters == 100e6)
    text = table(results).replace("raw Ray", "torch.save") if arguments.table else None
    sys.stdout.write(f"{text or json.dumps({'machine': ran_on, 'figures': results}, indent=2)}\n")


if __name__ == "__main__":
    main()
