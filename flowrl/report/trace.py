"""Timing analysis of call events: parts of calls, critical path, busy and idle fractions. Bounds the recorded calls.

A process serves one device of a pool. It runs one call at a time, in the order of submission. A call starts when it is
submitted, its inputs are available and its process is free.

Clocks of different machines may disagree. If a call seems to arrive before its submission or before one of its inputs,
the arrival time is used instead, so no duration is negative.
"""

from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal, NamedTuple

from flowrl.data.events import CallEvent

STARTING = ("__init__", "join", "find_missing_protections")
"""Methods that are called during startup, before the training loop."""

CONNECTING = ("num_buckets", "open_transfer_group", "join_transfer_group", "describe_weights")
"""Methods that connect roles for weight transfers: in startup if rollouts are streamed, otherwise in the first
transfer.
"""

Part = Literal["compute", "transfer", "driver"]


def loop_events(events: Iterable[CallEvent]) -> list[CallEvent]:
    """Returns the events of the training loop, without startup.

    Startup ends when the calls before the first one that neither starts nor connects roles are finished. Calls that
    were finished by then are part of startup. The driver may submit the first calls of the loop before that time. Their
    submission times become the end of startup, so that their wait and queue times do not contain startup.
    """
    events = list(events)
    first = min((event.number for event in events if event.method not in (*STARTING, *CONNECTING)), default=0)
    end_ns = max((event.finished_ns for event in events if event.number < first), default=0)
    loop = [event for event in events if event.method not in STARTING and event.finished_ns > end_ns]
    return [event if event.submitted_ns >= end_ns else replace(event, submitted_ns=end_ns) for event in loop]


def call_name(event: CallEvent) -> str:
    return f"{event.role}.{event.method}"


class Times(NamedTuple):
    """Times of a call, in ascending order."""

    submitted_ns: int
    arrived_ns: int
    started_ns: int
    ended_ns: int
    finished_ns: int


def times(event: CallEvent) -> Times:
    """Returns the times of an event, corrected to be in ascending order."""
    own = accumulate((event.arrived_ns, event.started_ns, event.ended_ns, event.finished_ns), max)
    return Times(min(event.submitted_ns, event.arrived_ns), *own)


@dataclass(frozen=True, slots=True)
class CallParts:
    """Durations of the parts of a call. Their sum is the time from the submission until the result is packed."""

    event: CallEvent
    wait_ns: int
    """Time from the submission until the last input is available."""
    queue_ns: int
    """Time from the arrival of the last input until the process is free."""
    transfer_ns: int
    """Time for receiving and unpacking the arguments, and for packing the result."""
    compute_ns: int
    """Execution time of the method."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Interval of the critical path. An interval of part `driver` ends at the submission of `event`."""

    event: CallEvent
    part: Part
    start_ns: int
    end_ns: int

    @property
    def duration_ns(self) -> int:
        return self.end_ns - self.start_ns


def span(events: Iterable[CallEvent]) -> tuple[int, int]:
    """Returns the times of the first submission and the last result, or (0, 0) without events."""
    both = [(at.submitted_ns, at.finished_ns) for at in map(times, events)]
    return min((first for first, _ in both), default=0), max((last for _, last in both), default=0)


def call_parts(events: Iterable[CallEvent]) -> list[CallParts]:
    """Returns the parts of every call, in the order of submission. Ignores inputs that are not among `events`."""
    graph, calls = _Graph(events), []
    for number, event in graph.events.items():
        at = graph.times[number]
        ready_ns = max(at.submitted_ns, graph.seen_by(number, graph.last_input(number)))
        free_ns = max(ready_ns, graph.seen_by(number, graph.before.get(number)))
        transfer_ns = at.started_ns - free_ns + at.finished_ns - at.ended_ns
        compute_ns = at.ended_ns - at.started_ns
        calls.append(CallParts(event, ready_ns - at.submitted_ns, free_ns - ready_ns, transfer_ns, compute_ns))
    return calls


def critical_path(events: Iterable[CallEvent]) -> list[Segment]:
    """Returns the critical path: consecutive segments that cover the time span of the events exactly once.

    The path is traced backwards from the call that finished last. A call can be preceded by its last input, by the
    previous call of its process, or by the driver. The path takes the predecessor that the call waited for longest.
    Events do not record why the driver submitted a call late. All time between the end of the last earlier call and the
    submission therefore counts as driver time.
    """
    graph = _Graph(events)
    if not graph.events:
        return []
    begin_ns, cursor_ns = span(graph.events.values())
    number: int | None = max(graph.times, key=lambda number: graph.times[number].finished_ns)
    path: list[Segment] = []

    def reach(event: CallEvent, part: Part, start_ns: int) -> None:
        """Extends the path back to `start_ns`, unless the path already starts earlier."""
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
    """Dependency graph of calls. Every edge leads to a call with a smaller number, so the graph has no cycles."""

    def __init__(self, events: Iterable[CallEvent]) -> None:
        self.events = {event.number: event for event in sorted(events, key=lambda event: event.number)}
        self.times = {number: times(event) for number, event in self.events.items()}
        self.before: dict[int, int] = {}
        """Previous call of the same process, per call."""
        latest: dict[tuple[str, str], int] = {}
        for number, event in self.events.items():
            process = (event.pool, event.device_label)
            if process in latest:
                self.before[number] = latest[process]
            latest[process] = number
        self._finished = sorted((at.finished_ns, number) for number, at in self.times.items())

    def last_input(self, number: int) -> int | None:
        """Returns the input that finished last."""
        known = [source for source in self.events[number].inputs if source < number and source in self.events]
        return max(known, key=lambda source: self.times[source].finished_ns, default=None)

    def seen_by(self, number: int, source: int | None) -> int:
        """Returns the finish time of `source`, capped at the arrival time of call `number`; 0 without a source."""
        return 0 if source is None else min(self.times[source].finished_ns, self.times[number].arrived_ns)

    def cause(self, number: int) -> tuple[int | None, int]:
        """Returns the call's predecessor on the critical path (None: the driver), and the end of the wait for it."""
        sources = [source for source in (self.last_input(number), self.before.get(number)) if source is not None]
        last = max(sources, key=lambda source: self.seen_by(number, source), default=None)
        submitted_ns = self.times[number].submitted_ns
        if last is None or self.seen_by(number, last) < submitted_ns:
            return None, submitted_ns
        return last, self.seen_by(number, last)

    def last_finished(self, number: int, until_ns: int) -> int | None:
        """Returns the last call that finished by `until_ns`, among the calls submitted before `number`."""
        for i in range(bisect_right(self._finished, until_ns, key=lambda entry: entry[0]) - 1, -1, -1):
            if self._finished[i][1] < number:
                return self._finished[i][1]
        return None


def since(path: Iterable[Segment], start_ns: int) -> list[Segment]:
    """Returns the critical path from `start_ns` on."""
    return [replace(segment, start_ns=max(segment.start_ns, start_ns)) for segment in path if segment.end_ns > start_ns]


def path_totals(path: Iterable[Segment]) -> dict[tuple[str, Part], int]:
    """Returns (call name, part) -> nanoseconds on a critical path, largest first."""
    totals: defaultdict[tuple[str, Part], int] = defaultdict(int)
    for segment in path:
        totals[call_name(segment.event), segment.part] += segment.duration_ns
    return dict(sorted(totals.items(), key=lambda item: -item[1]))


def busy_fractions(events: Iterable[CallEvent], start_ns: int, end_ns: int) -> dict[str, float]:
    """Returns the fraction of [start_ns, end_ns] in which each device (`CallEvent.device_label`) ran a call."""
    intervals: defaultdict[str, list[CallEvent]] = defaultdict(list)
    for event in events:
        intervals[event.device_label].append(event)
    return {label: _busy_fraction(calls, start_ns, end_ns) for label, calls in sorted(intervals.items())}


def rank_fractions(events: Iterable[CallEvent], start_ns: int, end_ns: int) -> dict[str, list[float]]:
    """Returns, per role, the fraction of [start_ns, end_ns] in which each rank ran a call, in the order of ranks."""
    ranks: defaultdict[tuple[str, int], list[CallEvent]] = defaultdict(list)
    for event in events:
        ranks[event.role, event.rank].append(event)
    roles: defaultdict[str, list[float]] = defaultdict(list)
    for (role, _), calls in sorted(ranks.items()):
        roles[role].append(_busy_fraction(calls, start_ns, end_ns))
    return dict(roles)


class IdleTracker:
    """Computes the idle fraction of roles per step. Remembers the number of ranks of each role."""

    def __init__(self) -> None:
        self._num_ranks: dict[str, int] = {}

    def idle_fractions(
        self, events: Iterable[CallEvent], roles: Iterable[str], start_ns: int, end_ns: int
    ) -> dict[str, float]:
        """Returns `idle_<role>`: the fraction of [start_ns, end_ns] without a call of the role, mean over ranks."""
        if end_ns <= start_ns:
            return {}
        busy = rank_fractions(events, start_ns, end_ns)
        for role, fractions in busy.items():
            self._num_ranks[role] = max(self._num_ranks.get(role, 0), len(fractions))
        known = [role for role in roles if role in self._num_ranks]
        return {f"idle_{role}": 1 - sum(busy.get(role, ())) / self._num_ranks[role] for role in known}


def _busy_fraction(events: Iterable[CallEvent], start_ns: int, end_ns: int) -> float:
    return busy_ns(events, start_ns, end_ns) / max(1, end_ns - start_ns)


def busy_ns(events: Iterable[CallEvent], start_ns: int, end_ns: int) -> int:
    """Returns the nanoseconds of [start_ns, end_ns] in which at least one of the calls ran."""
    spans = sorted((max(event.started_ns, start_ns), min(event.ended_ns, end_ns)) for event in events)
    covered, reached = 0, start_ns
    for first, last in spans:
        covered += max(0, last - max(first, reached))
        reached = max(reached, last)
    return covered


MAX_CALLS = 10_000
"""Number of calls that a run keeps for `trace.json` (about 4 MB of memory, and at most 10 MB on disk)."""

MAX_RECENT_CALLS = 100_000
"""Largest number of calls, if the most recent steps have more than `MAX_CALLS`."""

_SPARE = MAX_CALLS // 10
"""Number of calls above `MAX_CALLS` at which the oldest calls are dropped."""


class RecordedCalls:
    """The most recent calls of a run, and the busy time of each device during all earlier calls.

    The controller appends finished calls to `events`, and `drop_oldest` removes them from the front.
    """

    def __init__(self, events: deque[CallEvent]) -> None:
        self._events = events
        self.dropped_until_ns = 0
        """Time at which the last dropped call was finished, in ns since the epoch; 0 if no call was dropped."""
        self._busy_ns: defaultdict[str, int] = defaultdict(int)
        """Busy time per device until `_counted_until_ns`."""
        self._counted_until_ns: dict[str, int] = {}
        self._first_ns: int | None = None
        """Start of the first dropped call of the training loop."""

    def drop_oldest(self, keep_from_ns: int) -> None:
        """Drops the oldest calls above `MAX_CALLS`.

        Calls that were finished at `keep_from_ns` or later are dropped only above `MAX_RECENT_CALLS`.
        """
        if len(self._events) < MAX_CALLS + _SPARE:
            return
        dropped: list[CallEvent] = []
        while len(self._events) > MAX_CALLS:
            if self._events[0].finished_ns >= keep_from_ns and len(self._events) <= MAX_RECENT_CALLS:
                break
            dropped.append(self._events.popleft())
        self.dropped_until_ns = max([self.dropped_until_ns, *(event.finished_ns for event in dropped)])
        loop = loop_events(dropped)
        if not loop:
            return
        first_ns = min(event.started_ns for event in loop)
        self._first_ns = first_ns if self._first_ns is None else min(self._first_ns, first_ns)
        for label, calls in _by_device(loop).items():
            until_ns = max(event.ended_ns for event in calls)
            self._busy_ns[label] += busy_ns(calls, self._counted_until_ns.get(label, first_ns), until_ns)
            self._counted_until_ns[label] = max(self._counted_until_ns.get(label, 0), until_ns)

    def busy_fractions(self) -> dict[str, float]:
        """Returns the fraction of the training loop in which each device ran a call, also of dropped calls."""
        loop = loop_events(self._events)
        firsts = [event.started_ns for event in loop] + ([] if self._first_ns is None else [self._first_ns])
        start_ns = min(firsts, default=0)
        end_ns = max([*(event.ended_ns for event in loop), *self._counted_until_ns.values()], default=0)
        calls = _by_device(loop)
        return {
            label: (
                self._busy_ns[label]
                + busy_ns(calls.get(label, ()), self._counted_until_ns.get(label, start_ns), end_ns)
            )
            / max(1, end_ns - start_ns)
            for label in sorted(calls.keys() | self._busy_ns.keys())
        }


def _by_device(events: Iterable[CallEvent]) -> Mapping[str, list[CallEvent]]:
    calls: defaultdict[str, list[CallEvent]] = defaultdict(list)
    for event in events:
        calls[event.device_label].append(event)
    return calls
