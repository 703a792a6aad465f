"""Tests the selection of the best responses with literals and random groups, and its KL bound with an exact KL."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flowrl.algorithms import best_of_n, best_of_n_kl_bound
from tests.algorithms.strategies import grouped_rows, orders, quick

SCORES = torch.tensor([0.5, 2.0, 1.0, 2.0, 0.0, -1.0, -3.0])
GROUPS = torch.tensor([7, 7, 4, 7, 4, 9, 9])
"""Group 7 has rows 0, 1, 3 with a tie, group 4 has rows 2, 4, and group 9 has rows 5, 6."""


@pytest.mark.parametrize(
    ("keep", "min_score", "expected"),
    [
        (1, None, [1, 2, 5]),  # of the equal scores of rows 1 and 3, the earlier row
        (2, None, [1, 2, 3, 4, 5, 6]),
        (3, None, [0, 1, 2, 3, 4, 5, 6]),  # groups 4 and 9 have two rows only
        (1, 1.0, [1, 2]),
        (2, 1.0, [1, 2, 3]),
        (1, 9.0, []),
    ],
)
def test_by_hand(keep: int, min_score: float | None, expected: list[int]) -> None:
    assert best_of_n(SCORES, GROUPS, keep=keep, min_score=min_score).tolist() == expected


def test_no_rows_give_no_rows() -> None:
    assert best_of_n(torch.ones(0), torch.ones(0).long()).tolist() == []


@quick
@given(grouped_rows(), st.integers(1, 4), st.data())
def test_selected_rows_are_the_best_of_their_groups(
    rows: tuple[Tensor, Tensor], keep: int, data: st.DataObject
) -> None:
    order = data.draw(orders(len(rows[0])))
    scores, groups = rows[0][order], rows[1][order]
    best = best_of_n(scores, groups, keep=keep)
    assert best.tolist() == sorted(set(best.tolist()))
    for group in groups.unique():
        own = (groups == group).nonzero()[:, 0].tolist()
        ranked = sorted(own, key=lambda row: (-float(scores[row]), row))
        assert [row for row in best.tolist() if row in own] == sorted(ranked[:keep])


@pytest.mark.parametrize(
    ("scores", "groups", "keep", "pattern"),
    [
        (torch.zeros(2), torch.zeros(3).long(), 1, r"scores .*\[2\].*\[3\]"),
        (torch.zeros(2), torch.zeros(2), 1, "integers"),
        (torch.zeros(2), torch.zeros(2).long(), 0, "keep .*0"),
        (torch.tensor([0.0, float("nan")]), torch.zeros(2).long(), 1, "NaN"),
    ],
)
def test_invalid_input_is_rejected(scores: Tensor, groups: Tensor, keep: int, pattern: str) -> None:
    with pytest.raises(ValueError, match=pattern):
        best_of_n(scores, groups, keep=keep)


def test_kl_bound_by_hand() -> None:
    assert best_of_n_kl_bound(1) == 0
    assert best_of_n_kl_bound(4) == pytest.approx(1.3862943611 - 0.75)
    with pytest.raises(ValueError, match=r"num_samples .*0"):
        best_of_n_kl_bound(0)


@pytest.mark.parametrize("num_samples", [2, 8])
def test_the_exact_kl_of_many_unlikely_responses_approaches_the_bound(num_samples: int) -> None:
    """The best of N draws from M equally likely responses, in order of their scores, is response i with probability
    (i / M)^N - ((i - 1) / M)^N.
    """
    kl = {}
    for num_responses in (4, 100_000):
        edges = torch.arange(num_responses + 1, dtype=torch.float64) / num_responses
        best = (edges**num_samples).diff()
        kl[num_responses] = float((best * (best.log() + math.log(num_responses))).sum())
    bound = best_of_n_kl_bound(num_samples)
    assert kl[4] < kl[100_000] < bound
    assert kl[100_000] == pytest.approx(bound, abs=1e-4)
