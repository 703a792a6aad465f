"""TensorBoard events in the folder `tensorboard/` of a run.

torch's `SummaryWriter` is not used, because it writes on another thread. With a full disk, it would print a traceback
and raise an error without the name of the file.
"""

import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import (
    Event,  # pyright: ignore[reportAttributeAccessIssue] (protobuf)
    SessionLog,  # pyright: ignore[reportAttributeAccessIssue] (protobuf)
)
from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue] (protobuf)
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard.summary import text as text_summary

from flowrl.checkpoints.run_folder import naming_full_disk
from flowrl.report.rollout_log import Kind, Row
from flowrl.report.rollout_text import render_markdown
from flowrl.report.trackers.tracker import TrackedRun, tracker_folder


class EventFile:
    """A new file of TensorBoard events. Each write is flushed, so that a killed run loses no events."""

    def __init__(self, folder: Path, purge_step: int | None = None) -> None:
        """Creates the file in `folder`.

        With `purge_step`, TensorBoard ignores the events of this step and of later steps in older files.
        """
        seconds, nanoseconds = divmod(time.time_ns(), 10**9)
        # The name begins with the time of creation, because TensorBoard sorts files by name before it reads them.
        self._path = folder / f"events.out.tfevents.{seconds:010}.{nanoseconds:09}.{socket.gethostname()}"
        folder.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("wb")
        self._records = RecordWriter(self._file)
        self._write(Event(file_version="brain.Event:2"))
        if purge_step is not None:
            self._write(Event(step=purge_step, session_log=SessionLog(status=SessionLog.START)))

    def write_scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Writes the values of a step. Raises OSError if the file cannot be written."""
        scalars = [Summary.Value(tag=name, simple_value=float(value)) for name, value in values.items()]
        self._write(Event(step=step, summary=Summary(value=scalars)))

    def write_text(self, name: str, step: int, text: str) -> None:
        """Writes a text, which TensorBoard displays as Markdown. Raises OSError if the file cannot be written."""
        self._write(Event(step=step, summary=text_summary(name, text)))

    def close(self) -> None:
        """Closes the file. Is idempotent."""
        with naming_full_disk(self._path):
            self._file.close()

    def _write(self, event: Event) -> None:
        event.wall_time = time.time()
        with naming_full_disk(self._path):
            self._records.write(event.SerializeToString())
            self._file.flush()


class TensorBoardTracker:
    """Writes the metrics as scalars, and the first saved rows of a step as a text."""

    def __init__(self, run: TrackedRun) -> None:
        # `purge_step` hides the events of steps that a resumed run repeats.
        self._events = EventFile(tracker_folder(run, "tensorboard"), None if run.last_step < 0 else run.last_step + 1)

    def write_metrics(self, step: int, values: Mapping[str, float]) -> None:
        self._events.write_scalars(step, values)

    def write_rows(self, kind: Kind, step: int, rows: Sequence[Row]) -> None:
        self._events.write_text(f"rollouts/{kind}", step, render_markdown(rows))

    def finish(self, summary: Mapping[str, Any]) -> None:
        pass  # TensorBoard has no results besides events

    def close(self) -> None:
        self._events.close()
