"""Advantages with a separate baseline per token, without a critic.

Shape suffixes: B rows, T token positions, N tokens that the policy chose, in the order of rows.
"""

import torch
from torch import Tensor

from flowrl.algorithms.advantages.group_estimators import group_extremes, group_index, group_sums
from flowrl.algorithms.masks import at_least_float32, masked_rows, masked_tokens


@torch.no_grad()
def optimal_token_baseline(
    rewards: Tensor,
    groups: Tensor,
    logprobs: Tensor,
    sum_squared_probs: Tensor,
    mask: Tensor,
    *,
    importance_weights: Tensor | None = None,
) -> Tensor:
    """Returns future rewards minus their group mean at the same token position, weighted by gradient energy.

        A_it = G_it - sum_j(W_jt G_jt) / sum_j(W_jt)      over the rows j of the group that have a step t
        G_it = r_it + r_i,t+1 + ...        W_it = sum over s <= t of v_is^2 (1 - 2 p_is + q_is)

    p is the probability of the sampled token and q the sum of the squared probabilities of all tokens, so the bracket
    is the squared norm of the gradient of log p by the logits. Steps count the tokens that the policy chose.

    Arguments:
        rewards: [B, T], the reward received for token t. Pass the whole batch: a group must not be divided over calls.
        groups: integer [B], rows with equal ids form a group; neither contiguous nor of equal size.
        logprobs: [B, T], of the sampled tokens under the policy that is trained, before this batch's updates.
        sum_squared_probs: [B, T], in (0, 1], under the same policy and temperature.
        mask: bool [B, T], true where the policy chose the token. The others are no steps, and may hold anything.
        importance_weights: [B, T], v, with which the loss weighs the tokens (`corrections`); None is 1.
    Returns: [B, T]. A step that one row of the group alone reaches gives 0, and so does a group of one: there is
        nothing to compare with. So do rewards to come that are equal. Where no row of a step has any energy yet (every
        token so far was certain) the mean is not weighted.
    Raises: ValueError on shapes that do not fit, on a mask that is not bool, on ids that are not integers.

    Li et al. 2026, https://arxiv.org/abs/2602.07078, the optimal token baseline with the logit-gradient proxy.
    Deviations: statistics are in float64 and no epsilon is added to the denominator; steps that one row alone reaches
    give 0, where published code gives the reward itself, or leaves what an epsilon makes of 0.
    """
    weights = torch.ones_like(logprobs) if importance_weights is None else importance_weights
    rewards_BT, logprobs_BT, squares_BT, weights_BT = (
        tokens.double()
        for tokens in masked_tokens(
            mask, rewards=rewards, logprobs=logprobs, sum_squared_probs=sum_squared_probs, importance_weights=weights
        )
    )
    (groups_B,) = masked_rows(mask, groups=groups)
    # (1 - p)^2 + the other squares is never negative; its rounded form may be.
    energy_BT = (1 - 2 * logprobs_BT.exp() + squares_BT).clamp(min=0) * weights_BT.square()
    energy_N = energy_BT.masked_fill(~mask, 0).cumsum(-1)[mask]
    to_come_N = rewards_BT.flip(-1).cumsum(-1).flip(-1)[mask]

    # A cell is a step of a group: at most one per position, so their number needs no look at the data.
    cell_BT = group_index(groups_B)[:, None] * mask.shape[1] + mask.cumsum(-1) - 1
    cell_N, num_cells = cell_BT[mask], mask.numel()
    total_N = group_sums(energy_N, cell_N, num_cells)
    energy_N = torch.where(total_N > 0, energy_N, 1)
    # Against the smallest first: equal sums become exact zeros.
    above_low_N = to_come_N - group_extremes(to_come_N, cell_N, num_cells)[0]
    baseline_N = group_sums(energy_N * above_low_N, cell_N, num_cells) / group_sums(energy_N, cell_N, num_cells)
    advantages_BT = torch.zeros_like(rewards_BT)
    advantages_BT[mask] = above_low_N - baseline_N
    return advantages_BT.to(at_least_float32(rewards).dtype)
