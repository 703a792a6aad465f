"""The trace file of a run: the Chrome trace format, which Perfetto and chrome://tracing open, and its way back."""

import json
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from flowrl.checkpoints.run_folder import RunFolder
from flowrl.config.errors import UserError
from flowrl.data.events import CallEvent, Counted
from flowrl.report.trace import CallParts, call_parts


class TraceError(UserError):
    """A file that is no trace of a run."""


@dataclass(frozen=True, order=True)
class Row:
    """A line of a timeline; rows sort by pool and device, then role and rank."""

    pool: str
    device: str
    role: str
    rank: int

    @classmethod
    def of(cls, event: CallEvent) -> "Row":
        return cls(event.pool, event.device_label, event.role, event.rank)


@dataclass(frozen=True)
class Resume:
    """Where another process went on with a run."""

    number: int
    """Of its first call."""
    step: int
    """That it went on after."""


@dataclass(frozen=True)
class Trace:
    """All calls of a run, in the order of submission, those of one process after those of the one before."""

    events: Sequence[CallEvent] = ()
    resumes: Sequence[Resume] = ()
    counts: Sequence[Counted] = ()

    def up_to_save(self, saved_at_s: float) -> "Trace":
        """What was submitted until a checkpoint's own save: the last call of that name before its manifest was written.

        Args:
            saved_at_s: seconds since 1970 at which the manifest was written.
        """
        until_ns = saved_at_s * 1e9
        saves = [e.number for e in self.events if e.method == _SAVE and e.submitted_ns <= until_ns]
        last = max(saves, default=0)
        kept = [event for event in self.events if event.number <= last]
        counts = [counted for counted in self.counts if counted.at_ns <= until_ns]
        return Trace(kept, [resume for resume in self.resumes if resume.number <= last], counts)

    def followed_by(self, events: Sequence[CallEvent], step: int) -> "Trace":
        """With the calls of the process that went on after a step, which had counted them from the start."""
        past = max((event.number for event in self.events), default=0)
        later = [replace(e, number=e.number + past, inputs=tuple(i + past for i in e.inputs)) for e in events]
        resumes = [Resume(min(event.number for event in later), step)] if later else []
        return Trace([*self.events, *later], [*self.resumes, *resumes], self.counts)

    def counted(self, counts: Iterable[Counted]) -> "Trace":
        """With these counts after its own."""
        return replace(self, counts=[*self.counts, *counts])

    def last_process(self) -> list[CallEvent]:
        """The calls of the process that wrote last."""
        first = max((resume.number for resume in self.resumes), default=0)
        return [event for event in self.events if event.number >= first]


_SAVE = "save_checkpoint"
"""The registered method by which workers take part in checkpoints."""


def chrome_trace(
    events: Sequence[CallEvent], resumes: Sequence[Resume] = (), counts: Sequence[Counted] = ()
) -> dict[str, Any]:
    """The events in the Chrome trace format.

    A process per pool and device, in it a thread per role and rank; times are microseconds from the first submission.
    `args` of each call has what it waited for, in milliseconds, and all of its event that is not said elsewhere, in
    nanoseconds. An arrow comes to each call from the last result that it waited for. A mark across all rows stands
    where another process went on with the run. Counts are a graph above all rows.
    """
    rows = sorted({Row.of(event) for event in events})
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
    origin_ns = _origin_ns(events)
    places = {event.number: _place(event, pids, tids) for event in events}
    by_number = {event.number: event for event in events}
    for parts in sorted(call_parts(events), key=lambda parts: parts.event.started_ns):
        event = parts.event
        trace.append(_complete_event(parts, origin_ns) | places[event.number])
        sources = [by_number[number] for number in event.inputs if number in by_number]
        if sources:
            last = max(sources, key=lambda source: source.finished_ns)
            # An arrow belongs to the call that holds its moment, which the end of a call is no longer in.
            left_ns = max(last.started_ns, last.ended_ns - 1)
            trace.append(_arrow("s", event, left_ns - origin_ns) | places[last.number])
            trace.append(_arrow("f", event, event.started_ns - origin_ns) | places[event.number] | {"bp": "e"})
    trace += [_mark(resume, by_number[resume.number].submitted_ns - origin_ns) for resume in resumes]
    trace += [_counter(counted, origin_ns) for counted in counts if events]
    return {"traceEvents": trace, "displayTimeUnit": "ms"}


def _origin_ns(events: Iterable[CallEvent]) -> int:
    return min((event.submitted_ns for event in events), default=0)


def _counter(counted: Counted, origin_ns: int) -> dict[str, Any]:
    at = (counted.at_ns - origin_ns) / 1e3
    return {"ph": "C", "name": "groups", "pid": 0, "tid": 0, "ts": at, "args": dict(counted.values)}


def _place(event: CallEvent, pids: Mapping[tuple[str, str], int], tids: Mapping[Row, int]) -> dict[str, int]:
    row = Row.of(event)
    return {"pid": pids[row.pool, row.device], "tid": tids[row]}


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
    name = f"resumed after step {resume.step}"
    return {"ph": "i", "s": "g", "name": name, "ts": at_ns / 1e3, "pid": 0, "tid": 0, "args": asdict(resume)}


def read_trace(path: Path) -> Trace:
    """A trace file, or that of a run folder.

    Raises `TraceError` where there is none, and for a file that `chrome_trace` did not make.
    """
    file = RunFolder(path).trace if path.is_dir() else path
    fix = "name the output folder of a run that has ended, or its trace.json"
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
        found = [_event(entry) for entry in value["traceEvents"] if entry["ph"] == "X"]
        resumes = [Resume(**entry["args"]) for entry in value["traceEvents"] if entry["ph"] == "i"]
        origin_ns = _origin_ns(found)
        counters = [entry for entry in value["traceEvents"] if entry["ph"] == "C"]
        counts = [Counted(origin_ns + round(1e3 * entry["ts"]), entry["args"]) for entry in counters]
    except OSError as error:
        raise TraceError(f"{file} cannot be read ({error.strerror}); {fix}") from error
    except KeyError as error:
        raise TraceError(f"{file} is not the trace of a run of flowrl: it has no {error.args[0]}; {fix}") from error
    except (ValueError, TypeError) as error:
        raise TraceError(f"{file} is not the trace of a run of flowrl; {fix}") from error
    return Trace(sorted(found, key=lambda event: event.number), resumes, counts)


_COUNTS = ("number", "rank", "submitted_ns", "arrived_ns", "started_ns", "ended_ns", "finished_ns")


def _event(entry: Mapping[str, Any]) -> CallEvent:
    """The event of an entry. Raises `KeyError` or `TypeError` for an entry of another making."""
    args = entry["args"]
    counts = {name: operator.index(args[name]) for name in _COUNTS}
    return CallEvent(
        **counts,
        inputs=tuple(args["inputs"]),
        role=entry["cat"],
        node=args["node"],
        device=args["device"],
        pool=args["pool"],
        method=entry["name"],
    )
