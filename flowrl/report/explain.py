"""What a trace tells a person: tables of its calls, its critical path and who was busy; and what bounds the run."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median

from rich.console import Console
from rich.table import Table
from rich.text import Text

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
)

SMALL_SHARE = 0.005
"""Lines of the critical path below this share are summed up in one."""

MIN_WIDTH = 64
"""Tables are so wide at least: a narrower terminal breaks their lines, and no figure is cut."""


def explain(events: Sequence[CallEvent], *, window_s: float | None = None, console: Console | None = None) -> None:
    """Prints where the time of a run's loop went.

    Args:
        events: the run's calls; at least one is not of its start, which is left out.
        window_s: look at the last so many seconds only, and at the calls that finished in them; None is the whole loop.
        console: where to print; the standard output unless stated.
    """
    console = console or Console()
    loop = loop_events(events)
    start_ns, end_ns = span(loop)
    if window_s is not None:
        start_ns = max(start_ns, end_ns - int(window_s * 1e9))
    parts = [call for call in call_parts(loop) if call.event.finished_ns > start_ns]
    path = since(critical_path(loop), start_ns)
    busy = busy_fractions(loop, start_ns, end_ns)
    console.print(f"{len(parts):,} calls in {duration(end_ns - start_ns)}", highlight=False)
    pools = {event.device_label: event.pool for event in loop}
    ranks = rank_fractions(loop, start_ns, end_ns)
    for table in (calls_table(parts), path_table(path), busy_table(ranks, busy, pools)):
        if console.width < MIN_WIDTH:
            table.width = MIN_WIDTH
        console.print(table, crop=False)
    console.print(bound(path, busy), highlight=False, markup=False)


def calls_table(calls: Sequence[CallParts]) -> Table:
    """What the calls of each method waited for and took, median and total; the longest computing first."""
    table = Table(title="Calls", title_justify="left")
    table.add_column("call", overflow="fold")
    table.add_column("", no_wrap=True)
    for heading in ("wait", "queue", "transfer", "compute"):
        table.add_column(heading, justify="right", no_wrap=True)
    by_name: defaultdict[str, list[CallParts]] = defaultdict(list)
    for call in calls:
        by_name[call_name(call.event)].append(call)
    for name, found in sorted(by_name.items(), key=lambda item: -sum(call.compute_ns for call in item[1])):
        columns = [
            [call.wait_ns for call in found],
            [call.queue_ns for call in found],
            [call.transfer_ns for call in found],
            [call.compute_ns for call in found],
        ]
        medians = (duration(median(column)) for column in columns)
        totals = (duration(sum(column)) for column in columns)
        table.add_row(Text(name), "median", *medians)
        table.add_row(f"  {len(found):,} {'call' if len(found) == 1 else 'calls'}", "total", *totals, end_section=True)
    return table


def path_table(path: Sequence[Segment]) -> Table:
    """What the critical path consists of, the longest first."""
    table = Table(title="Critical path", title_justify="left")
    table.add_column("call", overflow="fold")
    table.add_column("part", overflow="fold")
    table.add_column("time", justify="right", no_wrap=True)
    table.add_column("share", justify="right", no_wrap=True)
    totals = path_totals(path)
    whole_ns = max(1, sum(totals.values()))
    small_ns = 0
    for (name, part), spent_ns in totals.items():
        if spent_ns < SMALL_SHARE * whole_ns:
            small_ns += spent_ns
        else:
            table.add_row(Text(name), _ROLE_OF_PART[part], duration(spent_ns), f"{spent_ns / whole_ns:.1%}")
    if small_ns:
        table.add_row("everything else", "", duration(small_ns), f"{small_ns / whole_ns:.1%}")
    return table


_ROLE_OF_PART: dict[Part, str] = {"compute": "compute", "transfer": "transfer", "driver": "driver, before it"}


def busy_table(ranks: Mapping[str, Sequence[float]], devices: Mapping[str, float], pools: Mapping[str, str]) -> Table:
    """How much of the time each role's ranks, on average, and each device were in a method.

    Args:
        ranks: the busy fraction of every rank of each role.
        devices: the busy fraction of each device.
        pools: the pool that each device belongs to.
    """
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


def bound(path: Sequence[Segment], busy: Mapping[str, float]) -> str:
    """One sentence on what the run's time depends on most, from its critical path and each device's busy fraction."""
    totals = path_totals(path)
    whole_ns = max(1, sum(totals.values()))
    parts: defaultdict[Part, int] = defaultdict(int)
    for (_, part), spent_ns in totals.items():
        parts[part] += spent_ns
    most = max(parts, key=lambda part: parts[part])
    share = f"{parts[most] / whole_ns:.0%}"
    name, spent_ns = next((name, spent_ns) for (name, part), spent_ns in totals.items() if part == most)
    first = f"{name} ({spent_ns / whole_ns:.0%})"
    if most == "driver":
        return f"Bound by the driver: {share} of the time it had not submitted the next call, above all before {first}."
    if most == "transfer":
        return f"Bound by transfer: {share} of the time calls and results were on their way, above all for {first}."
    device = max(busy, key=lambda label: busy[label])
    return (
        f"Bound by compute: {share} of the time went into methods that the rest waited for, above all {first}; "
        f"{device} was busy {busy[device]:.0%} of the time."
    )


def duration(ns: float) -> str:
    """Nanoseconds with three digits, in milliseconds below a second."""
    value, unit = (ns / 1e9, "s") if ns >= 999.5e6 else (ns / 1e6, "ms")
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:,.{digits}f} {unit}"
