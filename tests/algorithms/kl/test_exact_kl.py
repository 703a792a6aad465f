"""Tests the exact KL with literals, its definition and finite differences, and its memory."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from flowrl.algorithms import exact_kl
from flowrl.algorithms.kl import exact_kl as exact_kl_module
from tests.algorithms.largest import Largest
from tests.engines.closeness import FLOAT64_RTOL, assert_norm_close, reduction_rtol


def random_logits(seed: int, shape: tuple[int, int, int] = (3, 5, 7)) -> tuple[Tensor, Tensor]:
    """Returns logits of a policy and a reference, both requiring gradient."""
    generator = torch.Generator().manual_seed(seed)
    both = 2 * torch.randn(2, *shape, generator=generator, dtype=torch.float64)
    return both[0].clone().requires_grad_(), both[1].clone().requires_grad_()


def naive_kl(logits: Tensor, ref_logits: Tensor, temperature: float) -> Tensor:
    logprobs, ref_logprobs = (logits / temperature).log_softmax(-1), (ref_logits / temperature).log_softmax(-1)
    return torch.nn.functional.pad((logprobs.exp() * (logprobs - ref_logprobs)).sum(-1)[:, :-1], (1, 0))


def test_exact_kl_by_hand_uses_the_logits_of_the_previous_position():
    """[1/4, 3/4] against [1/2, 1/2]: 1/4 ln 1/2 + 3/4 ln 3/2 = 0.1308120; the last position predicts no token."""
    logits = torch.tensor([[[0.0, math.log(3)], [0.0, 0.0], [9.0, 0.0]]])
    assert_close(exact_kl(logits, torch.zeros(1, 3, 2)), torch.tensor([[0.0, 0.1308120, 0.0]]))


def test_temperature_divides_both_logits():
    """At 2, [0, 2 ln 3] is [1/4, 3/4] and [2 ln 3, 0] is [3/4, 1/4]: 1/2 ln 3 = 0.5493061."""
    logits, ref_logits = torch.tensor([[[0.0, 2 * math.log(3)], [0.0, 0.0]]]), torch.zeros(1, 2, 2)
    ref_logits[0, 0, 0] = 2 * math.log(3)
    assert_close(exact_kl(logits, ref_logits, temperature=2.0), torch.tensor([[0.0, 0.5493061]]))


def test_agrees_with_the_published_formula():
    logits, ref_logits = (x.detach().numpy() for x in random_logits(0))
    probs, ref_probs = (np.exp(x) / np.exp(x).sum(-1, keepdims=True) for x in (logits, ref_logits))
    expected = (probs * np.log(probs / ref_probs)).sum(-1)
    result = exact_kl(torch.from_numpy(logits), torch.from_numpy(ref_logits)).numpy()
    np.testing.assert_allclose(result[:, 1:], expected[:, :-1], rtol=1e-6)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_gradients_in_both_logits_are_those_of_the_definition(temperature: float):
    logits, ref_logits = random_logits(1)
    weights = torch.randn(3, 5, dtype=torch.float64)
    kls = exact_kl(logits, ref_logits, temperature=temperature), naive_kl(logits, ref_logits, temperature)
    assert_norm_close(*kls, rtol=FLOAT64_RTOL)
    gradients = [torch.autograd.grad((weights * kl).sum(), [logits, ref_logits]) for kl in kls]
    assert_norm_close(*gradients, rtol=FLOAT64_RTOL)


def test_passes_a_gradient_check():
    assert torch.autograd.gradcheck(lambda x, y: exact_kl(x, y, temperature=0.8), random_logits(2, (2, 3, 4)))


@pytest.mark.parametrize("chunk_elements", [1, 14, 70])
def test_results_and_gradients_do_not_depend_on_the_chunks(monkeypatch: pytest.MonkeyPatch, chunk_elements: int):
    def results() -> list[Tensor]:
        inputs = random_logits(3)
        kl = exact_kl(*inputs)
        return [kl, *torch.autograd.grad((kl * torch.arange(5)).sum(), inputs)]

    full = results()
    monkeypatch.setattr(exact_kl_module, "_CHUNK_ELEMENTS", chunk_elements)
    assert_norm_close(results(), full, rtol=FLOAT64_RTOL)


@pytest.mark.parametrize("num_rows", [1, 4])
def test_no_pass_allocates_a_float32_tensor_of_the_size_of_the_logits(monkeypatch: pytest.MonkeyPatch, num_rows: int):
    monkeypatch.setattr(exact_kl_module, "_CHUNK_ELEMENTS", 256)
    logits, ref_logits = (torch.randn(num_rows, 64, 32).bfloat16().requires_grad_() for _ in range(2))
    with Largest(torch.float32) as largest:
        torch.autograd.grad(exact_kl(logits, ref_logits).sum(), [logits, ref_logits])
    assert 0 < largest.elements <= 256


def test_equal_logits_have_no_divergence_and_no_gradient():
    logits = torch.randn(2, 4, 9, requires_grad=True)
    kl = exact_kl(logits, logits.detach().clone())
    assert not kl.any() and not torch.autograd.grad(kl.sum(), logits)[0].any()


def test_only_required_gradients_are_computed():
    logits, ref_logits = random_logits(4)
    kl = exact_kl(logits, ref_logits.detach())
    assert_norm_close(
        torch.autograd.grad(kl.sum(), logits),
        torch.autograd.grad(naive_kl(*(logits, ref_logits), 1).sum(), logits),
        rtol=FLOAT64_RTOL,
    )


def test_tokens_that_both_models_exclude_contribute_zero():
    logits = torch.tensor([[[0.0, math.log(3), -math.inf], [0.0, 0.0, 0.0]]], requires_grad=True)
    ref_logits = torch.tensor([[[0.0, 0.0, -math.inf], [0.0, 0.0, 0.0]]], requires_grad=True)
    kl = exact_kl(logits, ref_logits)
    assert_close(kl, torch.tensor([[0.0, 0.1308120]]))
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(kl.sum(), [logits, ref_logits]))


def test_tokens_that_only_the_reference_excludes_give_infinite_kl():
    assert exact_kl(torch.zeros(1, 2, 2), torch.tensor([[[0.0, -math.inf], [0.0, 0.0]]]))[0, 1] == math.inf


def test_extreme_logits_stay_finite_in_value_and_gradient():
    logits = torch.tensor([[[1e4, -1e4], [0.0, 0.0]]], requires_grad=True)
    ref_logits = torch.tensor([[[-1e4, 1e4], [0.0, 0.0]]], requires_grad=True)
    kl = exact_kl(logits, ref_logits)
    assert kl.tolist() == [[0.0, 2e4]]
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(kl.sum(), [logits, ref_logits]))


def test_positions_without_incoming_gradient_have_zero_gradient():
    logits, ref_logits = random_logits(5)
    dirty, ref_dirty = logits.detach().clone(), ref_logits.detach().clone()
    dirty[:, 2], ref_dirty[:, 2] = math.nan, math.inf
    used = torch.tensor([True, True, True, False, True])
    inputs = [(logits, ref_logits), (dirty.requires_grad_(), ref_dirty.requires_grad_())]
    sums = [torch.where(used, exact_kl(*pair), 0).sum() for pair in inputs]
    assert_close(sums[1], sums[0], rtol=0, atol=0)
    gradients = [torch.autograd.grad(total, pair) for total, pair in zip(sums, inputs, strict=True)]
    assert_close(*gradients, rtol=0, atol=0)


def test_bfloat16_logits_give_float32_results_and_bfloat16_gradients():
    low, ref_low = (x.detach().bfloat16().requires_grad_() for x in random_logits(6))
    kl = exact_kl(low, ref_low)
    assert kl.dtype == torch.float32
    rtol = reduction_rtol(torch.float32, length=low.shape[-1], depth=3)  # two log-softmaxes and the expectation
    assert_norm_close(kl.double(), exact_kl(low.double(), ref_low.double()), rtol)
    assert [g.dtype for g in torch.autograd.grad(kl.sum(), [low, ref_low])] == [torch.bfloat16] * 2


@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 4), (2, 1, 4)])
def test_rows_of_no_or_one_token_are_zero(shape: tuple[int, int, int]):
    assert exact_kl(torch.randn(shape), torch.randn(shape)).equal(torch.zeros(shape[:2]))


def test_misuse_is_rejected():
    with pytest.raises(ValueError, match=r"logits .*\[1, 2, 3\].* ref_logits \[1, 2, 4\]"):
        exact_kl(torch.zeros(1, 2, 3), torch.zeros(1, 2, 4))
    with pytest.raises(ValueError, match=r"logits .*\[2, 3\]"):
        exact_kl(torch.zeros(2, 3), torch.zeros(2, 3))
    with pytest.raises(ValueError, match=r"temperature .*0.0"):
        exact_kl(torch.zeros(1, 2, 3), torch.zeros(1, 2, 3), temperature=0.0)
