"""Policy losses whose gradient is a constant weight times grad(log pi): REINFORCE, GPG, CISPO and DPPO.

The module docstring of policy_losses.py describes arguments, results and errors. The weight carries no gradient. Finite
differences of these losses therefore do not match their gradients.
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
from flowrl.algorithms.registry import Fraction, NonNegativeFloat, PositiveFloat, policy_losses

Divergence = Literal["tv", "kl"]


@policy_losses.register("reinforce")
def reinforce_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the REINFORCE loss: minus the log-probability of each token times its advantage.

        L = -A logprobs

    The loss has no off-policy correction and no trust region. It uses `old_logprobs` only for the metrics. The module
    docstring of policy_losses.py describes arguments, results and errors.

    Williams 1992, https://doi.org/10.1007/BF00992696.
    """
    logprobs_BT, old_logprobs_BT, advantages_BT = policy_inputs(logprobs, old_logprobs, advantages, mask)
    ratio_BT = bounded_ratio(logprobs_BT.detach() - old_logprobs_BT)
    return -advantages_BT * logprobs_BT, ratio_metrics(ratio_BT, logprobs_BT, old_logprobs_BT, mask)


@policy_losses.register("gpg")
def gpg_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the GPG loss, which equals REINFORCE. The estimator `gpg` computes the advantages of GPG.

    The objective of the paper requires aggregation with token_mean. `reinforce_loss` describes arguments, results and
    errors.

    Chu et al. 2025, https://arxiv.org/abs/2504.02546.
    """
    return reinforce_loss(logprobs, old_logprobs, advantages, mask)


@policy_losses.register("cispo")
def cispo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: Fraction = 1.0,
    clip_high: NonNegativeFloat = 4.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the CISPO loss: REINFORCE with a clipped importance weight. Every token keeps its gradient.

        L = -stop_gradient(clip(w, 1 - clip_low, 1 + clip_high)) A logprobs,        w = exp(logprobs - old_logprobs)

    The objective of the paper requires aggregation with token_mean.

    Args (the module docstring of policy_losses.py describes the tensors):
        clip_low: The weight is at least 1 - clip_low; 1 disables the lower bound.
        clip_high: The weight is at most 1 + clip_high. The default is from ScaleRL, arXiv 2510.13786.
    Returns: a tuple (loss [B, T], metrics). Clip fractions are 1 where the weight is clipped, for any advantage.

    MiniMax 2025, https://arxiv.org/abs/2506.13585, eq. (4) and (5). As in its experiments, there is no lower clip by
    default. The paper gives no value of clip_high.
    """
    check_clips(clip_low, clip_high)
    logprobs_BT, old_logprobs_BT, advantages_BT = policy_inputs(logprobs, old_logprobs, advantages, mask)
    ratio_BT = bounded_ratio(logprobs_BT.detach() - old_logprobs_BT)
    weight_BT = ratio_BT.clamp(1 - clip_low, 1 + clip_high)
    metrics = clip_metrics(mask & (ratio_BT < weight_BT), mask & (ratio_BT > weight_BT), dtype=ratio_BT.dtype)
    loss_BT = -weight_BT * advantages_BT * logprobs_BT
    return loss_BT, metrics | ratio_metrics(ratio_BT, logprobs_BT, old_logprobs_BT, mask)


@policy_losses.register("dppo_tv", bind={"divergence": "tv"})
@policy_losses.register("dppo_kl", bind={"divergence": "kl"}, defaults={"delta_low": 0.05, "delta_high": 0.05})
def dppo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    divergence: Divergence,
    delta_low: NonNegativeFloat = 0.15,
    delta_high: NonNegativeFloat = 0.15,
    max_ratio: PositiveFloat | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the DPPO loss: REINFORCE with a trust region on the divergence per token, not on the ratio.

        L = -M A min(w, max_ratio)        gradient: -M A min(w, max_ratio) grad(log pi)        w = p / q
        M = 0 where (A > 0, w > 1, D > delta_high) or (A < 0, w < 1, D > delta_low), else M = 1

    p and q are the probabilities of the token under the policy and the old policy. D is the divergence of the binary
    distribution "this token or any other". It is a lower bound of the divergence over the vocabulary:

        tv   |p - q|                                       in [0, 1]
        kl   q log(q / p) + (1 - q) log((1 - q) / (1 - p))   in nats

    Compared to a ratio clip, rare tokens may change by a larger factor, and frequent tokens by a smaller factor.

    Args (the module docstring of policy_losses.py describes the tensors):
        divergence: formula of D, one of the two above.
        delta_low: Divergence above which a token with a negative advantage gets no gradient that lowers its probability
            further.
        delta_high: Divergence above which a token with a positive advantage gets no gradient that raises its
            probability further.
        max_ratio: Upper bound of a token's weight; null disables it. Capped tokens keep their gradient.
    Returns: a tuple (loss [B, T], metrics). Clip fractions are 1 where M is 0. Additional metrics:
        max_ratio_fraction: 1 where w > max_ratio and M is 1.
        divergence: D.

    Qi et al. 2026, https://arxiv.org/abs/2602.04879, eq. (12) to (14), with bounds of D of 0.05 for kl and of 0.15 or
    0.2 for tv, and max_ratio 5 in large runs. Deviations: the recipes pass old
    log-probabilities that the trainer recomputes; the paper uses log-probabilities from the rollout. Log-probabilities
    above 0, which rounding may cause, count as 0. 1 - p is at least the resolution of the dtype.
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
    """Returns the divergence of the binary distribution "this token or any other" between old and new policy, at least
    0.
    """
    logprobs_BT, old_logprobs_BT = logprobs_BT.clamp(max=0), old_logprobs_BT.clamp(max=0)
    if divergence == "tv":
        return (logprobs_BT.exp() - old_logprobs_BT.exp()).abs()
    # expm1 is accurate where p is near 1, as for most tokens.
    smallest = torch.finfo(logprobs_BT.dtype).eps
    others_BT, old_others_BT = (-torch.expm1(x).clamp(max=-smallest) for x in (logprobs_BT, old_logprobs_BT))
    this_BT = old_logprobs_BT.exp() * (old_logprobs_BT - logprobs_BT)
    return (this_BT + old_others_BT * (old_others_BT / others_BT).log()).clamp(min=0)


def _check_trust_region(divergence: Divergence, delta_low: float, delta_high: float, max_ratio: float | None) -> None:
    if divergence not in get_args(Divergence):
        raise ValueError(f"divergence is {divergence!r}, but must be one of {', '.join(get_args(Divergence))}")
    for name, value in (("delta_low", delta_low), ("delta_high", delta_high)):
        if not value >= 0:
            raise ValueError(f"{name} is {value}, but must be 0 or more: no divergence is negative")
    if max_ratio is not None and not max_ratio > 0:
        raise ValueError(f"max_ratio is {max_ratio}, but must be above 0 (5 is usual), or None to disable it")
