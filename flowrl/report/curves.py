"""The curves of a run as one picture: a panel per quantity, the steps below."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, isfinite
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from flowrl.checkpoints.run_folder import replacing


@dataclass(frozen=True)
class Line:
    """One metric of a panel, by its name in the history; `label` tells it from the panel's other lines."""

    metric: str
    colour: str
    label: str = ""


@dataclass(frozen=True)
class Panel:
    """One quantity of the picture."""

    title: str
    lines: tuple[Line, ...]
    needs: str = ""
    """A metric without which the panel is left out."""


PANELS = (
    Panel("Mean reward", (Line("reward", "#2a78b5"),)),
    Panel("Held-out accuracy", (Line("accuracy", "#2e8b57"),)),
    Panel("KL to the reference (nats per token)", (Line("kl", "#c0562f"),)),
    Panel("Response length (tokens)", (Line("response_length", "#7a5aa6"),)),
    Panel("Policy loss", (Line("actor/loss", "#a63d57"),)),
    Panel("Value loss", (Line("critic/loss", "#8a6d1f"),)),
    Panel("Loss", (Line("loss", "#a63d57"),)),
    Panel("Validation loss", (Line("validation_loss", "#2e8b57"),)),
    Panel("Entropy (nats per token)", (Line("actor/entropy", "#3f7f8c"),)),
    Panel("Tokens per second", (Line("tokens_per_s", "#5b6470"),)),
    Panel("Staleness (updates)", (Line("staleness", "#2a78b5", "mean"), Line("staleness_max", "#c0562f", "max"))),
    Panel("Buffer depth (prompts)", (Line("buffer_depth", "#7a5aa6"),)),
    Panel(
        "Idle share of the step",
        (Line("idle_rollout", "#2e8b57", "makers"), Line("idle_actor", "#a63d57", "trainer")),
        needs="staleness",
    ),
)
"""What is drawn, in order. A line whose metric the history does not have is left out, and so is a panel without lines.
Steps without staleness have the roles in turns: what each of them waits then says nothing of a schedule."""

FEW_POINTS = 25
"""Up to so many points are marked and joined; more are smoothed."""


def draw_curves(history: Sequence[Mapping[str, float]], path: Path, *, panels: Sequence[Panel] = PANELS) -> None:
    """PromptQueue a run's metrics into a PNG file.

    Args:
        history: `MetricsLog.history`: rows with `step` and metrics. Values that are missing or not finite are skipped.
        path: the file, written whole or not at all.
        panels: which metrics to draw.
    """
    drawn = [(panel, lines_of(history, panel)) for panel in panels]
    series = [(panel, lines) for panel, lines in drawn if lines]
    num_columns = min(3, max(1, len(series)))
    num_rows = max(1, ceil(len(series) / num_columns))
    figure = Figure(figsize=(4.6 * num_columns, 3.0 * num_rows), layout="constrained")
    FigureCanvasAgg(figure)
    if not series:
        figure.text(0.5, 0.5, "no metrics yet", ha="center", va="center", color="#5b6470")
    for place, (panel, lines) in enumerate(series):
        axes = figure.add_subplot(num_rows, num_columns, place + 1)
        _draw_panel(axes, panel.title, lines)
        if place + num_columns >= len(series):
            axes.set_xlabel("step", fontsize=9, color="#444444")
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", dpi=130, facecolor="white")


Points = tuple[list[float], list[float]]
"""Steps and values."""


def lines_of(history: Sequence[Mapping[str, float]], panel: Panel) -> list[tuple[Line, Points]]:
    """What a panel shows of a history: the lines that have values, each with its steps and these."""
    if panel.needs and not _points(history, panel.needs)[1]:
        return []
    found = [(line, _points(history, line.metric)) for line in panel.lines]
    return [(line, points) for line, points in found if points[1]]


def _points(history: Sequence[Mapping[str, float]], metric: str) -> Points:
    rows = [(row["step"], row[metric]) for row in history if isfinite(row.get(metric, float("nan")))]
    return [step for step, _ in rows], [value for _, value in rows]


def _draw_panel(axes: Axes, title: str, lines: Sequence[tuple[Line, Points]]) -> None:
    for line, (steps, values) in lines:
        last = _draw_line(axes, line, steps, values)
        if not line.label:
            axes.set_title(last, fontsize=10, loc="right", color=line.colour, fontweight="bold")
    axes.set_title(title, fontsize=10, loc="left", color="#222222")
    if any(line.label for line, _ in lines):
        axes.legend(loc="best", fontsize=8.5, labelcolor="linecolor", framealpha=0.8, edgecolor="none")
    axes.margins(x=0.02, y=0.1)
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color("#999999")
    axes.tick_params(labelsize=8.5, length=0, colors="#444444")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5))


def _draw_line(axes: Axes, line: Line, steps: list[float], values: list[float]) -> str:
    """PromptQueue a metric; its last value as the picture says it."""
    few = len(values) <= FEW_POINTS
    if not few:
        axes.plot(steps, values, color=line.colour, linewidth=0.8, alpha=0.3)
        values = smoothed(values)
    last = f"{values[-1]:,.0f}" if abs(values[-1]) >= 1_000 else f"{values[-1]:.3g}"
    label = f"{line.label} {last}" if line.label else None
    axes.plot(steps, values, color=line.colour, linewidth=2, marker="o" if few else "None", markersize=4, label=label)
    return last


def smoothed(values: Sequence[float], weight: float = 0.85) -> list[float]:
    """Exponential moving average, corrected at its start; `weight` in [0, 1) is how much of the past a point keeps."""
    averages: list[float] = []
    total = norm = 0.0
    for value in values:
        total = weight * total + value
        norm = weight * norm + 1
        averages.append(total / norm)
    return averages
