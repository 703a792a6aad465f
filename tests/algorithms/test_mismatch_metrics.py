"""Tests mismatch metrics with literals, NumPy formulas and merging of any split."""

import math
from collections.abc import Sequence
from functools import reduce
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flowrl.algorithms import Correlation, mismatch_metrics
from flowrl.data.metric import merge_metrics


def random_inputs(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns logprobs, rollout_logprobs and a nonempty mask."""
    generator = torch.Generator().manual_seed(seed)
    logprobs = -2 * torch.rand(6, 5, generator=generator, dtype=torch.float64)
    gaps = 0.3 * torch.randn(6, 5, generator=generator, dtype=torch.float64)
    mask = torch.rand(6, 5, generator=generator) < 0.7
    mask[2], mask[0, 0] = False, True
    return logprobs, logprobs + gaps, mask


def results(logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> dict[str, float]:
    return {name: metric.result() for name, metric in mismatch_metrics(logprobs, rollout_logprobs, mask).items()}


def test_by_hand():
    """Row one: policy 1/2, 1/4 and rollout 1/4, 1/4; row two: 1/2 and 1; row three has no token.

    |d| is ln 2, 0, ln 2; rho 2, 1, 1/2. Products of rho: 2 and 1/2. Perplexities: 8^(1/2) and 2 against 4 and 1.
    """
    mask = torch.tensor([[True, True], [False, True], [False, False]])
    logprobs = torch.tensor([[1 / 2, 1 / 4], [9.0, 1 / 2], [9.0, 9.0]], dtype=torch.float64).log()
    rollout_logprobs = torch.tensor([[1 / 4, 1 / 4], [7.0, 1.0], [7.0, 7.0]], dtype=torch.float64).log()
    root = math.sqrt(8)
    assert results(logprobs, rollout_logprobs, mask) == pytest.approx(
        {
            "logprob_gap_mean": 2 * math.log(2) / 3,
            "logprob_gap_max": math.log(2),
            "prob_gap_mean": 0.25,
            "prob_gap_max": 0.5,
            "prob_correlation": 0.5,
            "kl_k1": 0.0,
            "kl_k3": (2 - 1 - math.log(2) + 0.5 - 1 + math.log(2)) / 3,
            "chi_square_token": (4 + 1 + 0.25) / 3 - 1,
            "perplexity": (root + 2) / 2,
            "rollout_perplexity": 2.5,
            "perplexity_ratio": (root / 4 + 2) / 2,
            "chi_square_sequence": (4 + 0.25) / 2 - 1,
        },
        abs=1e-12,
    )


def numpy_results(logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> dict[str, float]:
    keep, rows = mask.numpy(), mask.any(-1).numpy()
    p, q = np.exp(logprobs.numpy()), np.exp(rollout_logprobs.numpy())
    rho, pairs = (p / q)[keep], np.corrcoef(p[keep], q[keep])
    counts = keep.sum(-1)[rows]
    likelihood, rollout_likelihood = (np.where(keep, x, 1).prod(-1)[rows] for x in (p, q))
    perplexity, rollout_perplexity = likelihood ** (-1 / counts), rollout_likelihood ** (-1 / counts)
    return {
        "logprob_gap_mean": np.abs(np.log(rho)).mean(),
        "logprob_gap_max": np.abs(np.log(rho)).max(),
        "prob_gap_mean": np.abs(p - q)[keep].mean(),
        "prob_gap_max": np.abs(p - q)[keep].max(),
        "prob_correlation": pairs[0, 1],
        "kl_k1": -np.log(rho).mean(),
        "kl_k3": (rho - 1 - np.log(rho)).mean(),
        "chi_square_token": (rho**2).mean() - 1,
        "perplexity": perplexity.mean(),
        "rollout_perplexity": rollout_perplexity.mean(),
        "perplexity_ratio": (perplexity / rollout_perplexity).mean(),
        "chi_square_sequence": ((likelihood / rollout_likelihood) ** 2).mean() - 1,
    }


@pytest.mark.parametrize("seed", range(5))
def test_agrees_with_the_formulas(seed: int):
    inputs = random_inputs(seed)
    assert results(*inputs) == pytest.approx(numpy_results(*inputs), rel=1e-6, abs=1e-9)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(st.integers(0, 50), st.lists(st.integers(0, 6), max_size=3))
def test_any_split_merges_to_the_full_batch(seed: int, splits: list[int]):
    inputs = random_inputs(seed)
    edges = [0, *sorted(splits), 6]
    parts = [slice(a, b) for a, b in pairwise(edges)]
    # At run time a Correlation merges as the metrics do; the type of the function names only those of data/metric.py.
    merged = merge_metrics([mismatch_metrics(*(x[rows] for x in inputs)) for rows in parts])  # pyright: ignore[reportArgumentType]
    merged_results = {name: metric.result() for name, metric in merged.items()}
    assert merged_results == pytest.approx(results(*inputs), rel=1e-9, abs=1e-12, nan_ok=True)


def test_exact_expectations_are_the_divergence_and_the_chi_square():
    """Eight tokens in proportion to the rollout's probabilities 1/2, 1/4, 1/4 and a policy of 1/4, 1/4, 1/2."""
    tokens = torch.tensor([[0, 0, 0, 0, 1, 1, 2, 2]])
    probs, rollout_probs = torch.tensor([0.25, 0.25, 0.5]).double(), torch.tensor([0.5, 0.25, 0.25]).double()
    actual = results(probs.log()[tokens], rollout_probs.log()[tokens], torch.ones(1, 8, dtype=torch.bool))
    divergence = (rollout_probs * (rollout_probs / probs).log()).sum().item()
    assert (actual["kl_k1"], actual["kl_k3"]) == pytest.approx((divergence, divergence))
    assert actual["chi_square_token"] == pytest.approx(((probs - rollout_probs) ** 2 / rollout_probs).sum().item())


def test_masked_tokens_change_nothing():
    logprobs, rollout_logprobs, mask = random_inputs(7)
    dirty = results(logprobs.masked_fill(~mask, math.nan), rollout_logprobs.masked_fill(~mask, -math.inf), mask)
    assert dirty == results(logprobs, rollout_logprobs, mask)


def test_equal_policies_have_no_gap():
    logprobs, _, mask = random_inputs(8)
    actual = results(logprobs, logprobs.clone(), mask)
    assert actual.pop("perplexity") == actual.pop("rollout_perplexity")
    assert (actual.pop("perplexity_ratio"), actual.pop("prob_correlation")) == pytest.approx((1, 1))
    assert set(actual.values()) == {0.0}


def test_extreme_log_ratios_stay_finite():
    logprobs, rollout_logprobs = torch.tensor([[-1e4, 0.0]]), torch.tensor([[0.0, -1e4]])
    assert all(map(math.isfinite, results(logprobs, rollout_logprobs, torch.ones(1, 2, dtype=torch.bool)).values()))


@pytest.mark.parametrize("shape", [(0, 4), (2, 0), (2, 3)])
def test_an_empty_mask_has_maxima_of_zero_and_nan_means(shape: tuple[int, int]):
    actual = results(torch.randn(shape), torch.randn(shape), torch.zeros(shape, dtype=torch.bool))
    assert (actual.pop("logprob_gap_max"), actual.pop("prob_gap_max")) == (0, 0)
    assert all(map(math.isnan, actual.values()))


def test_bfloat16_agrees_with_float64_on_the_same_numbers():
    logprobs, rollout_logprobs, mask = random_inputs(9)
    low, rollout_low = logprobs.bfloat16(), rollout_logprobs.bfloat16()
    assert results(low, rollout_low, mask) == pytest.approx(results(low.double(), rollout_low.double(), mask), rel=1e-6)


def test_shapes_that_differ_are_rejected():
    with pytest.raises(ValueError, match=r"rollout_logprobs .*\[1, 3\]"):
        mismatch_metrics(torch.zeros(1, 2), torch.zeros(1, 3), torch.ones(1, 2, dtype=torch.bool))


def correlation_of(pairs: Sequence[tuple[float, float]]) -> Correlation:
    """Returns the correlation merged from single pairs."""
    return reduce(
        lambda merged, pair: merged.merge(Correlation(1, *pair, 0.0, 0.0, 0.0)), pairs, Correlation(0, 0, 0, 0, 0, 0)
    )


def test_correlation_by_hand():
    """x = 1, 2, 3 and y = 2, 4, 3: deviations -1, 0, 1 and -1, 1, 0: products 1, squares 2 and 2."""
    correlation = correlation_of([(1.0, 2.0), (2.0, 4.0), (3.0, 3.0)])
    assert correlation.result() == pytest.approx(0.5)
    assert (correlation.squares_x, correlation.squares_y, correlation.products) == pytest.approx((2, 2, 1))


@pytest.mark.parametrize("slope", [3.0, -0.5])
def test_a_line_correlates_perfectly(slope: float):
    assert correlation_of([(x, slope * x + 1) for x in (0.1, 0.7, 0.4)]).result() == pytest.approx(
        math.copysign(1, slope)
    )


@pytest.mark.parametrize("pairs", [[], [(0.5, 0.5)], [(0.1, 0.2), (0.1, 0.9), (0.1, 0.4)]])
def test_a_correlation_that_is_not_defined_is_nan(pairs: list[tuple[float, float]]):
    assert math.isnan(correlation_of(pairs).result())


@pytest.mark.parametrize("value", [0.1, 1 / 3, 1.0])
def test_the_correlation_of_a_constant_is_nan_despite_rounding(value: float):
    logprobs = torch.full((3, 7), value, dtype=torch.float64).log()
    rollout_logprobs, mask = -torch.rand(3, 7, dtype=torch.float64), torch.ones(3, 7, dtype=torch.bool)
    parts = [mismatch_metrics(logprobs[[i]], rollout_logprobs[[i]], mask[[i]]) for i in range(3)]
    merged = reduce(lambda a, b: a.merge(b), [part["prob_correlation"] for part in parts])  # pyright: ignore[reportArgumentType]
    assert math.isnan(merged.result())


def test_correlation_survives_a_large_offset():
    """Sums of raw squares would lose these variances: 1e-10 next to 1."""
    exact = correlation_of([(1.0, 2.0), (2.0, 4.0), (3.0, 3.0)]).result()
    assert correlation_of([(1 + 1e-5, 2e-5), (1 + 2e-5, 4e-5), (1 + 3e-5, 3e-5)]).result() == pytest.approx(exact)
