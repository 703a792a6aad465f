from dataclasses import replace

from flowrl.data.events import CallEvent, Counted
from flowrl.report.chrome_trace import Trace
from flowrl.report.page.timeline_data import flow_data, timeline_data

MS = 1_000_000


def call(number: int, role: str, method: str, times: tuple[int, ...], inputs: tuple[int, ...] = ()) -> CallEvent:
    return CallEvent(number, inputs, role, 0, 0, "cpu:0", "main", method, *(time * MS for time in times))


EVENTS = [
    call(1, "actor", "__init__", (0, 0, 0, 90, 90)),
    call(2, "rollout", "generate", (100, 101, 102, 110, 111)),
    call(3, "actor", "update", (100, 112, 113, 120, 120), inputs=(2,)),
]


def test_calls_are_columns_of_microseconds_without_startup() -> None:
    data = timeline_data(Trace(EVENTS))
    assert data is not None
    assert data["origin_ns"] == 100 * MS
    assert data["duration_us"] == 20_000
    assert [(row["role"], row["rank"], row["pool"]) for row in data["rows"]] == [
        ("actor", 0, "main"),
        ("rollout", 0, "main"),
    ]
    assert data["methods"] == ["actor.update", "rollout.generate"]
    calls = data["calls"]
    assert (calls["row"], calls["method"]) == ([1, 0], [1, 0])
    assert calls["start"] == [2_000, 11_000]  # the second value is the difference between 13 ms and 2 ms
    assert calls["duration"] == [8_000, 7_000]
    assert (calls["wait"], calls["queue"], calls["transfer"]) == ([0, 11_000], [0, 0], [3_000, 2_000])


def test_the_critical_path_covers_the_timeline_once() -> None:
    data = timeline_data(Trace(EVENTS))
    assert data is not None
    path = data["path"]
    assert sum(path["duration"]) == data["duration_us"]
    ends = [start + duration for start, duration in zip(path["start"], path["duration"], strict=True)]
    assert path["start"][1:] == ends[:-1]
    assert data["bottleneck"].startswith("Bottleneck: compute")


def test_a_trace_without_calls_of_the_loop_has_no_timeline() -> None:
    assert timeline_data(Trace(EVENTS[:1])) is None
    assert timeline_data(Trace()) is None


def test_dropped_calls_move_the_start() -> None:
    data = timeline_data(replace(Trace(EVENTS), dropped_until_ns=112 * MS))
    assert data is not None and data["is_partial"]
    assert data["methods"] == ["actor.update"]


def test_counts_of_groups_are_columns() -> None:
    counts = [Counted(50 * MS, {"running": 9}), Counted(105 * MS, {"running": 2}), Counted(115 * MS, {"complete": 1})]
    data = timeline_data(Trace(EVENTS, counts=counts))
    assert data is not None
    assert data["counts"] == {"at_s": [0.005, 0.015], "complete": [0, 1], "running": [2, 0]}


def test_the_flow_counts_reading_calls_once_per_method() -> None:
    ranks = [
        call(1, "rollout", "generate", (0, 0, 0, 1, 1)),
        call(2, "rollout", "generate", (0, 0, 0, 1, 1)),
        call(3, "actor", "update", (0, 1, 1, 2, 2), inputs=(1, 2)),
        call(4, "actor", "update", (0, 2, 2, 3, 3), inputs=(3,)),
    ]
    assert flow_data(ranks) == {
        "nodes": [
            {"name": "rollout.generate", "role": "rollout", "pool": "main", "calls": 2},
            {"name": "actor.update", "role": "actor", "pool": "main", "calls": 2},
        ],
        "edges": [{"from": "rollout.generate", "to": "actor.update", "calls": 1}],
    }
