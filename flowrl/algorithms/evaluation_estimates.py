"""Estimates of an evaluation with several responses per prompt, and their bootstrap intervals over prompts.

A score of NaN marks a response without a score, for example because its reward failed. An estimate uses the other
responses of the prompt, and is NaN for a prompt that has too few of them.

All results are float64 and are the same on every CPU, because sums have a fixed order.
Shape suffixes: P prompts, N responses per prompt, R resamples.
"""

import math
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

LEVEL, NUM_RESAMPLES = 0.95, 2_000
"""Default confidence level, and default number of bootstrap resamples."""

_CHUNK = 1 << 21
"""Largest number of values that are resampled at once, which bounds the memory."""

_ROUNDING = 1e-9
"""Added before a rank is rounded down. Larger than the rounding error of a level, and much smaller than 1."""


# Estimates per prompt.


@torch.no_grad()
def mean_at_k(scores: Tensor) -> Tensor:
    """Returns the mean score of each prompt, float64 [P]; NaN for a prompt without a score.

    Args:
        scores: [P, N]. NaN: the response has no score.
    Raises: ValueError if a score is infinite, or if the scores are not a matrix with at least one column.
    """
    scores_PN = _checked_scores(scores)
    return _sum_rows(scores_PN.nan_to_num(0.0)) / _count_scored(scores_PN)  # 0 / 0 is NaN


@torch.no_grad()
def pass_at_k(scores: Tensor, k: int, *, min_score: float = 1.0) -> Tensor:
    """Returns for each prompt the probability that at least one of k responses is correct, float64 [P].

    The estimate is unbiased: 1 - C(n - c, k) / C(n, k) for c correct responses of n with a score. It does not exist for
    n < k, so the result is NaN.

    Args:
        scores: [P, N]. NaN: the response has no score.
        k: number of responses, from 1 to N.
        min_score: a response is correct if its score is at least this value.
    Raises: ValueError for an invalid `k`, an infinite score, or scores that are not a matrix.

    Chen et al. 2021, https://arxiv.org/abs/2107.03374, equation 1.
    """
    scores_PN = _checked_scores(scores)
    _check_k(k, scores_PN.shape[1])

    def passed(scored: int, correct: int) -> float:
        if scored < k:
            return math.nan
        return float(1 - Fraction(math.comb(scored - correct, k), math.comb(scored, k)))

    # The dtype of the scores is used, because 0.1 in float32 differs from 0.1 in float64.
    correct_PN = scores >= torch.tensor(min_score, dtype=scores.dtype)
    counts = list(zip(_count_scored(scores_PN).tolist(), correct_PN.sum(1).tolist(), strict=True))
    values = {pair: passed(*pair) for pair in set(counts)}
    return torch.tensor([values[pair] for pair in counts], dtype=torch.float64)


@torch.no_grad()
def best_at_k(scores: Tensor, k: int) -> Tensor:
    """Returns for each prompt the expected best score of k responses, drawn without replacement, float64 [P].

    The responses are drawn from the n responses with a score. With k = n, this is the best score, and with k > n, the
    result is NaN.

    Args:
        scores: [P, N]. NaN: the response has no score.
        k: number of responses, from 1 to N.
    Raises: ValueError for an invalid `k`, an infinite score, or scores that are not a matrix.
    """
    scores_PN = _checked_scores(scores)
    num_samples = scores_PN.shape[1]
    _check_k(k, num_samples)

    # The response with i lower scores is the best of a subset if the other k - 1 are among these i.
    def weights(scored: int) -> list[float]:
        if scored < k:
            return [math.nan] * num_samples
        subsets = math.comb(scored, k)
        own = [float(Fraction(math.comb(i, k - 1), subsets)) for i in range(scored)]
        return own + [0.0] * (num_samples - scored)

    counts, index_P = _count_scored(scores_PN).unique(return_inverse=True)
    weights_CN = torch.tensor([weights(scored) for scored in counts.tolist()], dtype=torch.float64)
    weights_PN = weights_CN.reshape(len(counts), num_samples)[index_P]  # the shape is also valid without prompts
    ordered_PN = scores_PN.sort(dim=1).values.nan_to_num(0.0)  # NaN is last
    return _sum_rows(ordered_PN * weights_PN)


@torch.no_grad()
def majority_at_k(scores: Tensor, answers: Sequence[Sequence[Hashable | None]]) -> Tensor:
    """Returns for each prompt the score of the answer that most of its N responses have, float64 [P].

    The score of an answer is the mean score of the responses with this answer. If several answers have the most votes,
    the result is the mean of their scores, which is the expectation of a random choice. A response without an answer
    has no vote. If no response has an answer, the result is the mean score.

    A response without a score has a vote, because its answer is known. The result is NaN if an answer with the most
    votes has no score.

    Args:
        scores: [P, N]. NaN: the response has no score.
        answers: the answer of each response, N per prompt. None: the response has no answer.
    Raises: ValueError if a score is infinite, if the scores are not a matrix, or if the number of answers differs.

    Self-consistency: Wang et al. 2022, https://arxiv.org/abs/2203.11171.
    """
    rows = _checked_scores(scores).tolist()
    if len(rows) != len(answers) or any(len(row) != len(own) for row, own in zip(rows, answers, strict=True)):
        raise ValueError(f"answers must have one answer per score, {list(scores.shape)}")
    return torch.tensor([_majority_score(*row) for row in zip(rows, answers, strict=True)], dtype=torch.float64)


def _majority_score(scores: Sequence[float], answers: Sequence[Hashable | None]) -> float:
    votes: defaultdict[Hashable, list[float]] = defaultdict(list)
    for answer, score in zip(answers, scores, strict=True):
        if answer is not None:
            votes[answer].append(score)
    if not votes:
        return _mean_of_scored(scores)
    most = max(map(len, votes.values()))
    return _mean([_mean_of_scored(own) for own in votes.values() if len(own) == most])


def _mean_of_scored(scores: Sequence[float]) -> float:
    known = [score for score in scores if not math.isnan(score)]
    return _mean(known) if known else math.nan


def mean_over_prompts(values: Tensor) -> float:
    """Returns the exactly rounded mean of the values of prompts, [P]. Raises ValueError if there are none."""
    return _mean(_checked_values(values, "values").tolist())


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


# Intervals over prompts.


@dataclass(frozen=True)
class Interval:
    """A mean over prompts, and its bootstrap interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Difference(Interval):
    """The mean difference of two models on the same prompts, and its bootstrap interval."""

    superiority: float
    """Share of resamples in which `values` has a larger mean than `baseline`. A tie counts half."""

    p_value: float
    """Two-sided p-value of the hypothesis that the difference is 0."""


@torch.no_grad()
def bootstrap_interval(
    values: Tensor,
    *,
    seed: int = 0,
    level: float = LEVEL,
    num_resamples: int = NUM_RESAMPLES,
    strata: Sequence[Hashable] | None = None,
) -> Interval:
    """Returns the mean of the values of prompts, and its percentile interval of the bootstrap.

    The limits are order statistics of the resampled means, without interpolation. The interval has width 0 if all
    values are equal, even by chance with few prompts.

    Args:
        values: [P], one value per prompt, such as the result of `mean_at_k`.
        seed: seed of the resamples.
        level: confidence level, between 0 and 1.
        num_resamples: R, at least 1.
        strata: stratum of each prompt, such as its data source. The number of prompts of a stratum is the same in all
            resamples. None resamples from all prompts.
    Raises: ValueError for no values, values that are not finite, or invalid arguments.

    Efron 1979, https://doi.org/10.1214/aos/1176344552.
    """
    values_P = _checked_values(values, "values")
    means_R = _resample_means(values_P, seed=seed, num_resamples=num_resamples, strata=strata)
    return Interval(_mean(values_P.tolist()), *_find_limits(means_R, level))


@torch.no_grad()
def paired_difference(
    values: Tensor,
    baseline: Tensor,
    *,
    seed: int = 0,
    level: float = LEVEL,
    num_resamples: int = NUM_RESAMPLES,
    strata: Sequence[Hashable] | None = None,
) -> Difference:
    """Returns the mean of `values` - `baseline` over the same prompts, and its percentile interval of the bootstrap.

    A resample draws prompts, with the values of both models. The p-value is 2 min(P(d <= 0), P(d >= 0)) over the
    resampled differences d, and at most 1. Both counts and R are increased by 1, so that the p-value is never 0.

    Args:
        values: [P], one value per prompt.
        baseline: [P], the values of the other model.
        seed: seed of the resamples.
        level: confidence level, between 0 and 1.
        num_resamples: R, at least 1.
        strata: see `bootstrap_interval`.
    Raises: ValueError for different numbers of values, no values, values that are not finite, or invalid arguments.
    """
    values_P, baseline_P = _checked_values(values, "values"), _checked_values(baseline, "baseline")
    if len(values_P) != len(baseline_P):
        raise ValueError(
            f"values has {len(values_P)} prompts, but baseline has {len(baseline_P)}: pass values of the same prompts"
        )
    differences_P = values_P - baseline_P
    means_R = _resample_means(differences_P, seed=seed, num_resamples=num_resamples, strata=strata)
    worse, better, total = int((means_R < 0).sum()), int((means_R > 0).sum()), len(means_R)
    ties = total - worse - better
    p_value = min(1.0, 2 * (min(worse, better) + ties + 1) / (total + 1))
    low, high = _find_limits(means_R, level)
    return Difference(_mean(differences_P.tolist()), low, high, (better + ties / 2) / total, p_value)


def _resample_means(values_P: Tensor, *, seed: int, num_resamples: int, strata: Sequence[Hashable] | None) -> Tensor:
    """Returns the means of `num_resamples` resamples of the prompts, [R]."""
    if num_resamples < 1:
        raise ValueError(f"num_resamples is {num_resamples}, but must be at least 1")
    generator = torch.Generator().manual_seed(seed)
    sums_R = torch.zeros(num_resamples, dtype=torch.float64)
    for own in _split_by_stratum(values_P, strata):
        chunk = max(1, _CHUNK // len(own))
        for start in range(0, num_resamples, chunk):
            count = min(chunk, num_resamples - start)
            drawn_RP = torch.randint(len(own), (count, len(own)), generator=generator)
            sums_R[start : start + count] += _sum_rows(own[drawn_RP])
    return sums_R / len(values_P)


def _split_by_stratum(values_P: Tensor, strata: Sequence[Hashable] | None) -> Iterator[Tensor]:
    if strata is None:
        yield values_P
        return
    if len(strata) != len(values_P):
        raise ValueError(f"strata has {len(strata)} prompts, but values has {len(values_P)}: pass one per prompt")
    members: defaultdict[Hashable, list[int]] = defaultdict(list)
    for prompt, stratum in enumerate(strata):
        members[stratum].append(prompt)
    yield from (values_P[prompts] for prompts in members.values())


def _find_limits(means_R: Tensor, level: float) -> tuple[float, float]:
    if not 0 < level < 1:
        raise ValueError(f"level is {level}, but must be between 0 and 1")
    ordered = means_R.sort().values
    outside = int(len(ordered) * (1 - level) / 2 + _ROUNDING)  # in float64, 20 * (1 - 0.9) / 2 < 1
    return float(ordered[outside]), float(ordered[-1 - outside])


# Sums and checks.


def _sum_rows(matrix: Tensor) -> Tensor:
    """Returns the sum of each row. `cumsum` adds in order, but the order of `sum` depends on the CPU."""
    return matrix.cumsum(1)[:, -1]


def _count_scored(scores_PN: Tensor) -> Tensor:
    return (~scores_PN.isnan()).sum(1)


def _checked_scores(scores: Tensor) -> Tensor:
    if scores.ndim != 2 or not scores.shape[1]:
        raise ValueError(f"scores has shape {list(scores.shape)}, but must be prompts x samples, with at least one")
    if bool(scores.isinf().any()):
        raise ValueError("scores contains infinity: replace it by NaN, which marks a response without a score")
    return scores.double()


def _checked_values(values: Tensor, name: str) -> Tensor:
    if values.ndim != 1 or not len(values):
        raise ValueError(f"{name} has shape {list(values.shape)}, but must have one value per prompt, at least one")
    if not bool(values.isfinite().all()):
        raise ValueError(f"{name} has NaN or infinity: drop these prompts, or replace the values")
    return values.double()


def _check_k(k: int, num_samples: int) -> None:
    if not 1 <= k <= num_samples:
        raise ValueError(f"k is {k}, but must be from 1 to the number of samples, {num_samples}")
