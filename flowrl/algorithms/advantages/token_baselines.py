"""Advantages with a separate baseline per token, without a critic.

Shape suffixes: B rows, T token positions, N true positions of the mask in row order.
"""

import torch
from torch import Tensor

from flowrl.algorithms.advantages.group_estimators import group_extremes, group_index, group_sums
from flowrl.algorithms.masking import at_least_float32, masked_rows, masked_tokens
from flowrl.algorithms.registry import advantage_estimators


@torch.no_grad()
def sum_squared_probs(logprobs: Tensor, sharp_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Returns the sum over the vocabulary of the squared probabilities of each token's distribution.

    With logits z, p = softmax(z) and p' = softmax(2 z), the sum needs only the log-probabilities of one token:

        p'_v = p_v^2 / sum_u p_u^2        sum_u p_u^2 = exp(2 log p_v - log p'_v)

    Args:
        logprobs: [B, T], log p of the sampled tokens.
        sharp_logprobs: [B, T], log p' of the same tokens: their log-probabilities at half of the temperature.
        mask: bool [B, T].
    Returns: [B, T] in at least float32, in (0, 1], and 0 where the mask is false.
    Raises: ValueError for mismatched shapes, or a mask that is not bool.
    """
    logprobs_BT, sharp_BT = masked_tokens(mask, logprobs=logprobs, sharp_logprobs=sharp_logprobs)
    return (2 * logprobs_BT - sharp_BT).clamp(max=0).exp().masked_fill(~mask, 0)


@advantage_estimators.register("optimal_token_baseline", kl_penalty=True)
@torch.no_grad()
def optimal_token_baseline(
    rewards: Tensor,
    groups: Tensor,
    logprobs: Tensor,
    sum_squared_probs: Tensor,
    mask: Tensor,
    importance_weights: Tensor | None = None,
) -> Tensor:
    """Returns future rewards minus a baseline: their group mean at the same step, weighted by gradient norms.

        A_it = G_it - sum_j(W_jt G_jt) / sum_j(W_jt)      over the rows j of the group that have a step t
        G_it = r_it + r_i,t+1 + ...        W_it = sum over s <= t of v_is^2 (1 - 2 p_is + q_is)

    p is the probability of the sampled token, and q is the sum of the squared probabilities of all tokens. 1 - 2 p + q
    is the squared norm of the gradient of log p with respect to the logits. The steps of a row are the positions where
    its mask is true.

    Args:
        rewards: [B, T], reward for token t, of the whole batch. All rows of a group must be in the same call.
        groups: integer [B], group ids. Groups may be interleaved and differ in size.
        logprobs: [B, T], of the sampled tokens under the policy before the updates of this batch.
        sum_squared_probs: [B, T], q in (0, 1], under the same policy and temperature.
        mask: bool [B, T], true for tokens that the policy sampled.
        importance_weights: [B, T], v, weights of the tokens in the loss (see corrections.py). By default, all are 1.
    Returns: [B, T]. It is 0 at steps that only one row of the group has. The mean is unweighted where all W are 0.
    Raises: ValueError for mismatched shapes, a mask that is not bool, or group ids that are not integers.

    Li et al. 2026, https://arxiv.org/abs/2602.07078, optimal token baseline with the logit-gradient proxy. Deviations
    from the published code: statistics are in float64 without an epsilon, and a step of a single row gives 0.
    """
    weights = torch.ones_like(logprobs) if importance_weights is None else importance_weights
    rewards_BT, logprobs_BT, squares_BT, weights_BT = (
        tokens.double()
        for tokens in masked_tokens(
            mask, rewards=rewards, logprobs=logprobs, sum_squared_probs=sum_squared_probs, importance_weights=weights
        )
    )
    (groups_B,) = masked_rows(mask, groups=groups)
    # Rounding may make the squared norm negative.
    energy_BT = (1 - 2 * logprobs_BT.exp() + squares_BT).clamp(min=0) * weights_BT.square()
    energy_N = energy_BT.masked_fill(~mask, 0).cumsum(-1)[mask]
    returns_N = rewards_BT.flip(-1).cumsum(-1).flip(-1)[mask]

    # A cell is a step of a group. There is at most one per position, an upper bound without device synchronization.
    cell_BT = group_index(groups_B)[:, None] * mask.shape[1] + mask.cumsum(-1) - 1
    cell_N, num_cells = cell_BT[mask], mask.numel()
    total_N = group_sums(energy_N, cell_N, num_cells)
    energy_N = torch.where(total_N > 0, energy_N, 1)
    # Subtracting the minimum makes equal returns exactly 0.
    above_low_N = returns_N - group_extremes(returns_N, cell_N, num_cells)[0]
    baseline_N = group_sums(energy_N * above_low_N, cell_N, num_cells) / group_sums(energy_N, cell_N, num_cells)
    advantages_BT = torch.zeros_like(rewards_BT)
    advantages_BT[mask] = above_low_N - baseline_N
    return advantages_BT.to(at_least_float32(rewards).dtype)
