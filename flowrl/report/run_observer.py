"""The interface of everything that watches a run: files, displays, checks and trackers."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from flowrl.data.metric import Logged
from flowrl.report.rollout_log import Row

if TYPE_CHECKING:
    from flowrl.data.batch.batch import Batch


class RunObserver:
    """Watches a run. Each method handles an event, and does nothing by default.

    An event reaches all observers in the order of their list (flowrl/run/monitoring/observers.py).
    """

    @property
    def stop_reason(self) -> str | None:
        """Why the run must end after the current step, or None."""
        return None

    def begun(self) -> None:
        """Called when all workers are ready and, in a resumed run, the checkpoint is restored."""

    def step_begun(self, step: int, version: int, batch: "Batch") -> None:
        """Called before the loop body of a step, which trains the weights of `version` on `batch`."""

    def logged(self, metrics: Logged) -> None:
        """Called when the recipe logs metrics or a future of metrics."""

    def calls_done(self, step: int, values: Mapping[str, float]) -> None:
        """Called when all calls of a step are done. `values` has its metrics, except those of running evaluations.

        If no evaluation is running, `step_done` precedes this event.
        """

    def evaluated(self, step: int, values: Mapping[str, float], rows: Sequence[Row], num_examples: int) -> None:
        """Called when an evaluation is done, on `num_examples` prompts or examples, with its metrics and rows.

        `step` is 0 for the evaluation of the initial model.
        """

    def step_done(self, step: int, values: Mapping[str, float]) -> None:
        """Called when all metrics of a step are known. The steps are in ascending order."""

    def saved(self, step: int) -> None:
        """Called before the checkpoint of a step becomes complete, so that observers first store their records."""

    def ended(self, summary: Mapping[str, Any]) -> None:
        """Called when all steps and evaluations are done. `summary` has the results of the run."""
