"""Clip-Cov and KL-Cov: policy losses that restrain the few tokens that reduce the entropy most.

Shape suffixes: B rows, T token positions. Losses are called and reported as in policy_losses.py.

Which tokens these are is a matter of rank over the whole batch, and no part of a batch can know it. So it is decided
once, before the batch is split: `token_covariances`, then `select_clip_cov` or `select_kl_cov`, and the result is a
bool column that goes with the rows.
"""

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from flowrl.algorithms.kl.kl_estimates import kl_estimate
from flowrl.algorithms.losses.policy_losses import (
    bounded_ratio,
    check_clips,
    clipped_surrogate,
    policy_inputs,
    ratio_metrics,
)
from flowrl.algorithms.masks import masked_tokens

CovarianceKl = Literal["abs", "k2", "k3"]


@torch.no_grad()
def token_covariances(logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """Returns each token's contribution to the covariance of log-probability and advantage over the batch.

        cov = (logprobs - mean(logprobs)) (A - mean(A)),        means over all true positions

    Their mean is how fast a step of policy gradient lowers the entropy.

    Arguments:
        logprobs: [B, T]. Pass those under the policy before the batch's updates: they are known for the whole batch.
        advantages: [B, T].
        mask: bool [B, T], the tokens that count. Pass the whole batch: a part of it has other means.
    Returns: [B, T], zero where the mask is false, without gradient.
    Raises: ValueError on shapes that differ or a mask that is not bool.

    Cui et al. 2025, https://arxiv.org/abs/2505.22617, eq. (10). Means are in float64. Deviation: the paper takes the
    log-probabilities of the policy at each update, over the tokens of that update.
    """
    logprobs_BT, advantages_BT = masked_tokens(mask, logprobs=logprobs, advantages=advantages)
    num_tokens = mask.sum().clamp(min=1)
    deviations = [x.double() - x.sum(dtype=torch.float64) / num_tokens for x in (logprobs_BT, advantages_BT)]
    return (deviations[0] * deviations[1]).masked_fill(~mask, 0).to(logprobs_BT.dtype)


@torch.no_grad()
def select_clip_cov(
    covariances: Tensor, mask: Tensor, *, fraction: float, low: float, high: float, seed: int
) -> Tensor:
    """Returns a mask of the tokens that Clip-Cov excludes, sampled uniformly among covariances in [low, high].

    Arguments:
        covariances: [B, T], of `token_covariances`.
        mask: bool [B, T], the tokens that count. Pass the whole batch.
        fraction: in [0, 1], of all true positions, how many to draw, rounded down (the paper has 2e-4); if fewer are in
            the range, all of them.
        low, high: the range, in nats times the advantage's unit (the paper has 1 and 5).
        seed: of the draw; the same seed and batch give the same tokens on one kind of device.
    Returns: bool [B, T], false where the mask is. The draw is by position: permuted rows give another one.
    Raises: ValueError on a fraction or a range that cannot be, on shapes that differ, on a mask that is not bool.

    Cui et al. 2025, https://arxiv.org/abs/2505.22617, eq. (11). Deviation: the authors' code draws one token at
    least, and none that the clip of the ratio silences already; here the choice is made before any ratio leaves 1.
    """
    if not low <= high:
        raise ValueError(f"low is {low} and high is {high}, low must not be above high")
    (covariances_BT,) = masked_tokens(mask, covariances=covariances)
    candidates_BT = mask & (covariances_BT >= low) & (covariances_BT <= high)
    candidates_N = candidates_BT.flatten().nonzero().squeeze(-1)
    generator = torch.Generator(device=mask.device).manual_seed(seed)
    order_N = torch.randperm(len(candidates_N), generator=generator, device=mask.device)
    return _selection(mask, candidates_N[order_N[: _num_selected(mask, fraction)]])


@torch.no_grad()
def select_kl_cov(covariances: Tensor, mask: Tensor, *, fraction: float) -> Tensor:
    """Returns a mask of the tokens that KL-Cov penalizes: the largest covariances.

    Arguments:
        covariances: [B, T], of `token_covariances`.
        mask: bool [B, T], the tokens that count. Pass the whole batch.
        fraction: in [0, 1], of all true positions, how many to take, rounded down (the paper has 2e-4 to 2e-3). Of
            equal covariances the earlier row and token comes first.
    Returns: bool [B, T], false where the mask is.
    Raises: ValueError on a fraction outside [0, 1], on shapes that differ, on a mask that is not bool.

    Cui et al. 2025, https://arxiv.org/abs/2505.22617, eq. (13). The authors' code takes one token at least.
    """
    (covariances_BT,) = masked_tokens(mask, covariances=covariances)
    ranked_N = covariances_BT.masked_fill(~mask, -torch.inf).flatten().argsort(descending=True, stable=True)
    return _selection(mask, ranked_N[: _num_selected(mask, fraction)])


def clip_cov_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    selected: Tensor,
    clip_low: float,
    clip_high: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the Clip-Cov loss: the clipped PPO loss, and 0 for the selected tokens.

    Arguments:
        logprobs, old_logprobs, advantages, mask, clip_low, clip_high: as in `clipped_policy_loss`.
        selected: bool [B, T], of `select_clip_cov` on the whole batch. Ignored where the mask is false.
    Returns: (loss [B, T], metrics): clip_fraction, clip_fraction_low and clip_fraction_high (of PPO's clip, selected
        tokens apart), selected_fraction, ratio, approx_kl.
    Raises: ValueError on a clip outside its range, on shapes that differ, on a mask or a selection that is not bool.

    Cui et al. 2025, https://arxiv.org/abs/2505.22617, eq. (12). Deviations: the paper's formula has no clip of the
    ratio and its code has (clip_low 1 and a large clip_high turn it off); the log-ratio is held in [-20, 20].
    """
    check_clips(clip_low, clip_high)
    selected_BT = _checked_selection(selected, mask)
    logprobs_BT, old_logprobs_BT, advantages_BT = policy_inputs(logprobs, old_logprobs, advantages, mask)
    ratio_BT = bounded_ratio(logprobs_BT - old_logprobs_BT)
    loss_BT, clips = clipped_surrogate(ratio_BT, advantages_BT, clip_low=clip_low, clip_high=clip_high)
    metrics = {name: clip_BT.masked_fill(selected_BT, 0) for name, clip_BT in clips.items()}
    metrics["selected_fraction"] = selected_BT.to(loss_BT.dtype)
    return loss_BT.masked_fill(selected_BT, 0), metrics | ratio_metrics(ratio_BT, logprobs_BT, old_logprobs_BT, mask)


def kl_cov_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    selected: Tensor,
    kl_coef: float,
    kl_kind: CovarianceKl = "abs",
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the KL-Cov loss: the unclipped surrogate, plus a KL penalty to the old policy for selected tokens.

        L = -A w + [selected] kl_coef KL(old policy || policy),        w = exp(logprobs - old_logprobs)

    Arguments:
        logprobs: [B, T], of the sampled tokens under the policy that is trained; the loss is differentiated by them.
        old_logprobs: [B, T], under the policy before this batch's updates. No gradient flows into them.
        advantages: [B, T]; no gradient flows into them.
        mask: bool [B, T], the tokens that count.
        selected: bool [B, T], of `select_kl_cov` on the whole batch. Ignored where the mask is false.
        kl_coef: >= 0, in units of the advantage per nat (the paper has 1).
        kl_kind: the estimate, see `kl_estimate`: "abs" is that of the authors' code, "k3" that of the paper's formula.
    Returns: (loss [B, T], metrics): selected_fraction, kl_penalty (0 on tokens that are not selected, without kl_coef),
        ratio, approx_kl. Nothing is clipped, so there is no clip fraction.
    Raises: ValueError on a negative kl_coef, an unknown kl_kind, shapes that differ, a mask or selection not bool.

    Cui et al. 2025, https://arxiv.org/abs/2505.22617, eq. (14). Deviation: the log-ratio of w is held in [-20, 20].
    """
    if not kl_coef >= 0:
        raise ValueError(f"kl_coef is {kl_coef}, it must be 0 or more: a negative one would reward leaving the policy")
    if kl_kind not in get_args(CovarianceKl):
        raise ValueError(f"kl_kind is {kl_kind!r}, it must be one of {', '.join(get_args(CovarianceKl))}")
    selected_BT = _checked_selection(selected, mask)
    logprobs_BT, old_logprobs_BT, advantages_BT = policy_inputs(logprobs, old_logprobs, advantages, mask)
    ratio_BT = bounded_ratio(logprobs_BT - old_logprobs_BT)
    penalty_BT = kl_estimate(old_logprobs_BT, logprobs_BT, kind=kl_kind).masked_fill(~selected_BT, 0)
    metrics = {"selected_fraction": selected_BT.to(ratio_BT.dtype), "kl_penalty": penalty_BT.detach()}
    loss_BT = -advantages_BT * ratio_BT + kl_coef * penalty_BT
    return loss_BT, metrics | ratio_metrics(ratio_BT, logprobs_BT, old_logprobs_BT, mask)


def _num_selected(mask: Tensor, fraction: float) -> int:
    if not 0 <= fraction <= 1:
        raise ValueError(f"fraction is {fraction}, it must be in [0, 1]: it is a share of the tokens")
    # 0.29 * 100 is a little below 29 in floating point.
    return math.floor(fraction * int(mask.sum()) + 1e-9)


def _selection(mask: Tensor, positions_N: Tensor) -> Tensor:
    """Returns a bool mask [B, T] of these positions among the true positions of the mask."""
    flat = torch.zeros_like(mask).flatten()
    flat[positions_N] = True
    return flat.view_as(mask)


def _checked_selection(selected: Tensor, mask: Tensor) -> Tensor:
    masked_tokens(mask, selected=selected)
    if selected.dtype != torch.bool:
        raise ValueError(f"selected is {selected.dtype}, it must be torch.bool")
    return selected & mask
