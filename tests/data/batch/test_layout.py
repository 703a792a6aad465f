import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.data.batch.layout import Rows, block_rows, compaction, gather, split_by_weight, split_evenly

SIZES = st.lists(st.integers(0, 4), min_size=1, max_size=5)


@st.composite
def sizes_and_rows(draw: st.DrawFn) -> tuple[list[int], Rows]:
    """Sizes of shards, some of them empty, and a range of their rows or positions among them."""
    sizes = draw(SIZES)
    total = sum(sizes)
    if draw(st.booleans()):
        start = draw(st.integers(0, total))
        return sizes, (start, draw(st.integers(start, total)))
    positions = draw(st.lists(st.integers(0, total - 1), max_size=8)) if total else []
    return sizes, np.array(positions, dtype=np.int64)


def rows_of(sizes: list[int], rows: Rows) -> list[int]:
    """What `gather` plans, done with lists."""
    plan = gather(sizes, rows)
    gathered = np.full(plan.num_rows, -1)
    for piece in plan.pieces:
        first = sum(sizes[: piece.shard])
        shard = np.arange(first, first + sizes[piece.shard])
        gathered[slice(None) if piece.at is None else piece.at] = shard if piece.rows is None else shard[piece.rows]
    return gathered.tolist()


@given(sizes_and_rows())
@settings(deadline=None)
def test_pieces_give_the_rows_that_were_asked_for(case: tuple[list[int], Rows]):
    sizes, rows = case
    assert rows_of(sizes, rows) == (list(range(*rows)) if isinstance(rows, tuple) else rows.tolist())


@given(sizes_and_rows())
@settings(deadline=None)
def test_there_is_always_a_piece_so_that_columns_are_known(case: tuple[list[int], Rows]):
    assert len(gather(*case).pieces) >= 1


def test_a_whole_shard_in_order_passes_without_a_copy():
    assert [piece.rows for piece in gather([2, 3], (0, 5)).pieces] == [None, None]


def test_rows_in_the_order_of_the_shards_go_where_the_last_ended():
    assert [piece.at for piece in gather([2, 3], np.array([0, 0, 3, 4])).pieces] == [slice(0, 2), slice(2, 4)]


def test_consecutive_rows_of_a_shard_are_read_as_a_slice():
    assert [piece.rows for piece in gather([4, 3], np.array([5, 6, 1, 2])).pieces] == [slice(1, 3), slice(1, 3)]


def test_a_range_reads_the_shards_that_it_meets_alone():
    assert [piece.shard for piece in gather([2, 0, 3, 4], (2, 5)).pieces] == [2]


@given(st.integers(0, 50), st.integers(1, 9))
def test_even_ranges_cover_all_rows_and_differ_by_at_most_one(num_rows: int, num_parts: int):
    ranges = split_evenly(num_rows, num_parts)
    sizes = [stop - start for start, stop in ranges]
    assert [row for start, stop in ranges for row in range(start, stop)] == list(range(num_rows))
    assert len(ranges) == num_parts and max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)


@given(st.lists(st.integers(0, 100), max_size=30), st.integers(1, 5))
@settings(deadline=None)
def test_weighted_parts_hold_every_row_once_in_ascending_order(weights: list[int], num_parts: int):
    parts = split_by_weight(np.array(weights), num_parts)
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(weights)))
    assert all(part.tolist() == sorted(part) for part in parts)


def test_the_heaviest_row_stands_alone_where_it_weighs_as_much_as_the_others():
    assert [part.tolist() for part in split_by_weight(np.array([1, 1, 6, 2, 2]), 2)] == [[2], [0, 1, 3, 4]]


def test_an_index_that_is_a_range_becomes_one():
    assert block_rows(np.array([5, 6, 7, 9]), (0, 3)) == (5, 8)


def test_an_index_with_a_jump_stays_positions():
    assert np.array_equal(block_rows(np.array([5, 6, 7, 9]), (1, 4)), [6, 7, 9])


def test_an_empty_part_of_an_index_stays_empty():
    assert len(block_rows(np.array([5, 6]), (1, 1))) == 0


def test_nothing_is_rewritten_where_half_of_every_shard_is_taken():
    assert compaction(np.array([2, 0, 3]), np.array([True, False, True, True, False])) is None


def test_sparse_shards_and_smaller_ones_are_rewritten_behind_the_others():
    taken = np.array([True, False, False, False, True, True, False, True, True, True])
    plan = compaction(np.array([4, 1, 5]), taken)
    assert plan is not None
    assert plan.rewritten.tolist() == [True, True, False]
    assert plan.moved.tolist() == [0, 4]
    assert plan.places.tolist() == [5, -1, -1, -1, 6, 0, 1, 2, 3, 4]
