"""Which makers are too slow, by hand."""

import pytest

from flowrl.schedules.throughput import TRIES_AFTER, Throughput


def paced(*seconds: float) -> Throughput:
    """Replicas that have each done one group in this time; it is 100 s when the last is done."""
    pace = Throughput(len(seconds))
    for rank, took_s in sorted(enumerate(seconds), key=lambda each: -each[1]):
        pace.tick(100 - took_s)
        pace.given(rank, rank)
    pace.tick(100)
    for rank in range(len(seconds)):
        pace.finished(rank, rank)
    return pace


def test_the_time_of_a_maker_is_a_mean_of_which_the_last_group_is_an_eighth_or_more():
    pace, mean_s = paced(2.0), 2.0
    for group, count in enumerate([2, 3, 4, 5, 6, 7, 8, 8, 8], start=1):
        now_s = 100.0 + 10 * group
        pace.tick(now_s - 10)
        pace.given(0, group)
        pace.tick(now_s)
        mean_s += (10 - mean_s) / count
        assert pace.seconds(0) == pytest.approx(mean_s)  # so long it works on that already
        pace.finished(0, group)
        assert pace.seconds(0) == pytest.approx(mean_s)


def test_what_is_not_known_is_not_slow():
    pace = Throughput(2)
    pace.given(0, 0)
    pace.finished(0, 0)
    assert pace.seconds(0) is None and not pace.is_too_slow(0, [1], 0)
    pace.tick(5)
    pace.given(0, 1)
    pace.tick(50)
    assert pace.seconds(0) == 45 and not pace.is_too_slow(0, [1], 0)


def test_a_maker_is_too_slow_where_the_others_had_to_wait_for_it():
    pace = paced(10.0, 1.0, 1.0)
    assert pace.is_too_slow(0, [1, 2], 8)  # which they do in 4 s
    assert not pace.is_too_slow(0, [1, 2], 24)
    assert not pace.is_too_slow(1, [0, 2], 0)
    assert not pace.is_too_slow(0, [], 0), "there is nobody else"


def test_a_maker_that_takes_up_to_twice_as_long_is_as_good_as_the_others():
    assert not paced(2.0, 1.0, 1.0).is_too_slow(0, [1, 2], 0)
    assert paced(2.1, 1.0, 1.0).is_too_slow(0, [1, 2], 0)


def test_one_that_was_given_nothing_for_long_is_given_one_group_again():
    pace = paced(10.0, 1.0)
    pace.tick(100 + TRIES_AFTER * 10)
    assert pace.is_too_slow(0, [1], 0)
    pace.tick(101 + TRIES_AFTER * 10)
    assert not pace.is_too_slow(0, [1], 0)
    pace.given(0, 9)
    assert pace.is_too_slow(0, [1], 0)


def test_a_group_that_was_given_up_and_a_process_that_is_gone_tell_nothing():
    pace = paced(1.0, 1.0)
    pace.given(0, 9)
    pace.left(0, 9)
    pace.given(1, 8)
    pace.lost(1)
    pace.tick(500)
    assert pace.seconds(0) == 1.0 and pace.seconds(1) is None
