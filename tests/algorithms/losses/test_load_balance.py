"""The load-balancing loss of routers against literals, transformers and its own parts."""

import math

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from flowrl.algorithms.losses.load_balance import count_routes, load_balance_loss, router_probabilities
from tests.engines.closeness import assert_norm_close


def random_routes(num_tokens: int, num_experts: int, per_token: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns logits (requiring gradient), experts and mask."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(num_tokens, num_experts, generator=generator, dtype=torch.float64).requires_grad_()
    return logits, logits.topk(per_token).indices, torch.rand(num_tokens, generator=generator) < 0.7


def loss_of(logits: Tensor, experts: Tensor, mask: Tensor) -> Tensor:
    probabilities = router_probabilities(logits, scores="softmax")
    counts = count_routes(experts, mask, num_experts=logits.shape[1])
    return load_balance_loss(probabilities, counts, mask, num_tokens=float(mask.sum()))


def test_routes_of_masked_tokens_do_not_count():
    experts, mask = torch.tensor([[0, 2], [2, 1], [3, 0]]), torch.tensor([True, True, False])
    assert count_routes(experts, mask, num_experts=4).tolist() == [1, 1, 2, 0]


def test_the_loss_by_hand():
    # Shares 1, 1/2, 1/2 and mean probabilities 0.5, 0.3, 0.2 of three experts: 3 x (0.5 + 0.15 + 0.1).
    probabilities = torch.tensor([[0.6, 0.3, 0.1], [0.4, 0.3, 0.3], [0.9, 0.0, 0.1]])
    counts, mask = torch.tensor([2, 1, 1]), torch.tensor([True, True, False])
    assert_close(load_balance_loss(probabilities, counts, mask, num_tokens=2.0), torch.tensor(2.25))


def test_the_loss_of_equal_routes_is_the_number_of_experts_per_token():
    logits, experts = torch.zeros(6, 4), torch.tensor([[0, 1], [2, 3]] * 3)
    assert_close(loss_of(logits, experts, torch.ones(6, dtype=torch.bool)), torch.tensor(2.0))


@pytest.mark.parametrize("is_masked", [False, True])
def test_the_loss_and_its_gradient_of_one_layer_are_those_of_transformers(is_masked: bool):
    logits, experts, mask = random_routes(40, 5, 2)
    mask = mask if is_masked else torch.ones_like(mask)
    expected = load_balancing_loss_func((logits,), 5, 2, mask[None])
    assert isinstance(expected, Tensor)
    (expected_gradient,) = torch.autograd.grad(expected, logits)
    loss = loss_of(logits, experts, mask)
    # transformers sums in float32.
    assert_norm_close(loss.detach(), expected.detach().double(), 1e-6)
    assert_norm_close(torch.autograd.grad(loss, logits)[0], expected_gradient, 1e-6)


def test_the_terms_of_all_parts_sum_to_the_loss():
    logits, experts, mask = random_routes(40, 5, 2)
    counts, num_tokens = count_routes(experts, mask, num_experts=5), float(mask.sum())
    probabilities = router_probabilities(logits, scores="softmax")
    terms = [
        load_balance_loss(part, counts, own, num_tokens=num_tokens)
        for part, own in zip(probabilities.split([7, 1, 32]), mask.split([7, 1, 32]), strict=True)
    ]
    assert_norm_close(torch.stack(terms).sum().detach(), loss_of(logits, experts, mask).detach())


def test_sigmoids_are_normalized_to_probabilities():
    # sigmoid(0) = 1/2 and sigmoid(log 3) = 3/4.
    logits = torch.tensor([[0.0, math.log(3)]])
    assert_close(router_probabilities(logits, scores="sigmoid"), torch.tensor([[0.4, 0.6]]))


def test_probabilities_of_half_precision_are_float32():
    assert router_probabilities(torch.zeros(2, 4, dtype=torch.bfloat16), scores="softmax").dtype == torch.float32
