import numpy as np
import pytest

from flowrl.data.order.epoch_order import EpochOrder


def test_rows_of_one_file_have_the_order_of_earlier_versions() -> None:
    order = EpochOrder([(7, 1.0)], seed=3)
    for epoch in (0, 1, 5):
        assert order.rows(epoch).tolist() == np.random.default_rng([3, epoch]).permutation(7).tolist()
    assert [order.row(position) for position in range(7, 14)] == order.rows(1).tolist()


def test_weights_set_the_share_of_a_file_in_every_epoch() -> None:
    order = EpochOrder([(10, 2.0), (10, 0.3)], seed=0)
    assert len(order) == 23
    for epoch in range(3):
        rows = order.rows(epoch)
        assert np.bincount(rows, minlength=20)[:10].tolist() == [2] * 10
        assert (rows >= 10).sum() == 3


def test_a_small_weight_draws_every_row_before_any_row_again() -> None:
    order = EpochOrder([(4, 1.0), (10, 0.5)], seed=0)
    drawn = [row for epoch in range(2) for row in order.rows(epoch).tolist() if row >= 4]
    assert sorted(drawn) == list(range(4, 14))


def test_orders_depend_only_on_the_position() -> None:
    parts = [(5, 1.5), (3, 1.0)]
    first, second = EpochOrder(parts, seed=1), EpochOrder(parts, seed=1)
    expected = [first.row(position) for position in range(40)]
    assert [second.row(position) for position in reversed(range(40))] == expected[::-1]
    assert [EpochOrder(parts, seed=2).row(position) for position in range(40)] != expected


@pytest.mark.parametrize("weight", [1.0, 2.0])
def test_without_shuffling_the_order_is_that_of_the_files(weight: float) -> None:
    rows = EpochOrder([(2, weight), (2, 1.0)], seed=0, shuffle=False).rows(0).tolist()
    assert rows == [*([0, 1] * int(weight)), 2, 3]
