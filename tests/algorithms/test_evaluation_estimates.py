"""Tests the estimates of evaluations with hand-computed values, all subsets of samples, and simulated prompts."""

from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowrl.algorithms.evaluation_estimates import (
    best_at_k,
    bootstrap_interval,
    majority_at_k,
    mean_at_k,
    paired_difference,
    pass_at_k,
)
from tests.algorithms.strategies import SCORES, quick

HAND = torch.tensor([[1.0, 0.0, 0.5], [0.0, 0.0, 0.25], [2.0, 1.0, 3.0]])


@st.composite
def samples(draw: st.DrawFn) -> tuple[torch.Tensor, int]:
    """Scores [P, N] and k from 1 to N."""
    num_samples = draw(st.integers(1, 6))
    rows = draw(st.lists(st.lists(SCORES, min_size=num_samples, max_size=num_samples), min_size=1, max_size=3))
    return torch.tensor(rows, dtype=torch.float64), draw(st.integers(1, num_samples))


def test_mean_by_hand() -> None:
    assert mean_at_k(HAND).tolist() == pytest.approx([0.5, 0.25 / 3, 2.0], rel=1e-15)
    assert mean_at_k(HAND).dtype == torch.float64


@pytest.mark.parametrize(
    ("k", "expected"),
    [
        (1, [0.0, 0.25, 0.5, 0.75, 1.0]),
        (2, [0.0, 0.5, 5 / 6, 1.0, 1.0]),  # 1 - C(3, 2) / 6 and 1 - C(2, 2) / 6
        (4, [0.0, 1.0, 1.0, 1.0, 1.0]),
    ],
)
def test_pass_by_hand(k: int, expected: list[float]) -> None:
    """Prompt c has c correct responses of 4."""
    scores = torch.tensor([[1.0] * c + [0.0] * (4 - c) for c in range(5)])
    assert pass_at_k(scores, k).tolist() == expected


def test_a_response_passes_if_its_score_reaches_the_threshold() -> None:
    scores = torch.tensor([[0.1, 0.0], [0.5, 0.0999]])
    assert pass_at_k(scores, 1, min_score=0.1).tolist() == [0.5, 0.5]
    assert pass_at_k(scores, 1).tolist() == [0.0, 0.0]


@pytest.mark.parametrize(("k", "expected"), [(1, [0.5, 0.25 / 3, 2.0]), (2, [5 / 6, 0.5 / 3, 8 / 3])])
def test_best_by_hand(k: int, expected: list[float]) -> None:
    """The pairs of 0, 0.5 and 1 have the maxima 0.5, 1 and 1."""
    assert best_at_k(HAND, k).tolist() == pytest.approx(expected, rel=1e-15)


def test_best_of_all_samples_is_the_largest_score() -> None:
    assert torch.equal(best_at_k(HAND, 3), torch.tensor([1.0, 0.25, 3.0], dtype=torch.float64))


@quick
@given(samples())
def test_best_and_pass_are_the_means_over_all_subsets(drawn: tuple[torch.Tensor, int]) -> None:
    scores, k = drawn
    subsets = [scores[:, subset] for subset in combinations(range(scores.shape[1]), k)]
    best = torch.stack([own.amax(1) for own in subsets]).mean(0)
    torch.testing.assert_close(best_at_k(scores, k), best, rtol=1e-12, atol=1e-9)
    passed = torch.stack([(own >= 0.1).any(1).double() for own in subsets]).mean(0)
    torch.testing.assert_close(pass_at_k(scores, k, min_score=0.1), passed, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("scores", "answers", "expected"),
    [
        ([1.0, 1.0, 0.0], ["4", "4", "5"], 1.0),
        ([1.0, 0.0, 0.0], ["4", "5", "5"], 0.0),
        ([1.0, 0.0], ["4", "5"], 0.5),  # a tie: a random choice is correct half of the time
        ([1.0, 0.0, 0.0, 0.5], ["4", None, None, None], 1.0),  # a response without an answer has no vote
        ([1.0, 0.0, 0.5], [None, None, None], 0.5),
        ([1.0, 0.5, 0.0], ["4", "4", "5"], 0.75),  # the same answer with different scores
        ([1.0, 1.0, 0.0, 0.0, 0.2], ["4", "4", "5", "5", "6"], 0.5),
    ],
)
def test_majority_by_hand(scores: list[float], answers: list[str | None], expected: float) -> None:
    assert majority_at_k(torch.tensor([scores], dtype=torch.float64), [answers]).tolist() == [expected]


# Responses without a score.


NAN = float("nan")
PARTIAL = torch.tensor([[1.0, NAN, 0.0, 0.5], [NAN, NAN, 2.0, NAN], [NAN] * 4, [1.0, 0.0, 0.0, 0.0]])
"""Prompts with 3, 1, 0 and 4 scores."""


def assert_estimates(values: torch.Tensor, expected: list[float]) -> None:
    assert values.tolist() == pytest.approx(expected, rel=1e-15, nan_ok=True)


def test_the_mean_is_over_the_responses_with_a_score() -> None:
    assert_estimates(mean_at_k(PARTIAL), [0.5, 2.0, NAN, 0.25])


@pytest.mark.parametrize(
    ("k", "expected"),
    [
        (1, [1 / 3, 1.0, NAN, 0.25]),
        (2, [2 / 3, NAN, NAN, 0.5]),  # 1 - C(2, 2) / C(3, 2), and 1 - C(3, 2) / C(4, 2)
        (4, [NAN, NAN, NAN, 1.0]),
    ],
)
def test_pass_needs_k_responses_with_a_score(k: int, expected: list[float]) -> None:
    assert_estimates(pass_at_k(PARTIAL, k), expected)


@pytest.mark.parametrize(
    ("k", "expected"),
    [
        (1, [0.5, 2.0, NAN, 0.25]),
        (2, [2.5 / 3, NAN, NAN, 0.5]),  # the pairs of 0, 0.5 and 1 have the maxima 0.5, 1 and 1
        (3, [1.0, NAN, NAN, 0.75]),
    ],
)
def test_best_needs_k_responses_with_a_score(k: int, expected: list[float]) -> None:
    assert_estimates(best_at_k(PARTIAL, k), expected)


@pytest.mark.parametrize(
    ("scores", "answers", "expected"),
    [
        ([1.0, NAN, 0.0], ["4", "4", "5"], 1.0),  # the response without a score has a vote
        ([NAN, NAN, 0.0], ["4", "4", "5"], NAN),  # the score of the answer is unknown
        ([NAN, 0.0], ["4", "5"], NAN),  # a tie, of which one score is unknown
        ([1.0, NAN, 0.5], [None, None, None], 0.75),
        ([NAN, NAN], [None, None], NAN),
    ],
)
def test_majority_counts_the_answers_of_all_responses(
    scores: list[float], answers: list[str | None], expected: float
) -> None:
    assert_estimates(majority_at_k(torch.tensor([scores], dtype=torch.float64), [answers]), [expected])


@quick
@given(samples())
def test_a_response_without_a_score_is_a_response_that_was_not_generated(drawn: tuple[torch.Tensor, int]) -> None:
    scores, k = drawn
    padded = torch.cat([scores.new_full((len(scores), 1), NAN), scores, scores.new_full((len(scores), 2), NAN)], dim=1)
    assert torch.equal(mean_at_k(padded), mean_at_k(scores))
    assert torch.equal(best_at_k(padded, k), best_at_k(scores, k))
    assert torch.equal(pass_at_k(padded, k, min_score=0.1), pass_at_k(scores, k, min_score=0.1))


def test_the_interval_of_equal_values_has_no_width() -> None:
    interval = bootstrap_interval(torch.full((7,), 0.25), num_resamples=100)
    assert (interval.value, interval.low, interval.high) == (0.25, 0.25, 0.25)


def test_the_limits_are_order_statistics_of_the_resampled_means() -> None:
    """The mean of two draws from 0 and 1 is 0, 0.5 or 1 with probability 1/4, 1/2 and 1/4."""
    values = torch.tensor([0.0, 1.0])
    wide, narrow = (bootstrap_interval(values, level=level) for level in (0.95, 0.4))
    assert (wide.value, wide.low, wide.high) == (0.5, 0.0, 1.0)
    assert (narrow.low, narrow.high) == (0.5, 0.5)


def test_the_same_seed_gives_the_same_interval() -> None:
    values = torch.linspace(0, 1, 50, dtype=torch.float64) ** 2
    first, again, other = (bootstrap_interval(values, seed=seed) for seed in (0, 0, 1))
    assert first == again != other
    assert first.low < first.value < first.high


def test_strata_keep_their_sizes_in_all_resamples() -> None:
    values = torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0])
    sources = ["easy", "hard", "easy", "hard", "easy"]
    fixed = bootstrap_interval(values, strata=sources)
    assert fixed.low == fixed.value == fixed.high == 0.6
    assert bootstrap_interval(values).low < 0.6


def test_many_prompts_are_resampled_in_chunks() -> None:
    """The standard error of the mean of 10,000 values of 0 and 1 is 0.005."""
    interval = bootstrap_interval(torch.arange(10_000) % 2, num_resamples=500)
    assert interval.value == 0.5
    assert 0.006 < 0.5 - interval.low < 0.014 and 0.006 < interval.high - 0.5 < 0.014


def test_intervals_cover_the_true_mean() -> None:
    generator = torch.Generator().manual_seed(0)
    drawn = torch.rand(200, 60, generator=generator, dtype=torch.float64) < 0.3
    intervals = [bootstrap_interval(values, seed=seed, num_resamples=200) for seed, values in enumerate(drawn)]
    covered = sum(own.low <= 0.3 <= own.high for own in intervals) / len(intervals)
    assert 0.89 <= covered <= 0.98


def test_a_constant_difference_is_certain_although_the_values_vary() -> None:
    baseline = torch.linspace(0, 1, 33, dtype=torch.float64)
    difference = paired_difference(baseline + 0.125, baseline, num_resamples=199)
    assert [difference.value, difference.low, difference.high] == pytest.approx([0.125] * 3)
    assert difference.superiority == 1.0 and difference.p_value == 2 / 200
    reversed_one = paired_difference(baseline, baseline + 0.125, num_resamples=199)
    assert reversed_one.superiority == 0.0 and reversed_one.p_value == 2 / 200


def test_equal_models_are_ties() -> None:
    values = torch.tensor([0.0, 1.0, 1.0])
    difference = paired_difference(values, values)
    assert (difference.value, difference.low, difference.high) == (0.0, 0.0, 0.0)
    assert difference.superiority == 0.5 and difference.p_value == 1.0


def test_p_values_of_equally_good_models_are_spread_evenly() -> None:
    generator = torch.Generator().manual_seed(0)
    pairs = torch.randn(200, 2, 30, generator=generator, dtype=torch.float64)
    values = [paired_difference(*pair, num_resamples=150).p_value for pair in pairs]
    assert 0.01 <= sum(value <= 0.05 for value in values) / len(values) <= 0.11
    assert 0.35 <= sum(value <= 0.5 for value in values) / len(values) <= 0.65


@pytest.mark.parametrize(
    ("call", "pattern"),
    [
        (lambda: mean_at_k(torch.zeros(3)), r"scores .*\[3\]"),
        (lambda: mean_at_k(torch.zeros(3, 0)), r"scores .*\[3, 0\]"),
        (lambda: mean_at_k(torch.tensor([[float("inf")]])), "scores .*infinity"),
        (lambda: bootstrap_interval(torch.tensor([float("nan")])), "values .*NaN"),
        (lambda: pass_at_k(torch.zeros(1, 2), 3), "k is 3.*2"),
        (lambda: best_at_k(torch.zeros(1, 2), 0), "k is 0.*2"),
        (lambda: majority_at_k(torch.zeros(1, 2), [["4"]]), "answers"),
        (lambda: majority_at_k(torch.zeros(1, 2), []), "answers"),
        (lambda: bootstrap_interval(torch.zeros(0)), r"values .*\[0\]"),
        (lambda: bootstrap_interval(torch.zeros(2), level=1.0), "level .*1.0"),
        (lambda: bootstrap_interval(torch.zeros(2), num_resamples=0), "num_resamples .*0"),
        (lambda: bootstrap_interval(torch.zeros(2), strata=["a"]), "strata .*1.*2"),
        (lambda: paired_difference(torch.zeros(2), torch.zeros(3)), "2 .*3"),
    ],
)
def test_invalid_input_is_rejected(call: object, pattern: str) -> None:
    with pytest.raises(ValueError, match=pattern):
        call()  # pyright: ignore[reportCallIssue] (a lambda)
