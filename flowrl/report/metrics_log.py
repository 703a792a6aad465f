"""Metrics of a run: one JSON line per step in `metrics.jsonl`, and optionally TensorBoard events."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from flowrl.checkpoints.run_folder import finite, replacing


class MetricsLog:
    """Writes the metrics of each step immediately, so that a run that ends early keeps them."""

    def __init__(self, folder: Path, last_step: int = -1, *, has_tensorboard: bool = True) -> None:
        """Opens `metrics.jsonl`, and `tensorboard/` if requested.

        Args:
            folder: existing run folder.
            last_step: last step to keep from an existing `metrics.jsonl`; later lines are removed.
            has_tensorboard: also write TensorBoard events.
        """
        self.history: list[dict[str, float]] = _read(folder / "metrics.jsonl", last_step)
        """One dict per step: `step` and its metrics."""
        with replacing(folder / "metrics.jsonl") as temporary:
            temporary.write_text("".join(map(_line, self.history)), encoding="utf-8")
        self._lines = (folder / "metrics.jsonl").open("a", encoding="utf-8")
        self._tensorboard = None
        if has_tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 (only if the run writes its events)

            # Hides the events of steps that a resumed run repeats.
            purge_step = last_step + 1 if self.history else None
            self._tensorboard = SummaryWriter(str(folder / "tensorboard"), purge_step=purge_step)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Appends the metrics of a step; values that are not finite become null.

        Args:
            step: must be greater than the step of the previous call.
            values: metric name -> value; a name may have the form `group/metric`.
        """
        assert not self.history or step > self.history[-1]["step"], f"step {step} was written before"
        row = {"step": step, **{name: float(value) for name, value in values.items()}}
        self.history.append(row)
        self._lines.write(_line(row))
        self._lines.flush()
        if self._tensorboard is not None:
            for name, value in values.items():
                self._tensorboard.add_scalar(name, value, step)

    def sync(self) -> None:
        """Flushes `metrics.jsonl` to disk (fsync)."""
        os.fsync(self._lines.fileno())

    def close(self) -> None:
        """Closes both files. Is idempotent."""
        self._lines.close()
        if self._tensorboard is not None:
            self._tensorboard.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _line(row: Mapping[str, float]) -> str:
    return json.dumps(finite(row), allow_nan=False) + "\n"


def _read(path: Path, last_step: int) -> list[dict[str, float]]:
    """Returns the rows up to `last_step`. Stops at the first line that is not valid JSON, for example after a crash."""
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
