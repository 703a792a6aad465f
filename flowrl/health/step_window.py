"""The log records of the last steps of a run, and robust statistics of their values."""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from statistics import median

from flowrl.data.metric import held_out_bounds

Record = Mapping[str, float]
"""Metrics of a step by name."""

MAX_EVALUATIONS = 100
"""Largest number of evaluations in a window, per held-out metric."""

WINDOW_MULTIPLE = 4
"""Number of records in a window, as a multiple of `steps`."""


@dataclass(frozen=True)
class EvaluationPoint:
    """A held-out metric in one evaluation, and the corresponding training metric at the time of the evaluation."""

    low: float
    """Value of the metric if failed rewards had the worst score. Equals `high` if no reward failed."""
    high: float
    """Value of the metric if failed rewards had the best score."""
    training: Record
    """Median of the training metric over the last steps, by its name; empty for the initial model."""


class StepWindow:
    """The first and the last log records of a run, and its last evaluations, in bounded memory.

    Its state depends only on the records that were added. A resumed run adds the records of `metrics.jsonl` again.
    """

    def __init__(self, steps: int) -> None:
        """`steps` is the number of values in a median."""
        self.steps = steps
        self.records: deque[Record] = deque(maxlen=WINDOW_MULTIPLE * steps)
        """Last records with their finite values, oldest first."""
        self.first: list[Record] = []
        """Records of the first `steps` steps."""
        self.num_steps = 0
        """Number of records of training steps so far."""
        self.largest_reward = -math.inf
        """Largest `reward_max` so far."""
        self.evaluations: dict[str, deque[EvaluationPoint]] = {}
        """Evaluations by held-out metric, oldest first."""
        self.is_evaluated = False
        """Whether the last record has an evaluation."""

    def add(self, step: int, record: Record, held_out: Mapping[str, str]) -> None:
        """Adds the record of a step. Ignores values that are not finite.

        `held_out` maps the prefix of a held-out metric to the corresponding training metric.
        """
        values = {name: value for name, value in record.items() if math.isfinite(value)}
        if step > 0:
            self.records.append(values)
            self.num_steps += 1
            self.largest_reward = max(self.largest_reward, values.get("reward_max", -math.inf))
            if len(self.first) < self.steps:
                self.first.append(values)
        self.is_evaluated = False
        for name in values:
            training = held_out.get(name.split("/")[0])
            if training is not None:
                medians = self._training_median(training)
                points = self.evaluations.setdefault(name, deque(maxlen=MAX_EVALUATIONS))
                points.append(EvaluationPoint(*held_out_bounds(values, name), medians))
                self.is_evaluated = True

    def _training_median(self, name: str) -> Record:
        values = self.values(name)[-self.steps :]
        return {name: median(values)} if values else {}

    @property
    def last(self) -> Record:
        """The last record."""
        return self.records[-1]

    def values(self, name: str) -> list[float]:
        """Returns the values of a metric, oldest first. Skips the records without the metric."""
        return [record[name] for record in self.records if name in record]

    def recent_values(self, name: str) -> list[float] | None:
        """Returns the last `steps` values of a metric. Returns None if the last 2 x `steps` records have fewer."""
        values = [record[name] for record in islice(reversed(self.records), 2 * self.steps) if name in record]
        return values[: self.steps][::-1] if len(values) >= self.steps else None

    def recent_median(self, name: str) -> float | None:
        """Returns the median of `recent_values`, or None."""
        values = self.recent_values(name)
        return None if values is None else median(values)

    def first_value(self, name: str) -> float | None:
        """Returns the first value of a metric in the first `steps` steps, or None. Skips steps without the metric."""
        return next((record[name] for record in self.first if name in record), None)

    def first_median(self, name: str) -> float | None:
        """Returns the median over the first `steps` steps. Returns None unless each of them has the metric."""
        if len(self.first) < self.steps or any(name not in record for record in self.first):
            return None
        return median(record[name] for record in self.first)


def spread(values: list[float]) -> float:
    """Returns the standard deviation of values without outliers: 1.4826 times the median absolute deviation."""
    center = median(values)
    return 1.4826 * median(abs(value - center) for value in values)
