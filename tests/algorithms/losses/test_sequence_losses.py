"""GSPO, GSPO-token and GMPO against literals and their papers' formulas in NumPy."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from flowrl.algorithms import aggregate, gmpo_loss, gspo_loss, gspo_token_loss
from tests.algorithms.policy_cases import columns
from tests.engines.closeness import FLOAT64_RTOL, assert_norm_close

MASK = torch.tensor([[True, True], [True, True], [True, False]])
OLD = torch.full((3, 2), -2.0)
ADVANTAGES = torch.tensor([[1.0, 1.0], [-1.0, -1.0], [2.0, 2.0]])


def moved(log_ratios: list[list[float]]) -> Tensor:
    return (OLD + torch.tensor(log_ratios)).requires_grad_()


def per_row(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns logprobs, old_logprobs, advantages (constant per row) and mask."""
    table = columns(seed)
    advantages = table["advantages"][:, :1].expand_as(table["mask"]).contiguous()
    return table["logprobs"], table["old_logprobs"], advantages, table["mask"]


def as_numpy(inputs: tuple[Tensor, Tensor, Tensor, Tensor]) -> list[tuple[np.ndarray, float]]:
    """Returns (log-ratios of unmasked tokens, advantage) of every nonempty row."""
    logprobs, old_logprobs, advantages, mask = (x.detach().numpy() for x in inputs)
    return [
        ((logprobs[row] - old_logprobs[row])[mask[row]], float(advantages[row, 0]))
        for row in range(len(mask))
        if mask[row].any()
    ]


@pytest.mark.parametrize("loss_function", [gspo_loss, gspo_token_loss])
def test_gspo_by_hand(loss_function):
    """s is sqrt(2) (clipped at 1.3), 2 (A < 0: not clipped) and 1.1 (the second token is masked)."""
    logprobs = moved([[math.log(2), 0.0], [math.log(4), 0.0], [math.log(1.1), 9.0]])
    loss, metrics = loss_function(logprobs, OLD, ADVANTAGES, MASK, clip_low=0.2, clip_high=0.3)
    assert_close(loss, torch.tensor([[-1.3, -1.3], [2.0, 2.0], [-2.2, 0.0]]))
    assert_close(metrics["ratio"], torch.tensor([[math.sqrt(2)] * 2, [2.0, 2.0], [1.1, 0.0]]))
    assert metrics["clip_fraction_high"].tolist() == [[1, 1], [0, 0], [0, 0]]
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    assert_close(gradient, torch.tensor([[0.0, 0.0], [2.0, 2.0], [-2.2, 0.0]]))


def test_gspo_aggregates_to_the_objective_of_the_paper():
    inputs = per_row(0)
    loss, _ = gspo_loss(*inputs, clip_low=0.05, clip_high=0.06)
    rows = as_numpy(inputs)
    ratios = [(np.exp(log_ratios.mean()), advantage) for log_ratios, advantage in rows]
    objective = np.mean([min(s * a, np.clip(s, 0.95, 1.06) * a) for s, a in ratios])
    reduced = aggregate(loss, inputs[3], mode="seq_mean_token_mean", denominator=len(rows))
    assert reduced.item() == pytest.approx(-objective, abs=1e-12)


def test_gspo_token_has_the_value_and_the_gradient_of_gspo_for_one_advantage_per_row():
    logprobs, *rest = per_row(1)
    results = []
    for loss_function in (gspo_loss, gspo_token_loss):
        x = logprobs.clone().requires_grad_()
        loss, metrics = loss_function(x, *rest, clip_low=0.05, clip_high=0.06)
        total = aggregate(loss, rest[2], mode="seq_mean_token_mean", denominator=5)
        results.append((total, torch.autograd.grad(total, x), metrics))
    assert_norm_close(*results, rtol=FLOAT64_RTOL)


def test_gspo_token_gives_each_token_the_gradient_of_its_own_advantage():
    table = columns(2)
    logprobs = table["logprobs"].requires_grad_()
    loss, metrics = gspo_token_loss(
        logprobs, table["old_logprobs"], table["advantages"], table["mask"], clip_low=1.0, clip_high=100.0
    )
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    assert_norm_close(gradient, -table["advantages"] * metrics["ratio"], rtol=FLOAT64_RTOL)


def test_gmpo_by_hand():
    """Means (0.4 + 0.1) / 2, (0.6 - 0.4) / 2 and 0.3; a clipped token has no gradient and the other of its row has."""
    logprobs = moved([[math.log(2), 0.1], [0.6, -0.8], [0.3, 9.0]])
    loss, metrics = gmpo_loss(logprobs, OLD, ADVANTAGES, MASK, clip_low=0.4, clip_high=0.4)
    assert_close(loss, torch.tensor([[-1.2840254] * 2, [1.1051709] * 2, [-2.6997176, 0.0]]))
    assert metrics["clip_fraction_high"].tolist() == [[1, 0], [0, 0], [0, 0]]
    assert metrics["clip_fraction_low"].tolist() == [[0, 0], [0, 1], [0, 0]]
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    assert_close(gradient, torch.tensor([[0.0, -1.2840254], [1.1051709, 0.0], [-2.6997176, 0.0]]))


def test_gmpo_aggregates_to_the_objective_of_the_paper():
    """The paper: the product of min(rho^sgn, clip(rho)^sgn)^sgn over the tokens, to the power 1 / |o|, times A."""
    inputs = per_row(3)
    loss, _ = gmpo_loss(*inputs, clip_low=0.3, clip_high=0.4)
    rows, total = as_numpy(inputs), 0.0
    for log_ratios, advantage in rows:
        sign, rho = np.sign(advantage), np.exp(log_ratios)
        clipped = np.clip(rho, np.exp(-0.3), np.exp(0.4))
        total += np.prod(np.minimum(rho**sign, clipped**sign) ** sign) ** (1 / len(rho)) * advantage
    reduced = aggregate(loss, inputs[3], mode="seq_mean_token_mean", denominator=len(rows))
    assert reduced.item() == pytest.approx(-total / len(rows), abs=1e-12)


def test_gmpo_without_clips_is_gspo_without_clips():
    inputs = per_row(4)
    geometric, _ = gmpo_loss(*inputs, clip_low=1e9, clip_high=1e9)
    assert_norm_close(geometric, gspo_loss(*inputs, clip_low=1.0, clip_high=1e9)[0], rtol=FLOAT64_RTOL)


@pytest.mark.parametrize("name", ["clip_low", "clip_high"])
def test_a_negative_clip_of_gmpo_is_rejected(name: str):
    with pytest.raises(ValueError, match=rf"{name} .*-0.1"):
        gmpo_loss(*per_row(5), **({"clip_low": 0.4, "clip_high": 0.4} | {name: -0.1}))


@pytest.mark.parametrize("loss_function", [gspo_loss, gspo_token_loss])
def test_clips_of_gspo_outside_their_range_are_rejected(loss_function):
    with pytest.raises(ValueError, match=r"clip_low .*1.5"):
        loss_function(*per_row(6), clip_low=1.5, clip_high=0.1)
