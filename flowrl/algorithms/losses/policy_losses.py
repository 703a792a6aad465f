"""Policy losses on token ratios: PPO, decoupled PPO and SAPO. They return one loss per token.

Shape suffixes: B rows, T token positions.

Every policy loss of this package is called `(logprobs, old_logprobs, advantages, mask, *, ...)` and returns
`(loss [B, T], metrics)`. Metrics are tensors [B, T], zero where the mask is false and without gradient: their sum
divided by the number of true positions is the mean, however the batch was split, and `masked_range` gives the
range. All have `ratio` and `approx_kl`, the k3 estimate of KL(old policy || policy). Those that clip also have

    clip_fraction        1 where a clip below or above takes the gradient of a token, or changes its weight
    clip_fraction_low    1 where that is the clip below
    clip_fraction_high   1 where that is the clip above

A dual clip, a cap of a weight and a selection of tokens have fractions of their own.
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
    """Returns the clipped surrogate loss of PPO, with separate lower and upper clips and an optional dual clip.

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


def decoupled_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    behavior_logprobs: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    max_weight: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the decoupled PPO loss: clipped around a proximal policy, weighted for an older behavior policy.

    With c = exp(old_logprobs - behavior_logprobs) and L_clip that of `clipped_policy_loss`:

        L = c L_clip        where c > max_weight:  L = 0

    The clip keeps the policy near the proximal one, and the weight corrects for who sampled: with stale rollouts PPO
    asks one ratio to do both. If both policies are the same, c is 1 and this is PPO.

    Arguments:
        logprobs: [B, T], of the sampled tokens under the policy that is trained; the loss is differentiated by them.
        old_logprobs: [B, T], under the proximal policy, usually that before this batch's updates. No gradient.
        advantages: [B, T]; no gradient flows into them.
        mask: bool [B, T], the tokens that count. Tokens left out by max_weight count in the denominator all the same.
        behavior_logprobs: [B, T], under the policy that sampled, as the rollout reported them. No gradient.
        clip_low, clip_high, dual_clip: as in `clipped_policy_loss`.
        max_weight: > 0 (5 is usual): tokens with a larger c are left out. None keeps all.
    Returns: (loss [B, T], metrics). The metrics of `clipped_policy_loss`, whose ratio is that to the proximal policy,
        and
        behavior_weight: c, 0 where the token is left out.
        weight_cap_fraction: 1 where it is left out.
        behavior_kl: k3 estimate of KL(behavior policy || proximal policy), how stale the rollout is.
    Raises: ValueError as `clipped_policy_loss`, and on a max_weight that is not above 0.

    Hilton et al. 2021, https://arxiv.org/abs/2110.00641, section 2; for language models: Fu et al. 2025 (AReaL),
    https://arxiv.org/abs/2505.24298, section 5.2. Deviations: both log-ratios are held in [-20, 20]; max_weight is in
    AReaL's code and not in the papers.
    """
    if max_weight is not None and not max_weight > 0:
        raise ValueError(f"max_weight is {max_weight}, it must be above 0 (5 is usual), or None to keep every token")
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


def sapo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    temperature_positive: float = 1.0,
    temperature_negative: float = 1.05,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the SAPO loss: a soft gate reduces the gradient smoothly as the ratio leaves 1.

    With w = exp(logprobs - old_logprobs), tau = temperature_positive where A > 0 and temperature_negative elsewhere:

        L = -A (4 / tau) sigmoid(tau (w - 1)),        so that dL/dw = -A 4 p (1 - p) with p = sigmoid(tau (w - 1))

    The factor 4 makes the gate 1 at w = 1: on the first update the gradient is that of REINFORCE. The paper's
    objective is the mean over rows of the row's token mean: aggregate with seq_mean_token_mean.

    Arguments:
        logprobs: [B, T], of the sampled tokens under the policy that is trained; the loss is differentiated by them.
        old_logprobs: [B, T], under the policy before this batch's updates. No gradient flows into them.
        advantages: [B, T]; no gradient flows into them.
        mask: bool [B, T], the tokens that count.
        temperature_positive: > 0, how fast the gate of tokens with A > 0 closes.
        temperature_negative: > 0, that of the others; a little more than temperature_positive (the paper: 1.05 and 1).
    Returns: (loss [B, T], metrics). The metrics:
        gate: 4 p (1 - p), the share of the gradient that is left, in [0, 1].
        ratio, approx_kl: as for every policy loss. Nothing is clipped, so there is no clip fraction.
    Raises: ValueError on a temperature that is not above 0, on shapes that differ, on a mask that is not bool.

    Gao et al. 2025, https://arxiv.org/abs/2511.20347, eq. (5) and (6). Deviation: the log-ratio is held in [-20, 20].
    """
    for name, value in (
        ("temperature_positive", temperature_positive),
        ("temperature_negative", temperature_negative),
    ):
        if not value > 0:
            raise ValueError(f"{name} is {value}, it must be above 0 (1 is usual)")
    logprobs_BT, old_logprobs_BT, advantages_BT = policy_inputs(logprobs, old_logprobs, advantages, mask)
    ratio_BT = bounded_ratio(logprobs_BT - old_logprobs_BT)
    temperatures_BT = torch.full_like(advantages_BT, temperature_negative)
    temperatures_BT = temperatures_BT.masked_fill_(advantages_BT > 0, temperature_positive)
    open_BT = (temperatures_BT * (ratio_BT - 1)).sigmoid()
    loss_BT = -advantages_BT * 4 / temperatures_BT * open_BT
    gate = {"gate": (4 * open_BT * (1 - open_BT)).detach().masked_fill(~mask, 0)}
    return loss_BT, gate | ratio_metrics(ratio_BT, logprobs_BT, old_logprobs_BT, mask)
