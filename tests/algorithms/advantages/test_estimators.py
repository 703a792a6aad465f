"""GAE, REINFORCE++, ReMax and whitening against literals, formulas in NumPy, and their properties."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from flowrl.algorithms import gae, reinforce_plus_plus, remax, whiten
from tests.algorithms.strategies import NAN, quick, token_tensors
from tests.engines.closeness import FLOAT64_RTOL, assert_norm_close, reduction_rtol

ONES = torch.ones(1, 3, dtype=torch.bool)


def random_inputs(seed: int, rows: int = 7, positions: int = 12) -> tuple[Tensor, Tensor, Tensor]:
    """Returns rewards, values and a mask with holes and empty rows."""
    generator = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, rows, positions, generator=generator, dtype=torch.float64)
    mask = torch.rand(rows, positions, generator=generator) < torch.linspace(0, 1, rows)[:, None]
    return rewards, values, mask


def gae_of_one_row(rewards: np.ndarray, values: np.ndarray, gamma: float, lam: float) -> np.ndarray:
    """Returns GAE of one row as the sum of eq. (16), without recursion."""
    next_values = np.append(values[1:], 0.0)
    deltas = rewards + gamma * next_values - values
    weights = (gamma * lam) ** np.arange(len(rewards))
    return np.array([np.sum(weights[: len(deltas) - t] * deltas[t:]) for t in range(len(deltas))])


def test_gae_by_hand():
    # delta = [1 + .9*.4 - .5, 2 + .9*.3 - .4, 3 - .3] = [.86, 1.87, 2.7]; decay = .72
    advantages, returns = gae(
        torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[0.5, 0.4, 0.3]]), ONES, gamma=0.9, lam=0.8
    )
    assert_close(advantages, torch.tensor([[3.60608, 3.814, 2.7]]))
    assert_close(returns, torch.tensor([[4.10608, 4.214, 3.0]]))


def test_gae_steps_over_masked_tokens_inside_a_row():
    mask = torch.tensor([[False, True, False, False, True, True, False]])
    rewards = torch.tensor([[9.0, 1.0, 9.0, 9.0, 2.0, 3.0, 9.0]])
    values = torch.tensor([[9.0, 0.5, 9.0, 9.0, 0.4, 0.3, 9.0]])
    advantages, returns = gae(rewards, values, mask, gamma=0.9, lam=0.8)
    assert_close(advantages, torch.tensor([[0.0, 3.60608, 0.0, 0.0, 3.814, 2.7, 0.0]]))
    assert_close(returns, torch.tensor([[0.0, 4.10608, 0.0, 0.0, 4.214, 3.0, 0.0]]))


def test_gae_with_lam_one_and_gamma_one_is_the_return_minus_the_value():
    rewards, values = torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[0.5, 0.4, 0.3]])
    advantages, returns = gae(rewards, values, ONES, gamma=1.0, lam=1.0)
    assert_close(returns, torch.tensor([[6.0, 5.0, 3.0]]))
    assert_close(advantages, torch.tensor([[5.5, 4.6, 2.7]]))


def test_gae_with_lam_zero_is_the_one_step_error():
    rewards, values = torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[0.5, 0.4, 0.3]])
    advantages, _ = gae(rewards, values, ONES, gamma=0.9, lam=0.0)
    assert_close(advantages, torch.tensor([[0.86, 1.87, 2.7]]))


@pytest.mark.parametrize("seed", range(3))
def test_gae_agrees_with_the_sum_of_the_paper_row_by_row(seed: int):
    rewards, values, mask = random_inputs(seed)
    advantages, returns = gae(rewards, values, mask, gamma=0.97, lam=0.9)
    for row in range(len(mask)):
        chosen = mask[row]
        expected = torch.from_numpy(
            gae_of_one_row(rewards[row, chosen].numpy(), values[row, chosen].numpy(), 0.97, 0.9)
        )
        assert_norm_close(advantages[row, chosen], expected, rtol=FLOAT64_RTOL)
        assert_norm_close(returns[row, chosen], expected + values[row, chosen], rtol=FLOAT64_RTOL)


def test_gae_ignores_masked_tokens_and_is_zero_there():
    rewards, values, mask = random_inputs(0)
    clean = gae(rewards, values, mask, gamma=0.9, lam=0.8)
    dirty = gae(rewards.masked_fill(~mask, NAN), values.masked_fill(~mask, NAN), mask, gamma=0.9, lam=0.8)
    assert_close(clean, dirty, rtol=0, atol=0)
    assert not clean[0][~mask].any() and not clean[1][~mask].any()


def test_gae_of_permuted_rows_is_permuted():
    rewards, values, mask = random_inputs(1)
    order = torch.tensor([3, 0, 6, 1, 5, 2, 4])
    full = gae(rewards, values, mask, gamma=0.9, lam=0.8)[0]
    assert_close(gae(rewards[order], values[order], mask[order], gamma=0.9, lam=0.8)[0], full[order], rtol=0, atol=0)


def test_gae_is_unchanged_by_more_padding():
    rewards, values, mask = (torch.nn.functional.pad(tensor, (2, 5)) for tensor in random_inputs(2))
    narrow = gae(*random_inputs(2), gamma=0.9, lam=0.8)[0]
    assert_close(gae(rewards, values, mask, gamma=0.9, lam=0.8)[0][:, 2:-5], narrow, rtol=0, atol=0)


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (2, 1)])
def test_gae_accepts_batches_without_rows_or_positions(shape: tuple[int, int]):
    advantages, returns = gae(torch.ones(shape), torch.ones(shape), torch.ones(shape).bool(), gamma=1.0, lam=1.0)
    assert advantages.shape == returns.shape == shape


def test_gae_carries_no_gradient():
    values = torch.ones(1, 3, requires_grad=True)
    advantages, returns = gae(torch.ones(1, 3), values, ONES, gamma=0.9, lam=0.8)
    assert not advantages.requires_grad and not returns.requires_grad


def test_gae_of_bfloat16_is_computed_in_float32():
    rewards, values, mask = random_inputs(3)
    rewards, values = rewards.bfloat16(), values.bfloat16()
    low = gae(rewards, values, mask, gamma=0.9, lam=0.8)[0]
    assert low.dtype == torch.float32
    exact = gae(rewards.double(), values.double(), mask, gamma=0.9, lam=0.8)[0]
    assert_norm_close(low.double(), exact, reduction_rtol(torch.float32, length=mask.shape[1], depth=2))


@pytest.mark.parametrize(("gamma", "lam", "name"), [(1.1, 0.9, "gamma"), (0.9, -0.1, "lam")])
def test_gae_rejects_a_discount_outside_zero_to_one(gamma: float, lam: float, name: str):
    with pytest.raises(ValueError, match=rf"{name} .* \[0, 1\]"):
        gae(torch.ones(1, 3), torch.ones(1, 3), ONES, gamma=gamma, lam=lam)


def test_gae_rejects_shapes_that_differ():
    with pytest.raises(ValueError, match=r"values .*\[1, 2\]"):
        gae(torch.ones(1, 3), torch.ones(1, 2), ONES, gamma=1.0, lam=1.0)


@quick
@given(token_tensors(2), st.floats(0, 1), st.floats(0, 1))
def test_gae_of_any_rows_agrees_with_a_loop_over_chosen_tokens(tokens: tuple[Tensor, ...], gamma: float, lam: float):
    rewards, values, mask = tokens
    advantages, returns = gae(rewards, values, mask, gamma=gamma, lam=lam)
    for row, chosen in enumerate(mask):
        expected = gae_of_one_row(rewards[row, chosen].numpy(), values[row, chosen].numpy(), gamma, lam)
        assert_norm_close(advantages[row, chosen], torch.as_tensor(expected, dtype=torch.float64))
        assert_norm_close(returns[row, chosen], advantages[row, chosen] + values[row, chosen])


def test_reinforce_plus_plus_by_hand():
    # to come: [1 + .5 * 2 + .25 * 4, 2 + .5 * 4, 4] = [3, 4, 4] and [8]; mean 4.75, unbiased variance 14.75 / 3
    mask = torch.tensor([[True, True, True], [False, True, False]])
    rewards = torch.tensor([[1.0, 2.0, 4.0], [9.0, 8.0, 9.0]])
    advantages = reinforce_plus_plus(rewards, mask, gamma=0.5)
    assert_close(advantages, torch.tensor([[-0.7892283, -0.3382407, -0.3382407], [0.0, 1.4657098, 0.0]]))


def test_reinforce_plus_plus_whitens_over_trained_tokens():
    # as above, but without the third token: [3, 4] and [8]; mean 5, unbiased variance 7
    mask = torch.tensor([[True, True, True], [False, True, False]])
    rewards = torch.tensor([[1.0, 2.0, 4.0], [9.0, 8.0, 9.0]])
    trained_mask = torch.tensor([[True, True, False], [False, True, False]])
    advantages = reinforce_plus_plus(rewards, mask, trained_mask=trained_mask, gamma=0.5)
    assert_close(advantages, torch.tensor([[-0.7559289, -0.3779645, 0.0], [0.0, 1.1338934, 0.0]]))


@quick
@given(token_tensors(1))
def test_reinforce_plus_plus_agrees_with_the_formula_in_numpy(tokens: tuple[Tensor, ...]):
    rewards, mask = tokens
    advantages = reinforce_plus_plus(rewards, mask)
    returns_to_go = [np.cumsum(rewards[row, mask[row]].numpy()[::-1])[::-1] for row in range(len(mask))]
    x = np.concatenate([*returns_to_go, np.zeros(0)])
    expected = (x - x.mean()) / np.sqrt(x.var(ddof=1) + 1e-8) if len(x) > 1 else np.zeros_like(x)
    assert_norm_close(advantages[mask], torch.from_numpy(expected))
    assert not advantages[~mask].any()


def test_reinforce_plus_plus_ignores_masked_tokens():
    rewards, _, mask = random_inputs(6)
    dirty = reinforce_plus_plus(rewards.masked_fill(~mask, NAN), mask)
    assert_close(dirty, reinforce_plus_plus(rewards, mask), rtol=0, atol=0)


def test_reinforce_plus_plus_of_equal_scores_of_one_token_is_zero():
    assert not reinforce_plus_plus(torch.full((4, 1), 0.1), torch.ones(4, 1).bool()).any()


def test_reinforce_plus_plus_of_bfloat16_is_computed_in_float32():
    rewards, _, mask = random_inputs(7)
    low = reinforce_plus_plus(rewards.bfloat16(), mask)
    assert low.dtype == torch.float32
    exact = reinforce_plus_plus(rewards.bfloat16().double(), mask)
    assert_norm_close(low.double(), exact, reduction_rtol(torch.float32, length=mask.numel(), depth=3))


def test_remax_by_hand():
    mask = torch.tensor([[True, False, True], [True, False, False]])
    advantages = remax(torch.tensor([1.0, 0.25]), torch.tensor([0.5, 1.0]), mask)
    assert advantages.tolist() == [[0.5, 0.0, 0.5], [-0.75, 0.0, 0.0]]


def test_remax_of_a_score_equal_to_the_greedy_score_is_zero():
    assert not remax(torch.full((3,), 0.1), torch.full((3,), 0.1), torch.ones(3, 2).bool()).any()


def test_remax_of_bfloat16_is_the_exact_difference_in_float32():
    advantages = remax(torch.tensor([1.0]).bfloat16(), torch.tensor([2.0**-9]).bfloat16(), torch.ones(1, 1).bool())
    assert advantages.dtype == torch.float32 and advantages.item() == 1 - 2.0**-9


def test_remax_rejects_greedy_scores_that_are_not_one_per_row():
    with pytest.raises(ValueError, match=r"greedy_scores .*\[1\]"):
        remax(torch.ones(2), torch.ones(1), torch.ones(2, 1).bool())


def test_whiten_by_hand():
    # 1, 2, 6: mean 3, unbiased variance (4 + 1 + 9) / 2 = 7
    mask = torch.tensor([[True, True], [True, False]])
    whitened = whiten(torch.tensor([[1.0, 2.0], [6.0, 50.0]]), mask)
    assert_close(whitened, torch.tensor([[-0.7559289, -0.3779645], [1.1338934, 0.0]]))


def test_whiten_can_keep_the_mean():
    mask = torch.tensor([[True, True], [True, False]])
    whitened = whiten(torch.tensor([[1.0, 2.0], [6.0, 50.0]]), mask, shift_mean=False)
    assert_close(whitened, torch.tensor([[2.2440711, 2.6220355], [4.1338934, 0.0]]))


def test_whitened_values_have_mean_zero_and_variance_one():
    _, values, mask = random_inputs(4)
    whitened = whiten(5 + 3 * values, mask)[mask]
    assert_close(whitened.mean(), torch.tensor(0.0, dtype=torch.float64))
    assert_close(whitened.var(), torch.tensor(1.0, dtype=torch.float64))


def test_whiten_ignores_masked_tokens():
    _, values, mask = random_inputs(5)
    assert_close(whiten(values.masked_fill(~mask, NAN), mask), whiten(values, mask), rtol=0, atol=0)


@pytest.mark.parametrize("value", [0.1, -3.7, 1e6])
def test_whiten_of_equal_values_is_exactly_zero_or_their_mean(value: float):
    mask = torch.ones(3, 7, dtype=torch.bool)
    assert not whiten(torch.full((3, 7), value), mask).any()
    assert_close(whiten(torch.full((3, 7), value), mask, shift_mean=False), torch.full((3, 7), value))


def test_whiten_of_one_value_or_none_is_zero():
    one = torch.tensor([[True, False, False]])
    assert not whiten(torch.ones(1, 3), one).any()
    assert not whiten(torch.ones(1, 3), torch.zeros_like(one), shift_mean=False).any()
