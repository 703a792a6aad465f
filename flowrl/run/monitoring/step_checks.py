"""All checks of the metrics of each step: health, failed rewards, learning rates, and the gap of the rollout."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from flowrl.config import RunConfig
from flowrl.controller.placement.plan import Plan
from flowrl.report.rollout_log import Row
from flowrl.run.monitoring.health_log import HealthLog
from flowrl.run.updates import ZeroRateWatch, describe_updates
from flowrl.schedules.failure_watch import FailureWatch
from flowrl.weight_sync.verification import RolloutWatch


class StepChecks:
    """All checks of the metrics of a step. Also reports the updates that the settings plan."""

    def __init__(self, config: RunConfig, notify: Callable[[str], None]) -> None:
        self._config, self._notify = config, notify
        self.failures = FailureWatch(config, notify)
        self.rollout = RolloutWatch(config, notify)
        self._rates = ZeroRateWatch(config, notify)
        for message in describe_updates(config):
            notify(message)

    def open(self, folder: Path, plan: Plan, history: Iterable[Mapping[str, float]]) -> None:
        """Opens `health.jsonl` in the run folder. `history` has the records of the steps before a resume."""
        self.health = HealthLog(folder, self._config, plan, history, self._notify)

    @property
    def error(self) -> str | None:
        """Why the run must end after the current step, or None."""
        return self.failures.error or self.health.error

    def check_evaluation(self, step: int, values: Mapping[str, float], rows: Sequence[Row]) -> None:
        """Checks the failures of an evaluation with these metrics and responses. Step 0 is the initial model."""
        self.failures.check_evaluation(f"of step {step}" if step else "of the initial model", values, rows)

    def check_step(self, step: int, values: Mapping[str, float]) -> None:
        """Runs all checks except the health checks, which need the complete log record (`health.check_step`).

        Raises CheckFailed if the rollout gap is too large and `rollout.check` is strict.
        """
        self._rates.check_step(step, values)
        self.failures.check_step(step, values)
        self.rollout.check_step(step, values)
