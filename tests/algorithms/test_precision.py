"""Tests inputs at which a naive formula or a lower precision is inaccurate."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from flowrl.algorithms import (
    RatioLevel,
    RejectionLevel,
    RewardMoments,
    dppo_loss,
    explained_variance,
    gae,
    kto_loss,
    kto_reference_kl,
    logprobs_and_entropy_from_hidden,
    logprobs_from_hidden,
    masked_weights,
    mismatch_metrics,
    normalize_rewards,
    optimal_token_baseline,
    orpo_loss,
    overlong_penalty,
    pass_at_k,
    rejection_mask,
    truncated_weights,
    whiten,
)
from flowrl.algorithms import hidden_logprobs as module
from tests.algorithms.unbounded import importance_ratios
from tests.engines.closeness import assert_norm_close, reduction_rtol

BIG = 2.0**24
"""Above this number float32 represents no odd integers."""


def every(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.bool)


@pytest.fixture
def tiny_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(module._TILE_SIDES, "cpu", (1, 1))


@pytest.mark.usefixtures("tiny_tiles")
def test_the_gradient_of_hidden_states_is_summed_in_float32():
    """All 1,024 tokens are equally likely, and all but the sampled token contribute -1/1024; bfloat16 stops at 1/4."""
    hidden = torch.zeros(1, 2, 1, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.ones(1024, 1, dtype=torch.bfloat16).index_fill(0, torch.tensor([0]), 0)
    logprobs = logprobs_from_hidden(hidden, weight, torch.zeros(1, 2).long(), every(1, 2))
    assert torch.autograd.grad(logprobs.sum(), hidden)[0][0, 0].item() == pytest.approx(-1023 / 1024, rel=2**-8)


@pytest.mark.usefixtures("tiny_tiles")
def test_the_gradients_of_weight_and_bias_are_summed_in_float32():
    """each of 1,024 positions contributes -1/2 for the other of two equally likely tokens; bfloat16 stops at -128."""
    hidden = torch.ones(1, 1025, 1, dtype=torch.bfloat16)
    weight, bias = (torch.zeros(shape, dtype=torch.bfloat16, requires_grad=True) for shape in ((2, 1), (2,)))
    logprobs = logprobs_from_hidden(hidden, weight, torch.zeros(1, 1025).long(), every(1, 1025), bias=bias)
    by_weight, by_bias = torch.autograd.grad(logprobs.sum(), (weight, bias))
    assert by_weight.tolist() == [[512.0], [-512.0]] and by_bias.tolist() == [512.0, -512.0]


def test_token_ids_outside_the_vocabulary_have_nan_logprobs():
    hidden, weight = torch.randn(1, 4, 3), torch.randn(5, 3)
    logprobs = logprobs_from_hidden(hidden, weight, torch.tensor([[0, 5, -1, 4]]), every(1, 4))
    assert logprobs.isnan().tolist() == [[False, True, True, False]]


@pytest.mark.parametrize("logprob", [-1e-6, -1e-4, -0.5, -0.7, -5.0, -30.0])
def test_the_odds_of_orpo_are_accurate_near_zero_and_one(logprob: float):
    chosen = torch.tensor([logprob])
    exact = np.float64(chosen.item())
    reward = orpo_loss(chosen, chosen, coef=0.1)[1]["chosen_reward"].item()
    assert reward == pytest.approx(exact - np.log(-np.expm1(exact)), rel=1e-6, abs=1e-6)


def test_a_row_s_log_ratio_is_summed_in_float64():
    logprobs, zeros = torch.tensor([[BIG, 1.0, -BIG]]), torch.zeros(1, 3)
    assert_close(importance_ratios(logprobs, zeros, every(1, 3), level="sequence"), torch.full((1, 3), math.e))
    actual = rejection_mask(logprobs, zeros, every(1, 3), kl_kind="k1", rejection_level="sequence_mean", high=0.0)[1][
        "divergence"
    ]
    assert_close(actual, torch.full((1, 3), -1 / 3))


def test_mismatch_is_measured_in_float64():
    actual = mismatch_metrics(torch.tensor([[-1e-8, 0.0]]), torch.zeros(1, 2), every(1, 2))
    assert actual["prob_gap_mean"].result() == pytest.approx(5e-9) and actual["prob_gap_max"].result() > 0


def test_a_large_constant_explains_no_variance():
    returns, values = torch.tensor([[1.0, 0.0]]), torch.full((1, 2), -BIG)
    assert explained_variance(values, returns, every(1, 2)).item() == 0


@pytest.mark.parametrize("value", [0.1, 0.7, 1e6 + 0.3])
@pytest.mark.parametrize("count", [3, 6, 7])
def test_equal_returns_of_float64_have_no_variance_to_explain(value: float, count: int):
    returns = torch.full((1, count), value, dtype=torch.float64)
    values = torch.arange(count, dtype=torch.float64)[None]
    assert explained_variance(values, returns, every(1, count)).item() == 0
    assert not whiten(returns, every(1, count)).any()
    assert_close(whiten(returns, every(1, count), shift_mean=False), returns, rtol=1e-15, atol=0)


def test_whitened_values_far_from_zero_have_mean_zero_and_variance_one():
    values = 1e4 + torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    whitened = whiten(values, every(8, 64)).double()
    # Computed in float64 and stored in float32.
    eps = torch.finfo(torch.float32).eps
    assert abs(whitened.mean().item()) < eps and whitened.var().item() == pytest.approx(1, rel=4 * eps)


def test_values_far_from_an_outlier_are_whitened_in_float64():
    values = 1e4 + torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    values[3, 5] = -1e4
    x = values.double().numpy()
    expected = (x - x.mean()) / np.sqrt(x.var(ddof=1) + 1e-8)
    stored_rtol = reduction_rtol(torch.float32, length=1, depth=1)
    assert_norm_close(whiten(values, every(8, 64)).double(), torch.from_numpy(expected), stored_rtol)


def test_the_reference_point_of_kto_is_a_mean_in_float64():
    assert kto_reference_kl(torch.tensor([BIG, 1.0, -BIG]), torch.zeros(3)).item() == pytest.approx(1 / 3)


def test_lengths_do_not_round_or_overflow():
    long = torch.tensor([2**24 + 3])
    assert overlong_penalty(long, max_length=2**24 + 4, buffer=2).tolist() == [-0.5]
    assert overlong_penalty(torch.tensor([250], dtype=torch.uint8), max_length=300, buffer=100).tolist() == [-0.5]


def test_an_energy_that_rounding_makes_negative_counts_as_zero():
    """The first row's is 1 - 2 + q = -1e-9, which counts as 0: the baseline is the second row's reward alone."""
    squares = torch.tensor([[1 - 1e-9], [1 + 3e-9]], dtype=torch.float64)
    rewards = torch.tensor([[1.0], [5.0]], dtype=torch.float64)
    actual = optimal_token_baseline(rewards, torch.zeros(2).long(), torch.zeros(2, 1).double(), squares, every(2, 1))
    assert_close(actual, torch.tensor([[-4.0], [0.0]], dtype=torch.float64))


def test_a_binary_divergence_is_never_negative():
    old = -torch.rand(1, 4096, generator=torch.Generator().manual_seed(0))
    new, ones = old * (1 + 1e-6), torch.ones(1, 4096)
    metrics = dppo_loss(new, old, ones, every(1, 4096), divergence="kl", delta_low=1.0, delta_high=1.0)[1]
    assert (metrics["divergence"] >= 0).all()


def test_a_ratio_at_both_bounds_is_inside():
    equal = torch.full((1, 2), -0.3), torch.full((1, 2), -0.3), every(1, 2)
    for function in (masked_weights, truncated_weights):
        weights, metrics = function(*equal, level="token", min_weight=1.0, max_weight=1.0)
        assert weights.tolist() == [[1.0, 1.0]]
        assert not any(x.any() for name, x in metrics.items() if "fraction" in name)


@pytest.mark.parametrize(
    ("level", "low", "high"),
    [("token", -0.5, 0.5), ("sequence_max", -0.5, 0.5), ("sequence_sum", 0.75, 0.75), ("sequence_mean", 0.25, 0.25)],
)
def test_a_divergence_at_a_threshold_is_kept(level: RejectionLevel, low: float, high: float):
    logprobs, zeros = torch.tensor([[0.5, -0.5, -0.75]]), torch.zeros(1, 3)
    if level in ("token", "sequence_max"):
        logprobs[0, 2] = 0
    retained, _ = rejection_mask(logprobs, zeros, every(1, 3), kl_kind="k1", rejection_level=level, low=low, high=high)
    assert retained.all()


def test_a_reward_at_the_reference_point_has_accuracy_zero():
    logprobs = torch.full((2,), -1.0)
    metrics = kto_loss(logprobs, logprobs - 0.5, torch.tensor([True, False]), reference_kl=0.5, beta=0.1)[1]
    assert metrics["accuracy"].tolist() == [0, 0]


def test_a_standard_deviation_up_to_eps_counts_as_zero():
    moments, rewards = RewardMoments(count=5, mean=0.0, sum_of_squares=1.0), torch.tensor([3.0])
    assert normalize_rewards(rewards, moments, shift_mean=False, eps=0.5).item() == 3
    assert normalize_rewards(rewards, moments, shift_mean=False, eps=0.49).item() == 6


@pytest.mark.parametrize("neighbor", [1e12, -math.inf, math.inf, math.nan])
@pytest.mark.parametrize("first", [True, False])
def test_pass_at_k_of_a_group_does_not_depend_on_other_groups(neighbor: float, first: bool):
    scores = torch.tensor([neighbor, 0.0, 0.0, 1e-3, 5e-4], dtype=torch.float64)
    groups = torch.tensor([0, 0, 1, 1, 1] if first else [2, 2, 1, 1, 1])
    actual = pass_at_k(scores, groups, every(5, 1))[2:, 0]
    assert_close(actual, torch.tensor([0.0, 5e-4, 0.0], dtype=torch.float64), rtol=1e-12, atol=1e-18)


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_a_nan_ratio_has_weight_zero(level: RatioLevel):
    logprobs = torch.tensor([[-math.inf, 0.0], [0.5, 0.5]])
    rollout_logprobs = torch.tensor([[-math.inf, 0.0], [0.5, 0.5]])
    for function in (truncated_weights, masked_weights):
        weights, _ = function(logprobs, rollout_logprobs, every(2, 2), level=level, min_weight=0.5, max_weight=2.0)
        assert weights.tolist() == [[0.0, 1.0 if level == "token" else 0.0], [1.0, 1.0]]


def test_gae_of_two_precisions_uses_the_higher():
    rewards, values, mask = torch.rand(3, 4).double(), torch.rand(3, 4), every(3, 4)
    for actual, expected in zip(
        (*gae(rewards, values, mask, gamma=0.9, lam=0.8), *gae(values, rewards, mask, gamma=0.9, lam=0.8)),
        (
            *gae(rewards, values.double(), mask, gamma=0.9, lam=0.8),
            *gae(values.double(), rewards, mask, gamma=0.9, lam=0.8),
        ),
        strict=True,
    ):
        assert_close(actual, expected, rtol=0, atol=0)


def head(seed: int, dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"hidden": (3, 8, 16), "weight": (40, 16), "bias": (40,)}
    return {name: torch.randn(s, generator=generator).to(dtype).requires_grad_() for name, s in shapes.items()}


def under(autocast: bool) -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16, enabled=autocast)


def with_gradients(inputs: dict[str, Tensor], forward: bool = False, backward: bool = False) -> tuple[Tensor, ...]:
    """Returns results and float32 gradients, with or without autocast in each pass."""
    tokens = torch.arange(24).reshape(3, 8)
    with under(forward):
        results = logprobs_and_entropy_from_hidden(
            inputs["hidden"], inputs["weight"], tokens, every(3, 8), bias=inputs["bias"], softcap=5.0, temperature=0.7
        )
        total = (results[0] - 0.3 * results[1]).sum()
    with under(backward):
        actual = torch.autograd.grad(total, list(inputs.values()))
    return *results, *(x.float() if x.dtype == torch.bfloat16 else x for x in actual)


@pytest.mark.parametrize("backward", [False, True])
def test_autocast_results_equal_those_of_bfloat16_inputs(backward: bool):
    inputs = head(0, torch.float32)
    actual = with_gradients(inputs, forward=True, backward=backward)
    expected = with_gradients({name: x.detach().bfloat16().requires_grad_() for name, x in inputs.items()})
    assert all(x.dtype == torch.float32 for x in actual)
    assert_close(actual, expected, rtol=0, atol=0)


def test_autocast_in_the_backward_pass_does_not_change_gradients():
    inputs = head(0, torch.float32)
    assert_close(with_gradients(inputs, backward=True), with_gradients(inputs), rtol=0, atol=0)


def test_autocast_keeps_float64_and_casts_a_float32_head():
    exact = head(1, torch.float64)
    mixed = head(1, torch.float32) | {"hidden": head(1, torch.bfloat16)["hidden"]}
    expected, expected_mixed = with_gradients(exact), with_gradients(head(1, torch.bfloat16))
    assert_close(with_gradients(exact, forward=True, backward=True), expected, rtol=0, atol=0)
    assert_close(with_gradients(mixed, forward=True, backward=True), expected_mixed, rtol=0, atol=0)
