"""Metrics of the mismatch between rollout and trained policy, which merge exactly over parts of a batch.

Shape suffixes: B rows, T token positions, N true positions, R rows that have one.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from flowrl.algorithms.kl.kl_estimates import MAX_LOG_RATIO, kl_estimate
from flowrl.algorithms.masks import masked_tokens
from flowrl.data.metric import Max, Mean


@dataclass(frozen=True)
class Correlation:
    """Pearson correlation of pairs (x, y) from mergeable sufficient statistics."""

    count: float
    mean_x: float
    mean_y: float
    squares_x: float
    """Sum of (x - mean_x)^2."""
    squares_y: float
    products: float

    def merge(self, other: "Correlation") -> "Correlation":
        """Merges the statistics of two disjoint sets.

        Chan et al. 1983, https://doi.org/10.1080/00031305.1983.10483115, extended to products.
        """
        count = self.count + other.count
        if not count:
            return self
        gap_x, gap_y = other.mean_x - self.mean_x, other.mean_y - self.mean_y
        share, between = other.count / count, self.count * other.count / count
        return Correlation(
            count,
            self.mean_x + gap_x * share,
            self.mean_y + gap_y * share,
            self.squares_x + other.squares_x + gap_x**2 * between,
            self.squares_y + other.squares_y + gap_y**2 * between,
            self.products + other.products + gap_x * gap_y * between,
        )

    def result(self) -> float:
        """Returns the correlation in [-1, 1]; NaN for fewer than two pairs or a constant x or y."""
        if self.squares_x <= self._rounding(self.mean_x) or self.squares_y <= self._rounding(self.mean_y):
            return math.nan
        return min(max(self.products / math.sqrt(self.squares_x * self.squares_y), -1.0), 1.0)

    def _rounding(self, mean: float) -> float:
        """Returns the largest sum of squares that rounding causes for a constant in float64."""
        return self.count * (1e-14 * mean) ** 2


@torch.no_grad()
def mismatch_metrics(logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> dict[str, Mean | Max | Correlation]:
    """Returns metrics of the mismatch between the trainer's and the rollout's probabilities of sampled tokens.

    With l = logprobs, m = rollout_logprobs, d = l - m per token, and sums and means over a row's tokens:

        logprob_gap_mean, logprob_gap_max   |d| over tokens
        prob_gap_mean, prob_gap_max         |exp(l) - exp(m)| over tokens
        prob_correlation                    Pearson's, of exp(l) and exp(m) over tokens
        kl_k1, kl_k3                        estimates of KL(rollout || policy) over tokens: -d and exp(d) - 1 - d
        perplexity, rollout_perplexity      exp(-mean l) and exp(-mean m), averaged over rows
        perplexity_ratio                    exp(mean m - mean l), averaged over rows: above 1 the policy is less sure
        chi_square_token                    exp(d)^2 - 1 over tokens
        chi_square_sequence                 exp(sum d)^2 - 1 over rows

    Arguments:
        logprobs: [B, T], of the sampled tokens as the trainer computes them.
        rollout_logprobs: [B, T], as the engine that sampled reported them.
        mask: bool [B, T], the tokens that count. A row without any is no row. The tokens of a row must not be divided
            over parts.
    Returns: metrics by name, plain numbers from float64 sums; each has `merge` and `result`. Without a true position
        means and correlation are NaN, and maxima 0.
    Raises: ValueError on shapes that differ or a mask that is not bool.

    Yao et al. 2025, https://fengyao.notion.site/off-policy-rl, and Liu et al. 2025, https://richardli.xyz/rl-collapse.
    Deviation: what is exponentiated is held in [-20, 20]; a mean of squared ratios rests on few samples and is too low
    when the policies are far apart, so the chi-squares say that they are, not how far.
    """
    logprobs_BT, rollout_logprobs_BT = masked_tokens(mask, logprobs=logprobs, rollout_logprobs=rollout_logprobs)
    logprobs_BT, rollout_logprobs_BT = logprobs_BT.double(), rollout_logprobs_BT.double()
    per_token = _per_token(logprobs_BT[mask], rollout_logprobs_BT[mask])
    rows_R = mask.any(-1)
    per_row = _per_row(logprobs_BT[rows_R], rollout_logprobs_BT[rows_R], mask[rows_R].sum(-1))
    means = per_token | per_row
    probs_N, rollout_probs_N = logprobs_BT[mask].exp(), rollout_logprobs_BT[mask].exp()
    sums = torch.stack(
        [
            *(values.sum() for values in means.values()),
            *(torch.cat([gaps, gaps.new_zeros(1)]).max() for gaps in _gaps(per_token)),
            *_moments(probs_N, rollout_probs_N),
        ]
    ).tolist()  # One wait for the device.
    names, num_means = list(means), len(means)
    return {
        **{name: Mean(total, means[name].numel()) for name, total in zip(names, sums[:num_means], strict=True)},
        "logprob_gap_max": Max(sums[num_means]),
        "prob_gap_max": Max(sums[num_means + 1]),
        "prob_correlation": Correlation(probs_N.numel(), *sums[num_means + 2 :]),
    }


def _per_token(logprobs_N: Tensor, rollout_logprobs_N: Tensor) -> dict[str, Tensor]:
    return {
        "logprob_gap_mean": (logprobs_N - rollout_logprobs_N).abs(),
        "prob_gap_mean": (logprobs_N.exp() - rollout_logprobs_N.exp()).abs(),
        "kl_k1": kl_estimate(rollout_logprobs_N, logprobs_N, kind="k1"),
        "kl_k3": kl_estimate(rollout_logprobs_N, logprobs_N, kind="k3"),
        "chi_square_token": _clamped_exp(logprobs_N - rollout_logprobs_N).square() - 1,
    }


def _per_row(logprobs_RT: Tensor, rollout_logprobs_RT: Tensor, num_tokens_R: Tensor) -> dict[str, Tensor]:
    sums_R, rollout_sums_R = logprobs_RT.sum(-1), rollout_logprobs_RT.sum(-1)
    return {
        "perplexity": _clamped_exp(-sums_R / num_tokens_R),
        "rollout_perplexity": _clamped_exp(-rollout_sums_R / num_tokens_R),
        "perplexity_ratio": _clamped_exp((rollout_sums_R - sums_R) / num_tokens_R),
        "chi_square_sequence": _clamped_exp(sums_R - rollout_sums_R).square() - 1,
    }


def _gaps(per_token: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return per_token["logprob_gap_mean"], per_token["prob_gap_mean"]


def _moments(x_N: Tensor, y_N: Tensor) -> tuple[Tensor, ...]:
    """Returns the fields of `Correlation` after `count`."""
    num_pairs = max(1, x_N.numel())
    mean_x, mean_y = x_N.sum() / num_pairs, y_N.sum() / num_pairs
    gaps_x_N, gaps_y_N = x_N - mean_x, y_N - mean_y
    return mean_x, mean_y, gaps_x_N.square().sum(), gaps_y_N.square().sum(), (gaps_x_N * gaps_y_N).sum()


def _clamped_exp(logarithms: Tensor) -> Tensor:
    return logarithms.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
