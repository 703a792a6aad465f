"""Results of user-defined functions with a wrong shape are rejected, because they would broadcast."""

import pytest
import torch

from flowrl.algorithms.registry import loss_and_metrics, per_token, scalar, weights_or_mask
from tests.errors import rejects

MASK = torch.ones((2, 3), dtype=torch.bool)
TOKENS = torch.zeros((2, 3), requires_grad=True)


def test_a_valid_result_is_returned_unchanged():
    loss, metrics = loss_and_metrics((TOKENS, {"ratio": TOKENS}), MASK, "actor.loss my:loss")
    assert loss is TOKENS and metrics["ratio"] is TOKENS
    assert weights_or_mask((MASK, {}), MASK, "correction") is MASK
    assert scalar(torch.tensor(1.0), "aggregation").item() == 1.0


@pytest.mark.parametrize(
    ("result", "facts"),
    [
        (TOKENS, ("tensor", 2, 3)),
        ((TOKENS,), ("tuple", 1)),
        ((TOKENS, None), ("tuple", 2)),
        (None, ("NoneType",)),
    ],
)
def test_a_loss_without_metrics_is_rejected(result: object, facts: tuple[object, ...]):
    with rejects("actor.loss", "my", *facts):
        loss_and_metrics(result, MASK, "actor.loss my:loss")


@pytest.mark.parametrize("value", [TOKENS.sum(), TOKENS.sum(-1), TOKENS.T, 1.0])
def test_a_loss_that_would_broadcast_is_rejected(value: object):
    with rejects("actor.loss", "B", "T", 2, 3):
        loss_and_metrics((value, {}), MASK, "actor.loss my:loss")


def test_an_invalid_metric_is_named():
    with rejects("ratio", "float", "tensor"):
        loss_and_metrics((TOKENS, {"ratio": 1.0}), MASK, "my:loss")


def test_a_loss_without_a_gradient_is_rejected():
    with rejects("gradient", "logprobs"):
        loss_and_metrics((TOKENS.detach(), {}), MASK, "my:loss")


@pytest.mark.parametrize("bad", [-1.0, torch.nan])
def test_a_negative_weight_is_rejected(bad: float):
    weights = torch.ones((2, 3))
    weights[0, 1] = bad
    with rejects("weights", "NaN"):
        weights_or_mask((weights, {}), MASK, "my:weights")
    mask = MASK.clone()
    mask[0, 1] = False
    assert weights_or_mask((weights, {}), mask, "my:weights") is weights


def test_a_correction_returns_a_pair():
    with rejects("weights", "tensor", 2, 3, "bool"):
        weights_or_mask(MASK, MASK, "my:weights")


@pytest.mark.parametrize("value", [TOKENS, 1.0])
def test_an_aggregation_returns_one_number(value: object):
    with rejects("actor.aggregation", "scalar"):
        scalar(value, "actor.aggregation my:mean")


def test_an_estimate_per_token_has_the_shape_of_the_mask():
    with rejects("actor.kl_loss_kind", "tensor", "B", "T"):
        per_token(TOKENS.sum(), MASK, "actor.kl_loss_kind my:kl")
