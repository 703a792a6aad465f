"""Policy losses on one ratio per sequence: GSPO, GSPO-token and GMPO. Interface as in policy_losses.py.

Shape suffixes: B rows, T token positions.

The sequence's quantity stands on every token of the row, so that `aggregate` with seq_mean_token_mean gives the papers'
objective, the mean over rows. Advantages that differ inside a row are used as they are, token by token; with one
number per row, as the group estimators give it, the formulas are those of the papers.
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
from flowrl.algorithms.masks import row_mean


def gspo_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, *, clip_low: float, clip_high: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the GSPO loss: the clipped surrogate of the geometric mean of a row's token ratios.

        s_i = exp(mean over the tokens of row i of (logprobs - old_logprobs))
        L_it = max(-A_it s_i, -A_it clip(s_i, 1 - clip_low, 1 + clip_high))

    Aggregate with seq_mean_token_mean for the paper's objective.

    Arguments:
        logprobs: [B, T], of the sampled tokens under the policy that is trained; the loss is differentiated by them.
        old_logprobs: [B, T], under the policy before this batch's updates. No gradient flows into them.
        advantages: [B, T]; no gradient flows into them.
        mask: bool [B, T], the tokens that count. The tokens of a row must not be divided over parts of a step.
        clip_low, clip_high: as in `clipped_policy_loss`, but of a mean, and so far smaller: the paper has 3e-4, 4e-4.
    Returns: (loss [B, T], metrics): clip_fraction, clip_fraction_low, clip_fraction_high, ratio (s_i on each of the
        row's tokens), approx_kl (of the tokens).
    Raises: ValueError on a clip outside its range, on shapes that differ, on a mask that is not bool.

    Zheng et al. 2025, https://arxiv.org/abs/2507.18071, eq. (5) and (7). Deviation: log s_i is held in [-20, 20].
    """
    check_clips(clip_low, clip_high)
    logprobs_BT, old_logprobs_BT, advantages_BT = policy_inputs(logprobs, old_logprobs, advantages, mask)
    ratio_BT = bounded_ratio(row_mean(logprobs_BT - old_logprobs_BT, mask)).expand_as(mask)
    loss_BT, clips = clipped_surrogate(ratio_BT, advantages_BT, clip_low=clip_low, clip_high=clip_high)
    return loss_BT, clips | ratio_metrics(ratio_BT, logprobs_BT, old_logprobs_BT, mask)


def gspo_token_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, *, clip_low: float, clip_high: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the GSPO-token loss: the row's ratio in value, separate gradients per token.

        s_it = stop_gradient(s_i) pi_it / stop_gradient(pi_it),        s_i as in `gspo_loss`
        L_it = max(-A_it s_it, -A_it clip(s_it, 1 - clip_low, 1 + clip_high))

    With one advantage per row, value and gradient of the aggregated loss (seq_mean_token_mean) are those of GSPO.

    Arguments:
        logprobs, old_logprobs, advantages, mask, clip_low, clip_high: as in `gspo_loss`.
    Returns: (loss [B, T], metrics), the metrics of `gspo_loss`.
    Raises: ValueError on a clip outside its range, on shapes that differ, on a mask that is not bool.

    Zheng et al. 2025, https://arxiv.org/abs/2507.18071, eq. (13) and (14). Deviation: log s_i is held in [-20, 20], in
    value only: the gradient of a token beyond that is not 0.
    """
    check_clips(clip_low, clip_high)
    logprobs_BT, old_logprobs_BT, advantages_BT = policy_inputs(logprobs, old_logprobs, advantages, mask)
    sequence_ratio_B1 = bounded_ratio(row_mean(logprobs_BT.detach() - old_logprobs_BT, mask))
    ratio_BT = weighted_score(sequence_ratio_B1, logprobs_BT)
    loss_BT, clips = clipped_surrogate(ratio_BT, advantages_BT, clip_low=clip_low, clip_high=clip_high)
    return loss_BT, clips | ratio_metrics(ratio_BT, logprobs_BT, old_logprobs_BT, mask)


def gmpo_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, *, clip_low: float, clip_high: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the GMPO loss: the geometric mean of a row's clipped token ratios.

    With l_it = logprobs - old_logprobs, held at +clip_high where A_it > 0 and at -clip_low where A_it < 0:

        L_it = -A_it exp(mean over the tokens of row i of min(l, clip_high) or max(l, -clip_low))

    A token that is clipped adds its bound to the mean and has no gradient; the others of its row keep theirs. A token
    with A = 0 is not clipped. Aggregate with seq_mean_token_mean for the paper's objective.

    Arguments:
        logprobs: [B, T], of the sampled tokens under the policy that is trained; the loss is differentiated by them.
        old_logprobs: [B, T], under the policy before this batch's updates. No gradient flows into them.
        advantages: [B, T]; no gradient flows into them.
        mask: bool [B, T], the tokens that count. The tokens of a row must not be divided over parts of a step.
        clip_low, clip_high: >= 0, in nats: clips of the log-ratio and not of the ratio. The paper has 0.4 and 0.4.
    Returns: (loss [B, T], metrics): clip_fraction, clip_fraction_low, clip_fraction_high (of tokens), ratio (the
        geometric mean on each of the row's tokens), approx_kl (of the tokens).
    Raises: ValueError on a negative clip, on shapes that differ, on a mask that is not bool.

    Zhao et al. 2025, https://arxiv.org/abs/2507.20673, the objective. Deviations: the logarithm of the geometric mean
    is held in [-20, 20]. As in the authors' code the ratio is clipped; the formula clips the ratio to the power of
    sgn(A), which would bind at clip_high on both sides. With equal clips, as in the paper, it is the same.
    """
    for name, value in (("clip_low", clip_low), ("clip_high", clip_high)):
        if not value >= 0:
            raise ValueError(f"{name} is {value}, it must be 0 or more: it bounds a log-ratio, in nats (0.4 is usual)")
    logprobs_BT, old_logprobs_BT, advantages_BT = policy_inputs(logprobs, old_logprobs, advantages, mask)
    log_ratios_BT = logprobs_BT - old_logprobs_BT
    low_binds_BT = (advantages_BT < 0) & (log_ratios_BT < -clip_low)
    high_binds_BT = (advantages_BT > 0) & (log_ratios_BT > clip_high)
    clipped_BT = torch.where(low_binds_BT, -clip_low, torch.where(high_binds_BT, clip_high, log_ratios_BT))
    ratio_BT = bounded_ratio(row_mean(clipped_BT, mask)).expand_as(mask)
    metrics = clip_metrics(low_binds_BT, high_binds_BT, dtype=ratio_BT.dtype)
    return -advantages_BT * ratio_BT, metrics | ratio_metrics(ratio_BT, logprobs_BT, old_logprobs_BT, mask)
