"""PPO, decoupled PPO and SAPO against literals and formulas in NumPy."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from flowrl.algorithms import clipped_policy_loss, decoupled_policy_loss, sapo_loss
from flowrl.algorithms.losses.policy_losses import bounded_ratio, check_clips, clipped_surrogate, weighted_score
from tests.algorithms.policy_cases import columns
from tests.engines.closeness import FLOAT64_RTOL, assert_norm_close, reduction_rtol

RATIOS = [2.0, 0.5, 2.0, 0.5, 1.1, 5.0]
ADVANTAGES = [1.0, 1.0, -1.0, -1.0, 3.0, -2.0]


def by_hand(dual_clip: float | None = None) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """Returns loss, metrics and gradient for the tokens above with clips 0.2 and 0.3."""
    old_logprobs = torch.full((1, 6), -1.0)
    logprobs = (old_logprobs + torch.tensor([RATIOS]).log()).requires_grad_()
    loss, metrics = clipped_policy_loss(
        logprobs,
        old_logprobs,
        torch.tensor([ADVANTAGES]),
        torch.ones(1, 6, dtype=torch.bool),
        clip_low=0.2,
        clip_high=0.3,
        dual_clip=dual_clip,
    )
    return loss, metrics, torch.autograd.grad(loss.sum(), logprobs)[0]


def random_inputs(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns logprobs (requiring gradient), old_logprobs, advantages, mask."""
    generator = torch.Generator().manual_seed(seed)
    logprobs, old_logprobs, advantages = torch.randn(3, 5, 9, generator=generator, dtype=torch.float64)
    return logprobs.requires_grad_(), old_logprobs, advantages, torch.rand(5, 9, generator=generator) < 0.6


def test_the_loss_by_hand():
    assert_close(by_hand()[0], torch.tensor([[-1.3, -0.5, 2.0, 0.8, -3.3, 10.0]]))


def test_the_gradient_computed_by_hand_is_zero_where_a_clip_binds():
    assert_close(by_hand()[2], torch.tensor([[0.0, -0.5, 2.0, 0.0, -3.3, 10.0]]))


def test_the_dual_clip_bounds_the_loss_of_bad_tokens_and_stops_their_gradient():
    loss, metrics, gradient = by_hand(dual_clip=3.0)
    assert_close(loss, torch.tensor([[-1.3, -0.5, 2.0, 0.8, -3.3, 6.0]]))
    assert_close(gradient, torch.tensor([[0.0, -0.5, 2.0, 0.0, -3.3, 0.0]]))
    assert metrics["dual_clip_fraction"].tolist() == [[0, 0, 0, 0, 0, 1]]


def test_clip_fractions_count_only_clips_that_bind():
    metrics = by_hand()[1]
    assert metrics["clip_fraction"].tolist() == [[1, 0, 0, 1, 0, 0]]
    assert metrics["clip_fraction_high"].tolist() == [[1, 0, 0, 0, 0, 0]]
    assert metrics["clip_fraction_low"].tolist() == [[0, 0, 0, 1, 0, 0]]
    assert not metrics["dual_clip_fraction"].any()


def test_ratio_and_approximate_divergence_by_hand():
    metrics = by_hand()[1]
    assert_close(metrics["ratio"], torch.tensor([RATIOS]))
    assert_close(metrics["approx_kl"], torch.tensor([[w - 1 - math.log(w) for w in RATIOS]]))
    assert_close(metrics["logprob_change"], torch.tensor([[abs(math.log(w)) for w in RATIOS]]))


@pytest.mark.parametrize("dual_clip", [None, 3.0])
def test_the_loss_agrees_with_the_formula_in_numpy(dual_clip: float | None):
    logprobs, old_logprobs, advantages, mask = random_inputs(0)
    loss, _ = clipped_policy_loss(
        logprobs, old_logprobs, advantages, mask, clip_low=0.2, clip_high=0.28, dual_clip=dual_clip
    )
    a, w = advantages.numpy(), np.exp(logprobs.detach().numpy() - old_logprobs.numpy())
    objective = np.minimum(w * a, np.clip(w, 0.8, 1.28) * a)
    if dual_clip is not None:
        objective = np.where(a < 0, np.maximum(objective, dual_clip * a), objective)
    assert_close(loss.detach().numpy(), np.where(mask, -objective, 0.0))


@pytest.mark.parametrize("dual_clip", [None, 1.5])
def test_the_loss_passes_a_gradient_check(dual_clip: float | None):
    logprobs, old_logprobs, advantages, mask = random_inputs(1)

    def loss(x: Tensor) -> Tensor:
        return clipped_policy_loss(x, old_logprobs, advantages, mask, clip_low=0.2, clip_high=0.3, dual_clip=dual_clip)[
            0
        ]

    assert torch.autograd.gradcheck(loss, (logprobs,))


def test_masked_tokens_change_neither_loss_nor_gradient_nor_metrics():
    logprobs, old_logprobs, advantages, mask = random_inputs(2)
    clean, clean_metrics = clipped_policy_loss(logprobs, old_logprobs, advantages, mask, clip_low=0.2, clip_high=0.2)
    dirty_logprobs = logprobs.detach().masked_fill(~mask, float("nan")).requires_grad_()
    old_logprobs, advantages = (x.masked_fill(~mask, float("inf")) for x in (old_logprobs, advantages))
    loss, metrics = clipped_policy_loss(dirty_logprobs, old_logprobs, advantages, mask, clip_low=0.2, clip_high=0.2)
    assert_close((loss, metrics), (clean, clean_metrics), rtol=0, atol=0)
    gradients = torch.autograd.grad(clean.sum() + loss.sum(), (logprobs, dirty_logprobs))
    assert_close(*gradients, rtol=0, atol=0)
    assert not loss[~mask].any() and not any(metric[~mask].any() for metric in metrics.values())


def test_a_split_batch_gives_the_rows_of_the_full_batch():
    inputs = random_inputs(3)
    full, _ = clipped_policy_loss(*inputs, clip_low=0.2, clip_high=0.2)
    parts = [
        clipped_policy_loss(*(x[rows] for x in inputs), clip_low=0.2, clip_high=0.2)[0]
        for rows in (slice(0, 2), slice(2, 2), slice(2, 5))
    ]
    assert_close(torch.cat(parts), full, rtol=0, atol=0)


def test_on_policy_the_ratio_is_one_and_the_gradient_is_reinforce():
    logprobs, _, advantages, mask = random_inputs(4)
    loss, metrics = clipped_policy_loss(logprobs, logprobs, advantages, mask, clip_low=0.2, clip_high=0.2)
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    assert_norm_close(gradient, torch.where(mask, -advantages, 0), rtol=FLOAT64_RTOL)
    assert metrics["ratio"].equal(mask.double())
    assert not metrics["clip_fraction"].any() and not metrics["approx_kl"].any()


def test_no_gradient_flows_into_old_logprobs_advantages_or_metrics():
    logprobs, old_logprobs, advantages, mask = random_inputs(5)
    loss, metrics = clipped_policy_loss(
        logprobs, old_logprobs.requires_grad_(), advantages.requires_grad_(), mask, clip_low=0.2, clip_high=0.2
    )
    loss.sum().backward()
    assert old_logprobs.grad is None and advantages.grad is None
    assert not any(metric.requires_grad for metric in metrics.values())


def test_extreme_log_ratios_stay_finite():
    logprobs = torch.tensor([[-1e4, 1e4, -1e4, 1e4]], requires_grad=True)
    advantages, mask = torch.tensor([[1.0, 1.0, -1.0, -1.0]]), torch.ones(1, 4, dtype=torch.bool)
    loss, metrics = clipped_policy_loss(logprobs, torch.zeros(1, 4), advantages, mask, clip_low=0.2, clip_high=0.2)
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    assert all(x.isfinite().all() for x in (loss, gradient, *metrics.values()))


def test_bfloat16_inputs_are_computed_in_float32():
    logprobs, old_logprobs, advantages, mask = (x.detach() for x in random_inputs(6))
    losses = []
    for dtype in (torch.bfloat16, torch.float64):
        now, old, gains = (x.bfloat16().to(dtype) for x in (logprobs, old_logprobs, advantages))
        losses.append(clipped_policy_loss(now, old, gains, mask, clip_low=0.2, clip_high=0.2)[0])
    low, exact = losses
    assert low.dtype == torch.float32
    assert_norm_close(low.double(), exact, reduction_rtol(torch.float32, length=1, depth=32))  # elementwise only


@pytest.mark.parametrize(
    ("clips", "message"),
    [
        ({"clip_low": 1.5, "clip_high": 0.2}, r"clip_low .*1.5"),
        ({"clip_low": 0.2, "clip_high": -0.2}, r"clip_high .*-0.2"),
        ({"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 1.0}, r"dual_clip .*1.0"),
    ],
)
def test_clips_outside_their_range_are_rejected(clips: dict[str, float], message: str):
    with pytest.raises(ValueError, match=message):
        clipped_policy_loss(*random_inputs(7), **clips)


def decoupled_by_hand(max_weight: float | None) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """Returns loss, metrics and gradient; w is 2, 1, 0.5 and 2, the weights of the sampling policy 0.5, 3, 2 and 2."""
    old_logprobs = torch.full((1, 4), -1.0)
    logprobs = (old_logprobs + torch.tensor([[2.0, 1.0, 0.5, 2.0]]).log()).requires_grad_()
    loss, metrics = decoupled_policy_loss(
        logprobs,
        old_logprobs,
        torch.tensor([[1.0, 1.0, 1.0, -1.0]]),
        torch.ones(1, 4, dtype=torch.bool),
        behavior_logprobs=old_logprobs - torch.tensor([[0.5, 3.0, 2.0, 2.0]]).log(),
        clip_low=0.2,
        clip_high=0.3,
        dual_clip=1.5,
        max_weight=max_weight,
    )
    return loss, metrics, torch.autograd.grad(loss.sum(), logprobs)[0]


def test_the_decoupled_loss_by_hand():
    """PPO's are -1.3 (clipped), -1, -0.5 and 1.5 (dual clip)."""
    loss, metrics, gradient = decoupled_by_hand(None)
    assert_close(loss, torch.tensor([[-0.65, -3.0, -1.0, 3.0]]))
    assert_close(gradient, torch.tensor([[0.0, -3.0, -1.0, 0.0]]))
    assert_close(metrics["behavior_weight"], torch.tensor([[0.5, 3.0, 2.0, 2.0]]))
    assert_close(metrics["ratio"], torch.tensor([[2.0, 1.0, 0.5, 2.0]]))
    assert not metrics["weight_cap_fraction"].any()


def test_the_decoupled_loss_excludes_tokens_above_max_weight():
    loss, metrics, gradient = decoupled_by_hand(2.5)
    assert_close(loss, torch.tensor([[-0.65, 0.0, -1.0, 3.0]]))
    assert_close(gradient, torch.tensor([[0.0, 0.0, -1.0, 0.0]]))
    assert_close(metrics["behavior_weight"], torch.tensor([[0.5, 0.0, 2.0, 2.0]]))
    assert metrics["weight_cap_fraction"].tolist() == [[0, 1, 0, 0]]


def test_the_decoupled_loss_reports_the_staleness_of_the_rollout():
    """k3 of KL(behavior || proximal): c - 1 - log c."""
    expected = torch.tensor([[c - 1 - math.log(c) for c in (0.5, 3.0, 2.0, 2.0)]])
    assert_close(decoupled_by_hand(None)[1]["behavior_kl"], expected)


def test_the_decoupled_loss_agrees_with_the_formula_in_numpy():
    table = columns(0)
    four = [table[name] for name in ("logprobs", "old_logprobs", "advantages", "mask")]
    loss, _ = decoupled_policy_loss(
        *four, behavior_logprobs=table["behavior_logprobs"], clip_low=0.2, clip_high=0.28, max_weight=1.5
    )
    x, proximal, a, mask = (column.numpy() for column in four)
    weights, ratios = np.exp(proximal - table["behavior_logprobs"].numpy()), np.exp(x - proximal)
    objective = weights * np.minimum(ratios * a, np.clip(ratios, 0.8, 1.28) * a)
    assert 0 < (weights > 1.5)[mask].sum() < mask.sum()
    assert_close(loss.numpy(), np.where(mask & (weights <= 1.5), -objective, 0.0))


def test_the_decoupled_loss_with_equal_behavior_and_proximal_policy_is_ppo():
    logprobs, old_logprobs, advantages, mask = random_inputs(8)
    decoupled, _ = decoupled_policy_loss(
        logprobs, old_logprobs, advantages, mask, behavior_logprobs=old_logprobs, clip_low=0.2, clip_high=0.3
    )
    ppo, _ = clipped_policy_loss(logprobs, old_logprobs, advantages, mask, clip_low=0.2, clip_high=0.3)
    assert_close(decoupled, ppo, rtol=0, atol=0)


def test_a_max_weight_of_zero_is_rejected():
    logprobs, old_logprobs, advantages, mask = random_inputs(9)
    with pytest.raises(ValueError, match=r"max_weight .*0.0"):
        decoupled_policy_loss(
            logprobs,
            old_logprobs,
            advantages,
            mask,
            behavior_logprobs=old_logprobs,
            clip_low=0.2,
            clip_high=0.2,
            max_weight=0.0,
        )


def test_sapo_by_hand():
    """Gates sigmoid(0), sigmoid(1) at temperature 1, and sigmoid(-1) at temperature 2 where A < 0."""
    logprobs = torch.tensor([[1.0, 2.0, 0.5]]).log().requires_grad_()
    advantages, mask = torch.tensor([[1.0, 1.0, -1.0]]), torch.ones(1, 3, dtype=torch.bool)
    loss, metrics = sapo_loss(
        logprobs, torch.zeros(1, 3), advantages, mask, temperature_positive=1.0, temperature_negative=2.0
    )
    assert_close(loss, torch.tensor([[-2.0, -2.9242343, 0.5378828]]))
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    assert_close(gradient, torch.tensor([[-1.0, -1.5728955, 0.3932239]]))
    assert_close(metrics["gate"], torch.tensor([[1.0, 0.7864477, 0.7864477]]))


def test_sapo_agrees_with_the_formula_in_numpy():
    logprobs, old_logprobs, advantages, mask = random_inputs(10)
    loss, _ = sapo_loss(logprobs, old_logprobs, advantages, mask, temperature_positive=0.8, temperature_negative=1.6)
    w, a = np.exp(logprobs.detach().numpy() - old_logprobs.numpy()), advantages.numpy()
    tau = np.where(a > 0, 0.8, 1.6)
    expected = -a * 4 / tau / (1 + np.exp(-tau * (w - 1)))
    assert_close(loss.detach().numpy(), np.where(mask, expected, 0.0))


@pytest.mark.parametrize("name", ["temperature_positive", "temperature_negative"])
def test_a_temperature_that_is_not_above_zero_is_rejected(name: str):
    with pytest.raises(ValueError, match=rf"{name} .*0.0"):
        sapo_loss(*random_inputs(11), **{name: 0.0})


def test_bounded_ratio_by_hand_and_clamped():
    ratio = bounded_ratio(torch.tensor([0.0, math.log(3), 1e4, -1e4], dtype=torch.float64))
    assert_close(ratio, torch.tensor([1.0, 3.0, math.exp(20), math.exp(-20)], dtype=torch.float64))


def test_weighted_score_has_the_weight_in_value_and_in_gradient():
    weights, logprobs = torch.tensor([2.0, 0.5], requires_grad=True), torch.tensor([-3.0, -1e4], requires_grad=True)
    score = weighted_score(weights, logprobs)
    score.sum().backward()
    assert score.tolist() == [2.0, 0.5]
    assert logprobs.grad is not None and logprobs.grad.tolist() == [2.0, 0.5]
    assert weights.grad is None


def test_clipped_surrogate_by_hand():
    ratio, advantages = torch.tensor([[2.0, 0.5, 2.0, 0.5]]), torch.tensor([[1.0, 1.0, -1.0, -1.0]])
    loss, metrics = clipped_surrogate(ratio, advantages, clip_low=0.2, clip_high=0.3)
    assert_close(loss, torch.tensor([[-1.3, -0.5, 2.0, 0.8]]))
    assert metrics["clip_fraction_high"].tolist() == [[1, 0, 0, 0]]
    assert metrics["clip_fraction_low"].tolist() == [[0, 0, 0, 1]]


@pytest.mark.parametrize("clips", [(-0.1, 0.2), (1.1, 0.2), (0.2, -0.1), (math.nan, 0.2), (0.2, math.nan)])
def test_check_clips_rejects_values_out_of_range(clips: tuple[float, float]):
    with pytest.raises(ValueError, match=r"clip_(low|high)"):
        check_clips(*clips)
