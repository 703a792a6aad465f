"""TensorBoard events in the folder `tensorboard/` of a run."""

from collections.abc import Mapping, Sequence
from typing import Any

from flowrl.report.rollout_log import Kind, Row
from flowrl.report.rollout_text import render_markdown
from flowrl.report.trackers.event_file import EventFile
from flowrl.report.trackers.tracker import TrackedRun, tracker_folder


class TensorBoardTracker:
    """Writes the metrics as scalars, and the first saved rows of a step as a text."""

    def __init__(self, run: TrackedRun) -> None:
        # Hides the events of steps that a resumed run repeats.
        self._events = EventFile(tracker_folder(run, "tensorboard"), None if run.last_step < 0 else run.last_step + 1)

    def write_metrics(self, step: int, values: Mapping[str, float]) -> None:
        self._events.write_scalars(step, values)

    def write_rows(self, kind: Kind, step: int, rows: Sequence[Row]) -> None:
        self._events.write_text(f"rollouts/{kind}", step, render_markdown(rows))

    def finish(self, summary: Mapping[str, Any]) -> None:
        pass  # TensorBoard has no results besides events

    def close(self) -> None:
        self._events.close()
