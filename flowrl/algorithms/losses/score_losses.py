"""Policy losses whose gradient is a weight times grad(log pi): REINFORCE, GPG, CISPO and DPPO.

Shape suffixes: B rows, T token positions. Called and reported as in policy_losses.py. The weight carries no gradient,
so these losses are not the integral of what they give: a finite difference of them differs from their gradient.
"""

from typing import Literal, get_args

import torch
from torch import Tensor

from flowrl.algorithms.losses.policy_losses import (
    bounded_ratio,
    check_clips,
    clip_metrics,
    policy_inputs,
    ratio_metrics,
    weighted_score,
)

Divergence = Literal["tv", "kl"]


def reinforce_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the REINFORCE loss: minus the log-probability of each token times its advantage.

        L = -A logprobs,        so that grad L = -A grad(log pi), the score-function estimate of the policy gradient

    It is right for tokens that the present policy sampled: nothing corrects for older ones and nothing bounds the step.

    Arguments:
        logprobs: [B, T], of the sampled tokens under the policy that is trained; the loss is differentiated by them.
        old_logprobs: [B, T], under the policy that sampled; for the metrics alone.
        advantages: [B, T]; no gradient flows into them.
        mask: bool [B, T], the tokens that count.
    Returns: (loss [B, T], metrics): ratio and approx_kl; both say how far from on-policy the update was.
    Raises: ValueError on shapes that differ, on a mask that is not bool.

    Williams 1992, https://doi.org/10.1007/BF00992696.
    """
    logprobs_BT, old_logprobs_BT, advantages_BT = policy_inputs(logprobs, old_logprobs, advantages, mask)
    ratio_BT = bounded_ratio(logprobs_BT.detach() - old_logprobs_BT)
    return -advantages_BT * logprobs_BT, ratio_metrics(ratio_BT, logprobs_BT, old_logprobs_BT, mask)


def gpg_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the GPG loss, which equals REINFORCE. The estimator `gpg` computes the advantages of GPG.

        L = -A logprobs

    Aggregate with token_mean for the paper's objective.

    Arguments, returns and errors: those of `reinforce_loss`.

    Chu et al. 2025, https://arxiv.org/abs/2504.02546, the objective.
    """
    return reinforce_loss(logprobs, old_logprobs, advantages, mask)


def cispo_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, *, clip_low: float, clip_high: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the CISPO loss: REINFORCE with a clipped importance weight. Every token keeps its gradient.

        L = -stop_gradient(clip(w, 1 - clip_low, 1 + clip_high)) A logprobs,        w = exp(logprobs - old_logprobs)

    Aggregate with token_mean for the paper's objective.

    Arguments:
        logprobs: [B, T], of the sampled tokens under the policy that is trained; the loss is differentiated by them.
        old_logprobs: [B, T], under the policy that sampled. No gradient flows into them.
        advantages: [B, T]; no gradient flows into them.
        mask: bool [B, T], the tokens that count.
        clip_low: in [0, 1]; 1 does not clip below, as in the paper's experiments.
        clip_high: >= 0, far larger than PPO's: it bounds a weight and does not silence a token. The paper tunes it and
            gives no number; 4, weights up to 5, is that of https://arxiv.org/abs/2510.13786.
    Returns: (loss [B, T], metrics): clip_fraction, clip_fraction_low and clip_fraction_high, 1 where the weight is
        clipped, whatever the sign of the advantage; ratio (before the clip); approx_kl.
    Raises: ValueError on a clip outside its range, on shapes that differ, on a mask that is not bool.

    MiniMax 2025, https://arxiv.org/abs/2506.13585, eq. (4) and (5). Deviation: log w is held in [-20, 20].
    """
    check_clips(clip_low, clip_high)
    logprobs_BT, old_logprobs_BT, advantages_BT = policy_inputs(logprobs, old_logprobs, advantages, mask)
    ratio_BT = bounded_ratio(logprobs_BT.detach() - old_logprobs_BT)
    weight_BT = ratio_BT.clamp(1 - clip_low, 1 + clip_high)
    metrics = clip_metrics(mask & (ratio_BT < weight_BT), mask & (ratio_BT > weight_BT), dtype=ratio_BT.dtype)
    loss_BT = -weight_BT * advantages_BT * logprobs_BT
    return loss_BT, metrics | ratio_metrics(ratio_BT, logprobs_BT, old_logprobs_BT, mask)


def dppo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    divergence: Divergence,
    delta_low: float,
    delta_high: float,
    max_ratio: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the DPPO loss: a trust region on the divergence of the two policies per token, not on the ratio.

        L = -M A min(w, max_ratio),        gradient -M A min(w, max_ratio) grad(log pi),        w = p / q
        M = 0 where A > 0, w > 1, D > delta_high, and where A < 0, w < 1, D > delta_low; else 1

    with p, q the token's probability under the policy and the old one, and D that of "this token or any other":

        tv   |p - q|                                       in [0, 1]
        kl   q log(q / p) + (1 - q) log((1 - q) / (1 - p))   in nats

    Both are lower bounds of the divergence over the vocabulary. A rare token may double its probability, where a clip
    of the ratio would stop it; a frequent one may not move by 0.2, where such a clip would let it.

    Arguments:
        logprobs: [B, T], of the sampled tokens under the policy that is trained; the loss is differentiated by them.
        old_logprobs: [B, T]. The paper takes those of the policy that sampled, as the rollout reported them, and not
            ones that were computed again. No gradient flows into them.
        advantages: [B, T]; no gradient flows into them.
        mask: bool [B, T], the tokens that count.
        divergence: see above.
        delta_low, delta_high: >= 0, in units of D; the paper has one for both, 0.05 for kl, 0.15 for tv (0.2 in most of
            its large runs).
        max_ratio: > 0, a bound on the weight that keeps the token's gradient; C of the paper's appendix, 5 in its large
            runs. None, as in its other runs, is off.
    Returns: (loss [B, T], metrics): clip_fraction, clip_fraction_low and clip_fraction_high, 1 where M is 0;
        max_ratio_fraction, 1 where max_ratio binds and M is 1; divergence, D; ratio, w; approx_kl.
    Raises: ValueError on an unknown divergence, a delta or max_ratio outside its range, on shapes that differ, on a
        mask that is not bool.

    Qi et al. 2026, https://arxiv.org/abs/2602.04879, eq. (12), with the binary approximations, eq. (13) and (14).
    Deviations: the recipes pass old log-probabilities that the trainer computed again, and not the rollout's (a recipe
    of your own may pass those); log w is held in [-20, 20], in value only; a log-probability above 0 (rounding) counts
    as 0; 1 - p is held above the resolution of the dtype.
    """
    _check_trust_region(divergence, delta_low, delta_high, max_ratio)
    logprobs_BT, old_logprobs_BT, advantages_BT = policy_inputs(logprobs, old_logprobs, advantages, mask)
    ratio_BT = bounded_ratio(logprobs_BT.detach() - old_logprobs_BT)
    divergence_BT = _binary_divergence(logprobs_BT.detach(), old_logprobs_BT, divergence)
    low_binds_BT = (advantages_BT < 0) & (ratio_BT < 1) & (divergence_BT > delta_low)
    high_binds_BT = (advantages_BT > 0) & (ratio_BT > 1) & (divergence_BT > delta_high)
    silent_BT = low_binds_BT | high_binds_BT
    weight_BT = ratio_BT if max_ratio is None else ratio_BT.clamp(max=max_ratio)
    too_large_BT = mask & (ratio_BT > weight_BT) & ~silent_BT
    loss_BT = -advantages_BT * weighted_score(weight_BT.masked_fill(silent_BT, 0), logprobs_BT)
    metrics = clip_metrics(low_binds_BT, high_binds_BT, dtype=ratio_BT.dtype) | {
        "max_ratio_fraction": too_large_BT.to(ratio_BT.dtype),
        "divergence": divergence_BT.masked_fill(~mask, 0),
    }
    return loss_BT, metrics | ratio_metrics(ratio_BT, logprobs_BT, old_logprobs_BT, mask)


def _binary_divergence(logprobs_BT: Tensor, old_logprobs_BT: Tensor, divergence: Divergence) -> Tensor:
    """Returns the binary divergence (this token or any other) between the old and new policy, at least 0."""
    logprobs_BT, old_logprobs_BT = logprobs_BT.clamp(max=0), old_logprobs_BT.clamp(max=0)
    if divergence == "tv":
        return (logprobs_BT.exp() - old_logprobs_BT.exp()).abs()
    # expm1 keeps the digits of 1 - p where p is near 1, which is where most tokens are.
    smallest = torch.finfo(logprobs_BT.dtype).eps
    others_BT, old_others_BT = (-torch.expm1(x).clamp(max=-smallest) for x in (logprobs_BT, old_logprobs_BT))
    this_BT = old_logprobs_BT.exp() * (old_logprobs_BT - logprobs_BT)
    return (this_BT + old_others_BT * (old_others_BT / others_BT).log()).clamp(min=0)


def _check_trust_region(divergence: Divergence, delta_low: float, delta_high: float, max_ratio: float | None) -> None:
    if divergence not in get_args(Divergence):
        raise ValueError(f"divergence is {divergence!r}, it must be one of {', '.join(get_args(Divergence))}")
    for name, value in (("delta_low", delta_low), ("delta_high", delta_high)):
        if not value >= 0:
            raise ValueError(f"{name} is {value}, it must be 0 or more: no divergence is negative")
    if max_ratio is not None and not max_ratio > 0:
        raise ValueError(f"max_ratio is {max_ratio}, it must be above 0 (5 is usual), or None to turn it off")
