"""GAE, group advantages and whitening against literals, a loop per row, and their properties."""

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from flowrl.algorithms import gae, grpo, whiten

NAN = float("nan")
ONES = torch.ones(1, 3, dtype=torch.bool)


def random_inputs(seed: int, rows: int = 7, positions: int = 12) -> tuple[Tensor, Tensor, Tensor]:
    """rewards, values, mask; rows of every kind, with holes and without any token."""
    generator = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, rows, positions, generator=generator, dtype=torch.float64)
    mask = torch.rand(rows, positions, generator=generator) < torch.linspace(0, 1, rows)[:, None]
    return rewards, values, mask


def gae_of_one_row(rewards: np.ndarray, values: np.ndarray, gamma: float, lam: float) -> np.ndarray:
    """The sum of eq. (16), term by term, with no recursion."""
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


def test_gae_with_lam_one_and_gamma_one_is_the_reward_to_go_minus_the_value():
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
        assert_close(advantages[row, chosen], expected)
        assert_close(returns[row, chosen], expected + values[row, chosen])


def test_gae_is_unchanged_by_what_masked_tokens_hold_and_zero_there():
    rewards, values, mask = random_inputs(0)
    clean = gae(rewards, values, mask, gamma=0.9, lam=0.8)
    dirty = gae(rewards.masked_fill(~mask, NAN), values.masked_fill(~mask, NAN), mask, gamma=0.9, lam=0.8)
    assert_close(clean, dirty, rtol=0, atol=0)
    assert not clean[0][~mask].any() and not clean[1][~mask].any()


def test_gae_of_permuted_rows_is_permuted():
    rewards, values, mask = random_inputs(1)
    order = torch.tensor([3, 0, 6, 1, 5, 2, 4])
    whole = gae(rewards, values, mask, gamma=0.9, lam=0.8)[0]
    assert_close(gae(rewards[order], values[order], mask[order], gamma=0.9, lam=0.8)[0], whole[order], rtol=0, atol=0)


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
    low = gae(rewards.bfloat16(), values.bfloat16(), mask, gamma=0.9, lam=0.8)[0]
    assert low.dtype == torch.float32
    assert_close(low.double(), gae(rewards, values, mask, gamma=0.9, lam=0.8)[0], rtol=0.02, atol=0.06)


@pytest.mark.parametrize(("gamma", "lam", "name"), [(1.1, 0.9, "gamma"), (0.9, -0.1, "lam")])
def test_gae_refuses_a_discount_outside_zero_to_one(gamma: float, lam: float, name: str):
    with pytest.raises(ValueError, match=rf"{name} is .* must be in \[0, 1\]"):
        gae(torch.ones(1, 3), torch.ones(1, 3), ONES, gamma=gamma, lam=lam)


def group_advantages(scores: list[float], groups: list[int], *, normalize_std: bool, eps: float = 1e-4) -> Tensor:
    """grpo over rows of one token, as a [B]."""
    mask = torch.ones(len(scores), 1, dtype=torch.bool)
    return grpo(torch.tensor(scores), torch.tensor(groups), mask, normalize_std=normalize_std, eps=eps)[:, 0]


def test_grpo_by_hand():
    # mean .5, unbiased std sqrt(4 * .25 / 3) = .5773503
    advantages = group_advantages([1, 0, 1, 0], [0, 0, 0, 0], normalize_std=True, eps=0.0)
    assert_close(advantages, torch.tensor([0.8660254, -0.8660254, 0.8660254, -0.8660254]))


def test_grpo_adds_eps_to_the_standard_deviation():
    # mean 1, std sqrt(2); 1 / (sqrt(2) + .1) = .6604130
    advantages = group_advantages([0, 2], [5, 5], normalize_std=True, eps=0.1)
    assert_close(advantages, torch.tensor([-0.6604130, 0.6604130]))


def test_grpo_without_std_is_the_difference_to_the_group_mean():
    advantages = group_advantages([3.0, 1.0, 5.0], [0, 0, 0], normalize_std=False)
    assert_close(advantages, torch.tensor([0.0, -2.0, 2.0]))


def test_grpo_groups_need_not_be_contiguous_or_equal_in_size():
    # group 7: 1, 3 (mean 2); group -2: 4, 1, 1 (mean 2)
    advantages = group_advantages([1, 4, 3, 1, 1], [7, -2, 7, -2, -2], normalize_std=False)
    assert_close(advantages, torch.tensor([-1.0, 2.0, 1.0, -1.0, -1.0]))


@pytest.mark.parametrize("normalize_std", [False, True])
def test_grpo_of_a_group_of_one_is_zero(normalize_std: bool):
    advantages = group_advantages([5.0, 1.0, 3.0], [0, 1, 1], normalize_std=normalize_std)
    assert advantages[0] == 0 and advantages[1] < 0 < advantages[2]


@pytest.mark.parametrize("normalize_std", [False, True])
@pytest.mark.parametrize("score", [0.1, 1 / 3, -7.3, 1e6])
def test_grpo_of_equal_scores_is_exactly_zero(score: float, normalize_std: bool):
    assert not group_advantages([score] * 7, [0, 1, 0, 1, 1, 0, 0], normalize_std=normalize_std).any()


def test_grpo_gives_every_masked_token_the_advantage_of_its_row_and_the_rest_zero():
    mask = torch.tensor([[False, True, True], [True, False, False]])
    advantages = grpo(torch.tensor([0.0, 4.0]), torch.tensor([1, 1]), mask, normalize_std=False)
    assert advantages.tolist() == [[0.0, -2.0, -2.0], [2.0, 0.0, 0.0]]


def test_grpo_counts_a_row_without_tokens_in_its_group():
    mask = torch.tensor([[False], [True]])
    advantages = grpo(torch.tensor([0.0, 4.0]), torch.tensor([1, 1]), mask, normalize_std=False)
    assert advantages.tolist() == [[0.0], [2.0]]


def test_grpo_agrees_with_the_formula_in_numpy():
    scores, groups = torch.randn(40, dtype=torch.float64), torch.arange(40) * 7919 % 6
    advantages = grpo(scores, groups, torch.ones(40, 1, dtype=torch.bool), normalize_std=True)[:, 0]
    for group in range(6):
        x = scores[groups == group].numpy()
        assert_close(advantages[groups == group].numpy(), (x - x.mean()) / (x.std(ddof=1) + 1e-4))


def test_grpo_of_permuted_rows_is_permuted():
    scores, groups = torch.randn(9), torch.tensor([0, 1, 0, 2, 2, 1, 2, 0, 3])
    order = torch.tensor([8, 3, 5, 0, 7, 1, 4, 6, 2])
    mask = torch.ones(9, 2, dtype=torch.bool)
    whole = grpo(scores, groups, mask, normalize_std=True)
    assert_close(grpo(scores[order], groups[order], mask, normalize_std=True), whole[order])


def test_grpo_of_no_rows_is_empty():
    empty = grpo(torch.ones(0), torch.ones(0).long(), torch.ones(0, 3).bool(), normalize_std=True)
    assert empty.shape == (0, 3)


def test_grpo_refuses_group_ids_that_are_not_integers():
    with pytest.raises(ValueError, match=r"groups is torch\.float32, group ids must be integers"):
        grpo(torch.ones(2), torch.ones(2), torch.ones(2, 1).bool(), normalize_std=True)


def test_grpo_refuses_scores_per_token():
    with pytest.raises(ValueError, match=r"scores has shape \[2, 3\]"):
        grpo(torch.ones(2, 3), torch.ones(2).long(), torch.ones(2, 3).bool(), normalize_std=True)


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


def test_whiten_is_unchanged_by_what_masked_tokens_hold():
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
