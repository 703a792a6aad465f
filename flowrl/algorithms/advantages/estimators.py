"""Advantage estimators without groups (GAE, REINFORCE++, ReMax), and whitening.

Shape suffixes: B rows, T token positions. Results have at least float32, are 0 where the mask is false, and carry no
gradient. All functions raise ValueError for settings out of range, mismatched shapes, or a mask that is not bool.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from flowrl.algorithms.masking import at_least_float32, masked_range, masked_rows, masked_tokens
from flowrl.algorithms.registry import Constant, Fraction, advantage_estimators


@advantage_estimators.register("gae", kl_penalty=True)
@torch.no_grad()
def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    trained_mask: Tensor | None = None,
    *,
    gamma: Fraction = 1.0,
    lam: Fraction = 1.0,
    whiten: bool = False,
) -> tuple[Tensor, Tensor]:
    """Returns generalized advantage estimates (GAE) over the tokens of each row, with the values of a critic.

    s(t) is the next position of the row at which the mask is true:

        delta_t = r_t + gamma * V_s(t) - V_t        A_t = delta_t + gamma * lam * A_s(t)        R_t = A_t + V_t

    V and A are 0 after the last token: every row ends in a terminal state, even if it was truncated.

    Args:
        rewards: [B, T], reward for token t.
        values: [B, T], value of the state in which token t is sampled.
        mask: bool [B, T], true for tokens that the policy sampled. Other tokens (tool outputs) are not time steps.
        trained_mask: bool [B, T], the tokens of the mask that the loss trains on. None: all tokens of the mask.
        gamma: Discount per token.
        lam: GAE lambda. 0 gives one-step TD errors; 1 gives the full return minus the value.
        whiten: Normalize the advantages of a step to mean 0 and variance 1 over its trained tokens.
    Returns: a tuple (advantages [B, T], returns [B, T]).

    Schulman et al. 2015, https://arxiv.org/abs/1506.02438, eq. (16). The finite form is eq. (11) and (12) of
    https://arxiv.org/abs/1707.06347. Deviation from the paper: tokens inside a row that are masked out are not time
    steps.
    """
    for name, value in (("gamma", gamma), ("lam", lam)):
        if not 0 <= value <= 1:
            raise ValueError(f"{name} is {value}, but must be in [0, 1]")
    rewards_BT, values_BT = masked_tokens(mask, rewards=rewards, values=values)
    dtype = torch.promote_types(rewards_BT.dtype, values_BT.dtype)
    rewards_BT, values_BT = rewards_BT.to(dtype), values_BT.to(dtype)

    # With R = A + V the recursion is R_t = r_t + c_t, with c_t = gamma * ((1 - lam) * V + lam * R) of the next
    # sampled token: one fused step per position. A masked step adds 0 with decay 1, so c does not change.
    # Time is the first dimension, so that each step of the recursion reads and writes contiguous memory.
    steps_TB = torch.lerp(values_BT, rewards_BT, lam).mul_(gamma).t().contiguous()
    decays_TB = torch.ones_like(steps_TB).masked_fill_(mask.t(), gamma * lam)
    future_TB = torch.zeros_like(steps_TB)
    for t in range(len(steps_TB) - 1, 0, -1):
        torch.addcmul(steps_TB[t], decays_TB[t], future_TB[t], out=future_TB[t - 1])
    returns_BT = future_TB.t().contiguous().masked_fill_(~mask, 0).add_(rewards_BT)
    advantages_BT = returns_BT - values_BT
    return _whitened(advantages_BT, mask, trained_mask) if whiten else advantages_BT, returns_BT


@advantage_estimators.register("reinforce_plus_plus", kl_penalty=True)
@torch.no_grad()
def reinforce_plus_plus(
    rewards: Tensor,
    mask: Tensor,
    trained_mask: Tensor | None = None,
    *,
    gamma: Fraction = 1.0,
    eps: Constant[float] = 1e-8,
) -> Tensor:
    """Returns REINFORCE++ advantages: discounted future rewards, whitened over the trained tokens of the batch.

        A_t = whiten(G_t)      G_t = r_t + gamma * G_s(t)      s(t): next position of the row where the mask is true

    Args:
        rewards: [B, T], reward for token t, of the whole batch. The paper includes the penalty of `kl_shaped_rewards`.
        mask: bool [B, T], as in `gae`.
        trained_mask: bool [B, T], the tokens of the mask that the loss trains on. Other tokens have rewards, but do
            not enter the whitening, and their advantages are 0. None: all tokens of the mask.
        gamma: Discount per token.
        eps: small number that `whiten` adds to the variance.
    Returns: [B, T]. All advantages are 0 if all G are equal.

    Hu et al. 2025, https://arxiv.org/abs/2501.03262. The discount is from the published code; the paper has none (1).
    """
    # With values of 0 and lam 1, returns are discounted sums of future rewards.
    returns_BT, _ = gae(rewards, torch.zeros_like(rewards), mask, gamma=gamma, lam=1.0)
    return _whitened(returns_BT, mask, trained_mask, eps=eps)


def _check_remax(shaping: Sequence[object]) -> None:
    if shaping:
        raise ValueError("shaping does not change the greedy_scores that remax subtracts: remove shaping")


@advantage_estimators.register("remax", kl_penalty=True, checks=(_check_remax,))
@torch.no_grad()
def remax(scores: Tensor, greedy_scores: Tensor, mask: Tensor) -> Tensor:
    """Returns ReMax advantages: the score minus the score of the greedy response, at every token.

    Args:
        scores: [B], one score per row, after the KL penalty if the run uses one.
        greedy_scores: [B], score of the same policy's greedy response to the row's prompt.
        mask: bool [B, T], tokens that receive the advantage.
    Returns: [B, T]. One sampled response per prompt is enough.

    Li et al. 2023, https://arxiv.org/abs/2310.10505.
    """
    masked_tokens(mask)
    scores_B, greedy_scores_B = masked_rows(mask, scores=scores, greedy_scores=greedy_scores)
    advantages_B = (scores_B.double() - greedy_scores_B.double()).to(at_least_float32(scores_B).dtype)
    return torch.where(mask, advantages_B[:, None], 0)


def _whitened(values: Tensor, mask: Tensor, trained_mask: Tensor | None, *, eps: float = 1e-8) -> Tensor:
    """Returns the values, whitened over the trained tokens of the mask."""
    trained_BT = mask if trained_mask is None else masked_tokens(mask, trained_mask=trained_mask)[0].bool()
    return whiten(values, trained_BT, eps=eps)


@torch.no_grad()
def whiten(values: Tensor, mask: Tensor, *, shift_mean: bool = True, eps: float = 1e-8) -> Tensor:
    """Normalizes values to mean 0 and variance 1 over all positions where the mask is true.

        y = (x - mean) / sqrt(var + eps)              with shift_mean
        y = (x - mean) / sqrt(var + eps) + mean       without

    Args:
        values: [B, T], of the whole batch. Statistics of micro-batches would depend on the split.
        mask: bool [B, T].
        shift_mean: False adds the mean again, so that whitened rewards keep their sign.
        eps: added to the unbiased variance, in squared units of the values.
    Returns: [B, T]. If all values are equal, or the mask has one true position, the result is 0 (or the mean).

    Statistics are in float64. Source: published code of Ziegler et al. 2019, https://arxiv.org/abs/1909.08593.
    """
    (values_BT,) = masked_tokens(mask, values=values)
    num_values = mask.sum()
    # Subtracting the minimum makes equal values exactly 0, regardless of rounding of the mean.
    low = masked_range(values_BT, mask)[0].double()
    above_low_BT = (values_BT.double() - low).masked_fill(~mask, 0)
    mean = above_low_BT.sum() / num_values.clamp(min=1)
    deviations_BT = (above_low_BT - mean).masked_fill(~mask, 0)
    variance = deviations_BT.square().sum() / (num_values - 1).clamp(min=1)
    whitened_BT = deviations_BT * (variance + eps).rsqrt()
    if not shift_mean:
        whitened_BT = (whitened_BT + mean + low).masked_fill(~mask, 0)
    return whitened_BT.to(values_BT.dtype)
