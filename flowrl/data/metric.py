"""Mergeable metrics. The merged value does not depend on the distribution of rows over ranks."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self


class Metric(Protocol):
    """A metric of some rows. `merge` combines it with the same metric of other rows."""

    def merge(self, other: Self) -> "Metric":
        """Returns the combined metric."""
        ...

    def result(self) -> float:
        """Returns the value to log."""
        ...


@dataclass(frozen=True)
class Mean:
    """A weighted mean: `total` is the weighted sum of the values, and `count` is the sum of the weights."""

    total: float
    count: float

    def merge(self, other: Self) -> "Mean":
        return Mean(self.total + other.total, self.count + other.count)

    def result(self) -> float:
        return self.total / self.count if self.count else float("nan")


@dataclass(frozen=True)
class Sum:
    """A total over ranks and calls."""

    total: float

    def merge(self, other: Self) -> "Sum":
        return Sum(self.total + other.total)

    def result(self) -> float:
        return self.total


@dataclass(frozen=True)
class Max:
    """The maximum over ranks and calls."""

    value: float

    def merge(self, other: Self) -> "Max":
        return Max(max(self.value, other.value))

    def result(self) -> float:
        return self.value


@dataclass(frozen=True)
class Min:
    """The minimum over ranks and calls."""

    value: float

    def merge(self, other: Self) -> "Min":
        return Min(min(self.value, other.value))

    def result(self) -> float:
        return self.value


def merge_metrics(reports: Sequence[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Merges the metrics of several ranks or calls by name. A metric may be missing in some of the reports.

    Raises `ValueError` if metrics with the same name have different classes.
    """
    merged: dict[str, Metric] = {}
    for report in reports:
        for name, metric in report.items():
            if name not in merged:
                merged[name] = metric
                continue
            if type(merged[name]) is not type(metric):
                kinds = f"{type(merged[name]).__name__} and {type(metric).__name__}"
                raise ValueError(f"metric {name!r} is reported as {kinds}; use one class of metric per name")
            merged[name] = merged[name].merge(metric)
    return merged


# Evaluations in which rewards failed.

NUM_FAILED, FAILED_FRACTION = "evaluation/failed", "evaluation/failed_fraction"
"""Number and share of the responses of an evaluation whose reward failed. Logged only if a reward failed."""

FAILED_AS_WORST, FAILED_AS_BEST = "evaluation/failed_as_worst", "evaluation/failed_as_best"
"""`accuracy` if the responses without a score had the worst score, or the best score. Logged only with these metrics.
"""


def held_out_bounds(values: Mapping[str, float], name: str) -> tuple[float, float]:
    """Returns the smallest and the largest possible value of a held-out metric of a step over all its responses.

    The two values differ if rewards failed in the evaluation. `name` is `accuracy`, `validation_loss` or a similar
    metric, possibly with the ending `/SET`.
    """
    metric, slash, ending = name.partition("/")
    value = values.get(name, math.nan)
    if metric != "accuracy":
        return value, value
    low, high = (values.get(f"{bound}{slash}{ending}", value) for bound in (FAILED_AS_WORST, FAILED_AS_BEST))
    return low, high


class MetricFuture(Protocol):
    """A future of a dictionary of metrics, such as the result of `actor.update`."""

    def get(self) -> Mapping[str, Metric | float]:
        """Waits for the metrics and returns them."""
        ...


Logged = MetricFuture | Mapping[str, Metric | float]
"""Metrics, or a future of metrics. Plain numbers with the same name are averaged."""


def finite(value: Any) -> Any:  # Any: a nested JSON value
    """Returns a copy of a nested value in which None replaces NaN and infinities."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [finite(item) for item in value]
    return value
