"""Value loss and explained variance of the critic.

Shape suffixes: B rows, T token positions.
"""

import torch
from torch import Tensor

from flowrl.algorithms.masking import masked_tokens


def clipped_value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, *, clip: float | None
) -> tuple[Tensor, Tensor]:
    """Returns half the squared value error per token, with PPO value clipping.

        L = 1/2 max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2)

    Args:
        values: [B, T], from the trained critic. Receives the gradient.
        old_values: [B, T], from the critic before the updates of this batch. Receives no gradient.
        returns: [B, T], targets. Receives no gradient.
        mask: bool [B, T], true for tokens that count.
        clip: > 0, in units of the value. None disables clipping.
    Returns: a tuple (loss [B, T], clip_fraction [B, T]), 0 where the mask is false. clip_fraction is 1 where the
        clipped error exceeds the unclipped error.
    Raises: ValueError for an invalid clip, mismatched shapes, or a mask that is not bool.

    Engstrom et al. 2020, https://arxiv.org/abs/2005.12729, describe value clipping in published PPO code.
    """
    if clip is not None and not clip > 0:
        raise ValueError(f"clip is {clip}, but must be above 0, or None to disable clipping")
    values_BT, old_values_BT, returns_BT = masked_tokens(
        mask, values=values, old_values=old_values.detach(), returns=returns.detach()
    )
    unclipped_BT = (values_BT - returns_BT).square() / 2
    if clip is None:
        return unclipped_BT, torch.zeros_like(unclipped_BT)
    near_BT = torch.clamp(values_BT, old_values_BT - clip, old_values_BT + clip)
    clipped_BT = (near_BT - returns_BT).square() / 2
    clip_binds_BT = clipped_BT > unclipped_BT
    return torch.maximum(unclipped_BT, clipped_BT), clip_binds_BT.to(unclipped_BT.dtype)


@torch.no_grad()
def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """Returns the fraction of the variance of the returns that the values explain: 1 - var(R - V) / var(R).

    Args:
        values: [B, T], of the whole batch. The results of several micro-batches cannot be averaged.
        returns: [B, T].
        mask: bool [B, T], true for tokens that count.
    Returns: a scalar in (-inf, 1]. It is 1 for perfect values, 0 for a constant, and negative if worse than a constant.
        It is 0 if the returns are constant or the mask is empty.
    Raises: ValueError for mismatched shapes or a mask that is not bool.
    """
    values_BT, returns_BT = masked_tokens(mask, values=values, returns=returns)
    returns_N = returns_BT[mask].double()
    errors_N = returns_N - values_BT[mask].double()
    # Subtracting the first return makes equal returns exactly 0, regardless of rounding of the mean.
    returns_N = returns_N - returns_N[:1]
    total = (returns_N - returns_N.mean()).square().sum()
    unexplained = (errors_N - errors_N.mean()).square().sum()
    return torch.where(total > 0, 1 - unexplained / total, 0).to(values_BT.dtype)
