"""Clip-Cov and KL-Cov: policy losses that restrain the few tokens that reduce the entropy most.

The module docstring of policy_losses.py describes shape suffixes, arguments, results and errors.

Tokens are ranked over the whole batch. Therefore call `clip_cov_tokens` or `kl_cov_tokens` before the batch is split
into micro-batches. Pass the resulting bool column to the loss.
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
from flowrl.algorithms.masking import masked_tokens
from flowrl.algorithms.registry import Fraction, NonNegativeFloat, policy_losses

CovarianceKl = Literal["abs", "k2", "k3"]


@torch.no_grad()
def token_covariances(logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """Returns each token's contribution to the covariance of log-probability and advantage over the batch.

        cov = (logprobs - mean(logprobs)) (A - mean(A))        means over all unmasked tokens, in float64

    A policy-gradient step lowers the entropy in proportion to the mean of the result.

    Args:
        logprobs: [B, T], under the policy before the updates, of the whole batch.
        advantages: [B, T].
        mask: bool [B, T], true for tokens that count.
    Returns: [B, T], 0 where the mask is false, without gradient.
    Raises: ValueError for mismatched shapes or a mask that is not bool.

    Cui et al. 2025, https://arxiv.org/abs/2505.22617, eq. (10). Deviation: the paper uses the current policy and the
    tokens of each update.
    """
    logprobs_BT, advantages_BT = masked_tokens(mask, logprobs=logprobs, advantages=advantages)
    num_tokens = mask.sum().clamp(min=1)
    deviations = [x.double() - x.sum(dtype=torch.float64) / num_tokens for x in (logprobs_BT, advantages_BT)]
    return (deviations[0] * deviations[1]).masked_fill(~mask, 0).to(logprobs_BT.dtype)


@torch.no_grad()
def select_clip_cov(
    covariances: Tensor, mask: Tensor, *, fraction: float, low: float, high: float, seed: int
) -> Tensor:
    """Returns a mask of the tokens that Clip-Cov excludes: a uniform sample of the tokens with a covariance in [low,
    high].

    Args:
        covariances: [B, T], from `token_covariances` on the whole batch.
        mask: bool [B, T], true for tokens that count.
        fraction: in [0, 1], fraction of all unmasked tokens to select, rounded down (paper: 2e-4).
        low, high: range of covariances, in nats times the unit of the advantage (paper: 1 and 5).
        seed: random seed. Results are reproducible for equal batches on the same type of device.
    Returns: bool [B, T], true for at most `fraction` of the unmasked tokens. Permuting the rows changes the sample.
    Raises: ValueError for an invalid fraction or range, mismatched shapes, or a mask that is not bool.

    Cui et al. 2025, https://arxiv.org/abs/2505.22617, eq. (11). Deviation: the authors' code selects at least one
    token, and skips tokens that the ratio clip already excludes. Here tokens are selected before the first update, when
    no ratio is clipped.
    """
    if not low <= high:
        raise ValueError(f"low is {low} and high is {high} but low must not exceed high")
    (covariances_BT,) = masked_tokens(mask, covariances=covariances)
    candidates_BT = mask & (covariances_BT >= low) & (covariances_BT <= high)
    candidates_N = candidates_BT.flatten().nonzero().squeeze(-1)
    generator = torch.Generator(device=mask.device).manual_seed(seed)
    order_N = torch.randperm(len(candidates_N), generator=generator, device=mask.device)
    return _selection(mask, candidates_N[order_N[: _num_selected(mask, fraction)]])


@torch.no_grad()
def select_kl_cov(covariances: Tensor, mask: Tensor, *, fraction: float) -> Tensor:
    """Returns a mask of the tokens that KL-Cov penalizes: the tokens with the largest covariances.

    Args:
        covariances: [B, T], from `token_covariances` on the whole batch.
        mask: bool [B, T], true for tokens that count.
        fraction: in [0, 1], fraction of all unmasked tokens to select, rounded down (paper: 2e-4 to 2e-3).
    Returns: bool [B, T]. Among equal covariances, earlier rows and tokens are selected first.
    Raises: ValueError for a fraction outside [0, 1], mismatched shapes, or a mask that is not bool.

    Cui et al. 2025, https://arxiv.org/abs/2505.22617, eq. (13). Deviation: the authors' code selects at least one
    token.
    """
    (covariances_BT,) = masked_tokens(mask, covariances=covariances)
    ranked_N = covariances_BT.masked_fill(~mask, -torch.inf).flatten().argsort(descending=True, stable=True)
    return _selection(mask, ranked_N[: _num_selected(mask, fraction)])


def clip_cov_tokens(
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    seed: int,
    *,
    cov_fraction: Fraction = 2e-4,
    cov_low: float = 1.0,
    cov_high: float = 5.0,
) -> Tensor:
    """Returns the tokens that Clip-Cov excludes, bool [B, T] (`select_clip_cov` of `token_covariances`).

    Args:
        old_logprobs, advantages, mask: [B, T], of the whole batch.
        seed: random seed.
        cov_fraction: Fraction of a step's tokens that is selected.
        cov_low: Smallest covariance of a selected token, in nats times the unit of the advantage.
        cov_high: Largest covariance of a selected token, in nats times the unit of the advantage.
    """
    covariances_BT = token_covariances(old_logprobs, advantages, mask)
    return select_clip_cov(covariances_BT, mask, fraction=cov_fraction, low=cov_low, high=cov_high, seed=seed)


def kl_cov_tokens(old_logprobs: Tensor, advantages: Tensor, mask: Tensor, *, cov_fraction: Fraction = 2e-4) -> Tensor:
    """Returns the tokens that KL-Cov penalizes, bool [B, T] (`select_kl_cov` of `token_covariances`).

    Args (`clip_cov_tokens` describes all of them):
    """
    return select_kl_cov(token_covariances(old_logprobs, advantages, mask), mask, fraction=cov_fraction)


def _check_range(cov_low: float, cov_high: float) -> None:
    if cov_low > cov_high:
        raise ValueError(f"cov_low is {cov_low:g}, above cov_high, {cov_high:g}: swap them")


@policy_losses.register("clip_cov", prepare={"selected": clip_cov_tokens}, checks=(_check_range,))
def clip_cov_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    selected: Tensor,
    *,
    clip_low: Fraction = 0.2,
    clip_high: NonNegativeFloat = 0.2,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the Clip-Cov loss: 0 for the selected tokens, and the clipped PPO loss for all others.

    Args (`clipped_policy_loss` describes the others):
        selected: bool [B, T], from `clip_cov_tokens`. Ignored where the mask is false.
    Returns: a tuple (loss [B, T], metrics). Clip fractions exclude selected tokens. Additional metric:
        selected_fraction.

    Cui et al. 2025, https://arxiv.org/abs/2505.22617, eq. (12). As in the authors' code, the ratio is also clipped; the
    paper's formula has no ratio clip. clip_low 1 and a large clip_high disable this clip.
    """
    check_clips(clip_low, clip_high)
    selected_BT = _checked_selection(selected, mask)
    logprobs_BT, old_logprobs_BT, advantages_BT = policy_inputs(logprobs, old_logprobs, advantages, mask)
    ratio_BT = bounded_ratio(logprobs_BT - old_logprobs_BT)
    loss_BT, clips = clipped_surrogate(ratio_BT, advantages_BT, clip_low=clip_low, clip_high=clip_high)
    metrics = {name: clip_BT.masked_fill(selected_BT, 0) for name, clip_BT in clips.items()}
    metrics["selected_fraction"] = selected_BT.to(loss_BT.dtype)
    return loss_BT.masked_fill(selected_BT, 0), metrics | ratio_metrics(ratio_BT, logprobs_BT, old_logprobs_BT, mask)


@policy_losses.register("kl_cov", prepare={"selected": kl_cov_tokens})
def kl_cov_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    selected: Tensor,
    *,
    cov_kl_coef: NonNegativeFloat = 1.0,
    cov_kl_kind: CovarianceKl = "abs",
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the KL-Cov loss: the unclipped surrogate, plus a KL penalty to the old policy for selected tokens.

        L = -A w + [selected] cov_kl_coef KL(old policy || policy),        w = exp(logprobs - old_logprobs)

    Args (the module docstring of policy_losses.py describes the others):
        selected: bool [B, T], from `kl_cov_tokens`. Ignored where the mask is false.
        cov_kl_coef: Weight of the KL to the old policy at selected tokens, in units of the advantage per nat.
        cov_kl_kind: KL estimator for the selected tokens.
    Returns: a tuple (loss [B, T], metrics). There are no clip fractions. Additional metrics: selected_fraction, and
        kl_penalty, the KL estimate without cov_kl_coef at selected tokens.

    Cui et al. 2025, https://arxiv.org/abs/2505.22617, eq. (14), with cov_kl_coef 1. The authors' code uses the
    estimator "abs", the formula of the paper is "k3".
    """
    if not cov_kl_coef >= 0:
        raise ValueError(f"cov_kl_coef is {cov_kl_coef}, but must be 0 or more: a negative value rewards divergence")
    if cov_kl_kind not in get_args(CovarianceKl):
        raise ValueError(f"cov_kl_kind is {cov_kl_kind!r}, but must be one of {', '.join(get_args(CovarianceKl))}")
    selected_BT = _checked_selection(selected, mask)
    logprobs_BT, old_logprobs_BT, advantages_BT = policy_inputs(logprobs, old_logprobs, advantages, mask)
    ratio_BT = bounded_ratio(logprobs_BT - old_logprobs_BT)
    penalty_BT = kl_estimate(old_logprobs_BT, logprobs_BT, kind=cov_kl_kind).masked_fill(~selected_BT, 0)
    metrics = {"selected_fraction": selected_BT.to(ratio_BT.dtype), "kl_penalty": penalty_BT.detach()}
    loss_BT = -advantages_BT * ratio_BT + cov_kl_coef * penalty_BT
    return loss_BT, metrics | ratio_metrics(ratio_BT, logprobs_BT, old_logprobs_BT, mask)


def _num_selected(mask: Tensor, fraction: float) -> int:
    if not 0 <= fraction <= 1:
        raise ValueError(f"fraction is {fraction}, but must be in [0, 1]")
    # In floating point, 0.29 * 100 is slightly below 29.
    return math.floor(fraction * int(mask.sum()) + 1e-9)


def _selection(mask: Tensor, positions_N: Tensor) -> Tensor:
    """Returns a bool mask [B, T] that is true at the given positions of the flattened mask."""
    flat = torch.zeros_like(mask).flatten()
    flat[positions_N] = True
    return flat.view_as(mask)


def _checked_selection(selected: Tensor, mask: Tensor) -> Tensor:
    masked_tokens(mask, selected=selected)
    if selected.dtype != torch.bool:
        raise ValueError(f"selected is {selected.dtype}, but must be torch.bool")
    return selected & mask
