"""Losses of distillation, compared with the exact KL of small distributions and its gradient."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from flowrl.algorithms import sampled_reverse_kl_loss, topk_forward_kl_loss

STUDENT = torch.tensor([0.3, -0.5, 1.0, 0.0], dtype=torch.float64)
TEACHER = torch.tensor([1.0, 0.2, -0.7, 0.1], dtype=torch.float64)
"""Logits of one position."""


def kl(logits: Tensor, others: Tensor) -> Tensor:
    logprobs = logits.log_softmax(-1)
    return (logprobs.exp() * (logprobs - others.log_softmax(-1))).sum()


def test_by_hand():
    ratio = math.log(0.5) - math.log(0.2)
    loss, metrics = sampled_reverse_kl_loss(torch.tensor([[0.2]]).log(), torch.tensor([[0.5]]).log())
    assert_close((loss.item(), metrics["reverse_kl"].item()), (-ratio, -ratio))
    assert_close(metrics["kl_k3"].item(), 0.5 / 0.2 - 1 - ratio)

    student, teacher = (torch.tensor([[probs]]).log() for probs in ([0.5, 0.25], [0.25, 0.5]))
    loss, metrics = topk_forward_kl_loss(student, teacher)
    # The mass outside of the candidates is 1/4 in both.
    assert_close(loss.item(), 0.25 * math.log(0.5) + 0.5 * math.log(2))
    assert_close(metrics["teacher_mass"].item(), 0.75)
    loss, _ = topk_forward_kl_loss(torch.tensor([[[0.25, 0.25]]]).log(), teacher)
    assert_close(loss.item(), 0.5 * math.log(2) + 0.25 * math.log(0.25 / 0.5))


def test_the_expected_gradient_of_samples_is_that_of_the_reverse_kl():
    logits = STUDENT.clone().requires_grad_()
    logprobs = logits.log_softmax(-1)
    loss, metrics = sampled_reverse_kl_loss(logprobs[None], TEACHER.log_softmax(-1)[None])
    expected_loss = (logprobs.detach().exp() * loss[0]).sum()
    (actual,) = torch.autograd.grad(expected_loss, logits)
    other = STUDENT.clone().requires_grad_()
    (expected,) = torch.autograd.grad(kl(other, TEACHER), other)
    assert_close(actual, expected)
    mean = (logprobs.detach().exp() * metrics["reverse_kl"][0]).sum()
    assert_close(mean, kl(STUDENT, TEACHER))
    assert (metrics["kl_k3"] >= 0).all()


def test_all_tokens_as_candidates_give_the_forward_kl_and_its_gradient():
    logits = STUDENT.clone().requires_grad_()
    loss, _ = topk_forward_kl_loss(logits.log_softmax(-1)[None, None], TEACHER.log_softmax(-1)[None, None])
    (actual,) = torch.autograd.grad(loss.sum(), logits)
    assert_close(loss.item(), kl(TEACHER, STUDENT).item())
    assert_close(actual, STUDENT.softmax(-1) - TEACHER.softmax(-1))


def top_loss(logits: Tensor, teacher: Tensor, k: int) -> Tensor:
    """Returns the loss of a student over the k most likely tokens of a teacher, from the logits of one position."""
    teacher_top = teacher.log_softmax(-1).topk(k)
    student_top = logits.log_softmax(-1)[teacher_top.indices]
    return topk_forward_kl_loss(student_top[None, None], teacher_top.values[None, None])[0].sum()


@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_the_teacher_is_the_minimum_of_the_loss_over_its_most_likely_tokens(scale: float):
    # Nine tokens. With scale 1, the four candidates have a mass of 0.72, and with scale 4, of 0.997.
    teacher = scale * torch.tensor([1.5, 1.1, 0.7, 0.6, -0.1, -0.2, -0.3, -0.4, -0.5], dtype=torch.float64)
    logits = teacher.clone().requires_grad_()
    loss = top_loss(logits, teacher, k=4)
    (gradient,) = torch.autograd.grad(loss, logits)
    assert abs(loss.item()) < 1e-12 and gradient.abs().max() < 1e-12
    curvature = torch.autograd.functional.hessian(lambda logits: top_loss(logits, teacher, k=4), teacher)
    assert torch.linalg.eigvalsh(torch.as_tensor(curvature)).min() > -1e-9
    for token in range(9):
        for step in (-2.0, 0.1, 2.0):
            assert top_loss(teacher + step * torch.eye(9, dtype=torch.float64)[token], teacher, k=4) > 1e-7


def test_the_loss_over_the_most_likely_tokens_is_at_most_the_kl():
    for k in (1, 2, 3, 4):
        assert 0 < top_loss(STUDENT, TEACHER, k) <= kl(TEACHER, STUDENT) + 1e-12


def test_probability_outside_of_the_candidates_moves_to_that_of_the_teacher():
    # The gradient of a logit outside of the candidates is its probability, times 1 - (teacher's rest) / (own rest).
    logits = STUDENT.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(top_loss(logits, TEACHER, k=2), logits)
    own, teacher = STUDENT.softmax(-1), TEACHER.softmax(-1)
    outside = [2, 3]  # the teacher's most likely tokens are 0 and 1
    expected = own * (1 - teacher[outside].sum() / own[outside].sum())
    expected[:2] = (own - teacher)[:2]
    assert_close(gradient, expected)


def test_float32_log_probabilities_of_all_tokens_have_a_finite_gradient():
    generator = torch.Generator().manual_seed(0)
    student, teacher = (torch.randn(3, 5, 1000, generator=generator).mul(4).log_softmax(-1) for _ in range(2))
    student.requires_grad_()
    loss, _ = topk_forward_kl_loss(student, teacher)
    (gradient,) = torch.autograd.grad(loss.sum(), student)
    assert loss.isfinite().all() and gradient.isfinite().all()


def test_the_expected_gradient_of_samples_of_another_policy_is_that_of_the_reverse_kl():
    behavior = torch.tensor([0.1, 0.4, 0.2, 0.3], dtype=torch.float64)
    logits = STUDENT.clone().requires_grad_()
    loss, metrics = sampled_reverse_kl_loss(
        logits.log_softmax(-1)[None], TEACHER.log_softmax(-1)[None], behavior.log()[None], max_weight=10.0
    )
    (actual,) = torch.autograd.grad((behavior * loss[0]).sum(), logits)
    other = STUDENT.clone().requires_grad_()
    (expected,) = torch.autograd.grad(kl(other, TEACHER), other)
    assert_close(actual, expected)
    assert_close(metrics["weight"][0], STUDENT.softmax(-1) / behavior)


def test_importance_weights_are_truncated():
    student, teacher, behavior = (torch.tensor([probs]).log() for probs in ([0.6, 0.2], [0.3, 0.4], [0.1, 0.4]))
    student.requires_grad_()
    loss, metrics = sampled_reverse_kl_loss(student, teacher, behavior, max_weight=2.0)
    assert_close(metrics["weight"], torch.tensor([[2.0, 0.5]]))
    assert_close(loss.detach(), torch.tensor([[2.0 * math.log(2), -0.5 * math.log(2)]]))
    (gradient,) = torch.autograd.grad(loss.sum(), student)
    assert_close(gradient, loss.detach())


@pytest.mark.parametrize("loss", [sampled_reverse_kl_loss, topk_forward_kl_loss])
def test_equal_policies_have_no_loss_and_the_teacher_gets_no_gradient(loss: Callable[..., tuple[Tensor, dict]]):
    student, teacher = (torch.full((2, 3, 4), -1.5, requires_grad=True) for _ in range(2))
    value, metrics = loss(student, teacher)
    value.sum().backward()
    assert not value.any() and teacher.grad is None
    assert not any(metric.requires_grad for metric in metrics.values())


@pytest.mark.parametrize("loss", [sampled_reverse_kl_loss, topk_forward_kl_loss])
def test_mismatched_shapes_are_rejected(loss: Callable[..., object]):
    with pytest.raises(ValueError, match=r"\[2, 3\].*\[2, 4\]"):
        loss(torch.zeros(2, 3), torch.zeros(2, 4))


def test_mismatched_log_probabilities_of_the_behavior_policy_are_rejected():
    with pytest.raises(ValueError, match=r"behavior_logprobs .*\[2, 3\].*\[2, 4\]"):
        sampled_reverse_kl_loss(torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(2, 4))
