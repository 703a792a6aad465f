"""Reads and writes `trace.json`: call events in the Chrome trace format (Perfetto, chrome://tracing)."""

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from flowrl.checkpoints.run_folder import RunFolder
from flowrl.config.source import read_json
from flowrl.config.user_errors import UserError
from flowrl.data.events import MAX_COUNTS, CallEvent, Counted
from flowrl.report.trace import CallParts, call_parts


class TraceError(UserError):
    """Raised if a trace file is missing, or is not the trace of a run."""


@dataclass(frozen=True, order=True)
class Row:
    """One row of a timeline. Rows are sorted by pool, device, role and rank."""

    pool: str
    device: str
    role: str
    rank: int

    @classmethod
    def of(cls, event: CallEvent) -> "Row":
        return cls(event.pool, event.device_label, event.role, event.rank)


@dataclass(frozen=True)
class Resume:
    """A resume of the run in a new driver process."""

    number: int
    """Number of the first call after the resume."""
    step: int


@dataclass(frozen=True)
class Trace:
    """The most recent calls of a run in the order of submission, including calls before a resume."""

    events: Sequence[CallEvent] = ()
    resumes: Sequence[Resume] = ()
    counts: Sequence[Counted] = ()
    dropped_until_ns: int = 0
    """Time at which the last dropped call was finished, in ns since the epoch; 0 if the trace has all calls."""

    def up_to_save(self, saved_at_s: float) -> "Trace":
        """Returns the trace up to the last `save_checkpoint` call before `saved_at_s` (seconds since the epoch)."""
        until_ns = saved_at_s * 1e9
        saves = [e.number for e in self.events if e.method == _SAVE and e.submitted_ns <= until_ns]
        last = max(saves, default=0)
        kept = [event for event in self.events if event.number <= last]
        counts = [counted for counted in self.counts if counted.at_ns <= until_ns]
        resumes = [resume for resume in self.resumes if resume.number <= last]
        return Trace(kept, resumes, counts, self.dropped_until_ns)

    def followed_by(self, events: Sequence[CallEvent], step: int) -> "Trace":
        """Returns this trace followed by `events` of a process that resumed from the checkpoint of `step`."""
        offset = max((event.number for event in self.events), default=0)
        resumed = [replace(e, number=e.number + offset, inputs=tuple(i + offset for i in e.inputs)) for e in events]
        resumes = [Resume(min(event.number for event in resumed), step)] if resumed else []
        return Trace([*self.events, *resumed], [*self.resumes, *resumes], self.counts, self.dropped_until_ns)

    def last_calls(self, count: int) -> "Trace":
        """Returns this trace with the last `count` calls, without resumes and group counts before these calls."""
        if len(self.events) <= count:
            return self
        dropped, kept = self.events[: len(self.events) - count], self.events[len(self.events) - count :]
        until_ns = max([self.dropped_until_ns, *(event.finished_ns for event in dropped)])
        first = min((event.number for event in kept), default=0)
        resumes = [resume for resume in self.resumes if resume.number >= first]
        return Trace(kept, resumes, [counted for counted in self.counts if counted.at_ns > until_ns], until_ns)

    def counted(self, counts: Iterable[Counted]) -> "Trace":
        """Returns this trace with `counts` appended, which are numbers of prompt groups per state at several times.

        Keeps only the last `MAX_COUNTS` counts.
        """
        return replace(self, counts=[*self.counts, *counts][-MAX_COUNTS:])

    def last_process(self) -> list[CallEvent]:
        """Returns the calls after the last resume, or all calls if there was none."""
        first = max((resume.number for resume in self.resumes), default=0)
        return [event for event in self.events if event.number >= first]


_SAVE = "save_checkpoint"


def chrome_trace(
    events: Sequence[CallEvent],
    resumes: Sequence[Resume] = (),
    counts: Sequence[Counted] = (),
    dropped_until_ns: int = 0,
) -> dict[str, Any]:
    """Converts a trace to the Chrome trace format. Each device is a process and each rank is a thread.

    Times are microseconds since the first submission. The `args` of a call contain its wait, queue and transfer times
    in milliseconds and the other fields of its event. A flow arrow leads to a call from the input that finished last.
    An instant event marks each resume. Group counts are counter events. `otherData` has the time until which calls are
    missing.
    """
    rows = sorted({Row.of(event) for event in events})
    devices = list(dict.fromkeys((row.pool, row.device) for row in rows))
    pids = {device: number for number, device in enumerate(devices, start=1)}
    # Thread ids are unique over the trace, because some viewers do not support the same id in two processes.
    tids = {row: len(devices) + number for number, row in enumerate(rows, start=1)}
    trace: list[dict[str, Any]] = []
    for (pool, device), pid in pids.items():
        trace.append(_label("process_name", pid, 0, name=f"{pool} {device}"))
        trace.append(_label("process_sort_index", pid, 0, sort_index=pid))
    for row, tid in tids.items():
        pid = pids[row.pool, row.device]
        trace.append(_label("thread_name", pid, tid, name=f"{row.role} {row.rank}"))
        trace.append(_label("thread_sort_index", pid, tid, sort_index=tid))
    origin_ns = _origin_ns(events)
    ids = {event.number: {"pid": pids[event.pool, event.device_label], "tid": tids[Row.of(event)]} for event in events}
    by_number = {event.number: event for event in events}
    for parts in sorted(call_parts(events), key=lambda parts: parts.event.started_ns):
        event = parts.event
        trace.append(_complete_event(parts, origin_ns) | ids[event.number])
        sources = [by_number[number] for number in event.inputs if number in by_number]
        if sources:
            last = max(sources, key=lambda source: source.finished_ns)
            # Viewers attach an arrow to the call at the arrow's time. The end time is no longer part of the call.
            arrow_ns = max(last.started_ns, last.ended_ns - 1)
            trace.append(_arrow("s", event, arrow_ns - origin_ns) | ids[last.number])
            trace.append(_arrow("f", event, event.started_ns - origin_ns) | ids[event.number] | {"bp": "e"})
    trace += [_mark(resume, by_number[resume.number].submitted_ns - origin_ns) for resume in resumes]
    trace += [
        {"ph": "C", "name": "groups", "pid": 0, "tid": 0, "ts": (at.at_ns - origin_ns) / 1e3, "args": dict(at.values)}
        for at in counts
        if events
    ]
    return {
        "traceEvents": trace,
        "displayTimeUnit": "ms",
        "otherData": {"dropped_until_ns": dropped_until_ns},
    }


def _origin_ns(events: Iterable[CallEvent]) -> int:
    return min((event.submitted_ns for event in events), default=0)


def _label(kind: str, pid: int, tid: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args}


def _complete_event(parts: CallParts, origin_ns: int) -> dict[str, Any]:
    event = parts.event
    return {
        "ph": "X",
        "name": event.method,
        "cat": event.role,
        "ts": (event.started_ns - origin_ns) / 1e3,
        "dur": (event.ended_ns - event.started_ns) / 1e3,
        "args": {
            "wait_ms": parts.wait_ns / 1e6,
            "queue_ms": parts.queue_ns / 1e6,
            "transfer_ms": parts.transfer_ns / 1e6,
            "number": event.number,
            "inputs": list(event.inputs),
            "rank": event.rank,
            "node": event.node,
            "device": event.device,
            "pool": event.pool,
            "submitted_ns": event.submitted_ns,
            "arrived_ns": event.arrived_ns,
            "started_ns": event.started_ns,
            "ended_ns": event.ended_ns,
            "finished_ns": event.finished_ns,
        },
    }


def _arrow(phase: str, reader: CallEvent, at_ns: int) -> dict[str, Any]:
    return {"ph": phase, "name": "result", "cat": "result", "id": reader.number, "ts": at_ns / 1e3}


def _mark(resume: Resume, at_ns: int) -> dict[str, Any]:
    name = f"resumed from step {resume.step}"
    return {"ph": "i", "s": "g", "name": name, "ts": at_ns / 1e3, "pid": 0, "tid": 0, "args": asdict(resume)}


def read_trace(path: Path) -> Trace:
    """Reads the trace of a file or run folder. Raises `TraceError` if it is missing or not written by flowrl."""
    file = RunFolder(path).trace if path.is_dir() else path
    fix = "pass the output folder of a finished run, or its trace.json"
    try:
        value = read_json(file, max_mb=None)
        events = [_parse_event(entry) for entry in value["traceEvents"] if entry["ph"] == "X"]
        resumes = [Resume(**entry["args"]) for entry in value["traceEvents"] if entry["ph"] == "i"]
        origin_ns = _origin_ns(events)
        counters = [entry for entry in value["traceEvents"] if entry["ph"] == "C"]
        counts = [Counted(origin_ns + round(1e3 * entry["ts"]), entry["args"]) for entry in counters]
        # Earlier versions of flowrl wrote all calls.
        dropped_until_ns = operator.index(value["otherData"]["dropped_until_ns"]) if "otherData" in value else 0
    except OSError as error:
        raise TraceError(f"{file} cannot be read ({error.strerror}); {fix}") from error
    except KeyError as error:
        raise TraceError(f"{file} is not the trace of a run of flowrl: {error.args[0]} is missing; {fix}") from error
    except (ValueError, TypeError) as error:
        raise TraceError(f"{file} is not the trace of a run of flowrl; {fix}") from error
    return Trace(sorted(events, key=lambda event: event.number), resumes, counts, dropped_until_ns)


_COUNTS = ("number", "rank", "submitted_ns", "arrived_ns", "started_ns", "ended_ns", "finished_ns")


def _parse_event(entry: Mapping[str, Any]) -> CallEvent:
    """Parses the event of an entry. Raises `KeyError` or `TypeError` if a field is missing or has a wrong type."""
    args = entry["args"]
    counts: dict[str, Any] = {name: operator.index(args[name]) for name in _COUNTS}  # Any: names of other fields
    return CallEvent(
        usage={},  # not in the file
        **counts,
        inputs=tuple(args["inputs"]),
        role=entry["cat"],
        node=args["node"],
        device=args["device"],
        pool=args["pool"],
        method=entry["name"],
    )
