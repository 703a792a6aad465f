"""Runs recipes as programs, and reads their metrics."""

import json
import statistics
import subprocess
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tests.benchmarks.gpu.cells import Cell

_NUM_STEPS = 100
LEAST_GAIN = 0.1
"""Required gain in held-out accuracy of GRPO in 100 steps. The measured gain on CPUs is 0.216."""
GRPO_CONFIG = "recipes/grpo/arithmetic.yaml"
_REPORT = ("report.plots=false", "report.tensorboard=false")
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
        return cls(tuple(map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())))

    def values(self, name: str) -> list[float]:
        """Returns the values of a metric in the order of the steps."""
        return [record[name] for record in self.records if name in record]

    @cached_property
    def gain(self) -> float:
        """Last minus first held-out accuracy."""
        accuracies = self.values("accuracy")
        return accuracies[-1] - accuracies[0]

    def describe(self) -> str:
        """Returns accuracy before and after, and the median duration of a step without the first one."""
        accuracies, seconds = self.values("accuracy"), self.values("seconds")
        shown = f"accuracy {accuracies[0]:.3f} to {accuracies[-1]:.3f} ({self.gain:+.3f})"
        return f"{shown} in {len(seconds)} steps of {statistics.median(seconds[1:]):.2f} s"


class Task:
    """The quickstart's task, and a model that has been trained on examples of it (warm start)."""

    def __init__(self, folder: Path, device: str) -> None:
        self._folder, self._device = folder, device

    def _prepare(self) -> None:
        """Creates data and model, and trains the model on examples, unless this has been done."""
        data, start = self._folder / "data", self._folder / "sft"
        if (start / "model").exists():
            return
        run_program("recipes.quickstart.prepare", "--output", str(data), "--seed", "0")
        run_program(
            "recipes.sft.train",
            "recipes/quickstart/sft.yaml",
            f"output={start}",
            f"actor.model.path={data}/model",
            f"data.train={data}/sft.jsonl",
            *single_device(self._device),
            *(() if self._device == "cuda" else ("steps=60",)),
            *_REPORT,
        )

    def train_grpo(self, name: str, *settings: str, num_steps: int) -> RecipeRun:
        """Runs recipes/grpo from the model after the warm start. A rehearsal on the CPU has four steps."""
        self._prepare()
        run_program("recipes.grpo.train", GRPO_CONFIG, *self.grpo_settings(name, *settings, num_steps=num_steps))
        return RecipeRun.read(self._folder / name)

    def grpo_settings(self, name: str, *settings: str, num_steps: int) -> list[str]:
        """Returns all settings of recipes/grpo for a run with the output folder `name`."""
        steps = num_steps if self._device == "cuda" else 4
        return [
            f"output={self._folder}/{name}",
            f"steps={steps}",
            f"evaluate_every={max(1, steps // 4)}",
            *(f"{role}.model.path={self._folder}/sft/model" for role in ("actor", "reference")),
            f"data.train={self._folder}/data/train.jsonl",
            f"data.test={self._folder}/data/test.jsonl",
            *settings,
            *_REPORT,
        ]


def single_device(device: str) -> tuple[str, str]:
    """Returns the settings of a placement with one device."""
    return "placement=placement/single.yaml", f"placement.device={device}"


def run_program(module: str, *arguments: str) -> None:
    """Runs a module to its end. Raises ProgramFailed if it fails."""
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode != 0:
        lines = done.stdout.splitlines()[-_SHOWN_LINES:] or ["without output"]
        raise ProgramFailed("\n".join([f"{module} ended with exit code {done.returncode}: {lines[-1]}", *lines]))


def grpo_cells(folder: Path, device: str) -> list[Cell]:
    """Returns the cell of GRPO in one process, without Ray."""
    return [Cell("GRPO, engine hf, inline", lambda: _train_inline(folder, device))]


def _train_inline(folder: Path, device: str) -> str:
    """Trains after the warm start. On a GPU, raises AssertionError if the gain is too small."""
    settings = ("backend=inline", *single_device(device))
    run = Task(folder, device).train_grpo("grpo", *settings, num_steps=_NUM_STEPS)
    if device == "cuda":
        assert run.gain >= LEAST_GAIN, f"{run.describe()}, but a gain of at least {LEAST_GAIN} is required"
    return run.describe()
