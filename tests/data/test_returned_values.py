"""What functions of a user's own return: a wrong shape would broadcast, and train."""

import re

import pytest
import torch

from flowrl.config import UserError
from flowrl.data.returned_values import loss_and_metrics, per_token, scalar, weights_or_mask

MASK = torch.ones((2, 3), dtype=torch.bool)
TOKENS = torch.zeros((2, 3), requires_grad=True)


def told(sentence: str):
    return pytest.raises(UserError, match=re.escape(sentence))


def test_a_valid_result_is_returned_unchanged():
    loss, metrics = loss_and_metrics((TOKENS, {"ratio": TOKENS}), MASK, "actor.loss my:loss")
    assert loss is TOKENS and metrics["ratio"] is TOKENS
    assert weights_or_mask((MASK, {}), MASK, "correction") is MASK
    assert scalar(torch.tensor(1.0), "aggregation").item() == 1.0


@pytest.mark.parametrize(
    ("result", "found"),
    [
        (TOKENS, "a tensor of shape [2, 3]"),
        ((TOKENS,), "a tuple of 1"),
        ((TOKENS, None), "a tuple of 2"),
        (None, "a NoneType"),
    ],
)
def test_a_loss_without_metrics_is_rejected(result: object, found: str):
    with told(f"actor.loss my:loss returned {found}, it must return (loss [B, T], a dictionary of metrics [B, T])"):
        loss_and_metrics(result, MASK, "actor.loss my:loss")


@pytest.mark.parametrize("value", [TOKENS.sum(), TOKENS.sum(-1), TOKENS.T, 1.0])
def test_a_loss_that_would_broadcast_is_rejected(value: object):
    with told("it must return a tensor [B, T], here [2, 3]: one value per token"):
        loss_and_metrics((value, {}), MASK, "actor.loss my:loss")


def test_an_invalid_metric_is_named():
    with told("my:loss (metric ratio) returned a float, it must return a tensor [B, T]"):
        loss_and_metrics((TOKENS, {"ratio": 1.0}), MASK, "my:loss")


def test_a_loss_without_a_gradient_is_rejected():
    with told("my:loss returned a loss without a gradient: compute it from logprobs"):
        loss_and_metrics((TOKENS.detach(), {}), MASK, "my:loss")


@pytest.mark.parametrize("bad", [-1.0, torch.nan])
def test_a_negative_weight_is_rejected(bad: float):
    weights = torch.ones((2, 3))
    weights[0, 1] = bad
    with told("my:weights returned weights that are negative or NaN"):
        weights_or_mask((weights, {}), MASK, "my:weights")
    mask = MASK.clone()
    mask[0, 1] = False
    assert weights_or_mask((weights, {}), mask, "my:weights") is weights


def test_a_correction_returns_a_pair():
    with told("my:weights returned a tensor of shape [2, 3], it must return (weights or a bool mask [B, T], a"):
        weights_or_mask(MASK, MASK, "my:weights")


@pytest.mark.parametrize("value", [TOKENS, 1.0])
def test_an_aggregation_returns_one_number(value: object):
    with told("it must return a scalar tensor: the sum divided by denominator"):
        scalar(value, "actor.aggregation my:mean")


def test_an_estimate_per_token_has_the_shape_of_the_mask():
    with told("actor.kl_loss_kind my:kl returned a tensor of shape [], it must return a tensor [B, T]"):
        per_token(TOKENS.sum(), MASK, "actor.kl_loss_kind my:kl")
