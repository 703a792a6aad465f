"""Ends a run or an evaluation in which too many rewards fail."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from flowrl.config import OnPolicyConfig, RolloutRunConfig, RunConfig
from flowrl.controller.dispatch import Future
from flowrl.data.batch.block import LocalRef
from flowrl.data.metric import FAILED_AS_BEST, FAILED_AS_WORST, FAILED_FRACTION, Logged, merge_metrics
from flowrl.schedules.rewards import FailedFraction, shorten_cause

_SHARE = "reward_failed_fraction"


class FailureWatch:
    """Compares the share of failed rewards or episodes with `max_failure_rate`, in each step and each evaluation."""

    def __init__(self, config: RunConfig, notify: Callable[[str], None]) -> None:
        self._notify = notify
        self._limit: float | None = None
        self._counts_as_zero = False
        """Whether failed rewards have the score 0 in training, and no warning about negative scores has been shown."""
        self._role = "reward"
        if isinstance(config, RolloutRunConfig) and config.on_failure != "stop":
            self._limit = config.max_failure_rate
            # Rejection sampling does not select failed responses.
            self._counts_as_zero = config.on_failure == "zero" and isinstance(config, OnPolicyConfig)
            self._role = "reward" if config.environment is None else "environment"
        self.error: str | None = None
        """Reason for which the run must end after the current step, or None."""
        self._results: list[Future | LocalRef | Mapping[str, Any]] = []
        """Metrics of the responses of the current step."""
        self._has_warned = False
        """Whether a warning about failures in training has been shown."""
        self._has_warned_evaluation = False

    def follow(self, metrics: Logged) -> tuple[Logged, ...]:
        """Stores metrics of the responses of a step until `check_responses`, and returns them for the log."""
        # Metrics of a resumed step are no future.
        if isinstance(metrics, Future | LocalRef) or (isinstance(metrics, Mapping) and _SHARE in metrics):
            self._results.append(metrics)
        return (metrics,)

    def check_responses(self, step: int) -> None:
        """Waits for the scores of a step, and compares the share of failures with the limit. Notifies the user of the
        first failures below the limit.

        The policy update of the step may still be running, so the driver can check a step before it submits the next.
        """
        results, self._results = self._results, []
        if self._limit is None or not results:
            return
        merged = merge_metrics([result if isinstance(result, Mapping) else result.get() for result in results])
        failed = merged.get(_SHARE)
        if not isinstance(failed, FailedFraction) or not failed.total:
            return
        share, ending = failed.result(), "/failed_fraction"
        names = [name.split("/")[1] for name, metric in merged.items() if name.endswith(ending) and metric.result()]
        observation = f"{self._describe(names, share)} responses of step {step}"
        if self._is_above_limit(share):
            self._set_error(observation, f"first cause: {failed.cause}")
        elif not self._has_warned:
            self._has_warned = True
            self._notify(
                f"warning: {observation} (first cause: {failed.cause}); later failures are only counted, in {_SHARE}"
            )

    def check_step(self, step: int, values: Mapping[str, float]) -> None:
        """Notifies the user once if failed rewards are better than others, given the metrics of a step."""
        share = values.get(_SHARE)
        if share and self._counts_as_zero and values.get("reward_min", 0.0) < 0:
            self._counts_as_zero = False
            self._notify(
                f"warning: {self._describe([], share)} responses of step {step}, and other responses have negative "
                f"scores: with {self._role}.on_failure: zero, training prefers the failed responses, so set it to drop"
            )

    def check_evaluation(self, where: str, values: Mapping[str, float], rows: Sequence[Mapping[str, Any]]) -> None:
        """Checks the metrics of an evaluation, and notifies the user once if rewards failed.

        Args:
            where: names the evaluation in messages, such as `of step 3`.
            values: metrics of the evaluation.
            rows: its responses, with the causes of failures in `reward_failures`.
        """
        endings = [name.removeprefix(FAILED_FRACTION) for name in values if name.startswith(FAILED_FRACTION)]
        for ending in endings:  # empty, or `/SET`
            share, own = values[FAILED_FRACTION + ending], ending.removeprefix("/")
            own_rows = [row for row in rows if (row.get("set") or "") == own]
            causes = [row["reward_failures"] for row in own_rows if row.get("reward_failures")]
            names = dict.fromkeys(name for failures in causes for name in failures)
            observation = f"{self._describe(names, share)} held-out responses {where}" + f" (set {own})" * bool(own)
            cause = next((cause for failures in causes for cause in failures.values()), "")
            cause = f"first cause: {shorten_cause(cause)}"
            if self._is_above_limit(share):
                self._set_error(observation, cause)
            elif not self._has_warned_evaluation:
                self._has_warned_evaluation = True
                worst, best = values[FAILED_AS_WORST + ending], values[FAILED_AS_BEST + ending]
                self._notify(
                    f"warning: {observation}: accuracy is the mean over the others, and would be {worst:.3f} with "
                    f"the worst score for these responses and {best:.3f} with the best ({cause})"
                )

    def _is_above_limit(self, share: float) -> bool:
        return self.error is None and self._limit is not None and share > self._limit

    def _describe(self, names: Iterable[str], share: float) -> str:
        own = [name for name in names if name != self._role]
        return f"{' '.join([self._role, ' and '.join(own)]).strip()} failed for {share:.0%} of the"

    def _set_error(self, observation: str, cause: str) -> None:
        self.error = (
            f"{observation}, more than {self._role}.max_failure_rate ({self._limit:g}): {cause}; correct the "
            f"{self._role}, or raise max_failure_rate"
        )
