"""The interface of trackers."""

import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from flowrl.config.user_errors import error_text
from flowrl.report.rollout_log import Kind, Row

TABLE_COLUMNS = ("prompt", "response", "answer", "score", "advantage", "finish_reason", "response_length", "version")
"""Columns of `Row` in the tables of trackers."""


@dataclass(frozen=True)
class TrackedRun:
    """The run that a tracker shows."""

    folder: Path
    """Output folder."""
    settings: Mapping[str, Any]  # Any: values of JSON
    """Resolved config."""
    last_step: int = -1
    """Step of the checkpoint from which the run resumes; -1 for a new run."""


class Tracker(Protocol):
    """Receives the metrics and the saved rows of a run. The driver calls its methods between two steps.

    `report.trackers` names a class with these methods. It is constructed with the `TrackedRun` and the settings of the
    tracker as keyword arguments. A static or class method `check`, with the same keyword arguments, may raise
    ConfigError before the run starts. A resumed run repeats the steps after `TrackedRun.last_step`.
    """

    def write_metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Adds the metrics of a step. Values may be NaN."""
        ...

    def write_rows(self, kind: Kind, step: int, rows: Sequence[Row]) -> None:
        """Adds the saved rows of a step as a table."""
        ...

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Adds the results of a complete run. `close` follows."""
        ...

    def close(self) -> None:
        """Ends the connection to the tracker. Is idempotent."""
        ...


class OptionalTracker:
    """A tracker whose errors do not end the run. After its first error, it receives no further calls."""

    def __init__(self, name: str, tracker: Tracker, notify: Callable[[str], None]) -> None:
        self._name, self._tracker, self._notify = name, tracker, notify
        self._has_failed = False

    def write_metrics(self, step: int, values: Mapping[str, float]) -> None:
        self._call(lambda: self._tracker.write_metrics(step, values))

    def write_rows(self, kind: Kind, step: int, rows: Sequence[Row]) -> None:
        self._call(lambda: self._tracker.write_rows(kind, step, rows))

    def finish(self, summary: Mapping[str, Any]) -> None:
        self._call(lambda: self._tracker.finish(summary))

    def close(self) -> None:
        self._call(self._tracker.close)

    def _call(self, function: Callable[[], None]) -> None:
        if self._has_failed:
            return
        try:
            function()
        except Exception as error:  # noqa: BLE001 (code of another project, whose results the run does not need)
            self._has_failed = True
            self._notify(
                f"{self._name} receives no further metrics, because it failed ({error_text(error)}); metrics.jsonl is "
                "complete"
            )


def table_rows(rows: Sequence[Row]) -> tuple[list[str], list[list[Any]]]:
    """Returns the names of columns and the rows of a table: `TABLE_COLUMNS`, each reward, and each other score."""
    scores = [(row.get("rewards") or {}) | (row.get("other_scores") or {}) for row in rows]
    columns = [*TABLE_COLUMNS, *(name for name in dict.fromkeys(name for own in scores for name in own)
                                 if name not in TABLE_COLUMNS)]  # fmt: skip
    values = [own | {name: row.get(name) for name in TABLE_COLUMNS} for row, own in zip(rows, scores, strict=True)]
    return columns, [[row.get(name) for name in columns] for row in values]


def tracker_folder(run: TrackedRun, name: str) -> Path:
    """Returns the folder of a tracker. For a new run, first removes the folder of an attempt without a checkpoint."""
    folder = run.folder / name
    if run.last_step < 0 and folder.is_dir():
        shutil.rmtree(folder, ignore_errors=True)
    return folder


def stored_id(folder: Path) -> str:
    """Returns the id of a run in a tracker. Creates a random id and stores it in the file `run_id`. If this file
    exists, returns its id, so that a resumed run has the same id.
    """
    path = folder / "run_id"
    if path.is_file():
        return path.read_text().strip()
    folder.mkdir(parents=True, exist_ok=True)
    run_id = secrets.token_hex(8)
    path.write_text(run_id)
    return run_id
