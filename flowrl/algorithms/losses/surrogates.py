"""Importance ratios, the clipped surrogate, and the metrics that all policy losses report.

Shape suffixes: B rows, T token positions. The tensors given here have been through `policy_inputs`.
"""

import torch
from torch import Tensor

from flowrl.algorithms.kl.kl_estimates import MAX_LOG_RATIO, kl_estimate
from flowrl.algorithms.masks import masked_tokens


def policy_inputs(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Checks and zeroes the three tensors [B, T] with `masked_tokens`; only the first keeps its gradient."""
    logprobs_BT, old_logprobs_BT, advantages_BT = masked_tokens(
        mask, logprobs=logprobs, old_logprobs=old_logprobs.detach(), advantages=advantages.detach()
    )
    return logprobs_BT, old_logprobs_BT, advantages_BT


def bounded_ratio(log_ratios: Tensor) -> Tensor:
    """Returns exp(log_ratios) with the exponent clamped to [-20, 20]; clamped entries have no gradient."""
    return log_ratios.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def weighted_score(weights: Tensor, logprobs: Tensor) -> Tensor:
    """Returns a tensor with the value of `weights` and the gradient weights * grad(logprobs).

    No gradient flows into the weights, so they may be clipped without the token losing its gradient.
    """
    # exp(x - x) is 1 in value, and its derivative is that of x.
    return weights.detach() * (logprobs - logprobs.detach()).exp()


def clipped_surrogate(
    ratio_BT: Tensor, advantages_BT: Tensor, *, clip_low: float, clip_high: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns max(-A w, -A clip(w, 1 - clip_low, 1 + clip_high)) per token, and the clip metrics."""
    unclipped_BT = -advantages_BT * ratio_BT
    clipped_BT = -advantages_BT * ratio_BT.clamp(1 - clip_low, 1 + clip_high)
    binds_BT = clipped_BT > unclipped_BT
    metrics = clip_metrics(binds_BT & (advantages_BT < 0), binds_BT & (advantages_BT > 0), dtype=ratio_BT.dtype)
    return torch.maximum(unclipped_BT, clipped_BT), metrics


def clip_metrics(low_binds_BT: Tensor, high_binds_BT: Tensor, *, dtype: torch.dtype) -> dict[str, Tensor]:
    """Returns the clip fractions: below, above, and either."""
    return {
        "clip_fraction": (low_binds_BT | high_binds_BT).to(dtype),
        "clip_fraction_low": low_binds_BT.to(dtype),
        "clip_fraction_high": high_binds_BT.to(dtype),
    }


def ratio_metrics(ratio_BT: Tensor, logprobs_BT: Tensor, old_logprobs_BT: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Returns the ratio and the k3 estimate of KL(old policy || policy), masked and without gradient."""
    return {
        "ratio": ratio_BT.detach().masked_fill(~mask, 0),
        "approx_kl": kl_estimate(old_logprobs_BT.detach(), logprobs_BT.detach(), kind="k3"),
    }


def check_clips(clip_low: float, clip_high: float, dual_clip: float | None = None) -> None:
    """Raises ValueError if a clip range is invalid."""
    if not 0 <= clip_low <= 1:
        raise ValueError(f"clip_low is {clip_low}, it must be in [0, 1]: a ratio cannot fall below 0")
    if not clip_high >= 0:
        raise ValueError(f"clip_high is {clip_high}, it must be 0 or more")
    if dual_clip is not None and not dual_clip > 1:
        raise ValueError(f"dual_clip is {dual_clip}, it must be above 1 (3 is usual), or None to turn it off")
