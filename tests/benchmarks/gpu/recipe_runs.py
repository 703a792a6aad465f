"""Runs recipes as programs, and reads their metrics."""

import json
import math
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.benchmarks.gpu.cells import Cell, CellSkipped

_NUM_STEPS = 100
_EXPECTED_S = 60.0
"""Seconds for the warm start and the first steps of a run."""
_ENDING_S = 15.0
"""A run receives SIGTERM so many seconds before the end of the measurements."""
_GRACE_S = 10.0
"""Seconds for a run to end after SIGTERM."""
_AVERAGED_STEPS = 5
_LEAST_GAIN = 0.1
"""Required gain in held-out accuracy of GRPO in 100 steps. The measured gain on CPUs is 0.216."""
GRPO_CONFIG = "recipes/grpo/arithmetic.yaml"
_REPORT = ("report.tensorboard=false",)
_SHOWN_LINES = 25
"""Number of lines that are shown from the end of a failed program's output."""


class ProgramFailed(Exception):
    """Raised if a program ends with an error. The message has the end of its output."""


@dataclass(frozen=True)
class RecipeRun:
    """The metrics of a run."""

    records: tuple[dict[str, Any], ...]
    """Lines of metrics.jsonl."""

    @classmethod
    def read(cls, folder: Path) -> "RecipeRun":
        """Reads a run, which may have ended before its last step. Raises CellSkipped if it has fewer than two steps."""
        path = folder / "metrics.jsonl"
        run = cls(tuple(map(json.loads, path.read_text().splitlines())) if path.exists() else ())
        if len(run.values("seconds")) < 2:
            raise CellSkipped("the time is over before the second step")
        return run

    def values(self, name: str) -> list[float]:
        """Returns the values of a metric in the order of the steps."""
        return [record[name] for record in self.records if name in record]

    @property
    def is_complete(self) -> bool:
        """Whether the run has an evaluation after the last step."""
        return len(self.values("accuracy")) > 1

    @cached_property
    def gain(self) -> float:
        """Last minus first held-out accuracy. Needs a complete run."""
        before, after = self.values("accuracy")
        return after - before

    def describe(self) -> str:
        """Returns the gain, and the median duration of a step without the first one.

        The gain is that of the held-out accuracy. If the run has no evaluation after its last step, it is that of the
        reward, from the mean of the first five steps to the mean of the last five.
        """
        seconds = self.values("seconds")
        steps = f"{len(seconds)} steps of {statistics.median(seconds[1:]):.2f} s"
        if self.is_complete:
            before, after = self.values("accuracy")
            return f"accuracy {before:.3f} to {after:.3f} ({after - before:+.3f}) in {steps}"
        rewards = self.values("reward")
        first, last = statistics.mean(rewards[:_AVERAGED_STEPS]), statistics.mean(rewards[-_AVERAGED_STEPS:])
        return f"ended by the time limit, reward {first:.3f} to {last:.3f} ({last - first:+.3f}) in {steps}"

    def check_gain(self, figures: str) -> None:
        """Raises AssertionError with the figures if the gain of a complete run is too small."""
        if self.is_complete:
            assert self.gain >= _LEAST_GAIN, f"{figures}, but a gain of at least {_LEAST_GAIN} is required"


class Task:
    """The quickstart's task, and a model that has been trained on examples of it (warm start)."""

    def __init__(self, folder: Path, device: str, end_s: float = math.inf) -> None:
        """`end_s` is the Unix time at which the measurements end. Runs end before, after a step."""
        self._folder, self._device, self._end_s = folder, device, end_s - _ENDING_S

    def _prepare(self) -> None:
        """Creates data and model, and trains the model on examples, unless this has been done.

        Raises CellSkipped if no time remains.
        """
        data, start = self._folder / "data", self._folder / "sft"
        if (start / "model").exists():
            return
        run_program("recipes.quickstart.prepare", "--output", str(data), "--seed", "0")
        is_trained = run_program(
            "recipes.sft.train",
            "recipes/quickstart/sft.yaml",
            f"output={start}",
            f"actor.model.path={data}/model",
            f"data.train={data}/sft.jsonl",
            *single_device(self._device),
            *(() if self._device == "cuda" else ("steps=60",)),
            *_REPORT,
            end_s=self._end_s,
        )
        if not is_trained:
            raise CellSkipped("the time is over in the warm start")

    def train_grpo(self, name: str, *settings: str, num_steps: int) -> RecipeRun:
        """Runs recipes/grpo from the model after the warm start. A rehearsal on the CPU has four steps.

        Evaluates before the first step and after the last step. Raises CellSkipped if no time remains.
        """
        self._prepare()
        arguments = self.grpo_settings(name, *settings, num_steps=num_steps)
        run_program("recipes.grpo.train", GRPO_CONFIG, *arguments, end_s=self._end_s)
        return RecipeRun.read(self._folder / name)

    def grpo_settings(self, name: str, *settings: str, num_steps: int) -> list[str]:
        """Returns all settings of recipes/grpo for a run with the output folder `name`."""
        steps = num_steps if self._device == "cuda" else 4
        return [
            f"output={self._folder}/{name}",
            f"steps={steps}",
            "evaluate_every=null",
            *(f"{role}.model.path={self._folder}/sft/model" for role in ("actor", "reference")),
            f"data.train={self._folder}/data/train.jsonl",
            f"data.test={self._folder}/data/test.jsonl",
            *settings,
            *_REPORT,
        ]


def single_device(device: str) -> tuple[str, str]:
    """Returns the settings of a placement with one device."""
    return "placement=placement/single.yaml", f"placement.device={device}"


def run_program(module: str, *arguments: str, end_s: float = math.inf) -> bool:
    """Runs a module. Returns whether it ended by itself before the Unix time `end_s`.

    Otherwise, it receives SIGTERM, after which a recipe ends its step and writes its metrics. Raises ProgramFailed if
    the module fails before.
    """
    command = [sys.executable, "-m", module, *arguments]
    remaining_s = None if end_s == math.inf else max(0.0, end_s - time.time())
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            output, _ = process.communicate(timeout=remaining_s)
        except subprocess.TimeoutExpired:
            process.terminate()
            try:
                process.communicate(timeout=_GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
            return False
    if process.returncode != 0:
        lines = output.splitlines()[-_SHOWN_LINES:] or ["without output"]
        raise ProgramFailed("\n".join([f"{module} ended with exit code {process.returncode}: {lines[-1]}", *lines]))
    return True


def grpo_cells(folder: Path, device: str, end_s: float) -> list[Cell]:
    """Returns the cells of GRPO in one process, and in processes of Ray. Runs end before the Unix time `end_s`."""
    task = Task(folder, device, end_s)
    return [
        Cell("GRPO, engine hf, inline", lambda: _train_inline(task, device), _EXPECTED_S),
        Cell("GRPO, engine hf, Ray", lambda: _train_with_ray(task, device), _EXPECTED_S / 2),
    ]


def _train_inline(task: Task, device: str) -> str:
    """Trains after the warm start. On a GPU, raises AssertionError if the gain is too small."""
    run = task.train_grpo("grpo", "backend=inline", *single_device(device), num_steps=_NUM_STEPS)
    figures = run.describe()
    if device == "cuda":
        run.check_gain(figures)
    return figures


def _train_with_ray(task: Task, device: str) -> str:
    """Trains ten steps with Ray, `fork_workers` and `offload: idle`."""
    if find_spec("ray") is None:
        raise CellSkipped("missing: ray")
    settings = ("fork_workers=true", "actor.engine.offload=idle", *single_device(device))
    return task.train_grpo("ray", *settings, num_steps=10).describe()
