"""Checks and opens the trackers of a run."""

from collections.abc import Callable
from importlib.util import find_spec

from flowrl.config import ConfigError, ReportConfig
from flowrl.config.monitoring.tracker_settings import TrackioConfig, WandbConfig
from flowrl.report.trackers.tracker import OptionalTracker, TrackedRun, Tracker


def check_trackers(config: ReportConfig) -> None:
    """Raises ConfigError if a tracker's package or credentials are missing."""
    for index, tracker in enumerate(config.trackers):
        if find_spec(tracker.kind) is None:
            raise ConfigError(
                f"report.trackers.{index} is {tracker.kind}, but the package {tracker.kind} is not installed: run "
                f"`pip install 'flowrl[{tracker.kind}]'`, or remove it"
            )
        if isinstance(tracker, WandbConfig):
            from flowrl.report.trackers.wandb_tracker import check_credentials  # noqa: PLC0415 (wandb, if it is used)

            check_credentials(tracker)


def open_trackers(config: ReportConfig, run: TrackedRun, notify: Callable[[str], None]) -> list[Tracker]:
    """Returns the trackers of a run. Errors of wandb and trackio are reported by `notify` and do not end the run."""
    trackers: list[Tracker] = []
    if config.tensorboard:
        from flowrl.report.trackers.tensorboard_tracker import TensorBoardTracker  # noqa: PLC0415 (if used)

        trackers.append(TensorBoardTracker(run))
    for tracker in config.trackers:
        try:
            trackers.append(OptionalTracker(tracker.kind, _open(tracker, run), notify))
        except Exception as error:  # noqa: BLE001 (code of another project, whose results the run does not need)
            notify(
                f"{tracker.kind} receives no metrics, because it cannot open the run "
                f"({type(error).__name__}: {error}); metrics.jsonl is complete"
            )
    return trackers


def _open(config: WandbConfig | TrackioConfig, run: TrackedRun) -> Tracker:
    """Opens the run in a tracker, and returns the tracker."""
    if isinstance(config, WandbConfig):
        from flowrl.report.trackers.wandb_tracker import WandbTracker  # noqa: PLC0415 (wandb, if it is used)

        return WandbTracker(config, run)
    from flowrl.report.trackers.trackio_tracker import TrackioTracker  # noqa: PLC0415 (trackio, if it is used)

    return TrackioTracker(config, run)
