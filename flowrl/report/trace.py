"""Where the time of a run went: pure functions on call events.

A process, which is a device of a pool, runs one call after another, in the order in which the driver submitted them. So
a call begins when the driver has submitted it, the results that it reads are there, and its process is free.

Clocks of two machines differ: a call that seems to have arrived before it was submitted, or before a result that it
reads was there, is taken to have been submitted, or to have had that result, when it arrived. No time is ever negative.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal, NamedTuple

from flowrl.data.events import CallEvent

STARTING = ("__init__", "join", "prepare")
"""Calls that belong to the start of a run, not to its loop."""

Part = Literal["compute", "transfer", "driver"]


def loop_events(events: Iterable[CallEvent]) -> list[CallEvent]:
    """The events without those of the start of the run."""
    return [event for event in events if event.method not in STARTING]


def call_name(event: CallEvent) -> str:
    return f"{event.role}.{event.method}"


class Times(NamedTuple):
    """The times of a call, never falling."""

    submitted_ns: int
    arrived_ns: int
    started_ns: int
    ended_ns: int
    finished_ns: int


def times(event: CallEvent) -> Times:
    """The event's times in order: the process's own as they are, if its clock was not set back meanwhile."""
    own = accumulate((event.arrived_ns, event.started_ns, event.ended_ns, event.finished_ns), max)
    return Times(min(event.submitted_ns, event.arrived_ns), *own)


@dataclass(frozen=True, slots=True)
class CallParts:
    """What a call's time from its submission until its result was packed went into; the parts sum to it."""

    event: CallEvent
    wait_ns: int
    """Until the last call whose result it reads had finished."""
    queue_ns: int
    """From then until its process had finished the call before."""
    transfer_ns: int
    """From then until the method began: arguments on their way and unpacked. And the packing of its result."""
    compute_ns: int
    """In the method."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of the critical path. A piece of the part `driver` ends when the driver submitted the event."""

    event: CallEvent
    part: Part
    start_ns: int
    end_ns: int

    @property
    def duration_ns(self) -> int:
        return self.end_ns - self.start_ns


def span(events: Iterable[CallEvent]) -> tuple[int, int]:
    """From the first submission to the last result; (0, 0) without events."""
    both = [(at.submitted_ns, at.finished_ns) for at in map(times, events)]
    return min((first for first, _ in both), default=0), max((last for _, last in both), default=0)


def call_parts(events: Iterable[CallEvent]) -> list[CallParts]:
    """The parts of every call, in the order of submission. Calls that are not among `events` are waited for by none."""
    graph, found = _Graph(events), []
    for number, event in graph.events.items():
        at = graph.times[number]
        ready_ns = max(at.submitted_ns, graph.seen_by(number, graph.last_input(number)))
        free_ns = max(ready_ns, graph.seen_by(number, graph.before.get(number)))
        transfer_ns = at.started_ns - free_ns + at.finished_ns - at.ended_ns
        compute_ns = at.ended_ns - at.started_ns
        found.append(CallParts(event, ready_ns - at.submitted_ns, free_ns - ready_ns, transfer_ns, compute_ns))
    return found


def critical_path(events: Iterable[CallEvent]) -> list[Segment]:
    """What the end of the run waited for at each moment: segments in order of time, which cover its span exactly once.

    From the call that finished last back: each call waited for the last of its inputs, for the call before it in its
    process, or for the driver, whichever came last. What the driver waited for is not recorded: its own time is taken
    to begin when the last call had finished that did so before the submission.
    """
    graph = _Graph(events)
    if not graph.events:
        return []
    begin_ns, cursor_ns = span(graph.events.values())
    number: int | None = max(graph.times, key=lambda number: graph.times[number].finished_ns)
    path: list[Segment] = []

    def reach(event: CallEvent, part: Part, start_ns: int) -> None:
        """Goes back to `start_ns`, or stays where the path is earlier than that already."""
        nonlocal cursor_ns
        if start_ns < cursor_ns:
            path.append(Segment(event, part, start_ns, cursor_ns))
            cursor_ns = start_ns

    while number is not None:
        event, at = graph.events[number], graph.times[number]
        cause, released_ns = graph.cause(number)
        reach(event, "transfer", at.ended_ns)
        reach(event, "compute", at.started_ns)
        reach(event, "transfer", released_ns)
        if cause is None:
            cause = graph.last_finished(number, released_ns)
            reach(event, "driver", begin_ns if cause is None else graph.times[cause].finished_ns)
        number = cause
    return path[::-1]


class _Graph:
    """Calls and what each may have waited for: always one with a smaller number, so that no walk goes in circles."""

    def __init__(self, events: Iterable[CallEvent]) -> None:
        self.events = {event.number: event for event in sorted(events, key=lambda event: event.number)}
        self.times = {number: times(event) for number, event in self.events.items()}
        self.before: dict[int, int] = {}
        """Call -> the one before it in its process."""
        latest: dict[tuple[str, str], int] = {}
        for number, event in self.events.items():
            process = (event.pool, event.device_label)
            if process in latest:
                self.before[number] = latest[process]
            latest[process] = number
        self._finished = sorted((at.finished_ns, number) for number, at in self.times.items())

    def last_input(self, number: int) -> int | None:
        """The call that finished last of those that this one reads."""
        known = [source for source in self.events[number].inputs if source < number and source in self.events]
        return max(known, key=lambda source: self.times[source].finished_ns, default=None)

    def seen_by(self, number: int, source: int | None) -> int:
        """When call `source` had finished, by the clock of call `number`: before that arrived; 0 without a source."""
        return 0 if source is None else min(self.times[source].finished_ns, self.times[number].arrived_ns)

    def cause(self, number: int) -> tuple[int | None, int]:
        """The call that this one waited for last, or None for the driver; and when that wait was over."""
        sources = [source for source in (self.last_input(number), self.before.get(number)) if source is not None]
        last = max(sources, key=lambda source: self.seen_by(number, source), default=None)
        submitted_ns = self.times[number].submitted_ns
        if last is None or self.seen_by(number, last) < submitted_ns:
            return None, submitted_ns
        return last, self.seen_by(number, last)

    def last_finished(self, number: int, until_ns: int) -> int | None:
        """The call that finished last until then, of those submitted before this one."""
        for place in range(bisect_right(self._finished, until_ns, key=lambda entry: entry[0]) - 1, -1, -1):
            if self._finished[place][1] < number:
                return self._finished[place][1]
        return None


def since(path: Iterable[Segment], start_ns: int) -> list[Segment]:
    """The part of a critical path from `start_ns` on."""
    return [replace(piece, start_ns=max(piece.start_ns, start_ns)) for piece in path if piece.end_ns > start_ns]


def path_totals(path: Iterable[Segment]) -> dict[tuple[str, Part], int]:
    """Nanoseconds of the path per call name and part, the largest first."""
    totals: defaultdict[tuple[str, Part], int] = defaultdict(int)
    for piece in path:
        totals[call_name(piece.event), piece.part] += piece.duration_ns
    return dict(sorted(totals.items(), key=lambda item: -item[1]))


def busy_fractions(events: Iterable[CallEvent], start_ns: int, end_ns: int) -> dict[str, float]:
    """The share of [start_ns, end_ns] in which each device ran at least one call, by `CallEvent.device_label`.

    Calls that overlap count once. Every device that appears in the events is in the result.
    """
    intervals: defaultdict[str, list[CallEvent]] = defaultdict(list)
    for event in events:
        intervals[event.device_label].append(event)
    return {label: _covered(found, start_ns, end_ns) for label, found in sorted(intervals.items())}


def rank_fractions(events: Iterable[CallEvent], start_ns: int, end_ns: int) -> dict[str, list[float]]:
    """The share of [start_ns, end_ns] in which each rank of each role was in one of its methods, in order of ranks."""
    ranks: defaultdict[tuple[str, int], list[CallEvent]] = defaultdict(list)
    for event in events:
        ranks[event.role, event.rank].append(event)
    roles: defaultdict[str, list[float]] = defaultdict(list)
    for (role, _), found in sorted(ranks.items()):
        roles[role].append(_covered(found, start_ns, end_ns))
    return dict(roles)


def _covered(events: Sequence[CallEvent], start_ns: int, end_ns: int) -> float:
    """The share of the window in which at least one of the calls ran."""
    spans = sorted((max(event.started_ns, start_ns), min(event.ended_ns, end_ns)) for event in events)
    covered, reached = 0, start_ns
    for first, last in spans:
        covered += max(0, last - max(first, reached))
        reached = max(reached, last)
    return covered / max(1, end_ns - start_ns)
