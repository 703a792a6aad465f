"""Kullback-Leibler divergence from sampled tokens, as an estimate per token and as a penalty in the reward.

Shape suffixes: B rows, T token positions.
"""

from typing import Literal, get_args

import torch
from torch import Tensor

from flowrl.algorithms.masks import at_least_float32, last_masked, masked_rows, masked_tokens

KlKind = Literal["k1", "k2", "k3", "abs"]

MAX_LOG_RATIO = 20.0
"""Log-ratios are held below this before they are exponentiated: exp(20) = 5e8 is finite in float32."""


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, *, kind: KlKind) -> Tensor:
    """Estimate, per token, of KL(policy || reference) from tokens that the policy sampled.

    With d = ref_logprobs - logprobs:

        k1   -d                 unbiased; may be negative; large variance
        k2   d^2 / 2            biased; never negative
        k3   exp(d) - 1 - d     unbiased; never negative; d is held below 20
        abs  |d|                no divergence; a distance that is easy to read

    Arguments:
        logprobs: any shape, log-probability of the sampled token under the policy.
        ref_logprobs: the same shape, under the reference.
        kind: see above. It matters which of them is differentiated: for a loss, the gradient of k2 is that of
            KL(policy || reference), that of k3 is the gradient of KL(reference || policy), and that of k1 has the
            expectation zero. As a penalty in the reward, which is not differentiated, k1 is the exact one.
    Returns: the same shape, in at least float32. Differentiable in both; beyond d = 20 the gradient of k3 is 0.
    Raises: ValueError on shapes that differ or an unknown kind.

    Schulman 2020, http://joschu.net/blog/kl-approx.html; k3 is eq. (4) of https://arxiv.org/abs/2402.03300.
    """
    if logprobs.shape != ref_logprobs.shape:
        raise ValueError(
            f"logprobs have shape {list(logprobs.shape)} and ref_logprobs {list(ref_logprobs.shape)}, they must agree"
        )
    differences = at_least_float32(ref_logprobs) - at_least_float32(logprobs)
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
            raise ValueError(f"kind is {kind!r}, it must be one of {', '.join(get_args(KlKind))}")


@torch.no_grad()
def kl_shaped_rewards(
    scores: Tensor, logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, *, coef: float, kind: KlKind
) -> Tensor:
    """Rewards per token: a KL penalty on every token that the policy chose, and the row's score on the last of them.

        r_t = -coef * KL_t + [t is the row's last chosen token] * score

    Arguments:
        scores: [B], one score per row.
        logprobs: [B, T], of the sampled tokens under the policy that sampled them.
        ref_logprobs: [B, T], under the reference.
        mask: bool [B, T], true where the policy chose the token.
        coef: weight of the penalty, >= 0, in score units per nat.
        kind: estimator of the divergence, see `kl_estimate`.
    Returns: [B, T], zero where the mask is false, without gradient. The score of a row whose mask is empty appears
        nowhere.
    Raises: ValueError on a negative coef, an unknown kind, shapes that do not fit, a mask that is not bool.

    Ziegler et al. 2019, https://arxiv.org/abs/1909.08593, eq. (2), there for the whole row; per token as in Ouyang et
    al. 2022, https://arxiv.org/abs/2203.02155, eq. (2).
    """
    if coef < 0:
        raise ValueError(f"coef is {coef}, it must be 0 or more: a negative one would reward leaving the reference")
    logprobs_BT, ref_logprobs_BT = masked_tokens(mask, logprobs=logprobs, ref_logprobs=ref_logprobs)
    (scores_B,) = masked_rows(mask, scores=scores)
    penalties_BT = coef * kl_estimate(logprobs_BT, ref_logprobs_BT, kind=kind)
    return torch.where(last_masked(mask), at_least_float32(scores_B)[:, None], 0) - penalties_BT
