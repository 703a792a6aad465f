"""The record of a run in numbers: one line per step in `metrics.jsonl`, and the same as TensorBoard events."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from torch.utils.tensorboard import SummaryWriter

from flowrl.run.folder import finite


class MetricsLog:
    """Writes the metrics of each step as they come, so that a run that ends early leaves all its lines."""

    def __init__(self, folder: Path) -> None:
        """Opens `metrics.jsonl` and `tensorboard/` in an existing folder."""
        self.history: list[dict[str, float]] = []
        """Every step written so far: its values, and `step`."""
        self._lines = (folder / "metrics.jsonl").open("a", encoding="utf-8")
        self._events = SummaryWriter(str(folder / "tensorboard"))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Writes one step: a line with `step` and the values (null for those that are not finite), and its events.

        Steps rise from call to call; a name is a metric, or `group/metric`.
        """
        assert not self.history or step > self.history[-1]["step"], f"step {step} was written before"
        row = {"step": step, **{name: float(value) for name, value in values.items()}}
        self.history.append(row)
        self._lines.write(json.dumps(finite(row), allow_nan=False) + "\n")
        self._lines.flush()
        for name, value in values.items():
            self._events.add_scalar(name, value, step)

    def close(self) -> None:
        """Closes both files. Closing twice is fine."""
        self._lines.close()
        self._events.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
