"""Tests informative groups and full batches with literals and random batches."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flowrl.algorithms import FullBatch, full_batches, informative_groups
from tests.algorithms.strategies import grouped_rows, orders, quick

Round = tuple[str, Tensor, Tensor]


def scored(name: str, scores: list[float], groups: list[int]) -> Round:
    """Returns a scored batch whose content is its name."""
    return name, torch.tensor(scores), torch.tensor(groups)


def parts(full: FullBatch[str]) -> list[tuple[str, list[int]]]:
    return [(batch, rows.tolist()) for batch, rows in full.parts]


MIXED = scored("a", [1, 0, 1, 1, 0, 1], [5, 5, 6, 6, 7, 7])
"""Groups 5 and 7 are informative, 6 is not."""
SILENT = scored("s", [1, 1, 0, 0], [0, 0, 1, 1])


def test_informative_groups_by_hand():
    scores, groups = torch.tensor([1.0, 0.0, 1.0, 0.5, 1.0, 0.0]), torch.tensor([3, 9, 3, 4, 9, 9])
    assert informative_groups(scores, groups).tolist() == [False, True, False, False, True, True]


def test_informative_groups_of_no_rows_is_empty():
    assert informative_groups(torch.ones(0), torch.ones(0).long()).shape == (0,)


def test_a_group_with_nan_is_not_informative():
    assert not informative_groups(torch.tensor([float("nan"), 1.0, 0.0]), torch.tensor([0, 0, 0])).any()


@quick
@given(grouped_rows(), st.data())
def test_informative_groups_are_those_with_two_different_scores(rows: tuple[Tensor, Tensor], data: st.DataObject):
    order = data.draw(orders(len(rows[0])))
    scores, groups = rows[0][order], rows[1][order]
    expected = [len(set(scores[groups == group].tolist())) > 1 for group in groups]
    assert informative_groups(scores, groups).tolist() == expected


def test_informative_groups_rejects_scores_that_are_not_one_per_row():
    with pytest.raises(ValueError, match=r"scores .*\[2, 3\]"):
        informative_groups(torch.ones(2, 3), torch.ones(2).long())


def test_one_round_with_enough_informative_groups_fills_a_batch():
    (full,) = full_batches([MIXED], num_groups=2, max_rounds=1)
    assert parts(full) == [("a", [0, 1, 4, 5])]
    assert full.groups.tolist() == [0, 0, 1, 1]
    assert (full.num_rounds, full.num_drawn, full.num_informative) == (1, 3, 2)


def test_rounds_are_drawn_until_the_batch_is_full_and_surplus_groups_start_the_next():
    rounds = [MIXED, SILENT, scored("b", [0, 1, 0, 1], [5, 5, 2, 2]), scored("c", [0, 1], [5, 5])]
    first, second = full_batches([*rounds, scored("d", [0, 1], [5, 5])], num_groups=3, max_rounds=3)
    assert parts(first) == [("a", [0, 1, 4, 5]), ("b", [0, 1])] and first.groups.tolist() == [0, 0, 1, 1, 2, 2]
    assert (first.num_rounds, first.num_drawn, first.num_informative) == (3, 7, 4)
    assert parts(second) == [("b", [2, 3]), ("c", [0, 1]), ("d", [0, 1])] and second.num_rounds == 2


def test_surplus_groups_may_fill_a_batch_without_a_round():
    drawn = []

    def source() -> Iterator[Round]:
        for number in range(9):
            drawn.append(number)
            yield scored(str(number), [0, 1, 0, 1, 0, 1], [0, 0, 1, 1, 2, 2])

    batches = full_batches(source(), num_groups=1, max_rounds=1)
    results = [next(batches) for _ in range(4)]
    assert [parts(full) for full in results] == [[("0", [0, 1])], [("0", [2, 3])], [("0", [4, 5])], [("1", [0, 1])]]
    assert [full.num_rounds for full in results] == [1, 0, 0, 1] and drawn == [0, 1]


def test_the_source_is_advanced_lazily():
    source = iter([MIXED, SILENT])
    batches = full_batches(source, num_groups=2, max_rounds=1)
    next(batches)
    assert list(source) == [SILENT]


def test_interleaved_groups_of_any_size_are_not_split():
    rows = scored("x", [0, 1, 1, 2, 0, 1], [8, 3, 8, 3, 1, 8])
    (full,) = full_batches([rows], num_groups=2, max_rounds=1)
    assert parts(full) == [("x", [0, 2, 5, 1, 3])] and full.groups.tolist() == [0, 0, 0, 1, 1]


def test_an_incomplete_batch_after_max_rounds_is_an_error():
    rounds = [MIXED, SILENT, MIXED]
    with pytest.raises(ValueError, match=r"max_rounds .*\b2\b.* 2 .* 4 .*\b2\b.*\b5\b"):
        list(full_batches(rounds, num_groups=4, max_rounds=2))


def test_rounds_are_counted_per_batch():
    rounds = [MIXED, SILENT, MIXED, SILENT, MIXED]
    assert len(list(full_batches(rounds, num_groups=2, max_rounds=2))) == 3


def test_the_iterator_ends_with_the_source_and_drops_an_incomplete_batch():
    assert list(full_batches([MIXED], num_groups=3, max_rounds=2)) == []


@pytest.mark.parametrize(("num_groups", "max_rounds", "name"), [(0, 1, "num_groups"), (1, 0, "max_rounds")])
def test_sizes_below_one_are_rejected_immediately(num_groups: int, max_rounds: int, name: str):
    with pytest.raises(ValueError, match=rf"{name} .*0"):
        full_batches([], num_groups=num_groups, max_rounds=max_rounds)


@quick
@given(st.lists(grouped_rows(), max_size=6), st.integers(1, 4))
def test_informative_rows_are_yielded_once_in_complete_groups(batches: list[tuple[Tensor, Tensor]], num_groups: int):
    source = [(number, scores, groups) for number, (scores, groups) in enumerate(batches)]
    results = list(full_batches(source, num_groups=num_groups, max_rounds=99))
    rows = [(number, int(row)) for full in results for number, part in full.parts for row in part]
    target = {(n, row) for n, s, g in source for row in informative_groups(s, g).nonzero()[:, 0].tolist()}
    assert len(rows) == len(set(rows)) and set(rows) <= target
    for full in results:
        ids = [(number, int(batches[number][1][row])) for number, part in full.parts for row in part]
        assert len(set(ids)) == num_groups == len(set(zip(ids, full.groups.tolist(), strict=True)))
    num_informative = sum(len(g[informative_groups(s, g)].unique()) for _, s, g in source)
    assert len(results) == num_informative // num_groups
