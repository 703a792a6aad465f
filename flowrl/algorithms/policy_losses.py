"""Policy losses: per-token losses, not reduced; `aggregate` reduces them.

Shape suffixes: B rows, T token positions.

Metrics are tensors [B, T], zero where the mask is false and without gradient: their sum divided by the number of true
positions is the mean, however the batch was split.
"""

import torch
from torch import Tensor

from flowrl.algorithms.kl import MAX_LOG_RATIO, kl_estimate
from flowrl.algorithms.masks import masked_tokens


def clipped_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The clipped surrogate loss of PPO, with separate clips below and above, and optionally a dual clip.

    With w = exp(logprobs - old_logprobs):

        L = max(-A w, -A clip(w, 1 - clip_low, 1 + clip_high));       where A < 0:  L = min(L, -A dual_clip)

    Arguments:
        logprobs: [B, T], of the sampled tokens under the policy that is trained; the loss is differentiated by them.
        old_logprobs: [B, T], under the policy before this batch's updates. No gradient flows into them, so on the
            first update of a batch `logprobs` may be passed again: w is 1 and the gradient that of REINFORCE.
        advantages: [B, T]; no gradient flows into them.
        mask: bool [B, T], the tokens that count.
        clip_low: in [0, 1], how far w may fall below 1 before a token with A < 0 stops pushing.
        clip_high: >= 0, how far it may rise above 1 before a token with A > 0 stops pushing.
        dual_clip: > 1 (3 is usual): the loss of a token with A < 0 stops growing at this ratio. None is off.
    Returns: (loss [B, T], metrics). The metrics:
        clip_fraction: 1 where a clip binds given the sign of the advantage; the sum of the next two.
        clip_fraction_low, clip_fraction_high: 1 where that clip binds.
        dual_clip_fraction: 1 where the dual clip binds; 0 everywhere if it is off.
        ratio: w.
        approx_kl: k3 estimate of KL(old policy || policy).
    Raises: ValueError on a clip outside its range, on shapes that differ, on a mask that is not bool.

    Schulman et al. 2017, https://arxiv.org/abs/1707.06347, eq. (7); separate clips: Yu et al. 2025 (DAPO),
    https://arxiv.org/abs/2503.14476, section 3.1; dual clip: Ye et al. 2020, https://arxiv.org/abs/1912.09729.
    Deviation: the log-ratio is held in [-20, 20], beyond which the gradient is 0.
    """
    _check_clips(clip_low, clip_high, dual_clip)
    logprobs_BT, old_logprobs_BT, advantages_BT = masked_tokens(
        mask, logprobs=logprobs, old_logprobs=old_logprobs.detach(), advantages=advantages.detach()
    )
    ratio_BT = (logprobs_BT - old_logprobs_BT).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    unclipped_BT = -advantages_BT * ratio_BT
    clipped_BT = -advantages_BT * ratio_BT.clamp(1 - clip_low, 1 + clip_high)
    loss_BT = torch.maximum(unclipped_BT, clipped_BT)
    clip_binds_BT = clipped_BT > unclipped_BT
    dual_clip_binds_BT = torch.zeros_like(mask)
    if dual_clip is not None:
        ceiling_BT = -advantages_BT * dual_clip
        dual_clip_binds_BT = (advantages_BT < 0) & (loss_BT > ceiling_BT)
        loss_BT = torch.where(dual_clip_binds_BT, ceiling_BT, loss_BT)
    metrics = {
        "clip_fraction": clip_binds_BT.to(loss_BT.dtype),
        "clip_fraction_low": (clip_binds_BT & (advantages_BT < 0)).to(loss_BT.dtype),
        "clip_fraction_high": (clip_binds_BT & (advantages_BT > 0)).to(loss_BT.dtype),
        "dual_clip_fraction": dual_clip_binds_BT.to(loss_BT.dtype),
        "ratio": ratio_BT.detach().masked_fill(~mask, 0),
        "approx_kl": kl_estimate(old_logprobs_BT, logprobs_BT.detach(), kind="k3"),
    }
    return loss_BT, metrics


def _check_clips(clip_low: float, clip_high: float, dual_clip: float | None) -> None:
    if not 0 <= clip_low <= 1:
        raise ValueError(f"clip_low is {clip_low}, it must be in [0, 1]: a ratio cannot fall below 0")
    if clip_high < 0:
        raise ValueError(f"clip_high is {clip_high}, it must be 0 or more")
    if dual_clip is not None and dual_clip <= 1:
        raise ValueError(f"dual_clip is {dual_clip}, it must be above 1 (3 is usual), or None to turn it off")
