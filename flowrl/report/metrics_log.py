"""The record of a run in numbers: one line per step in `metrics.jsonl`, and the same as TensorBoard events."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from torch.utils.tensorboard import SummaryWriter

from flowrl.checkpoints.run_folder import finite, replacing


class MetricsLog:
    """Writes the metrics of each step as they come, so that a run that ends early leaves all its lines."""

    def __init__(self, folder: Path, last_step: int = -1) -> None:
        """Opens `metrics.jsonl` and `tensorboard/` in an existing folder.

        Args:
            folder: of the run.
            last_step: lines that are there already are kept up to this step, and cut off after it.
        """
        self.history: list[dict[str, float]] = _read(folder / "metrics.jsonl", last_step)
        """Every step written so far: its values, and `step`."""
        with replacing(folder / "metrics.jsonl") as temporary:
            temporary.write_text("".join(map(_line, self.history)), encoding="utf-8")
        self._lines = (folder / "metrics.jsonl").open("a", encoding="utf-8")
        # TensorBoard then shows none of the steps that are done again.
        purge_step = last_step + 1 if self.history else None
        self._events = SummaryWriter(str(folder / "tensorboard"), purge_step=purge_step)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Writes one step: a line with `step` and the values (null for those that are not finite), and its events.

        Steps rise from call to call; a name is a metric, or `group/metric`.
        """
        assert not self.history or step > self.history[-1]["step"], f"step {step} was written before"
        row = {"step": step, **{name: float(value) for name, value in values.items()}}
        self.history.append(row)
        self._lines.write(_line(row))
        self._lines.flush()
        for name, value in values.items():
            self._events.add_scalar(name, value, step)

    def sync(self) -> None:
        """Brings every line to the disk."""
        os.fsync(self._lines.fileno())

    def close(self) -> None:
        """Closes both files. Closing twice is fine."""
        self._lines.close()
        self._events.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _line(row: Mapping[str, float]) -> str:
    return json.dumps(finite(row), allow_nan=False) + "\n"


def _read(path: Path, last_step: int) -> list[dict[str, float]]:
    """The lines up to a step. What a crash cut off in the middle of a line is no line, nor is anything after it."""
    rows: list[dict[str, float]] = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            row = json.loads(line)
        except ValueError:
            break
        if row["step"] > last_step:
            break
        rows.append({name: math.nan if value is None else value for name, value in row.items()})
    return rows
