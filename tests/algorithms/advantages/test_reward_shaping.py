"""Tests length penalties, clipping and running normalization with literals and NumPy formulas."""

import json
from dataclasses import asdict
from math import inf, isclose

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from flowrl.algorithms import (
    RewardMoments,
    clip_rewards,
    length_penalty,
    normalize_rewards,
    overlong_penalty,
    update_moments,
    with_length_penalty,
    with_overlong_penalty,
)
from tests.algorithms.strategies import grouped_rows, orders, quick
from tests.engines.closeness import assert_norm_close, reduction_rtol


def test_overlong_penalty_with_the_lengths_of_the_paper():
    # 16,384 tokens are expected, 4,096 more are punished more and more
    lengths = torch.tensor([0, 16_384, 16_385, 18_432, 20_480, 20_481, 10**6])
    penalty = overlong_penalty(lengths, max_length=20_480, buffer=4_096)
    assert_close(penalty, torch.tensor([0.0, 0.0, -1 / 4096, -0.5, -1.0, -1.0, -1.0]))


def test_overlong_penalty_with_a_buffer_of_max_length():
    assert overlong_penalty(torch.tensor([0, 1, 4]), max_length=4, buffer=4).tolist() == [0.0, -0.25, -1.0]


@quick
@given(st.lists(st.integers(0, 100), max_size=8), st.integers(1, 50), st.integers(0, 40))
def test_overlong_penalty_agrees_with_the_three_cases_of_the_paper(lengths: list[int], buffer: int, expected: int):
    max_length = expected + buffer
    cases = [0.0 if n <= expected else (expected - n) / buffer if n <= max_length else -1.0 for n in lengths]
    actual = overlong_penalty(torch.tensor(lengths, dtype=torch.int64), max_length=max_length, buffer=buffer)
    assert_close(actual, torch.tensor(cases, dtype=torch.float32))


@pytest.mark.parametrize(
    ("max_length", "buffer", "message"),
    [
        (0, 1, r"max_length .*0"),
        (8, 0, r"buffer .*0"),
        (8, 9, r"buffer .*9"),
    ],
)
def test_overlong_penalty_rejects_limits_out_of_range(max_length: int, buffer: int, message: str):
    with pytest.raises(ValueError, match=message):
        overlong_penalty(torch.ones(1), max_length=max_length, buffer=buffer)


def test_overlong_penalty_rejects_lengths_per_token():
    with pytest.raises(ValueError, match=r"lengths .*\[2, 2\]"):
        overlong_penalty(torch.ones(2, 2), max_length=8, buffer=4)


def test_length_penalty_by_hand():
    # group 0: lengths 10, 20, 50: 1/2, 1/4, -1/2; wrong answers gain nothing. Group 1 is of one length.
    lengths, groups = torch.tensor([10, 20, 50, 10, 7, 7]), torch.tensor([0, 0, 0, 0, 1, 1])
    correct = torch.tensor([True, True, False, False, True, False])
    assert length_penalty(lengths, correct, groups).tolist() == [0.5, 0.25, -0.5, 0.0, 0.0, 0.0]


@quick
@given(grouped_rows(), st.integers(0, 2**20))
def test_length_penalty_agrees_with_the_formula_in_numpy(rows: tuple[Tensor, Tensor], bits: int):
    lengths, groups = rows[0].abs().long(), rows[1]
    correct = torch.tensor([bits >> row & 1 == 1 for row in range(len(groups))])
    actual = length_penalty(lengths, correct, groups)
    for row, group in enumerate(groups):
        x = lengths[groups == group].numpy()
        value = 0.5 - (lengths[row].item() - x.min()) / (x.max() - x.min()) if x.max() > x.min() else 0.0
        assert isclose(actual[row], value if correct[row] else min(0, value), abs_tol=1e-6)


@quick
@given(grouped_rows(), st.data())
def test_length_penalty_of_permuted_rows_is_permuted(rows: tuple[Tensor, Tensor], data: st.DataObject):
    lengths, groups = rows[0].abs().long(), rows[1]
    order = data.draw(orders(len(groups)))
    full = length_penalty(lengths, lengths % 2 == 0, groups)
    assert_close(length_penalty(lengths[order], lengths[order] % 2 == 0, groups[order]), full[order], rtol=0, atol=0)


def test_length_penalty_rejects_scores_as_correct():
    with pytest.raises(ValueError, match=r"correct .*torch\.float32"):
        length_penalty(torch.ones(2), torch.ones(2), torch.ones(2).long())


def test_length_penalty_rejects_shapes_that_differ():
    with pytest.raises(ValueError, match=r"groups .*\[1\]"):
        length_penalty(torch.ones(2), torch.ones(2).bool(), torch.ones(1).long())


def test_clip_rewards_by_hand():
    clipped = clip_rewards(torch.tensor([-9.0, 0.5, 9.0, inf, float("nan")]), low=-1, high=2)
    assert_close(clipped, torch.tensor([-1.0, 0.5, 2.0, 2.0, float("nan")]), equal_nan=True)


def test_clip_rewards_of_integers_and_half_precision_are_in_float32():
    assert clip_rewards(torch.tensor([3]), low=0, high=2.5).tolist() == [2.5]
    assert clip_rewards(torch.ones(1).bfloat16(), low=-inf, high=inf).dtype == torch.float32


@pytest.mark.parametrize(("low", "high"), [(1, 1), (2, 1), (float("nan"), 1)])
def test_clip_rewards_rejects_a_low_that_is_not_below_high(low: float, high: float):
    with pytest.raises(ValueError, match="low"):
        clip_rewards(torch.ones(1), low=low, high=high)


def test_moments_by_hand():
    # 1, 3 and 5, 9: mean 4.5, squares 12.25 + 2.25 + .25 + 20.25 = 35
    moments = update_moments(update_moments(RewardMoments(), torch.tensor([1.0, 3.0])), torch.tensor([5.0, 9.0]))
    assert moments == RewardMoments(count=4, mean=4.5, sum_of_squares=35.0)
    assert isclose(moments.std, (35 / 3) ** 0.5)


@quick
@given(st.lists(st.lists(st.floats(-100, 100), max_size=5), max_size=5))
def test_moments_of_any_split_agree_with_numpy(parts: list[list[float]]):
    moments = RewardMoments()
    for part in parts:
        moments = update_moments(moments, torch.tensor(part, dtype=torch.float64))
    x = np.concatenate([*map(np.array, parts), np.zeros(0)])
    assert moments.count == len(x)
    if len(x) > 1:
        assert isclose(moments.mean, x.mean(), abs_tol=1e-9) and isclose(moments.std, x.std(ddof=1), abs_tol=1e-6)


def test_moments_are_saved_as_plain_numbers():
    moments = update_moments(RewardMoments(), torch.tensor([0.1, 0.7, -2.0]))
    assert RewardMoments(**json.loads(json.dumps(asdict(moments)))) == moments


@pytest.mark.parametrize("bad", [inf, float("nan")])
def test_moments_reject_non_finite_rewards(bad: float):
    with pytest.raises(ValueError, match="rewards"):
        update_moments(RewardMoments(), torch.tensor([1.0, bad]))


def test_moments_reject_rewards_per_token():
    with pytest.raises(ValueError, match=r"rewards .*\[2, 2\]"):
        update_moments(RewardMoments(), torch.ones(2, 2))


def test_normalize_rewards_by_hand():
    # 1 and 5: mean 3, std sqrt(8)
    moments, rewards = update_moments(RewardMoments(), torch.tensor([1.0, 5.0])), torch.tensor([3.0, 5.0])
    assert_close(normalize_rewards(rewards, moments, shift_mean=True), torch.tensor([0.0, 0.7071068]))
    assert_close(normalize_rewards(rewards, moments, shift_mean=False), torch.tensor([1.0606602, 1.7677670]))


@pytest.mark.parametrize("seen", [[], [2.0], [2.0, 2.0]])
def test_normalize_rewards_keeps_the_scale_while_the_std_is_zero(seen: list[float]):
    moments = update_moments(RewardMoments(), torch.tensor(seen))
    assert normalize_rewards(torch.tensor([3.0]), moments, shift_mean=False).item() == 3.0


def test_normalize_rewards_of_bfloat16_is_computed_in_float32():
    moments, rewards = RewardMoments(count=3, mean=1.0, sum_of_squares=2.0), torch.randn(20)
    low = normalize_rewards(rewards.bfloat16(), moments, shift_mean=True)
    assert low.dtype == torch.float32
    exact = normalize_rewards(rewards.bfloat16().double(), moments, shift_mean=True)
    assert_norm_close(low.double(), exact, reduction_rtol(torch.float32, length=1, depth=4))


def test_rewards_with_an_overlong_penalty_by_hand():
    rewards, lengths = torch.tensor([1.0, 1.0, 0.0]), torch.tensor([2, 3, 9])
    # P is 0, -1/2 and -1 of lengths 2, 3 and 9 where 4 is the limit.
    assert with_overlong_penalty(rewards, lengths, max_length=4, buffer=2).tolist() == [1.0, 0.5, -1.0]
    assert with_overlong_penalty(rewards, lengths, max_length=4, buffer=2, coef=4.0).tolist() == [1.0, -1.0, -4.0]


def test_rewards_with_a_length_penalty_by_hand():
    rewards, lengths = torch.tensor([5.0, 5.0, 5.0]), torch.tensor([1, 3, 1])
    scores, groups = torch.tensor([1.0, 2.0, 0.5]), torch.tensor([6, 6, 6])
    # Short and correct: 1/2; long and correct: -1/2; short and wrong: min(0, 1/2).
    actual = with_length_penalty(rewards, lengths, scores, groups, correct_from=1.0, coef=2.0)
    assert actual.tolist() == [6.0, 4.0, 5.0]


def test_penalties_keep_a_nan_reward_in_its_row():
    nan = float("nan")
    rewards, lengths, groups = torch.tensor([nan, 1.0]), torch.tensor([1, 2]), torch.tensor([0, 0])
    actual = with_length_penalty(rewards, lengths, rewards, groups, correct_from=1.0, coef=1.0)
    assert_close(actual, torch.tensor([nan, 0.5]), equal_nan=True)


def test_penalties_reject_another_number_of_lengths():
    with pytest.raises(ValueError, match=r"lengths .*\[1\]"):
        with_overlong_penalty(torch.ones(2), torch.ones(1), max_length=4, buffer=2)


def test_a_clip_on_one_side():
    assert clip_rewards(torch.tensor([-9.0, 9.0]), high=1.0).tolist() == [-9.0, 1.0]
