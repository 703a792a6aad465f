"""Weights & Biases as a tracker (package wandb)."""

import os
from collections.abc import Mapping, Sequence
from netrc import NetrcParseError, netrc
from typing import Any, Literal
from urllib.parse import urlsplit

import wandb

from flowrl.config import ConfigError
from flowrl.report.rollout_log import Kind, Row
from flowrl.report.trackers.tracker import TrackedRun, stored_id, table_rows, tracker_folder

_STEP = "step"
_CREDENTIALS = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")


class WandbTracker:
    """Sends metrics and tables to Weights & Biases, or writes them to the folder `wandb/` of the run.

    The x-axis of all charts is the step of the run. A resumed run continues the same run of wandb, which then has the
    repeated steps twice.
    """

    def __init__(
        self,
        run: TrackedRun,
        *,
        project: str,
        mode: Literal["online", "offline"],
        name: str | None = None,
        entity: str | None = None,
        group: str | None = None,
    ) -> None:
        self._run = wandb.init(
            project=project,
            entity=entity,
            group=group,
            name=name or run.folder.resolve().name,
            id=stored_id(tracker_folder(run, "wandb")),
            dir=run.folder,
            config=dict(run.settings),
            mode=mode,
            resume="allow",
            settings=wandb.Settings(silent=True, console="off", save_code=False, disable_git=True),
        )
        self._run.define_metric(_STEP)
        self._run.define_metric("*", step_metric=_STEP)
        self._is_finished = False

    @staticmethod
    def check(mode: str, **others: object) -> None:
        """Raises ConfigError if `mode` is `online` and no API key is configured, because wandb would ask for it."""
        if mode == "offline" or any(os.environ.get(name) for name in _CREDENTIALS):
            return
        host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
        try:
            has_key = netrc(os.environ.get("NETRC")).authenticators(host) is not None
        except (OSError, NetrcParseError):
            has_key = False
        if not has_key:
            raise ConfigError(
                f"report.trackers has wandb with mode online, but there is no API key for {host}: run `wandb login`, "
                "set WANDB_API_KEY, or set mode: offline"
            )

    def write_metrics(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({_STEP: step, **values})

    def write_rows(self, kind: Kind, step: int, rows: Sequence[Row]) -> None:
        columns, data = table_rows(rows)
        table = wandb.Table(
            columns=columns,  # pyright: ignore[reportArgumentType] (wandb has no annotation for a list of names)
            data=data,  # pyright: ignore[reportArgumentType] (nor for a list of rows)
            allow_mixed_types=True,
        )
        self._run.log({_STEP: step, f"rollouts/{kind}": table})

    def finish(self, summary: Mapping[str, Any]) -> None:
        self._run.summary.update(dict(summary))
        self._is_finished = True

    def close(self) -> None:
        self._run.finish(exit_code=0 if self._is_finished else 1)
