"""Importance weights and rejection masks for tokens sampled by a different engine, precision or weight version.

Shape suffixes: B rows, T token positions.

Per token, rho = exp(logprobs - rollout_logprobs). `logprobs` are those of the policy that the update starts from, as
the trainer computes them; `rollout_logprobs` are those under which the tokens were sampled. A correction is a weight
[B, T] by which the policy's loss is multiplied, or a smaller mask; no gradient flows through either. Metrics are
tensors [B, T] as in `policy_losses`; what belongs to a row stands on all its tokens.
"""

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from flowrl.algorithms.kl.kl_estimates import MAX_LOG_RATIO, KlKind, kl_estimate
from flowrl.algorithms.masks import last_masked, masked_tokens, row_mean
from flowrl.data.metric import Max, Mean

RatioLevel = Literal["token", "sequence", "geometric"]
RejectionLevel = Literal["token", "sequence_sum", "sequence_mean", "sequence_max"]


@torch.no_grad()
def importance_ratios(logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, *, level: RatioLevel) -> Tensor:
    """Returns the probability ratios of the trained policy to the policy that sampled the tokens.

        token      rho_t                              unbiased for the token given what came before it
        sequence   prod_t rho_t                       unbiased for the row; its variance grows with the length
        geometric  (prod_t rho_t)^(1 / tokens)        biased; comparable between lengths

    Arguments:
        logprobs: [B, T], of the sampled tokens under the policy that the update starts from.
        rollout_logprobs: [B, T], under the policy that sampled.
        mask: bool [B, T], the tokens that count.
        level: see above. A row's ratio stands on each of its tokens.
    Returns: [B, T] in at least float32, zero where the mask is false, without gradient.
    Raises: ValueError on an unknown level, on shapes that differ, on a mask that is not bool.

    The geometric mean: Zheng et al. 2025 (GSPO), https://arxiv.org/abs/2507.18071, eq. (7). Deviation: the logarithm of
    a ratio, of a row's too, is held in [-20, 20].
    """
    return _ratios(_log_ratios(logprobs, rollout_logprobs, mask, level), mask)


@torch.no_grad()
def truncated_weights(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    *,
    level: RatioLevel,
    max_weight: float,
    min_weight: float = 0.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns truncated importance ratios (TIS): ratios clipped to [min_weight, max_weight].

        weight = min(max(ratio, min_weight), max_weight)

    A ratio that is not a number, as of two log-probabilities of -inf, has the weight 0.

    Arguments:
        logprobs, rollout_logprobs, mask, level: of `importance_ratios`.
        max_weight: > 0, at least min_weight; 2 is usual for tokens. Infinity leaves the ratio as it is.
        min_weight: >= 0; 0 is the published form.
    Returns: (weights [B, T], metrics), zero where the mask is false, without gradient. The metrics:
        ratio: before it is cut off.
        truncated_fraction_low, truncated_fraction_high: 1 where that bound binds.
    Raises: ValueError on an unknown level, bounds out of range or order, shapes that differ, a mask that is not bool.

    Ionides 2008, https://doi.org/10.1198/106186008X320456; for engines that differ: Yao et al. 2025,
    https://fengyao.notion.site/off-policy-rl. Deviation: min_weight; the logarithm of a ratio is held in [-20, 20].
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
    return ratios_BT.clamp(min_weight, max_weight).masked_fill(~mask | ratios_BT.isnan(), 0), metrics


@torch.no_grad()
def masked_weights(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    *,
    level: RatioLevel,
    max_weight: float,
    min_weight: float = 0.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns masked importance ratios (MIS): ratios outside [min_weight, max_weight] become 0.

        weight = ratio if min_weight <= ratio <= max_weight, otherwise 0, also for one that is not a number

    A token of weight 0 still counts in the denominator of the mean; `rejection_mask` takes it out of there too.

    Arguments:
        logprobs, rollout_logprobs, mask, level: of `importance_ratios`.
        max_weight: > 0, at least min_weight.
        min_weight: >= 0.
    Returns: (weights [B, T], metrics), zero where the mask is false, without gradient. The metrics:
        ratio: before the range is applied.
        masked_fraction_low, masked_fraction_high: 1 where the ratio is below or above the range.
    Raises: ValueError on an unknown level, bounds out of range or order, shapes that differ, a mask that is not bool.

    Tokens with a range on both sides: Ling Team 2025 (IcePop), https://arxiv.org/abs/2510.18855, which has 0.5 to 5.
    Rows: Liu et al. 2025, https://richardli.xyz/rl-collapse. Deviation: the logarithm of a ratio inside the range is
    held in [-20, 20].
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
    return ratios_BT.masked_fill(low_BT | high_BT | ratios_BT.isnan(), 0), metrics


@torch.no_grad()
def rejection_mask(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    *,
    kind: KlKind,
    level: RejectionLevel,
    high: float,
    low: float = -math.inf,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns a mask without the tokens or rows whose estimated KL to the sampling policy is out of bounds.

    With x_t the estimate of KL(rollout policy || policy) from token t, k1 being -log rho_t:

        token          a token is kept if     low <= x_t <= high
        sequence_sum   a row is kept if       low <= sum of its x_t <= high
        sequence_mean  a row is kept if       low <= mean of its x_t <= high
        sequence_max   a row is kept if       each of its x_t is in [low, high]

    Arguments:
        logprobs, rollout_logprobs, mask: of `importance_ratios`.
        kind: estimator, see `kl_estimate`. k1 is signed: high drops what became less likely, low what became likelier.
        level: see above.
        high: the largest x that is kept, in nats.
        low: the smallest; of use with k1 only, since the others are never negative.
    Returns: (mask [B, T], metrics): the tokens of `mask` that are kept. Count the denominator of the loss with it for a
        mean over what is kept, or with `mask` if what is dropped is to count as zero. The metrics:
        divergence: x of the token or row.
        rejected_fraction: 1 where a token is dropped.
    Raises: ValueError on an unknown kind or level, low above high, shapes that differ, a mask that is not bool.

    sequence_mean with k1 is the geometric mean of the ratio in [exp(-high), exp(-low)], and sequence_max with k1 the
    veto of rows with a ratio below exp(-high): Liu et al. 2025, https://richardli.xyz/rl-collapse. With
    `kept | mask & (advantages >= 0)`, sequence_mean and k1 give the off-policy sequence masking of DeepSeek-V3.2,
    https://arxiv.org/abs/2512.02556, section 3.1.
    """
    if level not in get_args(RejectionLevel):
        raise ValueError(f"level is {level!r}, it must be one of {', '.join(get_args(RejectionLevel))}")
    if not low <= high:
        raise ValueError(f"low is {low} and high is {high}, low must not be above high")
    logprobs_BT, rollout_logprobs_BT = masked_tokens(mask, logprobs=logprobs, rollout_logprobs=rollout_logprobs)
    divergence_BT = kl_estimate(rollout_logprobs_BT, logprobs_BT, kind=kind)
    if level in ("sequence_sum", "sequence_mean"):
        divergence_BT = _row_sums(divergence_BT, mask, mean=level == "sequence_mean")
    # NaN is outside every range.
    kept_BT = mask & (divergence_BT >= low) & (divergence_BT <= high)
    if level == "sequence_max":
        kept_BT = mask & (kept_BT | ~mask).all(-1, keepdim=True)
        # A column of -inf, because rows of no position have no maximum.
        padded_BT = torch.nn.functional.pad(divergence_BT.masked_fill(~mask, -math.inf), (0, 1), value=-math.inf)
        divergence_BT = padded_BT.amax(-1, keepdim=True).expand_as(mask)
    metrics = {
        "divergence": divergence_BT.masked_fill(~mask, 0),
        "rejected_fraction": (mask & ~kept_BT).to(divergence_BT.dtype),
    }
    return kept_BT, metrics


@dataclass(frozen=True)
class WeightSums:
    """Sums over a part of a step that merge to the mean weight and the effective sample size of the step.

    `merge` and `result` are those of a metric; the result is the effective sample size as a share of the samples.
    """

    total: float
    total_of_squares: float
    count: float

    def merge(self, other: "WeightSums") -> "WeightSums":
        return WeightSums(
            self.total + other.total, self.total_of_squares + other.total_of_squares, self.count + other.count
        )

    def mean(self) -> float:
        """Mean weight, what `normalized_weights` divides by; NaN without samples."""
        return self.total / self.count if self.count else math.nan

    def effective_sample_size(self) -> float:
        """(sum w)^2 / sum w^2: how many equally weighted samples are worth as much; 0 if all weights are 0."""
        return self.total**2 / self.total_of_squares if self.total_of_squares else 0.0

    def result(self) -> float:
        """The effective sample size over the number of samples, in [0, 1]; NaN without samples."""
        return self.effective_sample_size() / self.count if self.count else math.nan


@torch.no_grad()
def weight_sums(weights: Tensor, mask: Tensor, *, level: RatioLevel) -> WeightSums:
    """Returns the sums over this part's samples: tokens at level "token", rows at the other levels.

    Arguments:
        weights: [B, T], of `truncated_weights` or `masked_weights`.
        mask: bool [B, T], the tokens that count. A row without any is no sample.
        level: that of the weights.
    Raises: ValueError on an unknown level, on shapes that differ, on a mask that is not bool.

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
    """Divides weights by their mean over the step, so that the gradient keeps its scale.

    Arguments:
        weights: [B, T].
        mask: bool [B, T].
        mean: >= 0, `WeightSums.mean` over all parts of the step. If it is 0 all weights are, and stay.
    Returns: [B, T] in at least float32, zero where the mask is false, without gradient.
    Raises: ValueError on a mean that is negative or NaN, on shapes that differ, on a mask that is not bool.

    Self-normalized importance sampling: Liu et al. 2025, https://richardli.xyz/rl-collapse, for language models.
    """
    if not mean >= 0:
        raise ValueError(f"mean is {mean}, it must be 0 or more: the mean weight of a step that has samples")
    (weights_BT,) = masked_tokens(mask, weights=weights)
    return weights_BT / (mean or 1.0)


def _log_ratios(logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, level: RatioLevel) -> Tensor:
    """Returns the unclamped log-ratios."""
    _check_level(level)
    logprobs_BT, rollout_logprobs_BT = masked_tokens(mask, logprobs=logprobs, rollout_logprobs=rollout_logprobs)
    log_ratios_BT = logprobs_BT - rollout_logprobs_BT
    return log_ratios_BT if level == "token" else _row_sums(log_ratios_BT, mask, mean=level == "geometric")


def _ratios(log_ratios_BT: Tensor, mask: Tensor) -> Tensor:
    return log_ratios_BT.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().masked_fill(~mask, 0)


def _row_sums(values_BT: Tensor, mask: Tensor, *, mean: bool) -> Tensor:
    """Returns the sum or mean of each row, expanded to all its positions."""
    doubles_BT = values_BT.double()
    sums_B1 = row_mean(doubles_BT, mask) if mean else doubles_BT.sum(-1, keepdim=True)
    return sums_B1.to(values_BT.dtype).expand_as(values_BT)


def _outside(log_ratios_BT: Tensor, mask: Tensor, min_weight: float, max_weight: float) -> tuple[Tensor, Tensor]:
    """Returns masks of ratios below and above the bounds, compared as unclamped logarithms."""
    log_low = math.log(min_weight) if min_weight else -math.inf
    log_high = math.log(max_weight) if max_weight < math.inf else math.inf
    return mask & (log_ratios_BT < log_low), mask & (log_ratios_BT > log_high)


def _check_level(level: RatioLevel) -> None:
    if level not in get_args(RatioLevel):
        raise ValueError(f"level is {level!r}, it must be one of {', '.join(get_args(RatioLevel))}")


def _check_bounds(min_weight: float, max_weight: float) -> None:
    if not 0 <= min_weight <= max_weight or not max_weight > 0:
        raise ValueError(
            f"min_weight is {min_weight} and max_weight is {max_weight}, it must be 0 <= min_weight <= max_weight, "
            "and max_weight above 0"
        )


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
