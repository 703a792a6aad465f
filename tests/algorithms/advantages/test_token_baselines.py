"""Tests the optimal token baseline with literals, a NumPy loop and its properties."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from flowrl.algorithms import optimal_token_baseline
from flowrl.algorithms.advantages.token_baselines import sum_squared_probs
from tests.algorithms.strategies import NAN, masks, orders, quick
from tests.engines.closeness import assert_norm_close, reduction_rtol


def inputs(seed: int, mask: Tensor) -> dict[str, Tensor]:
    """Returns rewards, groups, and probabilities of a vocabulary of four, in float64."""
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.randn(mask.shape, generator=generator, dtype=torch.float64)
    probs = torch.randn(*mask.shape, 4, generator=generator, dtype=torch.float64).softmax(-1)
    groups = torch.randint(0, 3, mask.shape[:1], generator=generator) * 1000 - 5
    return {
        "rewards": rewards,
        "groups": groups,
        "logprobs": probs[..., 0].log(),
        "sum_squared_probs": probs.square().sum(-1),
        "mask": mask,
    }


def by_loops(
    rewards: Tensor, groups: Tensor, logprobs: Tensor, sum_squared_probs: Tensor, mask: Tensor, weights: Tensor
) -> np.ndarray:
    """Computes the formula token by token in loops."""
    rows = [torch.nonzero(chosen)[:, 0].tolist() for chosen in mask]
    energy = weights.square() * (1 - 2 * logprobs.exp() + sum_squared_probs)
    actual = np.zeros(mask.shape)
    for i, chosen in enumerate(rows):
        for step, t in enumerate(chosen):
            peers = [j for j in range(len(rows)) if groups[j] == groups[i] and len(rows[j]) > step]
            returns_to_go = [sum(rewards[j, s].item() for s in rows[j][step:]) for j in peers]
            accumulated = [sum(energy[j, s].item() for s in rows[j][: step + 1]) for j in peers]
            own = sum(rewards[i, s].item() for s in chosen[step:])
            actual[i, t] = own - np.average(returns_to_go, weights=accumulated) if len(peers) > 1 else 0
    return actual


DRAWN = st.integers(0, 7).flatmap(lambda rows: masks(rows, 6))


def test_optimal_token_baseline_by_hand():
    # A fair coin: 1 - 2/2 + 1/2 = .5 a token. p = .1 and q = .82: 1 - .2 + .82 = 1.62.
    # Step 1: (.5 * 3 + 1.62 * 1) / 2.12 = 1.4716981. Step 2: (1 * 2 + 2.12 * 1) / 3.12 = 1.3205128.
    rewards = torch.tensor([[1.0, 2.0], [0.0, 1.0]])
    probs, squares = torch.tensor([[0.5, 0.5], [0.1, 0.5]]), torch.tensor([[0.5, 0.5], [0.82, 0.5]])
    advantages = optimal_token_baseline(rewards, torch.tensor([3, 3]), probs.log(), squares, torch.ones(2, 2).bool())
    assert_close(advantages, torch.tensor([[1.5283019, 0.6794872], [-0.4716981, -0.3205128]]))


def test_steps_of_a_single_row_and_groups_of_one_give_zero():
    mask = torch.tensor([[True, True], [True, False], [True, True]])
    data = inputs(0, mask) | {"groups": torch.tensor([0, 0, 1])}
    advantages = optimal_token_baseline(**data)
    assert advantages[0, 0] != 0 and advantages[0, 1] == 0 and not advantages[2].any()


@quick
@given(DRAWN, st.integers(0, 2**31))
def test_optimal_token_baseline_agrees_with_the_formula_in_numpy(mask: Tensor, seed: int):
    data = inputs(seed, mask)
    weights = torch.rand(mask.shape, generator=torch.Generator().manual_seed(seed)).double() + 0.1
    advantages = optimal_token_baseline(**data, importance_weights=weights)
    assert_norm_close(advantages, torch.from_numpy(by_loops(**data, weights=weights)))


@quick
@given(DRAWN, st.integers(0, 2**31))
def test_masked_tokens_change_nothing(mask: Tensor, seed: int):
    data = inputs(seed, mask)
    dirty = {name: x.masked_fill(~mask, NAN) if x.is_floating_point() else x for name, x in data.items()}
    weights = torch.ones_like(data["rewards"]).masked_fill(~mask, NAN)
    advantages = optimal_token_baseline(**dirty, importance_weights=weights)
    assert_close(advantages, optimal_token_baseline(**data), rtol=0, atol=0)


@quick
@given(DRAWN, st.data())
def test_permuted_rows_give_permuted_advantages(mask: Tensor, drawn: st.DataObject):
    data, order = inputs(1, mask), drawn.draw(orders(len(mask)))
    permuted = optimal_token_baseline(**{name: x[order] for name, x in data.items()})
    assert_norm_close(permuted, optimal_token_baseline(**data)[order])


@quick
@given(DRAWN)
def test_equal_future_rewards_give_exactly_zero(mask: Tensor):
    last = mask & (mask.flip(-1).cumsum(-1).flip(-1) == 1)
    data = inputs(2, mask) | {"rewards": last * torch.tensor(0.1, dtype=torch.float64)}
    assert not optimal_token_baseline(**data).any()


def test_with_equal_energies_the_baseline_is_the_group_mean():
    mask = torch.ones(3, 2, dtype=torch.bool)
    data = inputs(3, mask) | {"groups": torch.zeros(3).long()}
    data |= {"logprobs": torch.full((3, 2), -1.0), "sum_squared_probs": torch.full((3, 2), 0.5)}
    returns_to_go = data["rewards"].flip(-1).cumsum(-1).flip(-1)
    assert_norm_close(optimal_token_baseline(**data), returns_to_go - returns_to_go.mean(0))


def test_certain_tokens_are_not_weighted():
    data = inputs(4, torch.ones(2, 1).bool()) | {"groups": torch.zeros(2).long()}
    data |= {"logprobs": torch.zeros(2, 1), "sum_squared_probs": torch.ones(2, 1)}
    assert_norm_close(optimal_token_baseline(**data), data["rewards"] - data["rewards"].mean(0))


def test_the_energy_is_the_squared_gradient_of_the_logprob_by_the_logits():
    logits = torch.randn(5, dtype=torch.float64, requires_grad=True)
    logprobs = logits.log_softmax(-1)
    (gradient,) = torch.autograd.grad(logprobs[2], logits)
    probs = logprobs.detach().exp()
    assert_close(1 - 2 * probs[2] + probs.square().sum(), gradient.square().sum())


def test_extreme_logprobs_are_finite():
    data = inputs(5, torch.ones(4, 3).bool())
    data["logprobs"] = torch.full((4, 3), -1e4)
    assert torch.isfinite(optimal_token_baseline(**data)).all()


def test_bfloat16_is_computed_in_float32():
    data = inputs(6, torch.ones(16, 4).bool())
    low = {name: x.bfloat16() if x.is_floating_point() else x for name, x in data.items()}
    advantages = optimal_token_baseline(**low)
    assert advantages.dtype == torch.float32
    exact = optimal_token_baseline(**{name: x.double() if x.is_floating_point() else x for name, x in low.items()})
    assert_norm_close(advantages.double(), exact, reduction_rtol(torch.float32, length=16, depth=8))


@pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
def test_no_rows_or_no_positions_give_an_empty_result(shape: tuple[int, int]):
    assert optimal_token_baseline(**inputs(7, torch.ones(shape).bool())).shape == shape


def test_groups_per_token_are_rejected():
    data = inputs(8, torch.ones(2, 3).bool()) | {"groups": torch.ones(2, 3).long()}
    with pytest.raises(ValueError, match=r"groups .*\[2, 3\]"):
        optimal_token_baseline(**data)


def test_the_sum_of_squared_probabilities_follows_from_one_token() -> None:
    # p = (1/2, 1/4, 1/4): the sum of squares is 3/8. At half of the temperature, p' = (2/3, 1/6, 1/6).
    mask = torch.tensor([[True, True, True, False]])
    logprobs = torch.tensor([[1 / 2, 1 / 4, 1.0, 1.0]]).log()
    sharp = torch.tensor([[2 / 3, 1 / 6, 1.0, 1.0]]).log()
    assert sum_squared_probs(logprobs, sharp, mask)[0].tolist() == pytest.approx([3 / 8, 3 / 8, 1, 0])
