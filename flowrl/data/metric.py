"""Metrics that merge exactly: a worker reports sums with their counts, so any number of ranks gives the same value."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, Self


class Metric(Protocol):
    """What every kind of metric has, those of flowrl/algorithms too: parts merge to what the whole would give."""

    def merge(self, other: Self) -> "Metric": ...

    def result(self) -> float: ...


@dataclass(frozen=True)
class Mean:
    """A weighted mean: `total` is the sum of the values, `count` the sum of their weights."""

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
    """The largest value seen on any rank."""

    value: float

    def merge(self, other: Self) -> "Max":
        return Max(max(self.value, other.value))

    def result(self) -> float:
        return self.value


@dataclass(frozen=True)
class Min:
    """The smallest value seen on any rank."""

    value: float

    def merge(self, other: Self) -> "Min":
        return Min(min(self.value, other.value))

    def result(self) -> float:
        return self.value


def merge_metrics(reports: Sequence[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Merges the reports of several ranks or calls, each metric by its own reduction.

    A metric that only some reports have is merged over those. Raises `ValueError` if two reports give one name
    different kinds of metric.
    """
    merged: dict[str, Metric] = {}
    for report in reports:
        for name, metric in report.items():
            if name not in merged:
                merged[name] = metric
                continue
            if type(merged[name]) is not type(metric):
                kinds = f"{type(merged[name]).__name__} and {type(metric).__name__}"
                raise ValueError(f"metric {name!r} is reported as {kinds}; a name has one kind of metric")
            merged[name] = merged[name].merge(metric)
    return merged


class MetricFuture(Protocol):
    """A future of a dictionary of metrics."""

    def get(self) -> Mapping[str, Metric | float]: ...


Logged = MetricFuture | Mapping[str, Metric | float]
"""Metrics, or a future of them. A plain number is averaged over the values logged under its name."""
