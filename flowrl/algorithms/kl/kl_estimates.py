"""Estimates of the KL divergence from sampled tokens: per token, as a reward penalty, and as a loss.

Shape suffixes: B rows, T token positions.
"""

from collections.abc import Callable
from functools import partial
from typing import Literal, get_args

import torch
from torch import Tensor

from flowrl.algorithms.masking import at_least_float32, last_masked, masked_rows, masked_tokens

KlKind = Literal["k1", "k2", "k3", "abs"]

MAX_LOG_RATIO = 20.0
"""Bound of log-ratios before exponentiation. exp(20) = 5e8 is finite in float32."""


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, *, kind: KlKind, gradient: KlKind | None = None) -> Tensor:
    """Returns per-token estimates of KL(policy || reference) from tokens that the policy sampled.

    With d = ref_logprobs - logprobs:

        k1   -d                 unbiased; may be negative; large variance
        k2   d^2 / 2            biased; never negative
        k3   exp(d) - 1 - d     unbiased; never negative; d is clamped to at most 20
        abs  |d|                not a divergence; easy to interpret

    Used as a loss, k2 has the gradient of KL(policy || reference), and k3 has the gradient of KL(reference || policy).
    The gradient of k1 has the expectation 0. A reward penalty is not differentiated; there, k1 is unbiased.

    Args:
        logprobs: any shape, of the sampled tokens under the policy.
        ref_logprobs: the same shape, under the reference.
        kind: estimator of the value, one of the four above.
        gradient: estimator of the gradient (straight-through), by default `kind`. With gradient="k2", k1 and k3 have an
            unbiased value and an unbiased gradient.
    Returns: the same shape, in at least float32, differentiable in both arguments.
    Raises: ValueError for mismatched shapes, or an unknown kind or gradient.

    Schulman 2020, http://joschu.net/blog/kl-approx.html. k3 is eq. (4) of https://arxiv.org/abs/2402.03300. Gradients:
    Tang and Munos 2025, https://arxiv.org/abs/2506.09477.
    """
    if logprobs.shape != ref_logprobs.shape:
        raise ValueError(
            f"logprobs have shape {list(logprobs.shape)}, but ref_logprobs have {list(ref_logprobs.shape)}"
        )
    differences = at_least_float32(ref_logprobs) - at_least_float32(logprobs)
    values = _estimate(differences, kind, name="kind")
    if gradient is None or gradient == kind:
        return values
    differentiated = _estimate(differences, gradient, name="gradient")
    return _straight_through(values, differentiated)


def kl_loss(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor,
    *,
    kind: KlKind | Callable[..., Tensor],
    gradient: KlKind | None = None,
    old_logprobs: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the KL to the reference as a loss per token, before reduction and without a coefficient.

        L = kl                                               without old_logprobs
        L = w kl,  w = exp(logprobs - old_logprobs)          with old_logprobs

    Args:
        logprobs: [B, T], of the sampled tokens under the trained policy. Receives the gradient.
        ref_logprobs: [B, T], under the reference. Receives no gradient.
        mask: bool [B, T], true for tokens that count.
        kind: estimator of the value, see `kl_estimate`, or a function (logprobs, ref_logprobs) -> [B, T].
        gradient: estimator of the gradient, see `kl_estimate`. k2 is unbiased if the trained policy sampled the tokens.
        old_logprobs: [B, T], under the policy that sampled the tokens. The gradient also passes through w. With k1 and
            k3, value and gradient are therefore unbiased even if an older policy sampled the tokens.
    Returns: a tuple (loss [B, T], metrics), 0 where the mask is false. The metric kl is the estimate without w.
    Raises: ValueError if gradient and old_logprobs are both set, for an unknown kind, mismatched shapes, or a mask that
        is not bool.

    As a loss: Shao et al. 2024 (GRPO), https://arxiv.org/abs/2402.03300, eq. (3) and (4). With w: DeepSeek-V3.2,
    https://arxiv.org/abs/2512.02556, section 3.1; here, the log-ratio of w is clamped to [-20, 20]. Expectations are
    over a token given its prefix. Unlike a reward penalty, the loss ignores the effect of a token on later tokens (Tang
    and Munos 2025, https://arxiv.org/abs/2506.09477).
    """
    if gradient is not None and old_logprobs is not None:
        raise ValueError(
            "gradient and old_logprobs exclude each other, because both correct the gradient: pass only one"
        )
    logprobs_BT, ref_logprobs_BT = masked_tokens(mask, logprobs=logprobs, ref_logprobs=ref_logprobs.detach())
    estimate = kind if callable(kind) else partial(kl_estimate, kind=kind)
    loss_BT = estimate(logprobs=logprobs_BT, ref_logprobs=ref_logprobs_BT)
    if gradient is not None:
        loss_BT = _straight_through(loss_BT, _estimate(ref_logprobs_BT - logprobs_BT, gradient, name="gradient"))
    # A user estimator may be nonzero where both log-probabilities are 0.
    loss_BT = loss_BT.masked_fill(~mask, 0)
    metrics = {"kl": loss_BT.detach()}
    if old_logprobs is not None:
        (old_logprobs_BT,) = masked_tokens(mask, old_logprobs=old_logprobs.detach())
        loss_BT = loss_BT * (logprobs_BT - old_logprobs_BT).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return loss_BT, metrics


@torch.no_grad()
def kl_shaped_rewards(
    scores: Tensor,
    logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor,
    *,
    coef: float,
    kind: KlKind | Callable[..., Tensor],
) -> Tensor:
    """Returns rewards per token: minus the KL penalty at every response token, plus the score at the last response
    token.

        r_t = -coef * KL_t + [t is the last true position of the row] * score

    Args:
        scores: [B], one score per row.
        logprobs: [B, T], of the sampled tokens under the policy that sampled them.
        ref_logprobs: [B, T], under the reference.
        mask: bool [B, T], true for tokens that the policy sampled.
        coef: weight of the penalty, >= 0, in score units per nat.
        kind: estimator of `kl_estimate`, or a function (logprobs, ref_logprobs) -> [B, T].
    Returns: [B, T], 0 where the mask is false, without gradient. The score of a row without true positions is dropped.
    Raises: ValueError for a negative coef, an unknown kind, mismatched shapes, or a mask that is not bool.

    Ziegler et al. 2019, https://arxiv.org/abs/1909.08593 (penalty per row); Ouyang et al. 2022,
    https://arxiv.org/abs/2203.02155 (penalty per token).
    """
    if not coef >= 0:
        raise ValueError(f"coef is {coef}, but must be 0 or more: a negative value would reward divergence")
    logprobs_BT, ref_logprobs_BT = masked_tokens(mask, logprobs=logprobs, ref_logprobs=ref_logprobs)
    (scores_B,) = masked_rows(mask, scores=scores)
    estimate = kind if callable(kind) else partial(kl_estimate, kind=kind)
    kl_BT = estimate(logprobs=logprobs_BT, ref_logprobs=ref_logprobs_BT)
    penalties_BT = (coef * kl_BT).masked_fill(~mask, 0)
    return torch.where(last_masked(mask), at_least_float32(scores_B)[:, None], 0) - penalties_BT


def _straight_through(values: Tensor, differentiated: Tensor) -> Tensor:
    """Returns `values` with the gradient of `differentiated` (straight-through estimator)."""
    # The bracket is exactly 0, so it does not round the values.
    return values.detach() + (differentiated - differentiated.detach())


def _estimate(differences: Tensor, kind: KlKind, *, name: str) -> Tensor:
    match kind:
        case "k1":
            return -differences
        case "k2":
            return differences.square() / 2
        case "k3":
            differences = differences.clamp(max=MAX_LOG_RATIO)
            return torch.expm1(differences) - differences
        case "abs":
            return differences.abs()
        case _:
            raise ValueError(f"{name} is {kind!r}, but must be one of {', '.join(get_args(KlKind))}")
