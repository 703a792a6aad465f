"""RecordedCalls bounds the calls that a run keeps for its trace, while busy fractions still cover the whole run."""

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping

from flowrl.data.events import CallEvent
from flowrl.report.trace import busy_ns, loop_events

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
