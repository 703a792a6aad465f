"""Values per token of a saved row, and the color scale of each metric. The viewer and the report page share them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from flowrl.report.rollout_log import Row


@dataclass(frozen=True)
class TokenMetric:
    """A value per token by which tokens are colored."""

    title: str
    meaning: str
    scale: Literal["diverging", "sequential"]
    """`diverging`: two colors on both sides of `center`. `sequential`: one color from the smallest to the largest
    value.
    """
    center: float = 0.0


METRICS: dict[str, TokenMetric] = {
    "advantage": TokenMetric("advantage", "advantage of the token", "diverging"),
    "ratio": TokenMetric("ratio", "probability under the trained weights / at sampling", "diverging", 1.0),
    "gap": TokenMetric("gap", "log-probability under the trained weights - at sampling", "diverging"),
    "mask": TokenMetric("mask", "1: sampled by the policy, 0: from the environment", "sequential"),
    "version": TokenMetric("version", "weight version that sampled the token", "sequential"),
}
"""Metrics by name, in the order in which they are offered."""

LISTS = {"advantage": "advantages", "ratio": "ratios", "mask": "mask", "version": "versions"}
"""Metric -> list of the column `tokens` that has the values of the metric."""


def available_metrics(row: Row) -> list[str]:
    """Returns the names of the metrics for which a row has values. Empty without the column `tokens`."""
    tokens = row.get("tokens") or {}
    present = {name for name, own in LISTS.items() if own in tokens}
    if {"logprobs", "rollout_logprobs"} <= tokens.keys():
        present.add("gap")
    return [name for name in METRICS if name in present]


def token_values(row: Row, metric: str) -> list[float | None]:
    """Returns the value of an available metric for each token. None for tokens without a value."""
    tokens = row["tokens"]
    if metric != "gap":
        return tokens[LISTS[metric]]
    pairs = zip(tokens["logprobs"], tokens["rollout_logprobs"], strict=True)
    return [None if own is None or sampled is None else own - sampled for own, sampled in pairs]


@dataclass(frozen=True)
class ColorScale:
    """Range of the values of a metric."""

    low: float
    high: float
    center: float
    """Value that is drawn without a color: the center of the metric, or `low` for a sequential scale."""

    def position(self, value: float) -> float:
        """Returns the position of a value: -1 at the lower end, 0 at the center and 1 at the upper end."""
        span = self.high - self.center
        return 0.0 if span <= 0 else max(-1.0, min(1.0, (value - self.center) / span))


def color_scale(metric: str, values: Sequence[float | None]) -> ColorScale:
    """Returns the scale for all values of one or several rows.

    A diverging scale is symmetric around its center and reaches the largest distance. A sequential scale reaches from
    the smallest to the largest value. The scale of `mask` is always 0 to 1.
    """
    present = [value for value in values if value is not None]
    kind = METRICS[metric]
    if metric == "mask":
        return ColorScale(0.0, 1.0, 0.0)
    if kind.scale == "sequential":
        low, high = min(present, default=0.0), max(present, default=0.0)
        return ColorScale(low, high, low)
    span = max((abs(value - kind.center) for value in present), default=0.0)
    return ColorScale(kind.center - span, kind.center + span, kind.center)


_NEGATIVE, _POSITIVE = (0x21, 0x66, 0xAC), (0xD9, 0x6B, 0x0B)
"""Colors of the ends of a scale: blue and orange, which people with color blindness distinguish."""


def blend(position: float, background: tuple[int, int, int]) -> tuple[int, int, int]:
    """Returns the RGB color of a position on a background: blue at -1, the background at 0 and orange at 1."""
    end, weight = (_POSITIVE if position > 0 else _NEGATIVE), abs(position)
    red, green, blue = (round(a + (b - a) * weight) for a, b in zip(background, end, strict=True))
    return red, green, blue


def segments_of(row: Row) -> list[dict[str, Any]]:
    """Returns the parts of a response. Without an environment, the response is one part of the policy."""
    if row["segments"]:
        return row["segments"]
    length = row["response_length"]
    return [{"kind": "policy", "start": 0, "end": length, "text": row["response"]}] if length is not None else []
