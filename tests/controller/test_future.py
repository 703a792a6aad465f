import pytest

from flowrl import Future
from tests.controller.conftest import Shared


def test_a_call_that_does_not_block_gives_a_future(shared: Shared):
    future = shared.first.double(3)
    assert isinstance(future, Future) and future.get() == 6 and future.done()


def test_a_future_is_an_argument_of_another_group(shared: Shared):
    assert shared.second.identify(shared.first.double(4)) == [(0, 2, 8), (1, 2, 8)]


def test_a_future_of_all_ranks_arrives_gathered(shared: Shared):
    assert shared.second.options(shared.first.share.submit([1, 2, 3])) == [{"x": [(0, 2), (1, 4), (2, 6)]}] * 2


def test_futures_chain_without_a_get(shared: Shared):
    assert shared.first.double(shared.second.double(shared.first.double(1))).get() == 8


def test_a_list_of_futures_is_scattered(shared: Shared):
    assert shared.second.own_entry([shared.first.double(1), shared.first.double(2)]) == [(0, 2), (1, 4)]


def test_metrics_are_passed_on_merged(shared: Shared, batch):
    seen = shared.second.options(shared.first.statistics.submit(batch))
    assert seen[0]["x"]["rows"].result() == 7


def test_reading_a_future_twice_returns_the_same_value(shared: Shared):
    future = shared.first.double(5)
    assert future.get() == future.get() == 10


@pytest.mark.parametrize("timeout_s", [None, 60.0])
def test_a_timeout_that_is_not_reached_changes_nothing(shared: Shared, timeout_s: float | None):
    assert shared.first.double(5).get(timeout_s) == 10
