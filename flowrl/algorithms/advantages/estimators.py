"""Advantage estimators without groups: GAE, REINFORCE++ and ReMax; and whitening.

Shape suffixes: B rows, T token positions. Advantages and returns are targets: they carry no gradient.
All results are in at least float32 and are zero where the mask is false. What compares the samples of one prompt is in
group_estimators.py.
"""

import torch
from torch import Tensor

from flowrl.algorithms.masks import at_least_float32, masked_range, masked_rows, masked_tokens


@torch.no_grad()
def gae(rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Returns generalized advantage estimates (GAE) over the tokens of each row.

    With s(t) the next position of the row at which the mask is true:

        delta_t = r_t + gamma * V_s(t) - V_t        A_t = delta_t + gamma * lam * A_s(t)        R_t = A_t + V_t

    and V = A = 0 after the last one, so a row ends in a terminal state, also one that was cut off by a length limit.

    Arguments:
        rewards: [B, T], the reward received for token t. Ignored where the mask is false.
        values: [B, T], the value of the state in which token t is chosen. Ignored where the mask is false.
        mask: bool [B, T], true where the policy chose the token. Tokens in between that it did not choose (a tool's
            output) are stepped over: neither gamma nor lam is applied for them.
        gamma: discount per chosen token, in [0, 1].
        lam: weight of longer estimates, in [0, 1]; 0 is one-step, 1 is Monte Carlo minus the value.
    Returns: (advantages [B, T], returns [B, T]).
    Raises: ValueError on a gamma or lam outside [0, 1], on shapes that differ, on a mask that is not bool.

    Schulman et al. 2015, https://arxiv.org/abs/1506.02438, eq. (16); the finite form is eq. (11) and (12) of
    https://arxiv.org/abs/1707.06347. Deviation: masked tokens inside a row are no time steps.
    """
    for name, value in (("gamma", gamma), ("lam", lam)):
        if not 0 <= value <= 1:
            raise ValueError(f"{name} is {value}, it must be in [0, 1]")
    rewards_BT, values_BT = masked_tokens(mask, rewards=rewards, values=values)
    dtype = torch.promote_types(rewards_BT.dtype, values_BT.dtype)
    rewards_BT, values_BT = rewards_BT.to(dtype), values_BT.to(dtype)

    # With R = A + V the recursion is R_t = r_t + c_t, with c_t = gamma * ((1 - lam) * V + lam * R) of the next chosen
    # token: one fused step per position, and nothing else to hand on. A masked step adds 0 with decay 1: c stays.
    # Time comes first so that each step of the recursion reads and writes contiguous memory.
    steps_TB = torch.lerp(values_BT, rewards_BT, lam).mul_(gamma).t().contiguous()
    decays_TB = torch.ones_like(steps_TB).masked_fill_(mask.t(), gamma * lam)
    to_come_TB = torch.zeros_like(steps_TB)
    for t in range(len(steps_TB) - 1, 0, -1):
        torch.addcmul(steps_TB[t], decays_TB[t], to_come_TB[t], out=to_come_TB[t - 1])
    returns_BT = to_come_TB.t().contiguous().masked_fill_(~mask, 0).add_(rewards_BT)
    return returns_BT - values_BT, returns_BT


@torch.no_grad()
def reinforce_plus_plus(rewards: Tensor, mask: Tensor, *, gamma: float = 1.0, eps: float = 1e-8) -> Tensor:
    """Returns REINFORCE++ advantages: discounted future rewards, whitened over all tokens of the batch.

        A_t = whiten(G_t)      G_t = r_t + gamma * G_s(t), s(t) the next position of the row at which the mask is true

    Arguments:
        rewards: [B, T], the reward received for token t, with the KL penalty of `kl_shaped_rewards` in the paper. Pass
            the whole batch. Ignored where the mask is false.
        mask: bool [B, T], true where the policy chose the token. Others are stepped over, as in `gae`.
        gamma: discount per chosen token, in [0, 1]; 1 in the paper.
        eps: added to the variance, as in `whiten`.
    Returns: [B, T]. Where all sums are equal the result is 0.
    Raises: ValueError on a gamma outside [0, 1], on shapes that differ, on a mask that is not bool.

    Hu et al. 2025, https://arxiv.org/abs/2501.03262: the token's advantage is the score minus the sum of the KL
    penalties from it on, normalized over the global batch. Deviation: the discount, which the published code has too.
    """
    # Without values and with lam 1 the advantage is the discounted sum of what is to come.
    returns_BT, _ = gae(rewards, torch.zeros_like(rewards), mask, gamma=gamma, lam=1.0)
    return whiten(returns_BT, mask, eps=eps)


@torch.no_grad()
def remax(scores: Tensor, greedy_scores: Tensor, mask: Tensor) -> Tensor:
    """Returns ReMax advantages: the score minus the score of the greedy response, at every token.

        A_i = r_i - r(greedy answer to the prompt of i)

    Arguments:
        scores: [B], one score per row.
        greedy_scores: [B], the score of the answer decoded without sampling, by the same policy.
        mask: bool [B, T], the tokens that receive the advantage.
    Returns: [B, T]. There are no groups: one sample per prompt is enough.
    Raises: ValueError on shapes that do not fit, on a mask that is not bool.

    Li et al. 2023, https://arxiv.org/abs/2310.10505. Deviation: none for a score of the whole answer; a KL penalty
    belongs in the scores (some implementations keep it per token, as a sum of what is to come).
    """
    masked_tokens(mask)
    scores_B, greedy_scores_B = masked_rows(mask, scores=scores, greedy_scores=greedy_scores)
    advantages_B = (scores_B.double() - greedy_scores_B.double()).to(at_least_float32(scores_B).dtype)
    return torch.where(mask, advantages_B[:, None], 0)


@torch.no_grad()
def whiten(values: Tensor, mask: Tensor, *, shift_mean: bool = True, eps: float = 1e-8) -> Tensor:
    """Normalizes values to mean 0 and variance 1 over all true positions of the mask.

        y = (x - mean) / sqrt(var + eps) (+ mean)

    Arguments:
        values: [B, T]. Pass the whole batch: statistics of a part of it would depend on how it was split.
        mask: bool [B, T].
        shift_mean: false keeps the mean where it was (whitened rewards keep their sign).
        eps: added to the variance (unbiased, n - 1), in squared units of the values.
    Returns: [B, T]. Where all values are equal, or there is only one, the variance is 0 and the result is 0 (or the
        mean); an empty mask gives zeros.
    Raises: ValueError on shapes that differ or a mask that is not bool.

    Ziegler et al. 2019, https://arxiv.org/abs/1909.08593, in its published code. Statistics are in float64.
    """
    (values_BT,) = masked_tokens(mask, values=values)
    num_values = mask.sum()
    # Against the smallest value first: equal values become exact zeros, whatever their sum would round to.
    low = masked_range(values_BT, mask)[0].double()
    above_low_BT = (values_BT.double() - low).masked_fill(~mask, 0)
    mean = above_low_BT.sum() / num_values.clamp(min=1)
    deviations_BT = (above_low_BT - mean).masked_fill(~mask, 0)
    variance = deviations_BT.square().sum() / (num_values - 1).clamp(min=1)
    whitened_BT = deviations_BT * (variance + eps).rsqrt()
    if not shift_mean:
        whitened_BT = (whitened_BT + mean + low).masked_fill(~mask, 0)
    return whitened_BT.to(values_BT.dtype)
