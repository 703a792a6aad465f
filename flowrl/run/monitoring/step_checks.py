"""Checks of the metrics of each step: failed rewards, learning rates, and the gap of the rollout."""

from collections.abc import Callable, Mapping, Sequence

from flowrl.config import RunConfig
from flowrl.report.rollout_log import Row
from flowrl.report.run_observer import RunObserver
from flowrl.run.updates import ZeroRateWatch, describe_updates
from flowrl.schedules.failure_watch import FailureWatch
from flowrl.weight_sync.verification import RolloutWatch


class StepChecks(RunObserver):
    """Checks the metrics of each step, except for its health. Also reports the updates that the settings plan."""

    def __init__(self, config: RunConfig, notify: Callable[[str], None]) -> None:
        self.failures = FailureWatch(config, notify)
        self.rollout = RolloutWatch(config, notify)
        self._rates = ZeroRateWatch(config, notify)
        for message in describe_updates(config):
            notify(message)

    @property
    def stop_reason(self) -> str | None:
        return self.failures.error

    def evaluated(self, step: int, values: Mapping[str, float], rows: Sequence[Row], num_examples: int) -> None:
        self.failures.check_evaluation(f"of step {step}" if step else "of the initial model", values, rows)

    def calls_done(self, step: int, values: Mapping[str, float]) -> None:
        """Raises CheckFailed if the rollout gap is too large and `rollout.check` is strict."""
        self._rates.check_step(step, values)
        self.failures.check_step(step, values)
        self.rollout.check_step(step, values)
