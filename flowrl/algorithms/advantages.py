"""Advantages: how much better a token was than expected.

Shape suffixes: B rows, T token positions, G groups. Advantages and returns are targets: they carry no gradient.
All results are in at least float32 and are zero where the mask is false.
"""

import torch
from torch import Tensor

from flowrl.algorithms.masks import at_least_float32, masked_rows, masked_tokens


@torch.no_grad()
def gae(rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation over the tokens of each row.

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

    # Time comes first so that each step of the recursion reads and writes contiguous memory.
    deltas_TB = torch.where(mask, rewards_BT + gamma * _next_values(values_BT, mask) - values_BT, 0).t().contiguous()
    # A masked step has delta 0 and decay 1: it hands the advantage of the next chosen token on, unchanged.
    decays_TB = torch.ones_like(deltas_TB).masked_fill_(mask.t(), gamma * lam)
    advantages_TB = torch.empty_like(deltas_TB)
    carry_B = deltas_TB.new_zeros(deltas_TB.shape[1])
    for t in reversed(range(deltas_TB.shape[0])):
        carry_B = torch.addcmul(deltas_TB[t], decays_TB[t], carry_B, out=advantages_TB[t])
    advantages_BT = advantages_TB.t().contiguous().masked_fill_(~mask, 0)
    return advantages_BT, advantages_BT + values_BT


def _next_values(values_BT: Tensor, mask: Tensor) -> Tensor:
    """[B, T]: the value at the next position after t where the mask is true; 0 where there is none."""
    num_positions = mask.shape[1]
    if num_positions == 0:
        return values_BT
    positions_T = torch.arange(num_positions, device=mask.device)
    chosen_BT = torch.where(mask, positions_T, num_positions)
    first_chosen_from_BT = chosen_BT.flip(-1).cummin(-1).values.flip(-1)
    next_chosen_BT = torch.nn.functional.pad(first_chosen_from_BT[:, 1:], (0, 1), value=num_positions)
    return torch.nn.functional.pad(values_BT, (0, 1)).gather(-1, next_chosen_BT)


@torch.no_grad()
def grpo(scores: Tensor, groups: Tensor, mask: Tensor, *, normalize_std: bool, eps: float = 1e-4) -> Tensor:
    """Group-relative advantages: the score against the other samples of the same prompt, at every token of the row.

        A_i = (r_i - mean(r)) / (std(r) + eps)      over the rows of the group of row i

    Arguments:
        scores: [B], one score per row.
        groups: integer [B], rows with equal ids form a group; ids are arbitrary, groups need be neither contiguous nor
            of equal size.
        mask: bool [B, T], the tokens that receive the advantage. A row without any still counts in its group.
        normalize_std: divide by the group's standard deviation (GRPO); false is the advantage of Dr. GRPO.
        eps: added to the standard deviation, in units of the score. It decides how much of a difference that is only
            numerical noise survives: a spread of 1e-7 becomes an advantage of 1e-3 and not of 1.
    Returns: [B, T]. A group whose scores are all equal gives 0, and so does a group of one: with nothing to compare
        with there is no signal (other implementations give the raw score, or NaN).
    Raises: ValueError on shapes that do not fit, on a mask that is not bool, on ids that are not integers.

    Shao et al. 2024, https://arxiv.org/abs/2402.03300, section 4.1.2 (outcome supervision); without the standard
    deviation: Liu et al. 2025, https://arxiv.org/abs/2503.20783, section 3.2. The paper leaves the kind of standard
    deviation open; it is the unbiased one (n - 1) here, as in most implementations. Statistics are in float64.
    """
    masked_tokens(mask)
    scores_B, groups_B = masked_rows(mask, scores=scores, groups=groups)
    if groups_B.is_floating_point() or groups_B.dtype == torch.bool:
        raise ValueError(f"groups is {groups_B.dtype}, group ids must be integers")
    _, group_of_B = torch.unique(groups_B, return_inverse=True)
    deviations_B, variances_B = _group_deviations(scores_B.double(), group_of_B)
    advantages_B = deviations_B / (variances_B.sqrt() + eps) if normalize_std else deviations_B
    advantages_B = advantages_B.to(at_least_float32(scores_B).dtype)
    return torch.where(mask, advantages_B[:, None], 0)


def _group_deviations(scores_B: Tensor, group_of_B: Tensor) -> tuple[Tensor, Tensor]:
    """([B], [B]): score minus the mean of its group, and that group's unbiased variance (0 for a group of one)."""

    def group_sums(values_B: Tensor) -> Tensor:
        # At most B groups: a size known in advance spares a device synchronisation.
        sums_G = values_B.new_zeros(len(values_B)).index_add_(0, group_of_B, values_B)
        return sums_G[group_of_B]

    sizes_B = group_sums(torch.ones_like(scores_B))
    deviations_B = scores_B - group_sums(scores_B) / sizes_B
    variances_B = group_sums(deviations_B.square()) / (sizes_B - 1).clamp(min=1)
    return deviations_B, variances_B


@torch.no_grad()
def whiten(values: Tensor, mask: Tensor, *, shift_mean: bool = True, eps: float = 1e-8) -> Tensor:
    """Values scaled to unit variance, and shifted to mean 0, over all true positions of the mask together.

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
    mean = values_BT.sum(dtype=torch.float64) / num_values.clamp(min=1)
    deviations_BT = (values_BT - mean).masked_fill(~mask, 0)
    variance = deviations_BT.square().sum(dtype=torch.float64) / (num_values - 1).clamp(min=1)
    whitened_BT = deviations_BT * (variance + eps).rsqrt()
    if not shift_mean:
        whitened_BT = (whitened_BT + mean).masked_fill(~mask, 0)
    return whitened_BT
