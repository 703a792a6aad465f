"""Dropping old calls bounds a run's trace, and changes neither the busy fractions of the run nor the printed tables."""

import random
from collections import deque
from io import StringIO

import pytest
from rich.console import Console

from flowrl.data.events import CallEvent
from flowrl.report.chrome_trace import Resume, Trace, chrome_trace
from flowrl.report.explain import explain
from flowrl.report.trace import MAX_CALLS, MAX_RECENT_CALLS, RecordedCalls, busy_fractions, loop_events
from tests.report.call_events import timed

MS = 10**6
CALLS_PER_STEP = 4


def simulate(num_steps: int) -> list[CallEvent]:
    """Returns the calls of a run whose driver is one step ahead, in the order in which they end."""
    draw = random.Random(0)
    events, free_ns, submitted_ns = [], {"cpu:0": 10 * MS, "cpu:1": 10 * MS}, 10 * MS
    events.append(timed(1, "actor.__init__", "cpu:0", (0, 0, 0, 5 * MS, 5 * MS)))
    for step in range(num_steps):
        ended_ns = 0
        for i in range(CALLS_PER_STEP):
            number, device = CALLS_PER_STEP * step + i + 2, f"cpu:{i % 2}"
            inputs = (number - 1,) if i else ()
            started_ns = max(free_ns[device], ended_ns, submitted_ns) + draw.randrange(MS)
            ended_ns = started_ns + draw.randrange(10 * MS)
            arrived_ns = max(submitted_ns, started_ns - draw.randrange(MS))
            times_ns = (submitted_ns + i, arrived_ns, started_ns, ended_ns, ended_ns)
            events.append(timed(number, f"role{i}.run", device, times_ns, *inputs))
            free_ns[device] = ended_ns
        submitted_ns = max(submitted_ns, ended_ns - 15 * MS)
    return sorted(events, key=lambda event: event.finished_ns)


EVENTS = simulate(num_steps=3_000)


def record(events: list[CallEvent]) -> tuple[deque[CallEvent], RecordedCalls]:
    """Drops old calls after every step. Returns the calls that are kept."""
    kept: deque[CallEvent] = deque()
    recorded = RecordedCalls(kept)
    for i, event in enumerate(events):
        kept.append(event)
        if i % CALLS_PER_STEP == 0:
            recorded.drop_oldest(keep_from_ns=event.started_ns)
    return kept, recorded


@pytest.mark.parametrize("count", [1, 5_000, len(EVENTS)])
def test_busy_fractions_cover_dropped_calls(count: int) -> None:
    events = EVENTS[:count]
    _, recorded = record(events)
    loop = loop_events(events)
    start_ns, end_ns = min((e.started_ns for e in loop), default=0), max((e.ended_ns for e in loop), default=0)
    assert recorded.busy_fractions() == pytest.approx(busy_fractions(loop, start_ns, end_ns), rel=1e-12)


def test_the_number_of_calls_is_bounded() -> None:
    kept, recorded = record(EVENTS)
    assert MAX_CALLS <= len(kept) <= 1.1 * MAX_CALLS + CALLS_PER_STEP
    assert list(kept) == EVENTS[-len(kept) :]
    assert recorded.dropped_until_ns == max(event.finished_ns for event in EVENTS[: -len(kept)])


def test_calls_of_recent_steps_are_kept() -> None:
    kept = deque(EVENTS)
    recorded = RecordedCalls(kept)
    recorded.drop_oldest(keep_from_ns=EVENTS[100].finished_ns)
    assert list(kept) == EVENTS[100:] and recorded.dropped_until_ns == EVENTS[99].finished_ns
    recorded.drop_oldest(keep_from_ns=0)
    assert len(kept) == len(EVENTS) - 100


def test_calls_of_very_large_steps_are_bounded() -> None:
    kept = deque(EVENTS * 9)
    RecordedCalls(kept).drop_oldest(keep_from_ns=0)
    assert len(kept) == MAX_RECENT_CALLS


def printed(events: list[CallEvent], dropped_until_ns: int, window_s: float | None = None) -> str:
    console = Console(file=StringIO(), width=100)
    explain(events, dropped_until_ns=dropped_until_ns, window_s=window_s, console=console)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("window_s", [None, 5.0])
def test_tables_of_the_kept_calls_equal_those_of_all_calls_in_the_same_time(window_s: float | None) -> None:
    kept, recorded = record(EVENTS)
    until_ns = recorded.dropped_until_ns
    assert printed(list(kept), until_ns, window_s) == printed(EVENTS, until_ns, window_s)


def test_a_trace_file_has_the_time_until_which_calls_are_missing() -> None:
    trace = Trace(EVENTS[:10], [Resume(EVENTS[2].number, 1), Resume(EVENTS[8].number, 2)]).last_calls(5)
    assert list(trace.events) == EVENTS[5:10] and trace.resumes == [Resume(EVENTS[8].number, 2)]
    until_ns = EVENTS[4].finished_ns
    assert trace.dropped_until_ns == until_ns
    assert chrome_trace(trace.events, dropped_until_ns=until_ns)["otherData"] == {"dropped_until_ns": until_ns}
    assert trace.last_calls(5) == trace
