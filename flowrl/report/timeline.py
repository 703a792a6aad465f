"""The picture of when each rank worked."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import colormaps
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from flowrl.checkpoints.run_folder import replacing
from flowrl.data.events import CallEvent
from flowrl.report.chrome_trace import Row
from flowrl.report.trace import Segment, busy_fractions, call_name, critical_path, since

_PATH_COLOUR = "#222222"


def draw_timeline(
    events: Sequence[CallEvent], path: Path, *, window_s: float | None = None, until_ns: int | None = None
) -> None:
    """Draws the calls of every role and rank into a PNG file, coloured by method, with each device's busy fraction.

    A dark line under the calls is the critical path.

    Args:
        events: the calls.
        path: the file, written whole or not at all.
        window_s: draw only the last so many seconds; None draws everything.
        until_ns: where the picture ends; None is the end of the last call.
    """
    end_ns = max((event.ended_ns for event in events), default=0) if until_ns is None else until_ns
    start_ns = min((event.started_ns for event in events), default=0)
    if window_s is not None:
        start_ns = max(start_ns, end_ns - int(window_s * 1e9))
    rows = sorted({Row.of(event) for event in events})
    drawn = [event for event in events if event.ended_ns > start_ns and event.started_ns < end_ns]
    colours = _method_colours(drawn)
    figure = Figure(figsize=(13, min(40.0, 1.5 + 0.42 * max(2, len(rows)))), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    places = {row: place for place, row in enumerate(rows)}
    _draw_calls(axes, drawn, places, colours, start_ns, end_ns)
    _draw_path(axes, since(critical_path(drawn), start_ns), places, start_ns)
    axes.set_xlim(0, max(1e-3, (end_ns - start_ns) / 1e9))
    _label_rows(axes, rows, busy_fractions(events, start_ns, end_ns))
    handles: list[Artist] = [Patch(color=colour, label=call) for call, colour in colours.items()]
    if handles:
        handles.append(Line2D([], [], color=_PATH_COLOUR, linewidth=2.5, label="critical path"))
        figure.legend(handles=handles, loc="outside upper left", ncols=6, frameon=False, fontsize=9)
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", dpi=120, facecolor="white")


def _draw_calls(
    axes: Axes,
    events: Sequence[CallEvent],
    places: Mapping[Row, int],
    colours: Mapping[str, Any],
    start_ns: int,
    end_ns: int,
) -> None:
    spans: defaultdict[tuple[Row, str], list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        begin_ns = max(event.started_ns, start_ns)
        spans[Row.of(event), call_name(event)].append(_bar(begin_ns, event.ended_ns, start_ns))
    # An edge tells calls apart that follow at once; around a bar of a pixel or two it would hide the bar.
    wide_s = (end_ns - start_ns) / 1e9 / 150
    for (row, call), bars in spans.items():
        edges = [0.5 if duration_s > wide_s else 0.0 for _, duration_s in bars]
        axes.broken_barh(
            bars, (places[row] - 0.36, 0.72), facecolor=colours[call], edgecolor="white", linewidth=edges, snap=False
        )


def _draw_path(axes: Axes, path: Sequence[Segment], places: Mapping[Row, int], start_ns: int) -> None:
    """Underlines what the path consists of; what is neither in a method nor on its way to one is the driver's time."""
    bars: defaultdict[Row, list[tuple[float, float]]] = defaultdict(list)
    for piece in path:
        if piece.part != "driver":
            bars[Row.of(piece.event)].append(_bar(piece.start_ns, piece.end_ns, start_ns))
    for row, found in bars.items():
        axes.broken_barh(found, (places[row] + 0.39, 0.09), facecolor=_PATH_COLOUR, linewidth=0, snap=False)


def _bar(begin_ns: int, end_ns: int, origin_ns: int) -> tuple[float, float]:
    return (begin_ns - origin_ns) / 1e9, (end_ns - begin_ns) / 1e9


def _method_colours(events: Sequence[CallEvent]) -> dict[str, Any]:
    calls = sorted({call_name(event) for event in events})
    palette = colormaps["tab10" if len(calls) <= 10 else "tab20"]
    return {call: palette(number % palette.N) for number, call in enumerate(calls)}


def _label_rows(axes: Axes, rows: Sequence[Row], busy: dict[str, float]) -> None:
    """Names the rows on the left; on the right the device of each group of rows, and its busy fraction."""
    axes.set_ylim(max(1, len(rows)) - 0.5, -0.5)
    axes.set_yticks(range(len(rows)), [f"{row.role} {row.rank}" for row in rows], fontsize=9)
    axes.set_xlabel("seconds", fontsize=9, color="#444444")
    axes.grid(axis="x", color="#e3e3e3", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(length=0, labelsize=9, colors="#333333")
    groups: dict[tuple[str, str], list[int]] = {}
    for place, row in enumerate(rows):
        groups.setdefault((row.pool, row.device), []).append(place)
    for (pool, device), places in groups.items():
        text = f"{device}\n{pool} pool: {busy[device]:.0%} busy"
        middle = (places[0] + places[-1]) / 2
        axes.annotate(
            text, (1.01, middle), xycoords=("axes fraction", "data"), va="center", fontsize=9, annotation_clip=False
        )
        if places[0]:
            axes.axhline(places[0] - 0.5, color="#999999", linewidth=0.8)
