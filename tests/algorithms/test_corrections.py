"""Tests importance weights and rejection with literals, NumPy formulas and invariances."""

import math
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from flowrl.algorithms import (
    KlKind,
    RatioLevel,
    RejectionLevel,
    WeightSums,
    aggregate,
    masked_weights,
    normalized_weights,
    rejection_mask,
    truncated_weights,
    weight_sums,
)
from tests.algorithms.unbounded import importance_ratios
from tests.engines.closeness import FLOAT64_RTOL, assert_norm_close, reduction_rtol

LEVELS: list[RatioLevel] = list(get_args(RatioLevel))
REJECTION_LEVELS: list[RejectionLevel] = list(get_args(RejectionLevel))
KINDS: list[KlKind] = ["k1", "k2", "k3", "abs"]

MASK = torch.tensor([[False, True, True, False], [True, False, True, False], [False, False, False, False]])
# Ratios 4 and 1/2 in the first row, 8 and 2 in the second.
LOG_RATIOS = math.log(2) * torch.tensor([[9.0, 2.0, -1.0, 9.0], [3.0, 9.0, 1.0, 9.0], [9.0, 9.0, 9.0, 9.0]])
ROLLOUT_LOGPROBS = torch.full((3, 4), -1.5)
LOGPROBS = ROLLOUT_LOGPROBS + LOG_RATIOS


def on_tokens(*values: float) -> Tensor:
    """Returns [3, 4] with the values at the true positions of MASK in order and zero elsewhere."""
    return torch.zeros(3, 4).masked_scatter(MASK, torch.tensor(values))


def random_inputs(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns logprobs, rollout_logprobs, mask."""
    generator = torch.Generator().manual_seed(seed)
    logprobs, rollout_logprobs = -torch.rand(2, 6, 5, generator=generator, dtype=torch.float64)
    return logprobs, rollout_logprobs, torch.rand(6, 5, generator=generator) < 0.7


def numpy_ratios(logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, level: RatioLevel) -> np.ndarray:
    ratios = np.exp(logprobs.numpy()) / np.exp(rollout_logprobs.numpy())
    if level != "token":
        ratios = np.where(mask.numpy(), ratios, 1).prod(-1, keepdims=True) * np.ones(mask.shape)
    if level == "geometric":
        ratios = ratios ** (1 / np.maximum(mask.numpy().sum(-1, keepdims=True), 1))
    return np.where(mask.numpy(), ratios, 0)


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("token", (4.0, 0.5, 8.0, 2.0)),
        ("sequence", (2.0, 2.0, 16.0, 16.0)),
        ("geometric", (1.4142136, 1.4142136, 4.0, 4.0)),
    ],
)
def test_ratios_by_hand(level: RatioLevel, expected: tuple[float, ...]):
    assert_close(importance_ratios(LOGPROBS, ROLLOUT_LOGPROBS, MASK, level=level), on_tokens(*expected))


@pytest.mark.parametrize("level", LEVELS)
def test_ratios_agree_with_the_published_formulas(level: RatioLevel):
    inputs = random_inputs(0)
    result = importance_ratios(*inputs, level=level)
    np.testing.assert_allclose(result.numpy(), numpy_ratios(*inputs, level), rtol=1e-6)


def test_truncated_weights_by_hand():
    weights, metrics = truncated_weights(
        LOGPROBS, ROLLOUT_LOGPROBS, MASK, level="token", min_weight=0.7, max_weight=3.0
    )
    assert_close(weights, on_tokens(3.0, 0.7, 3.0, 2.0))
    assert_close(metrics["ratio"], on_tokens(4.0, 0.5, 8.0, 2.0))
    assert_close(metrics["truncated_fraction_low"], on_tokens(0.0, 1.0, 0.0, 0.0))
    assert_close(metrics["truncated_fraction_high"], on_tokens(1.0, 0.0, 1.0, 0.0))


def test_truncated_weights_of_rows_by_hand():
    weights, metrics = truncated_weights(LOGPROBS, ROLLOUT_LOGPROBS, MASK, level="sequence", max_weight=5.0)
    assert_close(weights, on_tokens(2.0, 2.0, 5.0, 5.0))
    assert_close(metrics["truncated_fraction_high"], on_tokens(0.0, 0.0, 1.0, 1.0))


def test_masked_weights_by_hand():
    weights, metrics = masked_weights(LOGPROBS, ROLLOUT_LOGPROBS, MASK, level="token", min_weight=0.7, max_weight=5.0)
    assert_close(weights, on_tokens(4.0, 0.0, 0.0, 2.0))
    assert_close(metrics["masked_fraction_low"], on_tokens(0.0, 1.0, 0.0, 0.0))
    assert_close(metrics["masked_fraction_high"], on_tokens(0.0, 0.0, 1.0, 0.0))


def test_masked_weights_of_rows_by_hand():
    weights, _ = masked_weights(LOGPROBS, ROLLOUT_LOGPROBS, MASK, level="geometric", max_weight=3.0)
    assert_close(weights, on_tokens(1.4142136, 1.4142136, 0.0, 0.0))


@pytest.mark.parametrize("level", LEVELS)
def test_weights_agree_with_the_published_formulas(level: RatioLevel):
    inputs = random_inputs(1)
    ratios = numpy_ratios(*inputs, level)
    truncated, _ = truncated_weights(*inputs, level=level, max_weight=1.1)
    masked, _ = masked_weights(*inputs, level=level, min_weight=0.9, max_weight=1.1)
    np.testing.assert_allclose(truncated.numpy(), np.minimum(ratios, 1.1), rtol=1e-6)
    np.testing.assert_allclose(masked.numpy(), np.where((ratios >= 0.9) & (ratios <= 1.1), ratios, 0), rtol=1e-6)


def test_without_truncation_the_weights_make_the_loss_unbiased_for_the_policy():
    """E_rollout[w f] equals E_policy[f]."""
    logprobs = torch.tensor([[0.1, 0.9, -0.4]], dtype=torch.float64).log_softmax(-1)
    rollout_logprobs = torch.tensor([[0.5, 0.1, 0.2]], dtype=torch.float64).log_softmax(-1)
    values, mask = torch.tensor([[3.0, -1.0, 2.0]]).double(), torch.ones(1, 3, dtype=torch.bool)
    weights, _ = truncated_weights(logprobs, rollout_logprobs, mask, level="token", max_weight=math.inf)
    assert_norm_close(
        (rollout_logprobs.exp() * weights * values).sum(), (logprobs.exp() * values).sum(), rtol=FLOAT64_RTOL
    )


@pytest.mark.parametrize(
    ("kind", "level", "expected"),
    [
        ("k1", "token", (-1.3862944, 0.6931472, -2.0794415, -0.6931472)),
        ("k2", "token", (0.9609060, 0.2402265, 2.1620385, 0.2402265)),
        ("k3", "token", (1.6137056, 0.1931472, 4.9205585, 0.3068528)),
        ("k1", "sequence_sum", (-0.6931472, -0.6931472, -2.7725887, -2.7725887)),
        ("k2", "sequence_mean", (0.6005663, 0.6005663, 1.2011325, 1.2011325)),
        ("k3", "sequence_max", (1.6137056, 1.6137056, 4.9205585, 4.9205585)),
    ],
)
def test_rejection_divergence_by_hand(kind: KlKind, level: RejectionLevel, expected: tuple[float, ...]):
    """k1 is -ln rho, k2 half its square, k3 rho - 1 - ln rho, for rho = 4, 1/2 and 8, 2."""
    _, metrics = rejection_mask(LOGPROBS, ROLLOUT_LOGPROBS, MASK, kl_kind=kind, rejection_level=level, high=1.0)
    assert_close(metrics["divergence"], on_tokens(*expected))


@pytest.mark.parametrize(
    ("kind", "level", "low", "high", "retained"),
    [
        ("k1", "token", -1.5, 0.6, (1, 0, 0, 1)),
        ("k2", "token", -math.inf, 1.0, (1, 1, 0, 1)),
        ("k3", "token", -math.inf, 0.25, (0, 1, 0, 0)),
        ("k1", "sequence_sum", -1.0, 1.0, (1, 1, 0, 0)),
        ("k2", "sequence_mean", -math.inf, 1.0, (1, 1, 0, 0)),
        ("k3", "sequence_max", -math.inf, 2.0, (1, 1, 0, 0)),
        ("k1", "sequence_max", -math.inf, 0.6, (0, 0, 1, 1)),
        ("k1", "sequence_max", -1.9, 0.7, (1, 1, 0, 0)),
    ],
)
def test_rejection_mask_by_hand(
    kind: KlKind, level: RejectionLevel, low: float, high: float, retained: tuple[int, ...]
):
    result, metrics = rejection_mask(
        LOGPROBS, ROLLOUT_LOGPROBS, MASK, kl_kind=kind, rejection_level=level, low=low, high=high
    )
    expected = on_tokens(*map(float, retained)).bool()
    assert result.equal(expected)
    assert_close(metrics["rejected_fraction"], (MASK & ~expected).float())


def numpy_divergence(inputs: tuple[Tensor, Tensor, Tensor], kind: KlKind, level: RejectionLevel) -> np.ndarray:
    logprobs, rollout_logprobs, mask = (x.numpy() for x in inputs)
    ratio = np.exp(logprobs) / np.exp(rollout_logprobs)
    each = {"k1": -np.log(ratio), "k2": np.log(ratio) ** 2 / 2, "k3": ratio - 1 - np.log(ratio)}[kind]
    total, count = np.where(mask, each, 0).sum(-1, keepdims=True), np.maximum(mask.sum(-1, keepdims=True), 1)
    largest = np.where(mask, each, -np.inf).max(-1, keepdims=True)
    values = {"token": each, "sequence_sum": total, "sequence_mean": total / count, "sequence_max": largest}[level]
    return np.where(mask, values, 0)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
@pytest.mark.parametrize("level", REJECTION_LEVELS)
def test_rejection_agrees_with_the_published_formulas(kind: KlKind, level: RejectionLevel):
    inputs = random_inputs(2)
    retained, metrics = rejection_mask(*inputs, kl_kind=kind, rejection_level=level, high=0.06)
    expected = numpy_divergence(inputs, kind, level)
    np.testing.assert_allclose(metrics["divergence"].numpy(), expected, rtol=1e-6, atol=1e-12)
    assert retained.numpy().tolist() == (inputs[2].numpy() & (expected <= 0.06)).tolist()


def test_a_mean_of_k1_is_a_range_of_the_geometric_mean():
    inputs = random_inputs(3)
    retained, _ = rejection_mask(*inputs, kl_kind="k1", rejection_level="sequence_mean", low=-0.1, high=0.1)
    weights, _ = masked_weights(*inputs, level="geometric", min_weight=math.exp(-0.1), max_weight=math.exp(0.1))
    assert retained.equal(weights > 0)


def test_off_policy_sequence_masking_drops_drifted_rows_only_where_the_advantage_is_negative():
    logprobs, rollout_logprobs = torch.full((4, 2), -2.0), torch.tensor([[-1.0], [-1.0], [-1.9], [-1.9]]).expand(4, 2)
    advantages, mask = torch.tensor([[1.0], [-1.0], [1.0], [-1.0]]).expand(4, 2), torch.ones(4, 2, dtype=torch.bool)
    retained, _ = rejection_mask(
        logprobs, rollout_logprobs, mask, kl_kind="k1", rejection_level="sequence_mean", high=0.5
    )
    assert (retained | mask & (advantages >= 0))[:, 0].tolist() == [True, False, True, True]


Corrected = dict[str, Tensor]


def everything(logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> Corrected:
    """Returns the results of all functions at all levels, by name."""
    actual: Corrected = {}
    for level in LEVELS:
        for function in (truncated_weights, masked_weights):
            weights, metrics = function(logprobs, rollout_logprobs, mask, level=level, min_weight=0.5, max_weight=2.0)
            actual |= {f"{function.__name__} {level} {name}": x for name, x in ({"weights": weights} | metrics).items()}
    for level in REJECTION_LEVELS:
        for kind in KINDS:
            retained, metrics = rejection_mask(
                logprobs, rollout_logprobs, mask, kl_kind=kind, rejection_level=level, low=-0.4, high=0.4
            )
            actual |= {f"{level} {kind} {name}": x for name, x in ({"kept": retained} | metrics).items()}
    return actual


def test_masked_tokens_change_nothing():
    logprobs, rollout_logprobs, mask = random_inputs(4)
    dirty = everything(logprobs.masked_fill(~mask, math.nan), rollout_logprobs.masked_fill(~mask, -math.inf), mask)
    assert_close(dirty, everything(logprobs, rollout_logprobs, mask), rtol=0, atol=0)
    assert not any(values[~mask].any() for values in dirty.values())


@settings(max_examples=15, deadline=None, derandomize=True)
@given(st.permutations(range(6)))
def test_permuting_rows_permutes_results(order: list[int]):
    inputs = random_inputs(5)
    permuted = everything(*(x[order] for x in inputs))
    assert_norm_close(permuted, {name: x[order] for name, x in everything(*inputs).items()}, rtol=FLOAT64_RTOL)


def test_equal_policies_have_the_weight_one_and_nothing_is_dropped():
    logprobs, _, mask = random_inputs(6)
    for name, values in everything(logprobs, logprobs.clone(), mask).items():
        expected = mask if name.endswith(("weights", "ratio", "kept")) else torch.zeros_like(mask)
        assert values.to(torch.float64).equal(expected.double()), name


@pytest.mark.parametrize("extreme", [1e4, -1e4, math.inf, -math.inf])
def test_extreme_log_ratios_stay_finite_and_are_bounded_or_dropped(extreme: float):
    mask, rollout_logprobs = torch.ones(1, 3, dtype=torch.bool), torch.zeros(1, 3)
    logprobs = torch.tensor([[extreme, 0.0, 0.0]])
    actual = everything(logprobs, rollout_logprobs, mask)
    assert all(values.isfinite().all() for name, values in actual.items() if name.endswith(("weights", "ratio")))
    assert not any(values[0, 0] for name, values in actual.items() if name.endswith("kept"))
    assert not any(
        values[0, 0] for name, values in actual.items() if name.startswith("masked") and name.endswith("weights")
    )


def test_nan_tokens_are_rejected_and_have_no_weight():
    mask, logprobs = torch.ones(1, 2, dtype=torch.bool), torch.tensor([[math.nan, 0.0]])
    tokens, _ = rejection_mask(logprobs, torch.zeros(1, 2), mask, kl_kind="k1", rejection_level="token", high=math.inf)
    rows, _ = rejection_mask(
        logprobs, torch.zeros(1, 2), mask, kl_kind="k1", rejection_level="sequence_max", high=math.inf
    )
    assert tokens.tolist() == [[False, True]] and rows.tolist() == [[False, False]]


@pytest.mark.parametrize("shape", [(0, 4), (2, 0), (2, 3)])
def test_an_empty_mask_gives_zeros(shape: tuple[int, int]):
    mask = torch.zeros(shape, dtype=torch.bool)
    for values in everything(torch.full(shape, math.nan), torch.randn(shape), mask).values():
        assert values.shape == shape and not values.any()


def test_bfloat16_is_computed_in_float32():
    logprobs, rollout_logprobs, mask = random_inputs(7)
    low, rollout_low = logprobs.bfloat16(), rollout_logprobs.bfloat16()
    actual, exact = everything(low, rollout_low, mask), everything(low.double(), rollout_low.double(), mask)
    rtol = reduction_rtol(torch.float32, length=mask.shape[1], depth=16)
    for name, values in actual.items():
        assert values.dtype in (torch.float32, torch.bool), name
        assert_norm_close(values.double(), exact[name].double(), rtol)


def test_no_gradient_flows_through_weights():
    logprobs, rollout_logprobs, mask = random_inputs(8)
    actual = everything(logprobs.requires_grad_(), rollout_logprobs.requires_grad_(), mask)
    assert not any(values.requires_grad for values in actual.values())


def test_a_weighted_loss_split_into_micro_batches_gives_the_same_sum_and_gradient():
    logprobs, rollout_logprobs, mask = random_inputs(9)
    current = logprobs.clone().requires_grad_()

    def reduced(rows: list[int], mean: float) -> Tensor:
        weights, _ = truncated_weights(
            logprobs[rows], rollout_logprobs[rows], mask[rows], level="sequence", max_weight=1.2
        )
        weights = normalized_weights(weights, mask[rows], mean=mean)
        return aggregate(-weights * current[rows], mask[rows], mode="token_mean", denominator=mask.sum())

    full_weights, _ = truncated_weights(logprobs, rollout_logprobs, mask, level="sequence", max_weight=1.2)
    mean = weight_sums(full_weights, mask, level="sequence").mean()
    full, parts = (
        reduced([0, 1, 2, 3, 4, 5], mean),
        reduced([5], mean) + reduced([1, 0], mean) + reduced([2, 3, 4], mean),
    )
    assert_norm_close(parts, full)
    assert_norm_close(torch.autograd.grad(parts, current), torch.autograd.grad(full, current))


def test_weight_sums_by_hand():
    """Tokens 4, 1/2, 8, 2: sum 14.5, squares 84.25; rows 2 and 16: sum 18, squares 260."""
    tokens = weight_sums(on_tokens(4.0, 0.5, 8.0, 2.0), MASK, level="token")
    rows = weight_sums(on_tokens(2.0, 2.0, 16.0, 16.0), MASK, level="sequence")
    assert tokens == WeightSums(14.5, 84.25, 4) and rows == WeightSums(18.0, 260.0, 2)
    assert (tokens.mean(), rows.mean()) == (3.625, 9.0)
    assert rows.effective_sample_size() == pytest.approx(1.2461538) and rows.result() == pytest.approx(0.6230769)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(st.integers(0, 100), st.integers(0, 6), st.sampled_from(LEVELS))
def test_weight_sums_of_any_split_merge_to_the_full_batch(seed: int, split: int, level: RatioLevel):
    inputs = random_inputs(seed)
    weights, mask = importance_ratios(*inputs, level=level), inputs[2]
    parts = [weight_sums(weights[rows], mask[rows], level=level) for rows in (slice(split), slice(split, None))]
    merged, full = parts[0].merge(parts[1]), weight_sums(weights, mask, level=level)
    assert merged.count == full.count
    assert merged.mean() == pytest.approx(full.mean()) and merged.result() == pytest.approx(full.result())


@pytest.mark.parametrize("level", LEVELS)
def test_effective_sample_size_of_equal_weights_and_of_a_single_weight(level: RatioLevel):
    mask = torch.ones(5, 3, dtype=torch.bool)
    equal = weight_sums(torch.full((5, 3), 0.3), mask, level=level)
    alone = weight_sums(torch.eye(5)[0][:, None].expand(5, 3), mask, level="sequence")
    assert equal.result() == pytest.approx(1) and alone.effective_sample_size() == pytest.approx(1)


def test_weight_sums_of_an_empty_batch():
    nothing = weight_sums(torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.bool), level="token")
    assert math.isnan(nothing.mean()) and math.isnan(nothing.result()) and nothing.effective_sample_size() == 0
    assert WeightSums(0.0, 0.0, 3).result() == 0


def test_normalized_weights_have_the_mean_one():
    inputs = random_inputs(10)
    weights, mask = importance_ratios(*inputs, level="token"), inputs[2]
    normalized = normalized_weights(weights, mask, mean=weight_sums(weights, mask, level="token").mean())
    assert weight_sums(normalized, mask, level="token").mean() == pytest.approx(1)


def test_normalized_zero_weights_are_zero():
    assert not normalized_weights(torch.zeros(3, 4), MASK, mean=0.0).any()


@pytest.mark.parametrize("mean", [-1.0, math.nan])
def test_an_invalid_mean_is_rejected(mean: float):
    with pytest.raises(ValueError, match="mean"):
        normalized_weights(torch.ones(3, 4), MASK, mean=mean)


@pytest.mark.parametrize("bounds", [(-0.1, 2.0), (3.0, 2.0), (0.0, 0.0), (0.0, math.nan)])
@pytest.mark.parametrize("function", [truncated_weights, masked_weights])
def test_bounds_out_of_range_are_rejected(function, bounds: tuple[float, float]):
    with pytest.raises(ValueError, match="min_weight"):
        function(LOGPROBS, ROLLOUT_LOGPROBS, MASK, level="token", min_weight=bounds[0], max_weight=bounds[1])


def test_unknown_levels_are_rejected():
    with pytest.raises(ValueError, match=r"level .*'row'"):
        importance_ratios(LOGPROBS, ROLLOUT_LOGPROBS, MASK, level="row")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"level .*'sequence'"):
        rejection_mask(LOGPROBS, ROLLOUT_LOGPROBS, MASK, kl_kind="k1", rejection_level="sequence", high=1.0)  # pyright: ignore[reportArgumentType]


def test_thresholds_in_the_wrong_order_are_rejected():
    with pytest.raises(ValueError, match=r"low .*2\.0.* high .*1\.0"):
        rejection_mask(LOGPROBS, ROLLOUT_LOGPROBS, MASK, kl_kind="k1", rejection_level="token", low=2.0, high=1.0)
