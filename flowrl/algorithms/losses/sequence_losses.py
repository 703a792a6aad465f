"""Policy losses on one ratio per sequence: GSPO, GSPO-token and GMPO.

The module docstring of policy_losses.py describes arguments, results and errors. All tokens of a row must be in the
same micro-batch. Each token of a row carries the value of the sequence. Aggregation with seq_mean_token_mean therefore
gives the objectives of the papers. The papers use one advantage per row, but advantages may differ between the tokens
of a row.
"""

import torch
from torch import Tensor

from flowrl.algorithms.losses.policy_losses import (
    bounded_ratio,
    check_clips,
    clip_metrics,
    clipped_surrogate,
    policy_inputs,
    ratio_metrics,
    weighted_score,
)
from flowrl.algorithms.masking import row_mean
from flowrl.algorithms.registry import Fraction, NonNegativeFloat, policy_losses


@policy_losses.register("gspo")
def gspo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: Fraction = 3e-4,
    clip_high: NonNegativeFloat = 4e-4,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the GSPO loss: the clipped surrogate of the geometric mean of a row's token ratios.

        s_i = exp(mean over the tokens of row i of (logprobs - old_logprobs))
        L_it = max(-A_it s_i, -A_it clip(s_i, 1 - clip_low, 1 + clip_high))

    Args (the module docstring of policy_losses.py describes the tensors):
        clip_low: Sequences with a mean ratio below 1 - clip_low and a negative advantage get no gradient.
        clip_high: Sequences with a mean ratio above 1 + clip_high and a positive advantage get no gradient.
    Returns: a tuple (loss [B, T], metrics). The metric ratio is s_i at each token; approx_kl is per token.

    Zheng et al. 2025, https://arxiv.org/abs/2507.18071, eq. (5) and (7). The defaults of the clips are from the paper.
    """
    check_clips(clip_low, clip_high)
    logprobs_BT, old_logprobs_BT, advantages_BT = policy_inputs(logprobs, old_logprobs, advantages, mask)
    ratio_BT = bounded_ratio(row_mean(logprobs_BT - old_logprobs_BT, mask)).expand_as(mask)
    loss_BT, clips = clipped_surrogate(ratio_BT, advantages_BT, clip_low=clip_low, clip_high=clip_high)
    return loss_BT, clips | ratio_metrics(ratio_BT, logprobs_BT, old_logprobs_BT, mask)


@policy_losses.register("gspo_token")
def gspo_token_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: Fraction = 3e-4,
    clip_high: NonNegativeFloat = 4e-4,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the GSPO-token loss, which uses the ratio of the row but has a separate gradient for each token.

        s_it = stop_gradient(s_i) pi_it / stop_gradient(pi_it)        s_i as in `gspo_loss`
        L_it = max(-A_it s_it, -A_it clip(s_it, 1 - clip_low, 1 + clip_high))

    With one advantage per row, value and gradient of the aggregated loss (seq_mean_token_mean) equal those of GSPO.

    Args (`gspo_loss` describes all of them, the results and the errors):

    Zheng et al. 2025, https://arxiv.org/abs/2507.18071, eq. (13) and (14). Deviation: log s_i is clamped to [-20, 20],
    which changes only the value, not the gradient.
    """
    check_clips(clip_low, clip_high)
    logprobs_BT, old_logprobs_BT, advantages_BT = policy_inputs(logprobs, old_logprobs, advantages, mask)
    sequence_ratio_B1 = bounded_ratio(row_mean(logprobs_BT.detach() - old_logprobs_BT, mask))
    ratio_BT = weighted_score(sequence_ratio_B1, logprobs_BT)
    loss_BT, clips = clipped_surrogate(ratio_BT, advantages_BT, clip_low=clip_low, clip_high=clip_high)
    return loss_BT, clips | ratio_metrics(ratio_BT, logprobs_BT, old_logprobs_BT, mask)


@policy_losses.register("gmpo")
def gmpo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: Fraction = 0.4,
    clip_high: NonNegativeFloat = 0.4,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the GMPO loss: the geometric mean of a row's clipped token ratios.

    l_it is logprobs - old_logprobs, clipped to at most clip_high where A_it > 0 and to at least -clip_low where A_it <
    0:

        L_it = -A_it exp(mean over the tokens of row i of the clipped l)

    A clipped token contributes its bound to the mean and has no gradient. Tokens with A = 0 are not clipped.

    Args (the module docstring of policy_losses.py describes the tensors):
        clip_low: A token's log-ratio is clipped to at least -clip_low if its advantage is negative.
        clip_high: A token's log-ratio is clipped to at most clip_high if its advantage is positive.
    Returns: a tuple (loss [B, T], metrics). The metric ratio is the geometric mean at each token; other metrics are per
        token.

    Zhao et al. 2025, https://arxiv.org/abs/2507.20673, with clips of 0.4 nats. As in the authors' code, the ratio is
    clipped. The paper clips ratio^sgn(A), which is the same if both clips are equal.
    """
    for name, value in (("clip_low", clip_low), ("clip_high", clip_high)):
        if not value >= 0:
            raise ValueError(f"{name} is {value}, but must be 0 or more: it bounds a log-ratio, in nats (0.4 is usual)")
    logprobs_BT, old_logprobs_BT, advantages_BT = policy_inputs(logprobs, old_logprobs, advantages, mask)
    log_ratios_BT = logprobs_BT - old_logprobs_BT
    low_binds_BT = (advantages_BT < 0) & (log_ratios_BT < -clip_low)
    high_binds_BT = (advantages_BT > 0) & (log_ratios_BT > clip_high)
    clipped_BT = torch.where(low_binds_BT, -clip_low, torch.where(high_binds_BT, clip_high, log_ratios_BT))
    ratio_BT = bounded_ratio(row_mean(clipped_BT, mask)).expand_as(mask)
    metrics = clip_metrics(low_binds_BT, high_binds_BT, dtype=ratio_BT.dtype)
    return -advantages_BT * ratio_BT, metrics | ratio_metrics(ratio_BT, logprobs_BT, old_logprobs_BT, mask)
