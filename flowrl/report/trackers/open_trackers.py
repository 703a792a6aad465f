"""Checks and opens the trackers of a run."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from typing import Any, Self

from flowrl.config import ConfigError, ReportConfig
from flowrl.config.base import ImportNameError, import_attribute
from flowrl.config.monitoring.tracker_settings import AnyTracker, CustomTracker
from flowrl.config.user_errors import convert_errors, error_text
from flowrl.report.rollout_log import Kind, Row
from flowrl.report.run_observer import RunObserver
from flowrl.report.trackers.tracker import OptionalTracker, TrackedRun, Tracker

_INCLUDED = {
    "wandb": "flowrl.report.trackers.wandb_tracker:WandbTracker",
    "trackio": "flowrl.report.trackers.trackio_tracker:TrackioTracker",
}
"""Name of an included tracker -> class. Its package, and flowrl's extra that installs it, have the same name."""

_METHODS = ("write_metrics", "write_rows", "finish", "close")


def check_trackers(config: ReportConfig) -> None:
    """Raises ConfigError if a tracker's package, class or credentials are missing."""
    for index, tracker in enumerate(config.trackers):
        where = f"report.trackers.{index} is {tracker.kind}, but"
        if tracker.kind in _INCLUDED and find_spec(tracker.kind) is None:
            raise ConfigError(
                f"{where} the package {tracker.kind} is not installed: run `pip install 'flowrl[{tracker.kind}]'`, or "
                "remove it"
            )
        try:
            tracker_class = _import_class(tracker)
        except ImportNameError as error:
            raise ConfigError(f"report.trackers.{index}: {error}") from error
        if isinstance(tracker, CustomTracker):
            _check_class(where, tracker, tracker_class)
        if hasattr(tracker_class, "check"):
            _call_check(where, tracker, tracker_class)


def _call_check(where: str, tracker: AnyTracker, tracker_class: Any) -> None:  # Any: what a user's name refers to
    def describe(error: BaseException) -> ConfigError:
        return ConfigError(f"{where} its method `check` failed ({error_text(error)}): correct it")

    with convert_errors(describe, keep=ConfigError):
        tracker_class.check(**tracker.arguments())


def _check_class(where: str, tracker: CustomTracker, tracker_class: Any) -> None:  # Any: what a user's name refers to
    """Raises ConfigError unless `tracker_class` is a class, has the methods of a tracker, and accepts the options."""
    if not isinstance(tracker_class, type):
        raise ConfigError(f"{where} it is no class: write a class with the methods {', '.join(_METHODS)}")
    if lacking := [name for name in _METHODS if not callable(getattr(tracker_class, name, None))]:
        raise ConfigError(f"{where} it has no method {lacking[0]}: write all of {', '.join(_METHODS)}")
    try:
        inspect.signature(tracker_class).bind(None, **tracker.arguments())
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{where} its class does not accept options ({error}): correct them") from error


class Trackers(RunObserver):
    """Passes the metrics and rows of a run to its trackers. Use it as a context manager, which closes the trackers."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = trackers

    def write_rows(self, kind: Kind, step: int, rows: Sequence[Row]) -> None:
        """Adds the saved rows of a step."""
        for tracker in self._trackers:
            tracker.write_rows(kind, step, rows)

    def step_done(self, step: int, values: Mapping[str, float]) -> None:
        for tracker in self._trackers:
            tracker.write_metrics(step, values)

    def ended(self, summary: Mapping[str, Any]) -> None:
        for tracker in self._trackers:
            tracker.finish(summary)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        with ExitStack() as resources:
            for tracker in self._trackers:
                resources.callback(tracker.close)


def open_trackers(config: ReportConfig, run: TrackedRun, notify: Callable[[str], None]) -> list[Tracker]:
    """Returns the trackers of a run. If a tracker of `report.trackers` fails, `notify` reports the error and the run
    continues.
    """
    trackers: list[Tracker] = []
    if config.tensorboard:
        from flowrl.report.trackers.tensorboard_tracker import TensorBoardTracker  # noqa: PLC0415 (if used)

        trackers.append(TensorBoardTracker(run))
    for tracker in config.trackers:
        try:
            opened = _import_class(tracker)(run, **tracker.arguments())
            trackers.append(OptionalTracker(tracker.kind, opened, notify))
        except Exception as error:  # noqa: BLE001 (code of another project, whose results the run does not need)
            notify(
                f"{tracker.kind} receives no metrics, because it cannot open the run ({error_text(error)}); "
                "metrics.jsonl is complete"
            )
    return trackers


def _import_class(tracker: AnyTracker) -> Any:  # Any: a user's name may name any object
    """Imports the class of a tracker. Raises ImportNameError if this fails."""
    return import_attribute(_INCLUDED.get(tracker.kind, tracker.kind))
