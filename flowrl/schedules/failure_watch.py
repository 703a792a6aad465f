"""Ends a run in which too many rewards fail."""

from collections.abc import Mapping

from flowrl.config import RolloutRunConfig, RunConfig
from flowrl.controller.dispatch import Future
from flowrl.data.batch.block import LocalRef
from flowrl.data.metric import Logged, merge_metrics


class FailureWatch:
    """Compares the share of failed rewards or episodes of each step with `max_failure_rate`."""

    def __init__(self, config: RunConfig) -> None:
        self._limit: float | None = None
        self._role = "reward"
        if isinstance(config, RolloutRunConfig) and config.on_failure != "stop":
            self._limit = config.max_failure_rate
            self._role = "reward" if config.environment is None else "environment"
        self.error: str | None = None
        """Reason for which the run must end after the current step, or None."""
        self._results: list[Future | LocalRef] = []
        """Metrics of the responses of the current step."""

    def follow(self, metrics: Logged) -> tuple[Logged, ...]:
        """Stores metrics of the responses of a step until `check_responses`, and returns them for the log."""
        if isinstance(metrics, Future | LocalRef):
            self._results.append(metrics)
        return (metrics,)

    def check_responses(self, step: int) -> None:
        """Waits for the scores of a step, and checks them. Its policy update may still be running, so the driver can
        check a step before it submits the next one.
        """
        results, self._results = self._results, []
        if self._limit is not None and results:
            merged = merge_metrics([result.get() for result in results])
            self.check_step(step, {name: metric.result() for name, metric in merged.items()})

    def check_step(self, step: int, values: Mapping[str, float]) -> None:
        """Checks the metrics of a step."""
        share = values.get("reward_failed_fraction")
        if self.error is None and self._limit is not None and share is not None and share > self._limit:
            names = [
                name.split("/")[1] for name, value in values.items() if name.endswith("/failed_fraction") and value
            ]
            failed = f"reward {' and '.join(names)}" if self._role == "reward" else self._role
            self.error = (
                f"{failed} failed for {share:.0%} of the responses of step {step}, more than "
                f"{self._role}.max_failure_rate ({self._limit:g}): the saved rows in rollouts/ have the causes in "
                f"reward_failures; correct the {self._role}, or raise max_failure_rate"
            )
