"""Ends a run in which too many rewards fail."""

from collections.abc import Mapping

from flowrl.config import RolloutRunConfig, RunConfig


class FailureWatch:
    """Compares the share of failed rewards of each step with `reward.max_failure_rate`."""

    def __init__(self, config: RunConfig) -> None:
        has_limit = isinstance(config, RolloutRunConfig) and config.on_failure != "stop"
        self._limit = config.max_failure_rate if isinstance(config, RolloutRunConfig) and has_limit else None
        self.error: str | None = None
        """Reason for which the run must end after the current step, or None."""

    def check_step(self, step: int, values: Mapping[str, float]) -> None:
        """Checks the metrics of a step."""
        share = values.get("reward_failed_fraction")
        if self.error is None and self._limit is not None and share is not None and share > self._limit:
            names = [
                name.split("/")[1] for name, value in values.items() if name.endswith("/failed_fraction") and value
            ]
            self.error = (
                f"reward {' and '.join(names)} failed for {share:.0%} of the responses of step {step}, more than "
                f"reward.max_failure_rate ({self._limit:g}): the saved rows in rollouts/ have the causes in "
                f"reward_failures; correct the reward, or raise max_failure_rate"
            )
