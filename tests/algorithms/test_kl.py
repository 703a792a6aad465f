"""KL estimators against literals, the exact divergence of a small distribution, and its gradient."""

import math

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from flowrl.algorithms import KlKind, kl_estimate, kl_shaped_rewards

KINDS: list[KlKind] = ["k1", "k2", "k3", "abs"]


@pytest.mark.parametrize(
    ("kind", "below", "above"), [("k1", 1.0, -1.0), ("k2", 0.5, 0.5), ("k3", 0.3678794, 0.7182818), ("abs", 1.0, 1.0)]
)
def test_kl_estimate_by_hand(kind: KlKind, below: float, above: float):
    """The reference one nat below the policy gives d = -1, one nat above d = 1."""
    logprobs, ref_logprobs = torch.tensor([-1.0, -2.0]), torch.tensor([-2.0, -1.0])
    assert_close(kl_estimate(logprobs, ref_logprobs, kind=kind), torch.tensor([below, above]))


def small_distributions() -> tuple[Tensor, Tensor]:
    """Log-probabilities [V] of a policy, which requires gradient through its logits, and of a reference."""
    logits = torch.tensor([0.3, -0.7, 1.1, 0.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-0.2, 0.5, 0.4, -1.0], dtype=torch.float64)
    return logits, reference.log_softmax(-1)


def expected_gradient(kind: KlKind) -> Tensor:
    """E over the policy's samples of the gradient of the estimate; the sampling itself is not differentiated."""
    logits, ref_logprobs = small_distributions()
    logprobs = logits.log_softmax(-1)
    estimate = kl_estimate(logprobs, ref_logprobs, kind=kind)
    return torch.autograd.grad((logprobs.exp().detach() * estimate).sum(), logits)[0]


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_k1_and_k3_have_the_exact_divergence_as_expectation(kind: KlKind):
    logits, ref_logprobs = small_distributions()
    logprobs = logits.log_softmax(-1)
    exact = (logprobs.exp() * (logprobs - ref_logprobs)).sum()
    assert_close((logprobs.exp() * kl_estimate(logprobs, ref_logprobs, kind=kind)).sum(), exact)


def test_the_expected_gradient_of_k1_is_zero():
    assert_close(expected_gradient("k1"), torch.zeros(4, dtype=torch.float64))


def test_the_expected_gradient_of_k2_is_that_of_the_divergence():
    logits, ref_logprobs = small_distributions()
    logprobs = logits.log_softmax(-1)
    exact = torch.autograd.grad((logprobs.exp() * (logprobs - ref_logprobs)).sum(), logits)[0]
    assert_close(expected_gradient("k2"), exact)


def test_the_expected_gradient_of_k3_is_that_of_the_reverse_divergence():
    logits, ref_logprobs = small_distributions()
    reverse = (ref_logprobs.exp() * (ref_logprobs - logits.log_softmax(-1))).sum()
    assert_close(expected_gradient("k3"), torch.autograd.grad(reverse, logits)[0])


@pytest.mark.parametrize("kind", KINDS)
def test_kl_estimate_passes_a_gradient_check(kind: KlKind):
    logprobs = torch.tensor([-1.0, -0.3, -4.0], dtype=torch.float64, requires_grad=True)
    ref_logprobs = torch.tensor([-1.5, -0.9, -2.0], dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(lambda a, b: kl_estimate(a, b, kind=kind), (logprobs, ref_logprobs))


@pytest.mark.parametrize("kind", KINDS)
def test_kl_estimate_of_equal_policies_is_exactly_zero(kind: KlKind):
    logprobs = torch.randn(50)
    assert not kl_estimate(logprobs, logprobs.clone(), kind=kind).any()


@pytest.mark.parametrize("kind", KINDS)
def test_kl_estimate_stays_finite_at_extreme_log_ratios(kind: KlKind):
    logprobs = torch.tensor([-1e4, 0.0], requires_grad=True)
    estimate = kl_estimate(logprobs, torch.tensor([0.0, -1e4]), kind=kind)
    estimate.sum().backward()
    assert logprobs.grad is not None
    assert estimate.isfinite().all() and logprobs.grad.isfinite().all()


def test_k3_is_accurate_for_tiny_differences():
    tiny = kl_estimate(torch.zeros(1), torch.full((1,), 1e-4), kind="k3")
    assert_close(tiny, torch.full((1,), 5e-9), rtol=1e-2, atol=0)


def test_kl_estimate_of_bfloat16_is_computed_in_float32():
    low = kl_estimate(torch.tensor([-1.0]).bfloat16(), torch.tensor([-2.0]).bfloat16(), kind="k3")
    assert_close(low, torch.tensor([math.exp(-1.0)]))


def test_kl_estimate_refuses_an_unknown_kind_and_lists_the_known():
    with pytest.raises(ValueError, match="kind is 'k4', it must be one of k1, k2, k3, abs"):
        kl_estimate(torch.zeros(1), torch.zeros(1), kind="k4")  # pyright: ignore[reportArgumentType]


def test_kl_estimate_refuses_to_broadcast():
    with pytest.raises(ValueError, match=r"\[2, 3\].*\[2, 1\]"):
        kl_estimate(torch.zeros(2, 3), torch.zeros(2, 1), kind="k1")


MASK = torch.tensor([[False, True, True, False], [True, False, True, False], [False, False, False, False]])


def test_shaped_rewards_by_hand():
    logprobs = torch.tensor([[0.0, -1.0, -2.0, 0.0], [-1.0, 0.0, -3.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    ref_logprobs = torch.tensor([[0.0, -2.0, -2.5, 0.0], [-0.5, 0.0, -3.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    scores = torch.tensor([1.0, 2.0, 4.0])
    rewards = kl_shaped_rewards(scores, logprobs, ref_logprobs, MASK, coef=0.1, kind="k1")
    assert_close(rewards, torch.tensor([[0.0, -0.1, 0.95, 0.0], [0.05, 0.0, 2.0, 0.0], [0.0, 0.0, 0.0, 0.0]]))


def test_shaped_rewards_add_up_to_the_score_minus_the_penalty():
    logprobs, ref_logprobs = torch.randn(2, 3, 4, dtype=torch.float64)
    scores = torch.randn(3, dtype=torch.float64)
    rewards = kl_shaped_rewards(scores, logprobs, ref_logprobs, MASK, coef=0.3, kind="k3")
    penalty = torch.where(MASK, 0.3 * kl_estimate(logprobs, ref_logprobs, kind="k3"), 0).sum(-1)
    assert_close(rewards.sum(-1), torch.where(MASK.any(-1), scores, 0) - penalty)


def test_shaped_rewards_are_unchanged_by_what_masked_tokens_hold():
    logprobs, ref_logprobs = torch.randn(2, 3, 4)
    clean = kl_shaped_rewards(torch.ones(3), logprobs, ref_logprobs, MASK, coef=0.3, kind="k3")
    logprobs, ref_logprobs = logprobs.masked_fill(~MASK, float("nan")), ref_logprobs.masked_fill(~MASK, float("inf"))
    dirty = kl_shaped_rewards(torch.ones(3), logprobs, ref_logprobs, MASK, coef=0.3, kind="k3")
    assert_close(dirty, clean, rtol=0, atol=0)


def test_shaped_rewards_refuse_a_negative_coefficient():
    with pytest.raises(ValueError, match=r"coef is -0\.1"):
        kl_shaped_rewards(torch.ones(3), MASK.float(), MASK.float(), MASK, coef=-0.1, kind="k1")
