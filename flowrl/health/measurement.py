"""The parts of a health check: the last steps of a run, a function that measures them, its meaning, and its remedy."""

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from statistics import median

from flowrl.config import HealthCheck
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
                recent = self.values(training)[-self.steps :]
                medians = {training: median(recent)} if recent else {}
                points = self.evaluations.setdefault(name, deque(maxlen=MAX_EVALUATIONS))
                points.append(EvaluationPoint(*held_out_bounds(values, name), medians))
                self.is_evaluated = True

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


@dataclass(frozen=True)
class RunFacts:
    """Facts about a run that its metrics do not contain."""

    settings: frozenset[str] = frozenset()
    """Dotted keys of the run's settings."""

    max_response_tokens: int | None = None
    """Setting `rollout.max_response_tokens`; None without a rollout."""

    prompts_per_step: int | None = None
    """Number of groups of a step; None without a rollout."""

    trains_on_scores: bool = True
    """Whether the policy is trained on the scores. Otherwise, scores only measure the policy."""

    can_mask_truncated: bool = False
    """Whether `algorithm.mask_truncated` exists and is false."""

    has_frozen_head: bool = False
    """Whether the actor trains a LoRA adapter, and neither its head nor its embeddings."""

    gap_limit: float | None = None
    """Largest gap between rollout and trainer without a finding, in nats per token. If None, the gap is not checked."""

    gap_causes: str = ""
    """Likely causes of a gap above the limit."""

    devices: Mapping[tuple[str, ...], str] = field(default_factory=dict)
    """Roles that share a device -> name of their pool. The names of several pools are joined by `+`."""


@dataclass(frozen=True)
class Measurement:
    """Value of a check at one step."""

    value: float
    observation: str
    """Start of the message: the measured quantity with its value."""
    role: str = "actor"
    """The trained role that has the value."""
    meaning: str = ""
    """Likely cause, as a clause. If empty, `Check.meaning` is used, and the same for `remedy` and `settings`."""
    remedy: str = ""
    settings: tuple[str, ...] = ()


Measure = Callable[[StepWindow, RunFacts], Measurement | None]

EXTREME = 5
"""Multiple of a threshold beyond which the value of a single step is a finding (`Check.measure_extreme`). The multiple
is large, so that noise of single steps causes no finding.
"""


@dataclass(frozen=True)
class Check:
    """A health check."""

    name: HealthCheck
    measure: Measure
    """Returns the value that is compared with the threshold after each step. For most checks, the value is the median
    of the last `health.steps` steps. Returns None if the run has not logged enough values yet.
    """
    meaning: str
    """Likely cause, as a clause."""
    remedy: str
    """Remedy. Empty for `logprob_gap` and `truncation`, because their remedies depend on the run."""
    settings: tuple[str, ...]
    """Settings to change. A finding names the first setting that the run has. `ROLE` stands for the trained role."""
    is_lower_bound: bool = False
    """If True, values below the threshold are findings. If False, values above the threshold are findings."""
    measure_extreme: Measure | None = None
    """Returns the value of the last step alone, for a check whose `measure` returns a median. If this value is far
    beyond the threshold (`EXTREME`), it is a finding even if the window is not full or the median is healthy. The
    reason is that the metric of a policy that breaks may be extreme only in the first step.
    """

    def measure_or_extreme(
        self, threshold: float, window: StepWindow, facts: RunFacts
    ) -> tuple[Measurement | None, float]:
        """Returns the value of the last step, and the multiple of the threshold to compare it with (usually 1)."""
        if self.measure_extreme is not None:
            multiple = 1 / EXTREME if self.is_lower_bound else EXTREME
            measurement = self.measure_extreme(window, facts)
            if measurement is not None and self.distance(measurement, multiple * threshold) > 0:
                return measurement, multiple
        return self.measure(window, facts), 1.0

    def distance(self, measurement: Measurement, limit: float) -> float:
        """Returns how far a value is beyond a limit. The distance is negative or 0 if the value is healthy."""
        return limit - measurement.value if self.is_lower_bound else measurement.value - limit

    def setting(self, measurement: Measurement, facts: RunFacts) -> str:
        """Returns the setting to change first."""
        names = [name.replace("ROLE", measurement.role) for name in measurement.settings or self.settings]
        return next((name for name in names if name in facts.settings), names[-1])
