"""Token log-probabilities and entropies against literals, plain softmax, and finite differences."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from flowrl.algorithms import logprobs as module
from flowrl.algorithms import token_entropy, token_logprobs
from flowrl.algorithms.logprobs import chunks
from tests.algorithms.largest import Largest
from tests.algorithms.strategies import quick
from tests.engines.closeness import FLOAT64_RTOL, assert_norm_close, reduction_rtol


def random_inputs(seed: int, shape: tuple[int, int, int] = (3, 5, 7)) -> tuple[Tensor, Tensor]:
    """Returns logits (requiring gradient) and tokens."""
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(shape, generator=generator, dtype=torch.float64)
    return logits.requires_grad_(), torch.randint(shape[2], shape[:2], generator=generator)


def naive_logprobs(logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    chosen = (logits / temperature).log_softmax(-1)[:, :-1].gather(-1, tokens[:, 1:, None]).squeeze(-1)
    return torch.nn.functional.pad(chosen, (1, 0))


def naive_entropy(logits: Tensor, temperature: float) -> Tensor:
    logprobs = (logits / temperature).log_softmax(-1)[:, :-1]
    return torch.nn.functional.pad(-(logprobs.exp() * logprobs).sum(-1), (1, 0))


def test_logprobs_by_hand_use_the_logits_of_the_previous_position():
    # Softmax of [0, ln 3] is [1/4, 3/4], of [0, 0] is [1/2, 1/2]; the last logits predict no token.
    logits = torch.tensor([[[0.0, math.log(3)], [0.0, 0.0], [50.0, 0.0]]])
    logprobs = token_logprobs(logits, torch.tensor([[0, 1, 0]]))
    assert_close(logprobs, torch.tensor([[0.0, math.log(0.75), math.log(0.5)]]))


def test_entropy_by_hand():
    logits = torch.tensor([[[0.0, math.log(3)], [0.0, 0.0], [50.0, 0.0]]])
    assert_close(token_entropy(logits), torch.tensor([[0.0, 0.5623351, 0.6931472]]))


def test_temperature_divides_the_logits():
    logits = torch.tensor([[[0.0, 2 * math.log(3)], [0.0, 0.0]]])
    assert_close(token_logprobs(logits, torch.tensor([[0, 0]]), temperature=2.0), torch.tensor([[0.0, math.log(0.25)]]))
    assert_close(token_entropy(logits, temperature=2.0), torch.tensor([[0.0, 0.5623351]]))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_and_their_gradient_agree_with_log_softmax(temperature: float):
    logits, tokens = random_inputs(0)
    weights = torch.randn(3, 5, dtype=torch.float64)
    ours, naive = token_logprobs(logits, tokens, temperature=temperature), naive_logprobs(logits, tokens, temperature)
    assert_norm_close(ours, naive, rtol=FLOAT64_RTOL)
    gradients = [torch.autograd.grad((weights * x).sum(), logits)[0] for x in (ours, naive)]
    assert_norm_close(*gradients, rtol=FLOAT64_RTOL)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_entropy_and_its_gradient_agree_with_the_definition(temperature: float):
    logits, _ = random_inputs(1)
    weights = torch.randn(3, 5, dtype=torch.float64)
    ours, naive = token_entropy(logits, temperature=temperature), naive_entropy(logits, temperature)
    assert_norm_close(ours, naive, rtol=FLOAT64_RTOL)
    gradients = [torch.autograd.grad((weights * x).sum(), logits)[0] for x in (ours, naive)]
    assert_norm_close(*gradients, rtol=FLOAT64_RTOL)


def test_both_pass_a_gradient_check():
    logits, tokens = random_inputs(2, (2, 3, 4))
    assert torch.autograd.gradcheck(lambda x: token_logprobs(x, tokens, temperature=0.8), (logits,))
    assert torch.autograd.gradcheck(lambda x: token_entropy(x, temperature=0.8), (logits,))


@pytest.mark.parametrize("chunk_elements", [1, 70])
def test_results_and_gradients_do_not_depend_on_the_chunks(monkeypatch: pytest.MonkeyPatch, chunk_elements: int):
    def results() -> list[Tensor]:
        logits, tokens = random_inputs(3)
        values = [token_logprobs(logits, tokens), token_entropy(logits)]
        return values + [torch.autograd.grad(value.sum(), logits)[0] for value in values]

    full = results()
    monkeypatch.setattr(module, "_CHUNK_ELEMENTS", chunk_elements)
    assert_norm_close(results(), full, rtol=FLOAT64_RTOL)


@pytest.mark.parametrize("kind", ["logprobs", "entropy"])
def test_no_row_of_logits_exists_in_float32(monkeypatch: pytest.MonkeyPatch, kind: str):
    monkeypatch.setattr(module, "_CHUNK_ELEMENTS", 140)
    logits, tokens = random_inputs(7, (2, 30, 70))
    low = logits.detach().bfloat16().requires_grad_()
    with Largest(torch.float32) as largest:
        value = token_logprobs(low, tokens) if kind == "logprobs" else token_entropy(low)
        torch.autograd.grad(value.sum(), low)
    assert largest.elements == 140  # two positions; a row has 2,100


def test_a_split_batch_gives_the_rows_of_the_full_batch():
    logits, tokens = random_inputs(4)
    full = token_logprobs(logits, tokens)
    assert_norm_close(
        torch.cat([token_logprobs(logits[r], tokens[r]) for r in ([0, 2], [1])]), full[[0, 2, 1]], rtol=FLOAT64_RTOL
    )


def test_padding_on_the_right_changes_nothing_before_it():
    logits, tokens = random_inputs(5)
    changed = logits.detach().clone()
    changed[:, 3:], tokens[:, 4:] = 99.0, 0
    assert_norm_close(token_logprobs(changed, tokens)[:, :4], token_logprobs(logits, tokens)[:, :4], rtol=FLOAT64_RTOL)


def test_an_excluded_token_has_logprob_minus_infinity_and_adds_nothing_to_entropy_or_gradient():
    logits = torch.tensor([[[0.0, -math.inf, 0.0], [0.0, 0.0, 0.0]]], requires_grad=True)
    assert token_logprobs(logits, torch.tensor([[0, 1]]))[0, 1] == -math.inf
    entropy = token_entropy(logits)
    assert_close(entropy, torch.tensor([[0.0, math.log(2)]]))
    assert torch.autograd.grad(entropy.sum(), logits)[0].isfinite().all()


def test_extreme_logits_stay_finite():
    logits = torch.tensor([[[1e4, -1e4], [0.0, 0.0]]], requires_grad=True)
    logprobs, entropy = token_logprobs(logits, torch.tensor([[0, 1]])), token_entropy(logits)
    (gradient,) = torch.autograd.grad((logprobs + entropy).sum(), logits)
    assert logprobs.tolist() == [[0.0, -2e4]] and entropy.tolist() == [[0.0, 0.0]]
    assert gradient.isfinite().all()


def test_bfloat16_logits_give_float32_results_and_bfloat16_gradients():
    logits, tokens = random_inputs(6)
    low = logits.detach().bfloat16().requires_grad_()
    logprobs, entropy = token_logprobs(low, tokens), token_entropy(low)
    assert logprobs.dtype == entropy.dtype == torch.float32
    rtol = reduction_rtol(torch.float32, length=logits.shape[-1], depth=2)
    assert_norm_close(logprobs.double(), token_logprobs(low.double(), tokens), rtol)
    assert_norm_close(entropy.double(), token_entropy(low.double()), rtol)
    assert torch.autograd.grad((logprobs + entropy).sum(), low)[0].dtype == torch.bfloat16


@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 4), (2, 1, 4)])
def test_rows_of_no_or_one_token_are_zero(shape: tuple[int, int, int]):
    logits, tokens = torch.randn(shape), torch.zeros(shape[:2], dtype=torch.int64)
    assert token_logprobs(logits, tokens).equal(torch.zeros(shape[:2]))
    assert token_entropy(logits).equal(torch.zeros(shape[:2]))


@pytest.mark.parametrize("temperature", [0.0, -1.0])
def test_a_temperature_that_is_not_above_zero_is_rejected(temperature: float):
    with pytest.raises(ValueError, match="temperature"):
        token_logprobs(torch.zeros(1, 2, 3), torch.zeros(1, 2).long(), temperature=temperature)


def test_invalid_shapes_are_rejected():
    with pytest.raises(ValueError, match=r"logits .*\[2, 3\]"):
        token_entropy(torch.zeros(2, 3))
    with pytest.raises(ValueError, match=r"tokens .*\[1, 3\]"):
        token_logprobs(torch.zeros(1, 2, 3), torch.zeros(1, 3).long())


@quick
@given(st.tuples(st.integers(0, 5), st.integers(0, 7), st.integers(1, 4)), st.integers(1, 40))
def test_chunks_cover_every_prediction_once(shape: tuple[int, int, int], elements: int):
    choosing_counts, chosen_counts = torch.zeros(shape[:2]), torch.zeros(shape[:2])
    for choosing, chosen in chunks(torch.Size(shape), elements):
        positions = choosing_counts[choosing].numel()
        assert positions > 0 and (positions == 1 or positions * shape[2] <= elements)
        choosing_counts[choosing] += 1
        chosen_counts[chosen] += 1
    assert (choosing_counts[:, :-1] == 1).all() and not choosing_counts[:, -1:].any()
    assert (chosen_counts[:, 1:] == 1).all() and not chosen_counts[:, :1].any()


def test_chunks_by_hand():
    actual = list(chunks(torch.Size((2, 4, 10)), 20))
    assert actual[0] == ((slice(0, 1), slice(0, 2)), (slice(0, 1), slice(1, 3)))
    assert actual[1] == ((slice(0, 1), slice(2, 3)), (slice(0, 1), slice(3, 4)))
    assert len(actual) == 4


@pytest.mark.parametrize("shape", [(0, 4, 3), (2, 0, 3), (2, 1, 3)])
def test_logits_without_predictions_have_no_chunks(shape: tuple[int, int, int]):
    assert list(chunks(torch.Size(shape), 8)) == []
