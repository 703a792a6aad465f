"""Policy losses on token ratios (PPO, decoupled PPO, SAPO), and the functions that all policy losses share.

Shape suffixes: B rows, T token positions.

All policy losses have the signature `(logprobs, old_logprobs, advantages, mask, *, settings)`:

    logprobs: [B, T], log-probabilities of the sampled tokens under the trained policy. Receives the gradient.
    old_logprobs: [B, T], the same under the policy before the updates of this batch. Receives no gradient.
    advantages: [B, T]. Receives no gradient.
    mask: bool [B, T], true for tokens that count.

They return `(loss [B, T], metrics)` and raise ValueError for invalid settings, mismatched shapes, or a mask that is not
bool. All log-ratios are clamped to [-20, 20] before exponentiation, which deviates from the papers.

Metrics are tensors [B, T] without gradient, 0 where the mask is false. To get the mean of a step, sum a metric over all
micro-batches and divide by the number of unmasked tokens. Every loss reports

    ratio                ratio of new to old probability
    approx_kl            k3 estimate of KL(old policy || policy)
    logprob_change       |logprobs - old_logprobs|

Losses that clip also report

    clip_fraction        1 where a clip removes the gradient of a token or changes its weight
    clip_fraction_low    1 where the lower clip does so
    clip_fraction_high   1 where the upper clip does so
"""

import torch
from torch import Tensor

from flowrl.algorithms.kl.kl_estimates import MAX_LOG_RATIO, kl_estimate
from flowrl.algorithms.masking import masked_tokens
from flowrl.algorithms.registry import Annotated, Fraction, Gt, NonNegativeFloat, PositiveFloat, policy_losses

DualClip = Annotated[float, Gt(1)]


def policy_inputs(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Checks the three tensors [B, T] and zeroes masked positions with `masked_tokens`. Only `logprobs` keeps its
    gradient.
    """
    logprobs_BT, old_logprobs_BT, advantages_BT = masked_tokens(
        mask, logprobs=logprobs, old_logprobs=old_logprobs.detach(), advantages=advantages.detach()
    )
    return logprobs_BT, old_logprobs_BT, advantages_BT


def bounded_ratio(log_ratios: Tensor) -> Tensor:
    """Returns exp(log_ratios) with the exponent clamped to [-20, 20]; clamped entries have no gradient."""
    return log_ratios.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def weighted_score(weights: Tensor, logprobs: Tensor) -> Tensor:
    """Returns a tensor with the value `weights` and the gradient weights * grad(logprobs). The weights receive no
    gradient.
    """
    # exp(x - stop_gradient(x)) has the value 1 and the derivative of x.
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
    """Returns the clip fractions: lower clip, upper clip, and either clip."""
    return {
        "clip_fraction": (low_binds_BT | high_binds_BT).to(dtype),
        "clip_fraction_low": low_binds_BT.to(dtype),
        "clip_fraction_high": high_binds_BT.to(dtype),
    }


def ratio_metrics(ratio_BT: Tensor, logprobs_BT: Tensor, old_logprobs_BT: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Returns the metrics `ratio`, `approx_kl` and `logprob_change` per token, which every policy loss reports.

    They have no gradient and are 0 where the mask is false.
    """
    logprobs_BT, old_logprobs_BT = logprobs_BT.detach(), old_logprobs_BT.detach()
    return {
        "ratio": ratio_BT.detach().masked_fill(~mask, 0),
        "approx_kl": kl_estimate(old_logprobs_BT, logprobs_BT, kind="k3"),
        "logprob_change": kl_estimate(old_logprobs_BT, logprobs_BT, kind="abs"),
    }


def check_clips(clip_low: float, clip_high: float, dual_clip: float | None = None) -> None:
    """Raises ValueError if a clip range is invalid."""
    if not 0 <= clip_low <= 1:
        raise ValueError(f"clip_low is {clip_low}, but must be in [0, 1]: a ratio cannot fall below 0")
    if not clip_high >= 0:
        raise ValueError(f"clip_high is {clip_high}, but must be 0 or more")
    if dual_clip is not None and not dual_clip > 1:
        raise ValueError(f"dual_clip is {dual_clip}, but must be above 1 (3 is usual), or None to disable it")


@policy_losses.register("ppo")
def clipped_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: Fraction = 0.2,
    clip_high: NonNegativeFloat = 0.2,
    dual_clip: DualClip | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the clipped surrogate loss of PPO, with separate lower and upper clips and an optional dual clip.

    With w = exp(logprobs - old_logprobs):

        L = max(-A w, -A clip(w, 1 - clip_low, 1 + clip_high))       where A < 0:  L = min(L, -A dual_clip)

    Args (the module docstring describes the tensors):
        clip_low: Tokens with a probability ratio below 1 - clip_low and a negative advantage get no gradient.
        clip_high: Tokens with a ratio above 1 + clip_high and a positive advantage get no gradient.
        dual_clip: Upper bound of the loss as a multiple of a negative advantage; null is none. Usually 3.
    Returns: a tuple (loss [B, T], metrics). Additional metric: dual_clip_fraction, 1 where dual_clip limits the loss.

    Schulman et al. 2017, https://arxiv.org/abs/1707.06347, eq. (7). Separate clips: Yu et al. 2025 (DAPO),
    https://arxiv.org/abs/2503.14476, section 3.1. Dual clip: Ye et al. 2020, https://arxiv.org/abs/1912.09729.
    """
    check_clips(clip_low, clip_high, dual_clip)
    logprobs_BT, old_logprobs_BT, advantages_BT = policy_inputs(logprobs, old_logprobs, advantages, mask)
    ratio_BT = bounded_ratio(logprobs_BT - old_logprobs_BT)
    loss_BT, clips = clipped_surrogate(ratio_BT, advantages_BT, clip_low=clip_low, clip_high=clip_high)
    dual_clip_binds_BT = torch.zeros_like(mask)
    if dual_clip is not None:
        ceiling_BT = -advantages_BT * dual_clip
        dual_clip_binds_BT = (advantages_BT < 0) & (loss_BT > ceiling_BT)
        loss_BT = torch.where(dual_clip_binds_BT, ceiling_BT, loss_BT)
    dual = {"dual_clip_fraction": dual_clip_binds_BT.to(loss_BT.dtype)}
    return loss_BT, clips | dual | ratio_metrics(ratio_BT, logprobs_BT, old_logprobs_BT, mask)


@policy_losses.register("decoupled_ppo")
def decoupled_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    behavior_logprobs: Tensor,
    *,
    clip_low: Fraction = 0.2,
    clip_high: NonNegativeFloat = 0.2,
    dual_clip: DualClip | None = None,
    max_weight: PositiveFloat | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the decoupled PPO loss: clipped around a proximal policy, and weighted for an older behavior policy.

    With c = exp(old_logprobs - behavior_logprobs) and L_clip the result of `clipped_policy_loss`:

        L = c L_clip        where c > max_weight:  L = 0

    The clip limits the distance to the proximal policy (`old_logprobs`). The weight c corrects for stale rollouts.

    Args (`clipped_policy_loss` describes the others):
        behavior_logprobs: [B, T], log-probabilities that the rollout reported. Receives no gradient.
        max_weight: Largest ratio of the proximal to the behavior policy; tokens with a larger ratio are excluded. Null
            keeps all tokens. Usually 5.
    Returns: a tuple (loss [B, T], metrics). Excluded tokens still count in the denominator. Metrics in addition to
        those of `clipped_policy_loss`:
        behavior_weight: c, 0 for excluded tokens.
        weight_cap_fraction: 1 for excluded tokens.
        behavior_kl: k3 estimate of KL(behavior policy || proximal policy), a measure of staleness.

    Hilton et al. 2021, https://arxiv.org/abs/2110.00641, section 2. For language models: Fu et al. 2025 (AReaL),
    https://arxiv.org/abs/2505.24298, section 5.2. max_weight is from the code of AReaL, not from the papers.
    """
    if max_weight is not None and not max_weight > 0:
        raise ValueError(f"max_weight is {max_weight}, but must be above 0 (5 is usual), or None to keep every token")
    loss_BT, metrics = clipped_policy_loss(
        logprobs, old_logprobs, advantages, mask, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip
    )
    old_logprobs_BT, behavior_logprobs_BT = masked_tokens(
        mask, old_logprobs=old_logprobs.detach(), behavior_logprobs=behavior_logprobs.detach()
    )
    weight_BT = bounded_ratio(old_logprobs_BT - behavior_logprobs_BT)
    too_large_BT = torch.zeros_like(mask) if max_weight is None else mask & (weight_BT > max_weight)
    weight_BT = weight_BT.masked_fill(~mask | too_large_BT, 0)
    metrics |= {
        "behavior_weight": weight_BT,
        "weight_cap_fraction": too_large_BT.to(weight_BT.dtype),
        "behavior_kl": kl_estimate(behavior_logprobs_BT, old_logprobs_BT, kind="k3"),
    }
    return weight_BT * loss_BT, metrics


@policy_losses.register("sapo")
def sapo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    temperature_positive: PositiveFloat = 1.0,
    temperature_negative: PositiveFloat = 1.05,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the SAPO loss: a soft gate reduces the gradient smoothly as the ratio leaves 1.

    w is exp(logprobs - old_logprobs). tau is temperature_positive where A > 0, and temperature_negative elsewhere:

        L = -A (4 / tau) sigmoid(tau (w - 1)),        so that dL/dw = -A 4 p (1 - p) with p = sigmoid(tau (w - 1))

    The gate 4 p (1 - p) is 1 at w = 1. Aggregate with seq_mean_token_mean for the objective of the paper.

    Args (the module docstring describes the tensors):
        temperature_positive: Steepness of the gate for tokens with a positive advantage.
        temperature_negative: Steepness of the gate for all other tokens.
    Returns: a tuple (loss [B, T], metrics). Additional metric: gate, in [0, 1]. There are no clip fractions.

    Gao et al. 2025, https://arxiv.org/abs/2511.20347, eq. (5) and (6), with temperatures of 1 and 1.05.
    """
    for name, value in (
        ("temperature_positive", temperature_positive),
        ("temperature_negative", temperature_negative),
    ):
        if not value > 0:
            raise ValueError(f"{name} is {value}, but must be above 0 (1 is usual)")
    logprobs_BT, old_logprobs_BT, advantages_BT = policy_inputs(logprobs, old_logprobs, advantages, mask)
    ratio_BT = bounded_ratio(logprobs_BT - old_logprobs_BT)
    temperatures_BT = torch.full_like(advantages_BT, temperature_negative)
    temperatures_BT = temperatures_BT.masked_fill_(advantages_BT > 0, temperature_positive)
    open_BT = (temperatures_BT * (ratio_BT - 1)).sigmoid()
    loss_BT = -advantages_BT * 4 / temperatures_BT * open_BT
    gate = {"gate": (4 * open_BT * (1 - open_BT)).detach().masked_fill(~mask, 0)}
    return loss_BT, gate | ratio_metrics(ratio_BT, logprobs_BT, old_logprobs_BT, mask)
