"""When each rank worked: pure functions on call events, and their picture."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from flowrl.data.events import CallEvent
from flowrl.run.folder import replacing


@dataclass(frozen=True, order=True)
class _Row:
    """A line of the timeline; rows sort by pool and device, then role and rank."""

    pool: str
    device: str
    role: str
    rank: int


def _row(event: CallEvent) -> _Row:
    return _Row(event.pool, event.device_label, event.role, event.rank)


def chrome_trace(events: Sequence[CallEvent]) -> dict[str, Any]:
    """The events in the Chrome trace format, which Perfetto and chrome://tracing open.

    A process per pool and device, in it a thread per role and rank; times are microseconds from the first submission.
    Each call carries how long it waited before it started.
    """
    rows = sorted({_row(event) for event in events})
    devices = list(dict.fromkeys((row.pool, row.device) for row in rows))
    pids = {device: number for number, device in enumerate(devices, start=1)}
    # Thread ids are unique over the whole trace: viewers disagree on whether one may be used in two processes.
    tids = {row: len(devices) + number for number, row in enumerate(rows, start=1)}
    trace: list[dict[str, Any]] = []
    for (pool, device), pid in pids.items():
        trace.append(_label("process_name", pid, 0, name=f"{pool} {device}"))
        trace.append(_label("process_sort_index", pid, 0, sort_index=pid))
    for row, tid in tids.items():
        pid = pids[row.pool, row.device]
        trace.append(_label("thread_name", pid, tid, name=f"{row.role} {row.rank}"))
        trace.append(_label("thread_sort_index", pid, tid, sort_index=tid))
    origin_ns = min((event.submitted_ns for event in events), default=0)
    for event in sorted(events, key=lambda event: event.started_ns):
        row = _row(event)
        trace.append(_complete_event(event, pids[row.pool, row.device], tids[row], origin_ns))
    return {"traceEvents": trace, "displayTimeUnit": "ms"}


def _label(kind: str, pid: int, tid: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args}


def _complete_event(event: CallEvent, pid: int, tid: int, origin_ns: int) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": event.method,
        "cat": event.role,
        "pid": pid,
        "tid": tid,
        "ts": (event.started_ns - origin_ns) / 1e3,
        "dur": (event.ended_ns - event.started_ns) / 1e3,
        "args": {"waited_ms": (event.started_ns - event.submitted_ns) / 1e6},
    }


def busy_fractions(events: Sequence[CallEvent], start_ns: int, end_ns: int) -> dict[str, float]:
    """The share of [start_ns, end_ns] in which each device ran at least one call, by `CallEvent.device_label`.

    Calls that overlap count once. Every device that appears in the events is in the result.
    """
    intervals: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    for event in events:
        intervals[event.device_label].append((max(event.started_ns, start_ns), min(event.ended_ns, end_ns)))
    span_ns = max(1, end_ns - start_ns)
    return {label: _covered_ns(spans) / span_ns for label, spans in sorted(intervals.items())}


def _covered_ns(spans: list[tuple[int, int]]) -> int:
    """Length of the union of half-open intervals; one that ends before it starts is empty."""
    covered, reached = 0, None
    for start, end in sorted(spans):
        first = start if reached is None else max(start, reached)
        covered += max(0, end - first)
        reached = max(first, end)
    return covered


def draw_timeline(events: Sequence[CallEvent], path: Path, *, window_s: float | None = None) -> None:
    """Draws the calls of every role and rank into a PNG file, coloured by method, with each device's busy fraction.

    Args:
        events: the calls.
        path: the file, written whole or not at all.
        window_s: draw only the last so many seconds; None draws everything.
    """
    end_ns = max((event.ended_ns for event in events), default=0)
    start_ns = min((event.started_ns for event in events), default=0)
    if window_s is not None:
        start_ns = max(start_ns, end_ns - int(window_s * 1e9))
    rows = sorted({_row(event) for event in events})
    colours = _method_colours([event for event in events if event.ended_ns > start_ns])
    figure = Figure(figsize=(13, min(40.0, 1.5 + 0.42 * max(2, len(rows)))), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    _draw_calls(axes, events, rows, colours, start_ns, end_ns)
    axes.set_xlim(0, max(1e-3, (end_ns - start_ns) / 1e9))
    _label_rows(axes, rows, busy_fractions(events, start_ns, end_ns))
    handles = [Patch(color=colour, label=call) for call, colour in colours.items()]
    if handles:
        figure.legend(handles=handles, loc="outside upper left", ncols=6, frameon=False, fontsize=9)
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", dpi=120, facecolor="white")


def _draw_calls(
    axes: Axes, events: Sequence[CallEvent], rows: Sequence[_Row], colours: dict[str, Any], start_ns: int, end_ns: int
) -> None:
    heights = {row: place for place, row in enumerate(rows)}
    spans: defaultdict[tuple[_Row, str], list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        begin_ns = max(event.started_ns, start_ns)
        if event.ended_ns > begin_ns:
            spans[_row(event), _call(event)].append(((begin_ns - start_ns) / 1e9, (event.ended_ns - begin_ns) / 1e9))
    # An edge tells calls apart that follow at once; around a bar of a pixel or two it would hide the bar.
    wide_s = (end_ns - start_ns) / 1e9 / 150
    for (row, call), bars in spans.items():
        edges = [0.5 if duration_s > wide_s else 0.0 for _, duration_s in bars]
        axes.broken_barh(
            bars, (heights[row] - 0.36, 0.72), facecolor=colours[call], edgecolor="white", linewidth=edges, snap=False
        )


def _call(event: CallEvent) -> str:
    return f"{event.role}.{event.method}"


def _method_colours(events: Sequence[CallEvent]) -> dict[str, Any]:
    calls = sorted({_call(event) for event in events})
    palette = colormaps["tab10" if len(calls) <= 10 else "tab20"]
    return {call: palette(number % palette.N) for number, call in enumerate(calls)}


def _label_rows(axes: Axes, rows: Sequence[_Row], busy: dict[str, float]) -> None:
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
