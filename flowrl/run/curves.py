"""The curves of a run as one picture: a panel per quantity, the steps below."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, isfinite
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from flowrl.run.folder import replacing


@dataclass(frozen=True)
class Panel:
    """One quantity of the picture; `metric` is its name in the history."""

    title: str
    metric: str
    colour: str


PANELS = (
    Panel("Mean reward", "reward", "#2a78b5"),
    Panel("Held-out accuracy", "accuracy", "#2e8b57"),
    Panel("KL to the reference (nats per token)", "kl", "#c0562f"),
    Panel("Response length (tokens)", "response_length", "#7a5aa6"),
    Panel("Policy loss", "actor/loss", "#a63d57"),
    Panel("Value loss", "critic/loss", "#8a6d1f"),
    Panel("Loss", "loss", "#a63d57"),
    Panel("Entropy (nats per token)", "actor/entropy", "#3f7f8c"),
    Panel("Tokens per second", "tokens_per_s", "#5b6470"),
)
"""What is drawn, in order. A panel whose metric the history does not have is left out."""

FEW_POINTS = 25
"""Up to so many points are marked and joined; more are smoothed."""


def draw_curves(history: Sequence[Mapping[str, float]], path: Path, *, panels: Sequence[Panel] = PANELS) -> None:
    """Draws a run's metrics into a PNG file.

    Args:
        history: `MetricsLog.history`: rows with `step` and metrics. Values that are missing or not finite are skipped.
        path: the file, written whole or not at all.
        panels: which metrics to draw.
    """
    series = [(panel, *_points(history, panel.metric)) for panel in panels]
    series = [(panel, steps, values) for panel, steps, values in series if values]
    num_columns = min(3, max(1, len(series)))
    num_rows = max(1, ceil(len(series) / num_columns))
    figure = Figure(figsize=(4.6 * num_columns, 3.0 * num_rows), layout="constrained")
    FigureCanvasAgg(figure)
    if not series:
        figure.text(0.5, 0.5, "no metrics yet", ha="center", va="center", color="#5b6470")
    for place, (panel, steps, values) in enumerate(series):
        axes = figure.add_subplot(num_rows, num_columns, place + 1)
        _draw_panel(axes, panel, steps, values)
        if place + num_columns >= len(series):
            axes.set_xlabel("step", fontsize=9, color="#444444")
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", dpi=130, facecolor="white")


def _points(history: Sequence[Mapping[str, float]], metric: str) -> tuple[list[float], list[float]]:
    rows = [(row["step"], row[metric]) for row in history if isfinite(row.get(metric, float("nan")))]
    return [step for step, _ in rows], [value for _, value in rows]


def _draw_panel(axes: Axes, panel: Panel, steps: list[float], values: list[float]) -> None:
    if len(values) <= FEW_POINTS:
        axes.plot(steps, values, color=panel.colour, linewidth=2, marker="o", markersize=4)
    else:
        axes.plot(steps, values, color=panel.colour, linewidth=0.8, alpha=0.3)
        values = smoothed(values)
        axes.plot(steps, values, color=panel.colour, linewidth=2)
    axes.set_title(panel.title, fontsize=10, loc="left", color="#222222")
    last = f"{values[-1]:,.0f}" if abs(values[-1]) >= 1_000 else f"{values[-1]:.3g}"
    axes.set_title(last, fontsize=10, loc="right", color=panel.colour, fontweight="bold")
    axes.margins(x=0.02, y=0.1)
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color("#999999")
    axes.tick_params(labelsize=8.5, length=0, colors="#444444")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5))


def smoothed(values: Sequence[float], weight: float = 0.85) -> list[float]:
    """Exponential moving average, corrected at its start; `weight` in [0, 1) is how much of the past a point keeps."""
    averages: list[float] = []
    total = norm = 0.0
    for value in values:
        total = weight * total + value
        norm = weight * norm + 1
        averages.append(total / norm)
    return averages
