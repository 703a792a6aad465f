"""Timeline of the report: the calls of a trace per rank, the critical path, and the data flow between methods."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from flowrl.data.events import CallEvent
from flowrl.report.chrome_trace import Row, Trace
from flowrl.report.explain import describe_bottleneck
from flowrl.report.trace import (
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

Named = dict[str, int]
"""Name -> index, in the order of the indices."""


def timeline_data(trace: Trace) -> dict[str, Any] | None:
    """Returns the calls of the training loop since the last resume, or None if there are none.

    Calls are columns of equal length: index of the row (rank), index of the method, start, duration, wait time, queue
    time and transfer time. Times are integers in microseconds. The first start is relative to `origin_ns`, and every
    other start is relative to the previous start.
    """
    events = loop_events(trace.last_process())
    if not events:
        return None
    start_ns, end_ns = span(events)
    start_ns = max(start_ns, trace.dropped_until_ns)
    parts = [call for call in call_parts(events) if call.event.finished_ns > start_ns]
    parts.sort(key=lambda call: call.event.started_ns)
    path = since(critical_path(events), start_ns)
    devices = busy_fractions(events, start_ns, end_ns)
    rows = {row: i for i, row in enumerate(sorted({Row.of(call.event) for call in parts}))}
    methods: Named = {name: i for i, name in enumerate(sorted({call_name(call.event) for call in parts}))}
    starts = [_us(call.event.started_ns - start_ns) for call in parts]
    origins = [0, *starts[:-1]]
    return {
        "origin_ns": start_ns,
        "duration_us": _us(end_ns - start_ns),
        "is_partial": bool(trace.dropped_until_ns),
        "is_resumed": bool(trace.resumes),
        "rows": [{"pool": r.pool, "device": r.device, "role": r.role, "rank": r.rank} for r in rows],
        "methods": list(methods),
        "calls": {
            "row": [rows[Row.of(call.event)] for call in parts],
            "method": [methods[call_name(call.event)] for call in parts],
            "start": [start - origin for start, origin in zip(starts, origins, strict=True)],
            "duration": [_us(call.compute_ns) for call in parts],
            "wait": [_us(call.wait_ns) for call in parts],
            "queue": [_us(call.queue_ns) for call in parts],
            "transfer": [_us(call.transfer_ns) for call in parts],
        },
        "path": _path_columns(path, rows, start_ns),
        "totals": _path_table(path),
        "bottleneck": f"{describe_bottleneck(path, devices).capitalize()}.",
        "devices": devices,
        "roles": rank_fractions(events, start_ns, end_ns),
        "counts": _counts(trace, start_ns),
        "flow": flow_data(events),
    }


def _us(ns: int) -> int:
    return round(ns / 1e3)


_PARTS = ("compute", "transfer", "driver")


def _path_columns(path: Sequence[Segment], rows: Mapping[Row, int], start_ns: int) -> dict[str, list[int]]:
    """Returns the critical path as columns. A segment of the driver, or of a rank that is not in `rows`, has row -1."""
    on_rank = [segment.part != "driver" and Row.of(segment.event) in rows for segment in path]
    return {
        "row": [rows[Row.of(s.event)] if is_on_rank else -1 for s, is_on_rank in zip(path, on_rank, strict=True)],
        "part": [_PARTS.index(segment.part) for segment in path],
        "start": [_us(segment.start_ns - start_ns) for segment in path],
        "duration": [_us(segment.duration_ns) for segment in path],
    }


_NUM_TOTALS = 8
"""Number of entries of the critical path in the table of the report."""


def _path_table(path: Sequence[Segment]) -> list[dict[str, Any]]:
    totals = path_totals(path)
    total_ns = max(1, sum(totals.values()))
    return [
        {"call": name, "part": part, "seconds": spent_ns / 1e9, "share": spent_ns / total_ns}
        for (name, part), spent_ns in list(totals.items())[:_NUM_TOTALS]
    ]


def _counts(trace: Trace, start_ns: int) -> dict[str, list[float]]:
    """Returns the number of groups per state over time, as columns. `at_s` has the times. Missing values are 0."""
    counts = [counted for counted in trace.counts if counted.at_ns >= start_ns]
    names = sorted({name for counted in counts for name in counted.values})
    if not counts:
        return {}
    columns: dict[str, list[float]] = {"at_s": [round((counted.at_ns - start_ns) / 1e9, 3) for counted in counts]}
    return columns | {name: [counted.values.get(name, 0) for counted in counts] for name in names}


def flow_data(events: Sequence[CallEvent]) -> dict[str, Any]:
    """Returns the graph of methods: a node per method, and an edge from each method to the methods that read its
    results.

    Nodes are in the order of their first calls. The value `calls` of an edge is the number of reading calls.
    """
    by_number = {event.number: event for event in events}
    first: dict[str, CallEvent] = {}
    num_calls: Counter[str] = Counter()
    edges: Counter[tuple[str, str]] = Counter()
    for event in sorted(events, key=lambda event: event.number):
        name = call_name(event)
        first.setdefault(name, event)
        num_calls[name] += 1
        sources = {call_name(by_number[number]) for number in event.inputs if number in by_number}
        edges.update((source, name) for source in sources if source != name)
    return {
        "nodes": [
            {"name": name, "role": event.role, "pool": event.pool, "calls": num_calls[name]}
            for name, event in first.items()
        ],
        "edges": [{"from": source, "to": target, "calls": count} for (source, target), count in edges.items()],
    }
