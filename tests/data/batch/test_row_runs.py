import numpy as np
import pytest

from flowrl.data.batch.row_runs import LONG_RUN_BYTES, Runs, offsets, one_dtype


def copied(runs: Runs, column: np.ndarray, size: int) -> list:
    out = np.full((size, *column.shape[1:]), -1, dtype=column.dtype)
    runs.copy(column, out)
    return out.tolist()


def test_neighbours_that_stay_neighbours_are_one_run():
    runs = Runs.of(np.array([4, 5, 6, 0, 1]), np.array([0, 1, 3, 4, 5]))
    assert (runs.sources.tolist(), runs.targets.tolist(), runs.counts.tolist()) == ([4, 6, 0], [0, 3, 4], [2, 1, 2])


def test_short_runs_go_where_they_are_sent():
    runs = Runs.of(np.array([2, 0, 1]), np.array([0, 3, 4]))
    assert copied(runs, np.array([10, 11, 12]), 5) == [12, -1, -1, 10, 11]


def test_short_runs_side_by_side_keep_their_order():
    assert copied(Runs.of(np.array([2, 0, 0]), np.arange(3)), np.array([[1, 2], [3, 4], [5, 6]]), 3) == [
        [5, 6],
        [1, 2],
        [1, 2],
    ]


def test_long_runs_go_where_they_are_sent():
    size = LONG_RUN_BYTES // 8
    column = np.arange(2 * size)
    assert copied(Runs(np.array([size, 0]), np.array([0, size]), np.array([size, size])), column, 2 * size) == [
        *range(size, 2 * size),
        *range(size),
    ]


@pytest.mark.parametrize("width", [1, LONG_RUN_BYTES])
def test_a_wider_type_takes_narrow_values(width: int):
    out = np.zeros((2, width))
    Runs.of(np.array([1, 0]), np.array([0, 1])).copy(np.array([[1], [2]], dtype=np.int32).repeat(width, axis=1), out)
    assert out[:, 0].tolist() == out[:, -1].tolist() == [2, 1]


def test_the_tokens_of_rows_follow_their_rows():
    lengths = np.array([2, 0, 3])
    tokens = Runs.of(np.array([2, 0]), np.array([0, 1])).of_tokens(offsets(lengths), offsets(lengths[[2, 0]]))
    assert copied(tokens, np.arange(5), 5) == [2, 3, 4, 0, 1]


def test_no_runs_copy_nothing():
    assert copied(Runs.of(np.zeros(0, dtype=int), np.zeros(0, dtype=int)), np.arange(3), 2) == [-1, -1]


def test_one_dtype_holds_the_values_of_all():
    assert one_dtype([np.zeros(1, np.int64), np.zeros(1, np.int64)]) == np.int64
    assert one_dtype([np.zeros(1, np.int64), np.zeros(1, np.float32)]) == np.float64
