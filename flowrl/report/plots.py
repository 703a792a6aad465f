"""Draws the metrics of a run as a picture, for the cards of exported models. Imports matplotlib."""

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
    metric: str
    color: str
    label: str = ""
    """Legend entry, used if the panel has several lines."""


@dataclass(frozen=True)
class Panel:
    title: str
    lines: tuple[Line, ...]
    needs: str = ""
    """Metric that the panel requires: without its values, the panel is omitted. Empty: no such metric."""


PANELS = (
    Panel("Mean reward", (Line("reward", "#2a78b5"),)),
    Panel("Mean reward of the selected responses", (Line("reward_selected", "#2a78b5"),)),
    Panel("Held-out accuracy", (Line("accuracy", "#2e8b57"),)),
    Panel("Held-out agreement with the teacher", (Line("agreement", "#2e8b57"),)),
    Panel("Accuracy on pairs", (Line("actor/accuracy", "#2e8b57"), Line("reward/accuracy", "#2e8b57"))),
    Panel(
        "Reward of chosen and rejected responses",
        (
            Line("actor/chosen_reward", "#2e8b57", "chosen"),
            Line("actor/rejected_reward", "#a63d57", "rejected"),
            Line("reward/chosen_reward", "#2e8b57", "chosen"),
            Line("reward/rejected_reward", "#a63d57", "rejected"),
        ),
    ),
    Panel("KL to the reference (nats per token)", (Line("kl", "#c0562f"), Line("actor/kl", "#c0562f"))),
    Panel(
        "KL to the teacher (nats per token)",
        (
            Line("actor/reverse_kl", "#c0562f", "from the student"),
            Line("actor/forward_kl", "#2a78b5", "from the teacher"),
        ),
    ),
    Panel("Response length (tokens)", (Line("response_length", "#7a5aa6"),)),
    Panel("Policy loss", (Line("actor/loss", "#a63d57"),)),
    Panel("Reward model loss", (Line("reward/loss", "#a63d57"),)),
    Panel("Value loss", (Line("critic/loss", "#8a6d1f"),)),
    Panel("Loss", (Line("loss", "#a63d57"),)),
    Panel("Validation loss", (Line("validation_loss", "#2e8b57"),)),
    Panel("Entropy (nats per token)", (Line("actor/entropy", "#3f7f8c"),)),
    Panel(
        "Largest load of an expert (multiple of the mean)",
        (Line("actor/expert_load_max", "#8a6d1f", "actor"), Line("critic/expert_load_max", "#3f7f8c", "critic")),
    ),
    Panel("Tokens per second", (Line("tokens_per_s", "#5b6470"),)),
    Panel("Staleness (versions)", (Line("staleness", "#2a78b5", "mean"), Line("staleness_max", "#c0562f", "max"))),
    Panel("Buffer depth (prompts)", (Line("buffer_depth", "#7a5aa6"),)),
    Panel(
        "Idle fraction of the step",
        (Line("idle_rollout", "#2e8b57", "rollout"), Line("idle_actor", "#a63d57", "actor")),
        # Without staleness the roles alternate, so idle fractions do not describe the schedule.
        needs="staleness",
    ),
)
"""Panels of the picture, in order. Lines without values and panels without lines are omitted."""

MAX_MARKED_POINTS = 25
"""Largest number of points that are drawn with markers. Longer curves are smoothed."""


def draw_curves(history: Sequence[Mapping[str, float]], path: Path) -> None:
    """Draws panels of the metrics in `MetricsLog.history` into a PNG file, which is replaced atomically."""
    series = [(panel, lines) for panel in PANELS if (lines := select_lines(history, panel))]
    num_columns = min(3, max(1, len(series)))
    num_rows = max(1, ceil(len(series) / num_columns))
    figure = Figure(figsize=(4.6 * num_columns, 3.0 * num_rows), layout="constrained")
    FigureCanvasAgg(figure)
    if not series:
        figure.text(0.5, 0.5, "no metrics yet", ha="center", va="center", color="#5b6470")
    for i, (panel, lines) in enumerate(series):
        axes = figure.add_subplot(num_rows, num_columns, i + 1)
        _draw_panel(axes, panel.title, lines)
        if i + num_columns >= len(series):
            axes.set_xlabel("step", fontsize=9, color="#444444")
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", dpi=130, facecolor="white")


Points = tuple[list[float], list[float]]


def select_lines(history: Sequence[Mapping[str, float]], panel: Panel) -> list[tuple[Line, Points]]:
    """Returns the lines of a panel that have values in the history."""
    if panel.needs and not _points(history, panel.needs)[1]:
        return []
    lines = [(line, _points(history, line.metric)) for line in panel.lines]
    return [(line, points) for line, points in lines if points[1]]


def _points(history: Sequence[Mapping[str, float]], metric: str) -> Points:
    rows = [(row["step"], row[metric]) for row in history if isfinite(row.get(metric, float("nan")))]
    return [step for step, _ in rows], [value for _, value in rows]


def _draw_panel(axes: Axes, title: str, lines: Sequence[tuple[Line, Points]]) -> None:
    for line, (steps, values) in lines:
        last_value = _draw_line(axes, line, steps, values)
        if not line.label:
            axes.set_title(last_value, fontsize=10, loc="right", color=line.color, fontweight="bold")
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
    has_markers = len(values) <= MAX_MARKED_POINTS
    if not has_markers:
        axes.plot(steps, values, color=line.color, linewidth=0.8, alpha=0.3)
        values = smooth(values)
    last_value = f"{values[-1]:,.0f}" if abs(values[-1]) >= 1_000 else f"{values[-1]:.3g}"
    label = f"{line.label} {last_value}" if line.label else None
    marker = "o" if has_markers else "None"
    axes.plot(steps, values, color=line.color, linewidth=2, marker=marker, markersize=4, label=label)
    return last_value


def smooth(values: Sequence[float], weight: float = 0.85) -> list[float]:
    """Returns the exponential moving average with bias correction. `weight` is the decay, in [0, 1)."""
    averages: list[float] = []
    total = norm = 0.0
    for value in values:
        total = weight * total + value
        norm = weight * norm + 1
        averages.append(total / norm)
    return averages
