"""Trackio as a tracker (package trackio), which stores metrics in a local database."""

import io
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from typing import Any

import trackio

from flowrl.data.metric import finite
from flowrl.report.rollout_log import Kind, Row
from flowrl.report.trackers.tracker import TrackedRun, stored_id, table_rows, tracker_folder


class TrackioTracker:
    """Writes metrics and tables to Trackio's database, or sends them to a Space.

    A resumed run continues the run of the same name in Trackio, which then has the repeated steps twice.
    """

    def __init__(self, run: TrackedRun, *, project: str, name: str | None = None, space_id: str | None = None) -> None:
        run_id = stored_id(tracker_folder(run, "trackio"))
        with redirect_stdout(io.StringIO()):  # trackio prints instructions
            self._run = trackio.init(
                project=project,
                # The name contains an id, because trackio resumes a run by its name, and runs in different folders may
                # have the same name.
                name=f"{name or run.folder.resolve().name}-{run_id[:4]}",
                space_id=space_id,
                config=finite(run.settings),
                resume="never" if run.last_step < 0 else "allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        self._is_open = True

    def write_metrics(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def write_rows(self, kind: Kind, step: int, rows: Sequence[Row]) -> None:
        columns, data = table_rows(rows)
        self._run.log({f"rollouts/{kind}": trackio.Table(columns=columns, data=data)}, step=step)

    def finish(self, summary: Mapping[str, Any]) -> None:
        numbers = {f"summary/{name}": value for name, value in summary.items() if isinstance(value, int | float)}
        self._run.log(numbers)

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            with redirect_stdout(io.StringIO()):
                trackio.finish()  # after `Run.finish`, trackio would end the run again at exit
