"""Corrections for off-policy rollouts: importance weights, rejection masks and metrics.

Rollouts are off-policy if the rollout's engine, numerical precision or weight version differs from the trainer's.

Shape suffixes: B rows, T token positions, N positions where the mask is true, R rows that have such positions.

All functions compare the same sampled tokens under two policies, with the ratio rho = exp(logprobs - rollout_logprobs):

    logprobs: [B, T], log-probabilities computed by the trainer, before the updates of this batch.
    rollout_logprobs: [B, T], log-probabilities reported by the rollout.
    mask: bool [B, T], true for tokens that count.

Functions return either weights [B, T] that multiply the policy loss, or a mask with fewer tokens. Both carry no
gradient and are 0 where the mask is false. Metrics are tensors [B, T] as in policy_losses.py; a metric of a row is
repeated at its tokens. All functions raise ValueError for invalid settings, mismatched shapes, or a mask that is not
bool. Log-ratios are clamped to [-20, 20] before exponentiation, which deviates from the papers.
"""

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from flowrl.algorithms.kl.kl_estimates import MAX_LOG_RATIO, KlKind, kl_estimate
from flowrl.algorithms.masking import last_masked, masked_tokens, row_mean
from flowrl.algorithms.registry import NonNegativeFloat, PositiveFloat, rollout_corrections
from flowrl.data.metric import Max, Mean

RatioLevel = Literal["token", "sequence", "geometric"]
RejectionLevel = Literal["token", "sequence_sum", "sequence_mean", "sequence_max"]


def _check_order(min_weight: float, max_weight: float) -> None:
    if min_weight > max_weight:
        raise ValueError(f"min_weight is {min_weight:g}, above max_weight, {max_weight:g}: swap them")


@rollout_corrections.register("truncated", checks=(_check_order,))
@torch.no_grad()
def truncated_weights(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    trained_mask: Tensor | None = None,
    *,
    level: RatioLevel = "token",
    max_weight: PositiveFloat = 2.0,
    min_weight: NonNegativeFloat = 0.0,
    normalize: bool = False,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns truncated importance ratios (TIS): ratios clipped to [min_weight, max_weight].

    The ratios are those of the trained policy to the policy that sampled the tokens:

        token      rho_t                              unbiased for a token given its prefix
        sequence   prod_t rho_t                       unbiased for a row; its variance grows with the length
        geometric  (prod_t rho_t)^(1 / tokens)        biased; comparable between lengths

    Args (the module docstring describes the others):
        trained_mask: bool [B, T], the tokens of the mask in the loss, over which normalize computes the mean. None: all
            tokens of the mask.
        level: Level of the ratio: of each token, of its sequence (product), or the geometric mean over its sequence.
        max_weight: Upper bound of the ratio.
        min_weight: Lower bound of the ratio.
        normalize: Divide the weights by their mean over the trained tokens of the step, so that the weights do not
            change the scale of the gradient.
    Returns: a tuple (weights [B, T], metrics). A row's ratio is repeated at its tokens. NaN ratios have weight 0.
        Metrics:
        ratio: ratio before clipping.
        truncated_fraction_low, truncated_fraction_high: 1 where the ratio is below or above the range.

    Ionides 2008, https://doi.org/10.1198/106186008X320456. The papers have no lower bound (0). For engine mismatch: Yao
    et al. 2025, https://fengyao.notion.site/off-policy-rl. Geometric mean: Zheng et al. 2025 (GSPO),
    https://arxiv.org/abs/2507.18071, eq. (7).
    """
    _check_bounds(min_weight, max_weight)
    log_ratios_BT = _log_ratios(logprobs, rollout_logprobs, mask, level)
    ratios_BT = _ratios(log_ratios_BT, mask)
    low_BT, high_BT = _outside(log_ratios_BT, mask, min_weight, max_weight)
    metrics = {
        "ratio": ratios_BT,
        "truncated_fraction_low": low_BT.to(ratios_BT.dtype),
        "truncated_fraction_high": high_BT.to(ratios_BT.dtype),
    }
    weights_BT = ratios_BT.clamp(min_weight, max_weight).masked_fill(~mask | ratios_BT.isnan(), 0)
    return _normalized(weights_BT, mask, trained_mask, level) if normalize else weights_BT, metrics


@rollout_corrections.register("masked", checks=(_check_order,))
@torch.no_grad()
def masked_weights(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    trained_mask: Tensor | None = None,
    *,
    level: RatioLevel = "token",
    max_weight: PositiveFloat = 2.0,
    min_weight: NonNegativeFloat = 0.0,
    normalize: bool = False,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns masked importance ratios (MIS): the weight is 0 where the ratio is outside [min_weight, max_weight].

    Tokens of weight 0 still count in the denominator of the loss. `rejection_mask` can also remove tokens from the
    denominator.

    Args (`truncated_weights` describes all of them):
    Returns: a tuple (weights [B, T], metrics). NaN ratios have weight 0. Metrics:
        ratio: ratio before masking.
        masked_fraction_low, masked_fraction_high: 1 where the ratio is below or above the range.

    Level "token": Ling Team 2025 (IcePop), https://arxiv.org/abs/2510.18855, with the range 0.5 to 5. Level "sequence":
    Liu et al. 2025, https://richardli.xyz/rl-collapse.
    """
    _check_bounds(min_weight, max_weight)
    log_ratios_BT = _log_ratios(logprobs, rollout_logprobs, mask, level)
    ratios_BT = _ratios(log_ratios_BT, mask)
    low_BT, high_BT = _outside(log_ratios_BT, mask, min_weight, max_weight)
    metrics = {
        "ratio": ratios_BT,
        "masked_fraction_low": low_BT.to(ratios_BT.dtype),
        "masked_fraction_high": high_BT.to(ratios_BT.dtype),
    }
    weights_BT = ratios_BT.masked_fill(low_BT | high_BT | ratios_BT.isnan(), 0)
    return _normalized(weights_BT, mask, trained_mask, level) if normalize else weights_BT, metrics


def _check_thresholds(kl_kind: str, low: float | None, high: float) -> None:
    if low is not None and kl_kind != "k1":
        raise ValueError(f"low applies only to k1, because {kl_kind} is never negative: remove low, or set kl_kind: k1")
    if low is not None and not low <= high:
        raise ValueError(f"low is {low:g}, above high, {high:g}: swap them")


@rollout_corrections.register("rejection", returns_mask=True, checks=(_check_thresholds,))
@torch.no_grad()
def rejection_mask(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    *,
    rejection_level: RejectionLevel = "sequence_mean",
    kl_kind: KlKind = "k1",
    high: float,
    low: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns a mask without the tokens or rows whose estimated KL to the sampling policy is out of bounds.

    x_t is the estimate of KL(rollout policy || policy) from token t:

        token          keeps a token if     low <= x_t <= high
        sequence_sum   keeps a row if       low <= sum of its x_t <= high
        sequence_mean  keeps a row if       low <= mean of its x_t <= high
        sequence_max   keeps a row if       each of its x_t is in [low, high]

    Args (the module docstring describes the others):
        rejection_level: Quantity that must be within [low, high]: each token's estimate, or the sum, mean or maximum
            over a sequence.
        kl_kind: KL estimator.
        high: Upper bound of the estimate, in nats.
        low: Lower bound of the estimate, in nats, only for k1; null disables it.
    Returns: a tuple (mask [B, T] of the kept tokens, metrics). Metrics:
        divergence: estimate for the token or row.
        rejected_fraction: 1 for rejected tokens.

    k1 = -log rho_t is signed: high rejects tokens that became less likely. The denominator of the loss may use the
    returned mask or the original mask. With the original mask, rejected tokens count as tokens of zero loss.

    sequence_mean with k1 bounds the geometric mean of the ratio to [exp(-high), exp(-low)]. sequence_max with k1
    rejects rows with a ratio below exp(-high): Liu et al. 2025, https://richardli.xyz/rl-collapse. The off-policy
    sequence masking of DeepSeek-V3.2, https://arxiv.org/abs/2512.02556, section 3.1, is sequence_mean with k1 and the
    mask `kept | mask & (advantages >= 0)`.
    """
    levels = get_args(RejectionLevel)
    if rejection_level not in levels:
        raise ValueError(f"rejection_level is {rejection_level!r}, but must be one of {', '.join(levels)}")
    low = -math.inf if low is None else low
    if not low <= high:
        raise ValueError(f"low is {low} and high is {high} but low must not exceed high")
    logprobs_BT, rollout_logprobs_BT = masked_tokens(mask, logprobs=logprobs, rollout_logprobs=rollout_logprobs)
    divergence_BT = kl_estimate(rollout_logprobs_BT, logprobs_BT, kind=kl_kind)
    if rejection_level in ("sequence_sum", "sequence_mean"):
        divergence_BT = _row_sums(divergence_BT, mask, mean=rejection_level == "sequence_mean")
    # NaN fails both comparisons.
    kept_BT = mask & (divergence_BT >= low) & (divergence_BT <= high)
    if rejection_level == "sequence_max":
        kept_BT = mask & (kept_BT | ~mask).all(-1, keepdim=True)
        # Padding with -inf, because the maximum of an empty row is undefined.
        padded_BT = torch.nn.functional.pad(divergence_BT.masked_fill(~mask, -math.inf), (0, 1), value=-math.inf)
        divergence_BT = padded_BT.amax(-1, keepdim=True).expand_as(mask)
    metrics = {
        "divergence": divergence_BT.masked_fill(~mask, 0),
        "rejected_fraction": (mask & ~kept_BT).to(divergence_BT.dtype),
    }
    return kept_BT, metrics


@dataclass(frozen=True)
class WeightSums:
    """Sums over a micro-batch, from which the mean weight and the effective sample size of the step are computed.

    `merge` and `result` implement the interface of mergeable metrics. The result is the effective sample size as a
    fraction of the samples.
    """

    total: float
    total_of_squares: float
    count: float

    def merge(self, other: "WeightSums") -> "WeightSums":
        return WeightSums(
            self.total + other.total, self.total_of_squares + other.total_of_squares, self.count + other.count
        )

    def mean(self) -> float:
        """Returns the mean weight, an argument of `normalized_weights`. It is NaN without samples."""
        return self.total / self.count if self.count else math.nan

    def effective_sample_size(self) -> float:
        """Returns (sum w)^2 / sum w^2, the number of equally weighted samples with the same variance. It is 0 if all
        weights are 0.
        """
        return self.total**2 / self.total_of_squares if self.total_of_squares else 0.0

    def result(self) -> float:
        """Returns the effective sample size divided by the number of samples, in [0, 1]. It is NaN without samples."""
        return self.effective_sample_size() / self.count if self.count else math.nan


@torch.no_grad()
def weight_sums(weights: Tensor, mask: Tensor, *, level: RatioLevel) -> WeightSums:
    """Returns the sums of weights and squared weights over samples.

    A sample is a token at level "token". At other levels, a sample is a row whose mask has a true position.

    Args:
        weights: [B, T], from `truncated_weights` or `masked_weights`.
        mask: bool [B, T].
        level: level of these weights.

    Effective sample size: Kong 1992, as in Liu 2001, Monte Carlo Strategies in Scientific Computing.
    """
    _check_level(level)
    (weights_BT,) = masked_tokens(mask, weights=weights)
    samples_BT = mask if level == "token" else last_masked(mask)
    weights_N = weights_BT.double()[samples_BT]
    sums = torch.stack([weights_N.sum(), weights_N.square().sum(), samples_BT.sum().double()])
    return WeightSums(*sums.tolist())


@torch.no_grad()
def normalized_weights(weights: Tensor, mask: Tensor, *, mean: float) -> Tensor:
    """Divides weights by their mean over the step, so that the weights do not change the scale of the gradient.

    Args:
        weights: [B, T].
        mask: bool [B, T].
        mean: >= 0, `WeightSums.mean` over the whole step. If it is 0, all weights are 0 and stay 0.
    Returns: [B, T] in at least float32, 0 where the mask is false, without gradient.

    Self-normalized importance sampling for language models: Liu et al. 2025, https://richardli.xyz/rl-collapse.
    """
    if not mean >= 0:
        raise ValueError(f"mean is {mean}, but must be 0 or more")
    (weights_BT,) = masked_tokens(mask, weights=weights)
    return weights_BT / (mean or 1.0)


def _normalized(weights_BT: Tensor, mask: Tensor, trained_mask: Tensor | None, level: RatioLevel) -> Tensor:
    """Returns the weights, divided by their mean over the trained tokens, if there are any."""
    trained_BT = mask if trained_mask is None else trained_mask
    if not bool(trained_BT.any()):
        return weights_BT
    return normalized_weights(weights_BT, mask, mean=weight_sums(weights_BT, trained_BT, level=level).mean())


def _log_ratios(logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, level: RatioLevel) -> Tensor:
    """Returns the unclamped log-ratios at `level`, [B, T]."""
    _check_level(level)
    logprobs_BT, rollout_logprobs_BT = masked_tokens(mask, logprobs=logprobs, rollout_logprobs=rollout_logprobs)
    log_ratios_BT = logprobs_BT - rollout_logprobs_BT
    return log_ratios_BT if level == "token" else _row_sums(log_ratios_BT, mask, mean=level == "geometric")


def _ratios(log_ratios_BT: Tensor, mask: Tensor) -> Tensor:
    return log_ratios_BT.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().masked_fill(~mask, 0)


def _row_sums(values_BT: Tensor, mask: Tensor, *, mean: bool) -> Tensor:
    """Returns the sum or mean of each row over the true positions of the mask, repeated at all positions."""
    doubles_BT = values_BT.double()
    sums_B1 = row_mean(doubles_BT, mask) if mean else doubles_BT.sum(-1, keepdim=True)
    return sums_B1.to(values_BT.dtype).expand_as(values_BT)


def _outside(log_ratios_BT: Tensor, mask: Tensor, min_weight: float, max_weight: float) -> tuple[Tensor, Tensor]:
    """Returns two masks: ratios below min_weight and ratios above max_weight. Compares unclamped logarithms."""
    log_low = math.log(min_weight) if min_weight else -math.inf
    log_high = math.log(max_weight) if max_weight < math.inf else math.inf
    return mask & (log_ratios_BT < log_low), mask & (log_ratios_BT > log_high)


def _check_level(level: RatioLevel) -> None:
    if level not in get_args(RatioLevel):
        raise ValueError(f"level is {level!r}, but must be one of {', '.join(get_args(RatioLevel))}")


def _check_bounds(min_weight: float, max_weight: float) -> None:
    if not 0 <= min_weight <= max_weight or not max_weight > 0:
        raise ValueError(
            f"min_weight is {min_weight} and max_weight is {max_weight}, but 0 <= min_weight <= max_weight "
            "and max_weight > 0 must hold"
        )


@dataclass(frozen=True)
class Correlation:
    """Pearson correlation of pairs (x, y), computed from sums that can be merged."""

    count: float
    mean_x: float
    mean_y: float
    squares_x: float
    """Sum of (x - mean_x)^2."""
    squares_y: float
    products: float

    def merge(self, other: "Correlation") -> "Correlation":
        """Returns the statistics of the union of two disjoint sets of pairs.

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
        """Returns the correlation in [-1, 1]. It is NaN for fewer than two pairs, or if x or y is constant."""
        if self.squares_x <= self._rounding(self.mean_x) or self.squares_y <= self._rounding(self.mean_y):
            return math.nan
        return min(max(self.products / math.sqrt(self.squares_x * self.squares_y), -1.0), 1.0)

    def _rounding(self, mean: float) -> float:
        """Returns the largest sum of squares that float64 rounding can cause if all values are equal."""
        return self.count * (1e-14 * mean) ** 2


@torch.no_grad()
def mismatch_metrics(logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> dict[str, Mean | Max | Correlation]:
    """Returns metrics of the mismatch between the trainer's and the rollout's probabilities of the sampled tokens.

    Per token, l = logprobs, m = rollout_logprobs and d = l - m. "sum" and "mean" are over the tokens of a row:

        logprob_gap_mean, logprob_gap_max   |d| over tokens
        prob_gap_mean, prob_gap_max         |exp(l) - exp(m)| over tokens
        prob_correlation                    Pearson correlation of exp(l) and exp(m) over tokens
        kl_k1, kl_k3                        estimates of KL(rollout || policy) over tokens: -d and exp(d) - 1 - d
        perplexity, rollout_perplexity      exp(-mean l) and exp(-mean m), averaged over rows
        perplexity_ratio                    exp(mean m - mean l), averaged over rows
        chi_square_token                    exp(d)^2 - 1 over tokens
        chi_square_sequence                 exp(sum d)^2 - 1 over rows

    The module docstring describes the arguments. All tokens of a row must be in the same micro-batch.
    Returns: mergeable metrics by name, computed in float64. If the mask is empty, means and correlation are NaN, and
        maxima are 0.

    Yao et al. 2025, https://fengyao.notion.site/off-policy-rl, and Liu et al. 2025, https://richardli.xyz/rl-collapse.
    If the policies differ much, few samples dominate the chi-square metrics, which are then too low.
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
    ).tolist()  # Synchronizes with the device once.
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
    """Returns arguments of `Correlation`: the means of x and y, their sums of squared deviations from the mean, and the
    sum of products of the deviations.
    """
    num_pairs = max(1, x_N.numel())
    mean_x, mean_y = x_N.sum() / num_pairs, y_N.sum() / num_pairs
    gaps_x_N, gaps_y_N = x_N - mean_x, y_N - mean_y
    return mean_x, mean_y, gaps_x_N.square().sum(), gaps_y_N.square().sum(), (gaps_x_N * gaps_y_N).sum()


def _clamped_exp(logarithms: Tensor) -> Tensor:
    return logarithms.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
