"""Parts of calls, critical path, busy and idle fractions."""

from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrl import Batch, Cluster, Placement
from flowrl.data.events import CallEvent
from flowrl.report.trace import (
    IdleTracker,
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
from tests.controller.sleeping_workers import Sleeping
from tests.report.call_events import STEP, any_events, call, timed

EVENTS = [
    call("actor", 10_000, 60_000),
    call("critic", 20_000, 80_000, device="cpu:1", pool="second"),
    call("actor", 70_000, 90_000),
    call("reward", 30_000, 40_000, rank=1, device="cpu:1", pool="second"),
]


def test_call_parts_of_a_step() -> None:
    result = {c.event.number: (c.wait_ns, c.queue_ns, c.transfer_ns, c.compute_ns) for c in call_parts(STEP)}
    assert result == {
        1: (0, 0, 12 + 5, 38),
        2: (55 - 5, 0, 6 + 1, 10),
        3: (55 - 6, 72 - 55, 3 + 1, 20),
        4: (96 - 7, 0, 8 + 1, 40),
        5: (0, 0, 5, 10),
    }


def test_critical_path_of_a_step() -> None:
    assert [(p.event.number, p.part, p.start_ns, p.end_ns) for p in critical_path(STEP)] == [
        (1, "transfer", 0, 12),
        (1, "compute", 12, 50),
        (1, "transfer", 50, 55),
        (2, "transfer", 55, 61),
        (2, "compute", 61, 71),
        (2, "transfer", 71, 72),
        (3, "transfer", 72, 75),
        (3, "compute", 75, 95),
        (3, "transfer", 95, 96),
        (4, "transfer", 96, 104),
        (4, "compute", 104, 144),
        (4, "transfer", 144, 145),
        (5, "driver", 145, 165),
        (5, "transfer", 165, 170),
        (5, "compute", 170, 180),
    ]


def test_the_totals_of_the_critical_path_are_sums_by_call_and_part() -> None:
    totals = path_totals(critical_path(STEP))
    assert list(totals.items())[:5] == [
        (("actor.update", "compute"), 40),
        (("rollout.generate", "compute"), 38),
        (("critic.values", "compute"), 20),
        (("actor.save", "driver"), 20),
        (("rollout.generate", "transfer"), 17),
    ]
    assert sum(totals.values()) == 180 and totals["critic.values", "transfer"] == 4


def test_since_truncates_the_path() -> None:
    assert [(p.event.number, p.start_ns, p.end_ns) for p in since(critical_path(STEP), 144)] == [
        (4, 144, 145),
        (5, 145, 165),
        (5, 165, 170),
        (5, 170, 180),
    ]


def test_driver_time_starts_at_the_first_submission_if_no_call_has_finished() -> None:
    events = [timed(1, "a.m", "cpu:0", (0, 1, 1, 40, 40)), timed(2, "b.m", "cpu:1", (30, 31, 31, 50, 50))]
    assert [(p.event.number, p.part, p.duration_ns) for p in critical_path(events)] == [
        (2, "driver", 30),
        (2, "transfer", 1),
        (2, "compute", 19),
    ]


def test_driver_time_starts_when_the_last_call_finished() -> None:
    events = [
        timed(1, "a.m", "cpu:0", (0, 0, 0, 10, 10)),
        timed(2, "b.m", "cpu:1", (0, 0, 0, 20, 20)),
        timed(3, "c.m", "cpu:2", (25, 25, 25, 30, 30)),
    ]
    assert [(call_name(p.event), p.part) for p in critical_path(events)] == [
        ("b.m", "compute"),
        ("c.m", "driver"),
        ("c.m", "compute"),
    ]


def test_a_clock_that_is_behind_does_not_change_the_own_parts() -> None:
    # Submitted at 100 by the driver's clock, it arrived at 90 by its own; the input was done at 95 by a third.
    events = [
        timed(1, "a.m", "cpu:0", (50, 60, 60, 94, 95)),
        timed(2, "b.m", "cpu:1", (100, 90, 92, 120, 121), 1),
    ]
    second = call_parts(events)[1]
    assert (second.wait_ns, second.queue_ns, second.transfer_ns, second.compute_ns) == (0, 0, 2 + 1, 28)
    assert sum(segment.duration_ns for segment in critical_path(events)) == 121 - 50


def test_unknown_inputs_are_ignored() -> None:
    only = call_parts([replace(STEP[3], inputs=(2, 3))])[0]
    assert (only.wait_ns, only.transfer_ns) == (0, 104 - 7 + 1)


@given(any_events(one_clock=True))
def test_the_parts_of_a_call_sum_to_its_time(events: list[CallEvent]) -> None:
    result = call_parts(events)
    assert [c.event.number for c in result] == list(range(len(events)))
    for c in result:
        parts = (c.wait_ns, c.queue_ns, c.transfer_ns, c.compute_ns)
        assert min(parts) >= 0 and sum(parts) == c.event.finished_ns - c.event.submitted_ns
        assert c.compute_ns == c.event.ended_ns - c.event.started_ns


@given(any_events(one_clock=False))
def test_no_part_is_negative_with_any_clocks(events: list[CallEvent]) -> None:
    assert all(min(c.wait_ns, c.queue_ns, c.transfer_ns, c.compute_ns) >= 0 for c in call_parts(events))


@given(any_events(one_clock=False))
def test_the_critical_path_covers_the_span_once(events: list[CallEvent]) -> None:
    path = critical_path(events)
    assert all(segment.duration_ns > 0 for segment in path)
    assert all(before.end_ns == after.start_ns for before, after in pairwise(path))
    if path:
        assert (path[0].start_ns, path[-1].end_ns) == span(events)
    assert sum(segment.duration_ns for segment in path) == span(events)[1] - span(events)[0]


@given(any_events(one_clock=False), st.randoms())
def test_the_order_of_the_events_is_irrelevant(events: list[CallEvent], random: Random) -> None:
    shuffled = random.sample(events, len(events))
    assert critical_path(shuffled) == critical_path(events) and call_parts(shuffled) == call_parts(events)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 9), st.sets(st.integers(0, 7), max_size=3)), max_size=8))
def test_without_gaps_the_path_is_compute_only(calls: list[tuple[int, int, set[int]]]) -> None:
    free, done, events = {0: 0, 1: 0, 2: 0}, [], []
    for number, (process, duration, wanted) in enumerate(calls):
        inputs = [source for source in wanted if source < number]
        start = max([free[process], *(done[source] for source in inputs)])
        end = free[process] = start + duration
        done.append(end)
        events.append(timed(number, "a.m", f"cpu:{process}", (0, start, start, end, end), *inputs))
    assert {segment.part for segment in critical_path(events)} <= {"compute"}
    assert sum(segment.duration_ns for segment in critical_path(events)) == max(done, default=0)


def test_startup_calls_are_not_part_of_the_loop() -> None:
    starting = [replace(STEP[0], method=method) for method in ("__init__", "join")]
    assert loop_events([*starting, *STEP]) == STEP


def test_the_connection_of_a_weight_transfer_is_part_of_startup_only_before_the_loop() -> None:
    methods = ("num_buckets", "open_transfer_group", "join_transfer_group", "describe_weights")
    connecting = [timed(n, f"actor.{method}", "cpu:0", (n, n, n, n + 1, n + 1)) for n, method in enumerate(methods, 1)]
    loop = [
        timed(5, "rollout.generate", "cpu:1", (6, 6, 6, 9, 9)),
        timed(6, "actor.update", "cpu:0", (9, 9, 9, 12, 12)),
    ]
    assert loop_events([*connecting, *loop]) == loop
    later = [replace(event, number=event.number + 6, submitted_ns=20, finished_ns=30) for event in connecting]
    assert loop_events([*loop, *later]) == [*loop, *later]


PIPELINED = [
    timed(1, "reward.__init__", "cpu:0", (0, 300, 300, 310, 310)),
    timed(2, "reward.find_missing_protections", "cpu:0", (1, 311, 311, 500, 500)),
    timed(3, "rollout.__init__", "cpu:1", (2, 310, 310, 600, 600)),
    timed(4, "reward.num_buckets", "cpu:0", (3, 501, 501, 502, 502)),
    timed(5, "rollout.generate", "cpu:1", (4, 601, 602, 640, 641)),
    timed(6, "reward.score", "cpu:0", (5, 642, 643, 650, 650), 5),
]
"""The driver submits all calls at the start. Startup ends at 600."""


def test_calls_that_were_submitted_during_startup_are_measured_from_its_end() -> None:
    loop = loop_events(PIPELINED)
    assert [call_name(event) for event in loop] == ["rollout.generate", "reward.score"]
    assert span(loop) == (600, 650)
    parts = [(c.wait_ns, c.queue_ns, c.transfer_ns, c.compute_ns) for c in call_parts(loop)]
    assert parts == [(0, 0, 2 + 1, 38), (41, 0, 2, 7)]
    assert path_totals(critical_path(loop)) == {
        ("rollout.generate", "compute"): 38,
        ("reward.score", "compute"): 7,
        ("rollout.generate", "transfer"): 3,
        ("reward.score", "transfer"): 2,
    }


def test_a_call_of_the_loop_may_start_before_the_last_process_has_started() -> None:
    early = replace(PIPELINED[4], arrived_ns=550, started_ns=551, device="cpu:2")
    loop = loop_events([*PIPELINED[:4], early])
    assert [event.number for event in loop] == [5] and span(loop) == (550, 641)


def test_a_device_is_busy_while_any_call_runs_on_it() -> None:
    assert busy_fractions(EVENTS, 0, 100_000) == pytest.approx({"node0/cpu:0": 0.7, "node0/cpu:1": 0.6})


def test_calls_outside_the_window_do_not_count() -> None:
    assert busy_fractions(EVENTS, 50_000, 70_000) == pytest.approx({"node0/cpu:0": 0.5, "node0/cpu:1": 1.0})
    assert busy_fractions(EVENTS, 90_000, 99_000) == {"node0/cpu:0": 0.0, "node0/cpu:1": 0.0}


def test_devices_of_two_nodes_are_distinguished() -> None:
    other = CallEvent(1, (), "actor", 1, 1, "cpu:0", "main", "update", 0, 0, 0, 100_000, 100_000)
    assert list(busy_fractions([*EVENTS, other], 0, 100_000)) == ["node0/cpu:0", "node0/cpu:1", "node1/cpu:0"]


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30))))
def test_busy_time_is_the_number_of_moments_with_a_call(spans: list[tuple[int, int]]) -> None:
    events = [call("actor", min(span), max(span)) for span in spans]
    moments = {moment for span in spans for moment in range(min(span), max(span))}
    assert busy_fractions(events, 0, 30).get("node0/cpu:0", 0.0) == pytest.approx(len(moments) / 30)


def test_a_role_is_busy_rank_by_rank() -> None:
    events = [*EVENTS, call("actor", 0, 100_000, rank=1, device="cpu:2")]
    result = rank_fractions(events, 0, 100_000)
    assert result == {"actor": [0.7, 1.0], "critic": [0.6], "reward": [0.1]}


PAIR = Placement(device="cpu", pools={"policy": [1], "judges": [1]}, roles={"actor": "policy", "critic": "judges"})


def test_idle_fraction_is_the_mean_over_ranks() -> None:
    events = [call("actor", 0, 60), call("rollout", 10, 100, rank=0), call("rollout", 50, 60, rank=1)]
    idle = IdleTracker()
    result = idle.idle_fractions(events, ["actor", "rollout", "critic"], 0, 100)
    assert result == {"idle_actor": pytest.approx(0.4), "idle_rollout": pytest.approx(0.5)}


def test_a_rank_without_calls_in_a_step_is_idle() -> None:
    idle = IdleTracker()
    idle.idle_fractions([call("rollout", 0, 10, rank=0), call("rollout", 0, 10, rank=1)], ["rollout"], 0, 10)
    assert idle.idle_fractions([call("rollout", 10, 20)], ["rollout"], 10, 20) == {"idle_rollout": pytest.approx(0.5)}
    assert idle.idle_fractions([], ["rollout"], 20, 30) == {"idle_rollout": 1.0}


def test_trace_of_a_real_run(ray_session: None) -> None:
    """Each method takes a second. The first critic call waits for the actor, the second queues."""
    with Cluster(PAIR, num_threads=1) as cluster:
        actor, critic = cluster.group("actor", Sleeping), cluster.group("critic", Sleeping)
        cluster.wait_for_calls()
        batch = Batch.from_rows([{"x": i} for i in range(4)])
        batch["x"] = actor.values(batch)
        first, second = critic.update(batch), critic.update(batch)
        assert [first.get()["rows"].result(), second.get()["rows"].result()] == [4, 4]
        cluster.wait_for_calls()
        events = loop_events(cluster.calls.events)
    values, first, second = call_parts(events)
    assert values.wait_ns == values.queue_ns == first.queue_ns == 0
    assert min(first.wait_ns, second.wait_ns, second.queue_ns) > 0.9e9
    totals = path_totals(critical_path(events))
    assert list(totals)[:2] == [("critic.update", "compute"), ("actor.values", "compute")]
    assert totals["critic.update", "compute"] + totals["actor.values", "compute"] >= 3e9
