import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrl.data.events import CallEvent
from flowrl.run.timeline import busy_fractions, chrome_trace, draw_timeline


def call(role: str, start: int, end: int, *, rank: int = 0, device: str = "cpu:0", pool: str = "main") -> CallEvent:
    return CallEvent(1, (), role, rank, 0, device, pool, "update", start - 1_000, start, start, end, end)


EVENTS = [
    call("actor", 10_000, 60_000),
    call("critic", 20_000, 80_000, device="cpu:1", pool="second"),
    call("actor", 70_000, 90_000),
    call("reward", 30_000, 40_000, rank=1, device="cpu:1", pool="second"),
]


def test_a_trace_has_a_process_per_device_and_a_thread_per_role_and_rank() -> None:
    labels = [event for event in chrome_trace(EVENTS)["traceEvents"] if event["name"].endswith("_name")]
    names = [(label["name"], label["args"]["name"], label["pid"]) for label in labels]
    assert names == [
        ("process_name", "main node0/cpu:0", 1),
        ("process_name", "second node0/cpu:1", 2),
        ("thread_name", "actor 0", 1),
        ("thread_name", "critic 0", 2),
        ("thread_name", "reward 1", 2),
    ]


def test_a_trace_counts_microseconds_from_the_first_submission() -> None:
    calls = [event for event in chrome_trace(EVENTS)["traceEvents"] if event["ph"] == "X"]
    assert [(event["cat"], event["ts"], event["dur"]) for event in calls] == [
        ("actor", 1.0, 50.0),
        ("critic", 11.0, 60.0),
        ("reward", 21.0, 10.0),
        ("actor", 61.0, 20.0),
    ]
    assert calls[0]["args"] == {"waited_ms": 0.001}


def test_a_trace_is_json_and_one_without_calls_is_empty() -> None:
    assert json.loads(json.dumps(chrome_trace(EVENTS))) == chrome_trace(EVENTS)
    assert chrome_trace([])["traceEvents"] == []


def test_thread_numbers_are_unique_over_all_processes() -> None:
    threads = [event["tid"] for event in chrome_trace(EVENTS)["traceEvents"] if event["name"] == "thread_name"]
    assert len(set(threads)) == len(threads)


def test_a_device_is_busy_while_any_call_runs_on_it() -> None:
    assert busy_fractions(EVENTS, 0, 100_000) == pytest.approx({"node0/cpu:0": 0.7, "node0/cpu:1": 0.6})


def test_calls_outside_the_window_do_not_count() -> None:
    assert busy_fractions(EVENTS, 50_000, 70_000) == pytest.approx({"node0/cpu:0": 0.5, "node0/cpu:1": 1.0})
    assert busy_fractions(EVENTS, 90_000, 99_000) == {"node0/cpu:0": 0.0, "node0/cpu:1": 0.0}


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30))))
def test_busy_time_is_the_number_of_moments_with_a_call(spans: list[tuple[int, int]]) -> None:
    events = [call("actor", min(span), max(span)) for span in spans]
    moments = {moment for span in spans for moment in range(min(span), max(span))}
    assert busy_fractions(events, 0, 30).get("node0/cpu:0", 0.0) == pytest.approx(len(moments) / 30)


def test_devices_of_two_nodes_are_told_apart() -> None:
    other = CallEvent(1, (), "actor", 1, 1, "cpu:0", "main", "update", 0, 0, 0, 100_000, 100_000)
    assert list(busy_fractions([*EVENTS, other], 0, 100_000)) == ["node0/cpu:0", "node0/cpu:1", "node1/cpu:0"]


@pytest.mark.parametrize("events", [EVENTS, []])
@pytest.mark.parametrize("window_s", [None, 1e-5])
def test_a_timeline_is_a_png(tmp_path: Path, events: list[CallEvent], window_s: float | None) -> None:
    draw_timeline(events, tmp_path / "timeline.png", window_s=window_s)
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
