"""Tests KL estimators with literals and with the exact KL of a small distribution and its gradient."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from flowrl.algorithms import KlKind, aggregate, kl_estimate, kl_loss, kl_shaped_rewards
from tests.engines.closeness import FLOAT64_RTOL, assert_norm_close, reduction_rtol

KINDS: list[KlKind] = ["k1", "k2", "k3", "abs"]


@pytest.mark.parametrize(
    ("kind", "below", "above"), [("k1", 1.0, -1.0), ("k2", 0.5, 0.5), ("k3", 0.3678794, 0.7182818), ("abs", 1.0, 1.0)]
)
def test_kl_estimate_by_hand(kind: KlKind, below: float, above: float):
    """The reference one nat below the policy gives d = -1, one nat above d = 1."""
    logprobs, ref_logprobs = torch.tensor([-1.0, -2.0]), torch.tensor([-2.0, -1.0])
    assert_close(kl_estimate(logprobs, ref_logprobs, kind=kind), torch.tensor([below, above]))


def small_distributions() -> tuple[Tensor, Tensor]:
    """Returns log-probabilities [V] of a policy, which require gradient, and of a reference."""
    logits = torch.tensor([0.3, -0.7, 1.1, 0.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-0.2, 0.5, 0.4, -1.0], dtype=torch.float64)
    return logits, reference.log_softmax(-1)


def expected_gradient(kind: KlKind) -> Tensor:
    """Returns the expected gradient of the estimate over samples of the policy."""
    logits, ref_logprobs = small_distributions()
    logprobs = logits.log_softmax(-1)
    estimate = kl_estimate(logprobs, ref_logprobs, kind=kind)
    return torch.autograd.grad((logprobs.exp().detach() * estimate).sum(), logits)[0]


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_k1_and_k3_have_the_exact_divergence_as_expectation(kind: KlKind):
    logits, ref_logprobs = small_distributions()
    logprobs = logits.log_softmax(-1)
    exact = (logprobs.exp() * (logprobs - ref_logprobs)).sum()
    assert_norm_close((logprobs.exp() * kl_estimate(logprobs, ref_logprobs, kind=kind)).sum(), exact, rtol=FLOAT64_RTOL)


def test_the_expected_gradient_of_k1_is_zero():
    assert_close(expected_gradient("k1"), torch.zeros(4, dtype=torch.float64))


def test_the_expected_gradient_of_k2_is_that_of_the_divergence():
    logits, ref_logprobs = small_distributions()
    logprobs = logits.log_softmax(-1)
    exact = torch.autograd.grad((logprobs.exp() * (logprobs - ref_logprobs)).sum(), logits)[0]
    assert_norm_close(expected_gradient("k2"), exact, rtol=FLOAT64_RTOL)


def test_the_expected_gradient_of_k3_is_that_of_the_reverse_divergence():
    logits, ref_logprobs = small_distributions()
    reverse = (ref_logprobs.exp() * (ref_logprobs - logits.log_softmax(-1))).sum()
    assert_norm_close(expected_gradient("k3"), torch.autograd.grad(reverse, logits)[0], rtol=FLOAT64_RTOL)


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


def test_kl_estimate_rejects_an_unknown_kind():
    with pytest.raises(ValueError, match=r"kind .*'k4'"):
        kl_estimate(torch.zeros(1), torch.zeros(1), kind="k4")  # pyright: ignore[reportArgumentType]


def test_kl_estimate_rejects_to_broadcast():
    with pytest.raises(ValueError, match=r"\[2, 3\].*\[2, 1\]"):
        kl_estimate(torch.zeros(2, 3), torch.zeros(2, 1), kind="k1")


STRAIGHT_THROUGH: list[tuple[KlKind, KlKind]] = [("k1", "k2"), ("k3", "k2"), ("k2", "k3"), ("abs", "k1")]


@pytest.mark.parametrize(("kind", "gradient"), STRAIGHT_THROUGH)
def test_straight_through_has_the_value_of_one_estimator_and_the_gradient_of_another(kind: KlKind, gradient: KlKind):
    logprobs = torch.tensor([-1.0, -0.3, -40.0], requires_grad=True)
    ref_logprobs = torch.tensor([-1.5, -0.9, -2.0])
    both = kl_estimate(logprobs, ref_logprobs, kind=kind, gradient=gradient)
    other = kl_estimate(logprobs, ref_logprobs, kind=gradient)
    assert both.equal(kl_estimate(logprobs, ref_logprobs, kind=kind))
    assert_norm_close(
        torch.autograd.grad(both.sum(), logprobs), torch.autograd.grad(other.sum(), logprobs), rtol=FLOAT64_RTOL
    )


def test_straight_through_by_hand():
    """d = -1: the value of k3 is exp(-1), and the gradient of k2 in the policy's log-probability is -d."""
    logprobs = torch.tensor([-1.0], requires_grad=True)
    estimate = kl_estimate(logprobs, torch.tensor([-2.0]), kind="k3", gradient="k2")
    assert_close(estimate, torch.tensor([0.3678794]))
    assert_close(torch.autograd.grad(estimate, logprobs)[0], torch.tensor([1.0]))


def test_kl_estimate_rejects_an_unknown_gradient():
    with pytest.raises(ValueError, match=r"gradient .*'k4'"):
        kl_estimate(torch.zeros(1), torch.zeros(1), kind="k1", gradient="k4")  # pyright: ignore[reportArgumentType]


MASK = torch.tensor([[False, True, True, False], [True, False, True, False], [False, False, False, False]])


def test_shaped_rewards_by_hand():
    logprobs = torch.tensor([[0.0, -1.0, -2.0, 0.0], [-1.0, 0.0, -3.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    ref_logprobs = torch.tensor([[0.0, -2.0, -2.5, 0.0], [-0.5, 0.0, -3.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    scores = torch.tensor([1.0, 2.0, 4.0])
    rewards = kl_shaped_rewards(scores, logprobs, ref_logprobs, MASK, coef=0.1, kind="k1")
    assert_close(rewards, torch.tensor([[0.0, -0.1, 0.95, 0.0], [0.05, 0.0, 2.0, 0.0], [0.0, 0.0, 0.0, 0.0]]))


def test_shaped_rewards_add_up_to_the_score_minus_the_penalty():
    # d = -1 and 2 in the first row: k3 is 0.3678794 and 4.3890561; 3 in the second: 16.0855369.
    logprobs = torch.zeros(2, 3)
    ref_logprobs, mask = torch.tensor([[-1.0, 2.0, 9.0], [9.0, 3.0, 9.0]]), torch.tensor([[1, 1, 0], [0, 1, 0]]).bool()
    rewards = kl_shaped_rewards(torch.tensor([1.0, 2.0]), logprobs, ref_logprobs, mask, coef=0.5, kind="k3")
    assert_close(rewards.sum(-1), torch.tensor([1 - 0.5 * 4.7569355, 2 - 0.5 * 16.0855369]))


def test_shaped_rewards_ignore_masked_tokens():
    logprobs, ref_logprobs = torch.randn(2, 3, 4)
    clean = kl_shaped_rewards(torch.ones(3), logprobs, ref_logprobs, MASK, coef=0.3, kind="k3")
    logprobs, ref_logprobs = logprobs.masked_fill(~MASK, float("nan")), ref_logprobs.masked_fill(~MASK, float("inf"))
    dirty = kl_shaped_rewards(torch.ones(3), logprobs, ref_logprobs, MASK, coef=0.3, kind="k3")
    assert_close(dirty, clean, rtol=0, atol=0)


def test_shaped_rewards_accept_a_user_estimator():
    def distance(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
        return (logprobs - ref_logprobs).abs() + 1

    logprobs, scores = torch.full((3, 4), -1.0).masked_fill(~MASK, float("nan")), torch.tensor([1.0, 2.0, 4.0])
    rewards = kl_shaped_rewards(scores, logprobs, torch.full((3, 4), -3.0), MASK, coef=0.5, kind=distance)
    assert_close(rewards, torch.tensor([[0.0, -1.5, -0.5, 0.0], [-1.5, 0.0, 0.5, 0.0], [0.0, 0.0, 0.0, 0.0]]))


def test_shaped_rewards_reject_a_negative_coefficient():
    with pytest.raises(ValueError, match=r"coef .*-0\.1"):
        kl_shaped_rewards(torch.ones(3), MASK.float(), MASK.float(), MASK, coef=-0.1, kind="k1")


def test_kl_loss_by_hand():
    """d = -1 at the token that counts: k3 is exp(-1); the policy is half as likely to sample it as the old policy."""
    mask = torch.tensor([[True, False]])
    logprobs, ref_logprobs = torch.tensor([[-1.0, 5.0]]), torch.tensor([[-2.0, 7.0]])
    old_logprobs = torch.tensor([[-1.0 + math.log(2), 9.0]])
    plain, metrics = kl_loss(logprobs, ref_logprobs, mask, kind="k3")
    weighted, weighted_metrics = kl_loss(logprobs, ref_logprobs, mask, kind="k3", old_logprobs=old_logprobs)
    assert_close(plain, torch.tensor([[0.3678794, 0.0]]))
    assert_close(weighted, torch.tensor([[0.1839397, 0.0]]))
    assert_close(metrics["kl"], plain)
    assert_close(weighted_metrics["kl"], plain)


def test_kl_loss_masks_the_result_of_a_user_estimator():
    def distance(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
        return (logprobs - ref_logprobs).abs() + 1

    logprobs = torch.full((3, 4), -1.0).masked_fill(~MASK, math.nan).requires_grad_()
    ref_logprobs = torch.full((3, 4), -3.0)
    loss, metrics = kl_loss(logprobs, ref_logprobs, MASK, kind=distance)
    assert_close(loss, torch.where(MASK, 3.0, 0.0))
    assert_close(metrics["kl"], loss.detach())
    assert_close(torch.autograd.grad(loss.sum(), logprobs)[0], MASK.float())
    # The value of the distance and the gradient of k2, which is the log-ratio.
    loss, _ = kl_loss(logprobs, ref_logprobs, MASK, kind=distance, gradient="k2")
    assert_close(loss, torch.where(MASK, 3.0, 0.0))
    assert_close(torch.autograd.grad(loss.sum(), logprobs)[0], torch.where(MASK, 2.0, 0.0))


def numpy_kl(logprobs: np.ndarray, ref_logprobs: np.ndarray, kind: KlKind) -> np.ndarray:
    ratio = np.exp(ref_logprobs) / np.exp(logprobs)
    return {"k1": -np.log(ratio), "k2": 0.5 * np.log(ratio) ** 2, "k3": ratio - np.log(ratio) - 1}[kind]


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
@pytest.mark.parametrize("weighted", [False, True])
def test_kl_loss_agrees_with_the_published_formula(kind: KlKind, weighted: bool):
    logprobs, ref_logprobs, old_logprobs = -torch.rand(3, 3, 4, dtype=torch.float64)
    loss, _ = kl_loss(logprobs, ref_logprobs, MASK, kind=kind, old_logprobs=old_logprobs if weighted else None)
    expected = numpy_kl(logprobs.numpy(), ref_logprobs.numpy(), kind)
    if weighted:
        expected = expected * np.exp(logprobs.numpy()) / np.exp(old_logprobs.numpy())
    np.testing.assert_allclose(loss.numpy(), np.where(MASK.numpy(), expected, 0), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("weighted", [False, True])
def test_kl_loss_passes_a_gradient_check(kind: KlKind, weighted: bool):
    logprobs, ref_logprobs, old_logprobs = torch.randn(3, 3, 4, dtype=torch.float64)
    old = old_logprobs if weighted else None
    logprobs.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: kl_loss(x, ref_logprobs, MASK, kind=kind, old_logprobs=old)[0], logprobs)


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_the_weighted_loss_of_an_older_policy_s_tokens_has_the_exact_value_and_gradient(kind: KlKind):
    logits, ref_logprobs = small_distributions()
    logprobs, mask = logits.log_softmax(-1), torch.ones(1, 4, dtype=torch.bool)
    old_logprobs = torch.tensor([0.9, -0.1, 0.2, 0.4], dtype=torch.float64).log_softmax(-1)
    loss, _ = kl_loss(logprobs[None], ref_logprobs[None], mask, kind=kind, old_logprobs=old_logprobs[None])
    expected_loss = (old_logprobs.exp() * loss).sum()
    exact = (logprobs.exp() * (logprobs - ref_logprobs)).sum()
    assert_norm_close(expected_loss, exact, rtol=FLOAT64_RTOL)
    gradients = [torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (expected_loss, exact)]
    assert_norm_close(*gradients, rtol=FLOAT64_RTOL)


def test_the_k2_gradient_under_a_k3_value_is_that_of_the_divergence():
    logits, ref_logprobs = small_distributions()
    logprobs, mask = logits.log_softmax(-1), torch.ones(1, 4, dtype=torch.bool)
    loss, _ = kl_loss(logprobs[None], ref_logprobs[None], mask, kind="k3", gradient="k2")
    exact = (logprobs.exp() * (logprobs - ref_logprobs)).sum()
    estimated = (logprobs.exp().detach() * loss).sum()
    assert_norm_close(estimated, exact, rtol=FLOAT64_RTOL)
    gradients = [torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (estimated, exact)]
    assert_norm_close(*gradients, rtol=FLOAT64_RTOL)


@pytest.mark.parametrize("kind", KINDS)
def test_kl_loss_and_its_gradient_ignore_masked_tokens(kind: KlKind):
    inputs = torch.randn(3, 3, 4)

    def results(tensors: Tensor) -> tuple[Tensor, Tensor]:
        logprobs = tensors[0].clone().requires_grad_()
        loss, _ = kl_loss(logprobs, tensors[1], MASK, kind=kind, old_logprobs=tensors[2])
        return loss, torch.autograd.grad(loss.sum(), logprobs)[0]

    dirty = inputs.masked_fill(~MASK, math.nan)
    dirty[1] = dirty[1].nan_to_num(math.inf)
    assert_close(results(dirty), results(inputs), rtol=0, atol=0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("weighted", [False, True])
def test_kl_loss_stays_finite_at_extreme_log_ratios(kind: KlKind, weighted: bool):
    mask = torch.ones(1, 4, dtype=torch.bool)
    logprobs = torch.tensor([[-1e4, 0.0, -1e4, 0.0]], requires_grad=True)
    old = torch.tensor([[0.0, -1e4, -1e4, -1e4]]) if weighted else None
    loss, _ = kl_loss(logprobs, torch.tensor([[0.0, -1e4, 0.0, 0.0]]), mask, kind=kind, old_logprobs=old)
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    assert loss.isfinite().all() and gradient.isfinite().all()


def test_kl_loss_split_into_micro_batches_gives_the_same_sum_and_gradient():
    logprobs = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    ref_logprobs, old_logprobs = torch.randn(2, 5, 4, dtype=torch.float64)
    mask = torch.rand(5, 4) < 0.7

    def reduced(rows: list[int]) -> Tensor:
        loss, _ = kl_loss(logprobs[rows], ref_logprobs[rows], mask[rows], kind="k3", old_logprobs=old_logprobs[rows])
        return aggregate(loss, mask[rows], mode="seq_mean_token_mean", denominator=5)

    full, parts = reduced([0, 1, 2, 3, 4]), reduced([3]) + reduced([0, 4]) + reduced([1, 2])
    assert_norm_close(parts, full, rtol=FLOAT64_RTOL)
    assert_norm_close(torch.autograd.grad(parts, logprobs), torch.autograd.grad(full, logprobs), rtol=FLOAT64_RTOL)


def test_kl_loss_of_bfloat16_agrees_with_float32_on_the_same_numbers():
    low = torch.randn(3, 3, 4).bfloat16()
    loss, _ = kl_loss(low[0], low[1], MASK, kind="k3", old_logprobs=low[2])
    exact, _ = kl_loss(low[0].double(), low[1].double(), MASK, kind="k3", old_logprobs=low[2].double())
    assert loss.dtype == torch.float32
    assert_norm_close(loss.double(), exact, reduction_rtol(torch.float32, length=1, depth=32))  # elementwise only


def test_reference_and_old_policy_receive_no_gradient():
    logprobs, ref_logprobs, old_logprobs = (torch.randn(3, 4, requires_grad=True) for _ in range(3))
    loss, metrics = kl_loss(logprobs, ref_logprobs, MASK, kind="k3", old_logprobs=old_logprobs)
    gradients = torch.autograd.grad(loss.sum(), [logprobs, ref_logprobs, old_logprobs], allow_unused=True)
    assert gradients[0] is not None and gradients[1:] == (None, None) and not metrics["kl"].requires_grad


def test_kl_loss_rejects_two_corrections_of_one_gradient():
    with pytest.raises(ValueError, match=r"gradient .*old_logprobs"):
        kl_loss(MASK.float(), MASK.float(), MASK, kind="k3", gradient="k2", old_logprobs=MASK.float())


@pytest.mark.parametrize("shape", [(0, 4), (2, 0), (2, 3)])
def test_kl_loss_of_an_empty_batch_is_zero(shape: tuple[int, int]):
    mask = torch.zeros(shape, dtype=torch.bool)
    loss, metrics = kl_loss(torch.full(shape, math.nan), torch.randn(shape), mask, kind="k3")
    assert loss.equal(torch.zeros(shape)) and metrics["kl"].equal(torch.zeros(shape))
