"""REINFORCE, GPG, CISPO and DPPO against literals and formulas in NumPy."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from flowrl.algorithms import cispo_loss, dppo_loss, gpg_loss, reinforce_loss
from tests.algorithms.policy_cases import columns

OLD_PROBS = [0.5, 0.5, 0.01, 0.9]
PROBS = [0.8, 0.8, 0.03, 0.6]
TRUST_ADVANTAGES = [1.0, -1.0, 2.0, -1.0]


def four(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    table = columns(seed)
    return table["logprobs"].requires_grad_(), table["old_logprobs"], table["advantages"], table["mask"]


def dppo_by_hand(divergence, max_ratio: float | None = None) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """Returns loss, metrics and gradient; w is 1.6, 1.6, 3 and 2 / 3, and 0.2 bounds both divergences."""
    logprobs = torch.tensor([PROBS]).log().requires_grad_()
    loss, metrics = dppo_loss(
        logprobs,
        torch.tensor([OLD_PROBS]).log(),
        torch.tensor([TRUST_ADVANTAGES]),
        torch.ones(1, 4, dtype=torch.bool),
        divergence=divergence,
        delta_low=0.2,
        delta_high=0.2,
        max_ratio=max_ratio,
    )
    return loss, metrics, torch.autograd.grad(loss.sum(), logprobs)[0]


@pytest.mark.parametrize("loss_function", [reinforce_loss, gpg_loss])
def test_reinforce_and_gpg_by_hand(loss_function):
    logprobs = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    loss, _ = loss_function(
        logprobs, torch.full((1, 2), -1.0), torch.tensor([[2.0, -3.0]]), torch.ones(1, 2, dtype=torch.bool)
    )
    assert loss.tolist() == [[2.0, -6.0]]
    assert torch.autograd.grad(loss.sum(), logprobs)[0].tolist() == [[-2.0, 3.0]]


def test_cispo_by_hand():
    """Weights 2 -> 1.3, 0.5 -> 0.8 and 1.1; log-probabilities -1 + log w; every token keeps a gradient."""
    old_logprobs = torch.full((1, 3), -1.0)
    logprobs = (old_logprobs + torch.tensor([[2.0, 0.5, 1.1]]).log()).requires_grad_()
    mask = torch.ones(1, 3, dtype=torch.bool)
    loss, metrics = cispo_loss(
        logprobs, old_logprobs, torch.tensor([[1.0, -1.0, 3.0]]), mask, clip_low=0.2, clip_high=0.3
    )
    assert_close(loss, torch.tensor([[0.3989087, -1.3545177, 2.9854764]]))
    assert_close(torch.autograd.grad(loss.sum(), logprobs)[0], torch.tensor([[-1.3, 0.8, -3.3]]))
    assert metrics["clip_fraction_high"].tolist() == [[1, 0, 0]]
    assert metrics["clip_fraction_low"].tolist() == [[0, 1, 0]]
    assert_close(metrics["ratio"], torch.tensor([[2.0, 0.5, 1.1]]))


def test_cispo_agrees_with_the_formula_in_numpy():
    logprobs, old_logprobs, advantages, mask = four(0)
    loss, _ = cispo_loss(logprobs, old_logprobs, advantages, mask, clip_low=0.3, clip_high=0.5)
    x, a = logprobs.detach().numpy(), advantages.numpy()
    weights = np.clip(np.exp(x - old_logprobs.numpy()), 0.7, 1.5)
    assert_close(loss.detach().numpy(), np.where(mask, -weights * a * x, 0.0))
    # The finite difference of the loss whose weight is held at this point.
    ahead, behind = (-weights * a * (x + step) for step in (1e-6, -1e-6))
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    assert_close(gradient.numpy(), np.where(mask, (ahead - behind) / 2e-6, 0.0), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("divergence", ["tv", "kl"])
def test_dppo_by_hand_masks_tokens_that_leave_the_trust_region(divergence):
    loss, metrics, gradient = dppo_by_hand(divergence)
    assert_close(loss, torch.tensor([[0.0, 1.6, -6.0, 0.0]]))
    assert_close(gradient, torch.tensor([[0.0, 1.6, -6.0, 0.0]]))
    assert metrics["clip_fraction_high"].tolist() == [[1, 0, 0, 0]]
    assert metrics["clip_fraction_low"].tolist() == [[0, 0, 0, 1]]
    assert not metrics["max_ratio_fraction"].any()


def test_the_binary_divergences_by_hand():
    assert_close(dppo_by_hand("tv")[1]["divergence"], torch.tensor([[0.3, 0.3, 0.02, 0.3]]))
    expected = torch.tensor([[0.2231436, 0.2231436, 0.0092187, 0.2262892]])
    assert_close(dppo_by_hand("kl")[1]["divergence"], expected, rtol=1e-4, atol=1e-7)


def test_max_ratio_caps_the_weight_and_keeps_the_gradient():
    loss, metrics, gradient = dppo_by_hand("tv", max_ratio=2.0)
    assert_close(loss, torch.tensor([[0.0, 1.6, -4.0, 0.0]]))
    assert_close(gradient, torch.tensor([[0.0, 1.6, -4.0, 0.0]]))
    assert metrics["max_ratio_fraction"].tolist() == [[0, 0, 1, 0]]


def test_max_ratio_does_not_count_masked_out_tokens():
    assert dppo_by_hand("tv", max_ratio=1.5)[1]["max_ratio_fraction"].tolist() == [[0, 1, 1, 0]]


@pytest.mark.parametrize("divergence", ["tv", "kl"])
def test_dppo_agrees_with_the_formula_in_numpy(divergence):
    logprobs, old_logprobs, advantages, mask = four(1)
    options = {"divergence": divergence, "delta_low": 0.1, "delta_high": 0.01, "max_ratio": 1.8}
    loss, _ = dppo_loss(logprobs, old_logprobs, advantages, mask, **options)
    p, q, a = np.exp(logprobs.detach().numpy()), np.exp(old_logprobs.numpy()), advantages.numpy()
    d = np.abs(p - q) if divergence == "tv" else q * np.log(q / p) + (1 - q) * np.log((1 - q) / (1 - p))
    silent = ((a > 0) & (p > q) & (d > 0.01)) | ((a < 0) & (p < q) & (d > 0.1))
    expected = np.where(mask.numpy() & ~silent, -a * np.minimum(p / q, 1.8), 0.0)
    assert 0 < silent[mask].sum() < mask.sum()
    assert_close(loss.detach().numpy(), expected)
    # -M A w is its own derivative by log p, and the weight is held where max_ratio binds.
    assert_close(torch.autograd.grad(loss.sum(), logprobs)[0].numpy(), expected)


def test_the_binary_divergence_is_accurate_near_probability_one():
    """q = 1 - 1e-6 and p = 1 - 1e-3 in float32: log((1 - q) / (1 - p)) would be noise if 1 - p were subtracted."""
    old_logprobs, logprobs = torch.tensor([[-1e-6]]), torch.tensor([[-1e-3]])
    one = torch.ones(1, 1)
    options = {"divergence": "kl", "delta_low": 1.0, "delta_high": 1.0}
    metrics = dppo_loss(logprobs, old_logprobs, one, one.bool(), **options)[1]
    q, p = math.exp(-1e-6), math.exp(-1e-3)
    expected = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
    assert metrics["divergence"].item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"divergence": "js"}, r"divergence .*'js'"),
        ({"delta_low": -0.1}, r"delta_low .*-0.1"),
        ({"delta_high": -0.1}, r"delta_high .*-0.1"),
        ({"max_ratio": 0.0}, r"max_ratio .*0.0"),
    ],
)
def test_options_of_dppo_outside_their_range_are_rejected(wrong: dict, message: str):
    options = {"divergence": "tv", "delta_low": 0.1, "delta_high": 0.1} | wrong
    with pytest.raises(ValueError, match=message):
        dppo_loss(*four(2), **options)


def test_clips_of_cispo_outside_their_range_are_rejected():
    with pytest.raises(ValueError, match=r"clip_high .*-1"):
        cispo_loss(*four(3), clip_low=0.2, clip_high=-1)
