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
        from flowrl.report.trackers.tensorboard_tracker import TensorBoardTracker  # noqa: PLC0415 (tensorboard, if used)

        trackers.append(TensorBoardTracker(run))
    for tracker in config.trackers:
        trackers.append(OptionalTracker(tracker.kind, _open(tracker, run), notify))
    return trackers


def _open(config: WandbConfig | TrackioConfig, run: TrackedRun) -> Tracker:
    """Connects to a tracker. Raises ConfigError if it rejects the run."""
    if isinstance(config, WandbConfig):
        from flowrl.report.trackers.wandb_tracker import WandbTracker as Opened  # noqa: PLC0415 (wandb, if it is used)
    else:
        from flowrl.report.trackers.trackio_tracker import TrackioTracker as Opened  # noqa: PLC0415 (trackio, if used)
    try:
        return Opened(config, run)  # pyright: ignore[reportArgumentType] (each class has its own settings)
    except Exception as error:
        raise ConfigError(
            f"report.trackers: {config.kind} cannot open the run ({type(error).__name__}: {error}): correct its "
            "settings, or remove it"
        ) from error
