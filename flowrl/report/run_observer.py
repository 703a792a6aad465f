"""The interface of everything that watches a run: files, displays, checks and trackers."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from flowrl.data.metric import Logged
from flowrl.report.rollout_log import Row

if TYPE_CHECKING:
    from flowrl.data.batch.batch import Batch


class RunObserver:
    """Watches a run. Each method is an event. By default, it does nothing.

    An event reaches all observers in the order of their list (flowrl/run/monitoring/observers.py).
    """

    @property
    def stop_reason(self) -> str | None:
        """Why the run must end after the current step, or None."""
        return None

    def begun(self) -> None:
        """All workers are ready. If the run resumes, its checkpoint is restored."""

    def step_begun(self, step: int, version: int, batch: "Batch") -> None:
        """A step trains the weights of a version on a batch. Its calls follow."""

    def logged(self, metrics: Logged) -> None:
        """The recipe has logged metrics, which may be a future."""

    def calls_done(self, step: int, values: Mapping[str, float]) -> None:
        """All calls of a step are done. `values` has the metrics of the step, but not of its running evaluations.

        If none is running, `step_done` precedes this event.
        """

    def evaluated(self, step: int, values: Mapping[str, float], rows: Sequence[Row], num_examples: int) -> None:
        """An evaluation of a step on a number of prompts or examples is done, with its metrics and its rows.

        Step 0 is the initial model.
        """

    def step_done(self, step: int, values: Mapping[str, float]) -> None:
        """All metrics of a step are known. The steps of this event ascend."""

    def saved(self, step: int) -> None:
        """The checkpoint of a step is complete as soon as this event is handled."""

    def ended(self, summary: Mapping[str, Any]) -> None:
        """All steps and evaluations are done. `summary` has the results of the run."""
