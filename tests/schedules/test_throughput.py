"""Stragglers, integrals over time, and the idle time that decides about evaluations: hand-computed values."""

import pytest

from flowrl.schedules.throughput import RETRY_AFTER, IdleTime, StepFunction, ThroughputTracker


def tracker_of(*seconds: float) -> ThroughputTracker:
    """Returns a tracker at time 100 s, after each replica has completed one group in the given seconds."""
    tracker = ThroughputTracker(len(seconds))
    for rank, took_s in sorted(enumerate(seconds), key=lambda each: -each[1]):
        tracker.advance_clock(100 - took_s)
        tracker.start_group(rank, rank)
    tracker.advance_clock(100)
    for rank in range(len(seconds)):
        tracker.complete_group(rank, rank)
    return tracker


def test_seconds_per_group_is_a_moving_average():
    tracker, mean_s = tracker_of(2.0), 2.0
    for group, count in enumerate([2, 3, 4, 5, 6, 7, 8, 8, 8], start=1):
        now_s = 100.0 + 10 * group
        tracker.advance_clock(now_s - 10)
        tracker.start_group(0, group)
        tracker.advance_clock(now_s)
        mean_s += (10 - mean_s) / count
        assert tracker.seconds_per_group(0) == pytest.approx(mean_s)
        tracker.complete_group(0, group)
        assert tracker.seconds_per_group(0) == pytest.approx(mean_s)


def test_a_replica_without_measurement_is_not_a_straggler():
    tracker = ThroughputTracker(2)
    tracker.start_group(0, 0)
    tracker.complete_group(0, 0)
    assert tracker.seconds_per_group(0) is None and not tracker.is_straggler(0, [1], 0)
    tracker.advance_clock(5)
    tracker.start_group(0, 1)
    tracker.advance_clock(50)
    assert tracker.seconds_per_group(0) == 45 and not tracker.is_straggler(0, [1], 0)


def test_a_replica_that_others_wait_for_is_a_straggler():
    tracker = tracker_of(10.0, 1.0, 1.0)
    assert tracker.is_straggler(0, [1, 2], 8)  # the others need 4 s
    assert not tracker.is_straggler(0, [1, 2], 24)
    assert not tracker.is_straggler(1, [0, 2], 0)
    assert not tracker.is_straggler(0, [], 0)


def test_a_replica_up_to_twice_as_slow_is_not_a_straggler():
    assert not tracker_of(2.0, 1.0, 1.0).is_straggler(0, [1, 2], 0)
    assert tracker_of(2.1, 1.0, 1.0).is_straggler(0, [1, 2], 0)


def test_an_idle_straggler_is_retried():
    tracker = tracker_of(10.0, 1.0)
    tracker.advance_clock(100 + RETRY_AFTER * 10)
    assert tracker.is_straggler(0, [1], 0)
    tracker.advance_clock(101 + RETRY_AFTER * 10)
    assert not tracker.is_straggler(0, [1], 0)
    tracker.start_group(0, 9)
    assert tracker.is_straggler(0, [1], 0)


def test_dropped_groups_and_lost_processes_are_not_measured():
    tracker = tracker_of(1.0, 1.0)
    tracker.start_group(0, 9)
    tracker.cancel_group(0, 9)
    tracker.start_group(1, 8)
    tracker.reset_replica(1)
    tracker.advance_clock(500)
    assert tracker.seconds_per_group(0) == 1.0 and tracker.seconds_per_group(1) is None


def test_a_step_function_is_integrated() -> None:
    function = StepFunction()
    assert function.integral_s(0, 10**9) == 0
    for at, value in ((1, 0.5), (3, 0.5), (5, 0.0), (6, 1.0)):
        function.set(at * 10**9, value)
    assert function.integral_s(0, 2 * 10**9) == 0.5
    assert function.integral_s(2 * 10**9, 7 * 10**9) == 0.5 * 3 + 1
    assert function.integral_s(7 * 10**9, 9 * 10**9) == 2 and len(function._changes) == 1


def idle_time(num_replicas: int, *intervals: tuple[float, int]) -> IdleTime:
    """Returns the idle time after intervals of (seconds, number of idle replicas)."""
    idle, now_s = IdleTime(), 100.0
    idle.resume(now_s)
    for seconds, num_idle in intervals:
        idle.set(now_s, num_idle / num_replicas)
        now_s += seconds
    idle.set(now_s, 0.0)
    return idle


def test_an_evaluation_runs_alongside_training_if_the_idle_time_covers_it() -> None:
    """Two replicas generate 80 rows in 4 s, are idle for 2 s, and one of them for another 2 s: 20 rows per second, and
    3 idle seconds. They generate at most 60 rows in this time.
    """
    idle = idle_time(2, (3, 0), (2, 2), (2, 1))
    idle.add_rows(80)
    assert idle.covers(60) and not idle.covers(61)


def test_replicas_that_are_never_idle_do_not_evaluate_alongside_training() -> None:
    idle = idle_time(2, (5, 0))
    idle.add_rows(100)
    assert not idle.covers(1)


def test_the_time_of_evaluations_that_training_waits_for_is_neither_idle_nor_busy() -> None:
    """4 s busy for 8 rows, 1 s idle, so the idle time covers 2 rows. The 10 s of an evaluation do not count."""
    idle = idle_time(1, (4, 0), (1, 1))
    idle.add_rows(8)
    idle.pause()
    idle.add_rows(5)
    idle.set(110.0, 1.0)
    idle.resume(115.0)
    idle.set(115.0, 0.0)
    assert idle.covers(2) and not idle.covers(3)


def test_idle_time_before_an_evaluation_does_not_count_for_the_next_one() -> None:
    idle = idle_time(1, (1, 0), (9, 1))
    idle.add_rows(4)
    assert idle.covers(36)
    idle.reset()
    idle.set(112.0, 0.0)  # 2 s busy for 4 rows
    idle.add_rows(4)
    assert not idle.covers(1)
