"""TensorBoard events of a run.

torch's `SummaryWriter` is not used, because it writes on another thread. With a full disk, it would print a traceback
and raise an error without the name of the file.
"""

import socket
import time
from collections.abc import Mapping
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import (
    Event,  # pyright: ignore[reportAttributeAccessIssue] (protobuf)
    SessionLog,  # pyright: ignore[reportAttributeAccessIssue] (protobuf)
)
from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue] (protobuf)
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard.summary import text as text_summary

from flowrl.checkpoints.run_folder import naming_full_disk


class EventFile:
    """A new file of TensorBoard events. Each write is flushed, so that a killed run loses no events."""

    def __init__(self, folder: Path, purge_step: int | None = None) -> None:
        """Creates the file in `folder`. TensorBoard then hides the events from `purge_step` in earlier files."""
        seconds, nanoseconds = divmod(time.time_ns(), 10**9)
        # TensorBoard reads files in the order of their names.
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
