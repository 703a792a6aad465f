"""Implements `flowrl trace`, which prints tables of calls, critical path and idle time, and names the bottleneck."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median

from rich.console import Console
from rich.table import Table
from rich.text import Text

from flowrl.data.console import make_console
from flowrl.data.events import CallEvent
from flowrl.report.trace import (
    CallParts,
    Part,
    Segment,
    busy_fractions,
    call_name,
    call_parts,
    critical_path,
    loop_events,
    path_totals,
    rank_fractions,
    since,
    span,
    times,
)

SMALL_SHARE = 0.005
"""Fraction of the critical path below which an entry is merged into the row `other`."""

MIN_WIDTH = 64
"""Minimum width of the tables. On a narrower terminal, lines wrap instead of being truncated."""


def explain(
    events: Sequence[CallEvent],
    *,
    dropped_until_ns: int = 0,
    window_s: float | None = None,
    console: Console | None = None,
) -> None:
    """Prints how the training loop spent its time. With `window_s`, covers only the last `window_s` seconds.

    Calls that were finished by `dropped_until_ns` may be missing in `events`. The tables then start at this time.
    """
    console = console or make_console()
    loop = loop_events(events)
    start_ns, end_ns = span(loop)
    start_ns = max(start_ns, dropped_until_ns)
    if window_s is not None:
        start_ns = max(start_ns, end_ns - int(window_s * 1e9))
    # Omits calls that were submitted before this time, because their inputs or previous calls may be missing.
    parts = [call for call in call_parts(loop) if times(call.event).submitted_ns >= dropped_until_ns]
    parts = [call for call in parts if call.event.finished_ns > start_ns]
    path = since(critical_path(loop), start_ns)
    busy = busy_fractions(loop, start_ns, end_ns)
    note = "; earlier calls are not in the trace" if dropped_until_ns and start_ns == dropped_until_ns else ""
    console.print(f"{len(parts):,} calls in {format_duration(end_ns - start_ns)}{note}", highlight=False)
    pools = {event.device_label: event.pool for event in loop}
    ranks = rank_fractions(loop, start_ns, end_ns)
    for table in (calls_table(parts), path_table(path), busy_table(ranks, busy, pools)):
        if console.width < MIN_WIDTH:
            table.width = MIN_WIDTH
        console.print(table, crop=False)
    console.print(describe_bottleneck(path, busy), highlight=False, markup=False)


def calls_table(calls: Sequence[CallParts]) -> Table:
    """Returns a table with the median and total duration of each part per method, sorted by compute time."""
    table = Table(title="Calls", title_justify="left")
    table.add_column("call", overflow="fold")
    table.add_column("", no_wrap=True)
    for heading in ("wait", "queue", "transfer", "compute"):
        table.add_column(heading, justify="right", no_wrap=True)
    by_name: defaultdict[str, list[CallParts]] = defaultdict(list)
    for call in calls:
        by_name[call_name(call.event)].append(call)
    for name, calls_of in sorted(by_name.items(), key=lambda item: -sum(call.compute_ns for call in item[1])):
        columns = [
            [call.wait_ns for call in calls_of],
            [call.queue_ns for call in calls_of],
            [call.transfer_ns for call in calls_of],
            [call.compute_ns for call in calls_of],
        ]
        medians = (format_duration(median(column)) for column in columns)
        totals = (format_duration(sum(column)) for column in columns)
        table.add_row(Text(name), "median", *medians)
        table.add_row(
            f"  {len(calls_of):,} {'call' if len(calls_of) == 1 else 'calls'}", "total", *totals, end_section=True
        )
    return table


def path_table(path: Sequence[Segment]) -> Table:
    """Returns a table of the critical path's entries, longest first."""
    table = Table(title="Critical path", title_justify="left")
    table.add_column("call", overflow="fold")
    table.add_column("part", overflow="fold")
    table.add_column("time", justify="right", no_wrap=True)
    table.add_column("share", justify="right", no_wrap=True)
    totals = path_totals(path)
    total_ns = max(1, sum(totals.values()))
    small_ns = 0
    for (name, part), spent_ns in totals.items():
        if spent_ns < SMALL_SHARE * total_ns:
            small_ns += spent_ns
        else:
            table.add_row(Text(name), _PART_LABELS[part], format_duration(spent_ns), f"{spent_ns / total_ns:.1%}")
    if small_ns:
        table.add_row("other", "", format_duration(small_ns), f"{small_ns / total_ns:.1%}")
    return table


_PART_LABELS: dict[Part, str] = {"compute": "compute", "transfer": "transfer", "driver": "driver, before the call"}


def busy_table(ranks: Mapping[str, Sequence[float]], devices: Mapping[str, float], pools: Mapping[str, str]) -> Table:
    """Returns a table of the busy and idle fractions of each role (mean over ranks) and each device."""
    table = Table(title="Busy and idle", title_justify="left")
    table.add_column("role or device", overflow="fold")
    table.add_column("", overflow="fold")
    table.add_column("busy", justify="right", no_wrap=True)
    table.add_column("idle", justify="right", no_wrap=True)
    for role, fractions in ranks.items():
        busy = sum(fractions) / len(fractions)
        table.add_row(Text(role), f"{len(fractions)} {'rank' if len(fractions) == 1 else 'ranks'}", *_busy_idle(busy))
    table.add_section()
    for label, busy in devices.items():
        table.add_row(Text(label), Text(f"{pools[label]} pool"), *_busy_idle(busy))
    return table


def _busy_idle(busy: float) -> tuple[str, str]:
    return f"{busy:.1%}", f"{1 - busy:.1%}"


def describe_bottleneck(path: Sequence[Segment], busy: Mapping[str, float]) -> str:
    """Returns one line that names the bottleneck: the largest part of the critical path and its main method."""
    totals = path_totals(path)
    total_ns = max(1, sum(totals.values()))
    parts: defaultdict[Part, int] = defaultdict(int)
    for (_, part), spent_ns in totals.items():
        parts[part] += spent_ns
    most = max(parts, key=lambda part: parts[part])
    share = f"{parts[most] / total_ns:.0%}"
    name, spent_ns = next((name, spent_ns) for (name, part), spent_ns in totals.items() if part == most)
    first = f"{name} ({spent_ns / total_ns:.0%})"
    if most == "driver":
        return f"bottleneck: driver ({share}), mostly before {first}"
    if most == "transfer":
        return f"bottleneck: data transfer ({share}), mostly {first}"
    device = max(busy, key=lambda label: busy[label])
    return f"bottleneck: compute ({share}), mostly {first}; {device} was busy {busy[device]:.0%} of the time"


def format_duration(ns: float) -> str:
    """Formats a duration in ns as milliseconds or seconds, with three significant digits."""
    value, unit = (ns / 1e9, "s") if ns >= 999.5e6 else (ns / 1e6, "ms")
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:,.{digits}f} {unit}"
