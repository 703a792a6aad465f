"""Ends a run in which too many rewards fail."""

from collections.abc import Mapping

from flowrl.config import RolloutRunConfig, RunConfig


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
