"""Advantage estimators that compare the samples of one prompt, with one score per row.

Shape suffixes: B rows, T token positions, K rewards.

In every function here:

    scores: [B], one score per row, of any real dtype. Pass the whole batch: a group must not be divided over calls.
    groups: integer [B]; rows with equal ids form a group. Ids are arbitrary; groups need be neither contiguous nor of
        equal size.
    mask: bool [B, T], the tokens that receive the advantage. A row without any still counts in its group.

and the result is [B, T] in at least float32, the row's advantage at every token of its mask and zero elsewhere. It is a
target and carries no gradient. Statistics are in float64. All raise ValueError on shapes that do not fit, on a mask
that is not bool, and on ids that are not integers.

A group of one has nothing to compare with and gives 0 (other implementations give the raw score, or NaN). A score that
is not finite makes all of its group NaN, and the other groups get what they would get without that group.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from flowrl.algorithms.advantages.estimators import whiten
from flowrl.algorithms.masks import at_least_float32, masked_rows, masked_tokens


def group_index(groups: Tensor) -> Tensor:
    """Maps group ids to indices 0 to G - 1, int64 [B], in the order of the ids.

    Arguments:
        groups: integer [B].
    Raises: ValueError on ids that are not integers, or that are not one per row.
    """
    if groups.is_floating_point() or groups.is_complex() or groups.dtype == torch.bool:
        raise ValueError(f"groups is {groups.dtype}, group ids must be integers")
    if groups.dim() != 1:
        raise ValueError(f"groups has shape {list(groups.shape)}, it must be [B]: one id per row")
    return torch.unique(groups, return_inverse=True)[1]


def group_sums(values: Tensor, group_of: Tensor, num_groups: int | None = None) -> Tensor:
    """Returns for each row the sum of `values` over its group, [B, ...].

    Arguments:
        values: [B, ...].
        group_of: int64 [B], result of `group_index`, below `num_groups`.
        num_groups: an upper bound of the number of groups; None is the number of rows.
    """
    sums = values.new_zeros(_table_shape(values, num_groups)).index_add_(0, group_of, values)
    return sums[group_of]


def group_extremes(values: Tensor, group_of: Tensor, num_groups: int | None = None) -> tuple[Tensor, Tensor]:
    """Returns for each row the minimum and maximum of `values` in its group; arguments as in `group_sums`."""
    index = group_of.reshape(-1, *[1] * (values.dim() - 1)).expand_as(values)
    table = values.new_zeros(_table_shape(values, num_groups))
    low = table.scatter_reduce(0, index, values, "amin", include_self=False)
    high = table.scatter_reduce(0, index, values, "amax", include_self=False)
    return low[group_of], high[group_of]


def group_sizes(group_of: Tensor) -> Tensor:
    """Returns for each row the size of its group, float64 [B]."""
    return group_sums(torch.ones_like(group_of, dtype=torch.float64), group_of)


def group_deviations(values: Tensor, group_of: Tensor) -> tuple[Tensor, Tensor]:
    """Returns for each row the deviation from its group's mean, and the group's unbiased variance.

    Arguments: as of `group_sums`; the values in float64.
    Returns: both exactly 0 for a group of equal values, and for a group of one.
    """
    # Against the smallest value first: equal values become exact zeros, whatever their sum would round to.
    above_low = values - group_extremes(values, group_of)[0]
    sizes = group_sizes(group_of).reshape(-1, *[1] * (values.dim() - 1))
    deviations = above_low - group_sums(above_low, group_of) / sizes
    variances = group_sums(deviations.square(), group_of) / (sizes - 1).clamp(min=1)
    return deviations, variances


def _table_shape(values: Tensor, num_groups: int | None) -> tuple[int, ...]:
    return (len(values) if num_groups is None else num_groups, *values.shape[1:])


@torch.no_grad()
def grpo(scores: Tensor, groups: Tensor, mask: Tensor, *, normalize_std: bool, eps: float = 1e-4) -> Tensor:
    """Returns GRPO advantages: the score minus the group mean, optionally divided by the standard deviation.

        A_i = (r_i - mean(r)) / (std(r) + eps)      over the rows of the group of row i

    Arguments (see the top of the file), and:
        normalize_std: divide by the group's standard deviation (GRPO); false is the advantage of Dr. GRPO.
        eps: added to the standard deviation, in units of the score. It decides how much of a difference that is only
            numerical noise survives: a spread of 1e-7 becomes an advantage of 1e-3 and not of 1.
    Returns: [B, T]. A group whose scores are all equal gives 0.

    Shao et al. 2024, https://arxiv.org/abs/2402.03300, section 4.1.2 (outcome supervision); without the standard
    deviation: Liu et al. 2025, https://arxiv.org/abs/2503.20783, section 3.2. The paper leaves the kind of standard
    deviation open; it is the unbiased one (n - 1) here, as in most implementations.
    """
    scores_B, group_of_B = _scores_and_groups(scores, groups, mask)
    deviations_B, variances_B = group_deviations(scores_B, group_of_B)
    return _on_tokens(deviations_B / _scale(variances_B, eps) if normalize_std else deviations_B, scores, mask)


@torch.no_grad()
def rloo(scores: Tensor, groups: Tensor, mask: Tensor) -> Tensor:
    """Returns leave-one-out advantages: the score minus the mean of the group's other scores.

        A_i = r_i - sum of r_j, j != i / (n - 1)  =  (r_i - mean(r)) n / (n - 1)      over the n rows of the group

    Arguments: see the top of the file. A KL penalty of the sequence belongs in the scores.
    Returns: [B, T]. A group whose scores are all equal gives 0.

    Kool et al. 2019, "Buy 4 REINFORCE samples, get a baseline for free!"; for language models Ahmadian et al. 2024,
    https://arxiv.org/abs/2402.14740, the RLOO estimator. Deviation: none for two and more samples.
    """
    scores_B, group_of_B = _scores_and_groups(scores, groups, mask)
    sizes_B = group_sizes(group_of_B)
    deviations_B, _ = group_deviations(scores_B, group_of_B)
    return _on_tokens(deviations_B * sizes_B / (sizes_B - 1).clamp(min=1), scores, mask)


@torch.no_grad()
def reinforce_plus_plus_baseline(scores: Tensor, groups: Tensor, mask: Tensor, *, eps: float = 1e-8) -> Tensor:
    """Returns REINFORCE++ advantages with a group baseline: score minus group mean, whitened over all tokens.

        A = whiten(r_i - mean(r))      mean over the rows of the group, whitening over the true positions of the mask

    Arguments (see the top of the file), and:
        eps: added to the variance, as in `whiten`.
    Returns: [B, T]. Scores that are equal within every group give 0 everywhere. The deviation of a group of one is 0
        before whitening, which moves it by as much as the mean over tokens differs from 0.

    Hu et al. 2025, https://arxiv.org/abs/2501.03262, REINFORCE++ with baseline: the group takes part in the baseline,
    and the batch alone in the scale. Deviation: mean and variance are over tokens, as in the published code, so a long
    row weighs more; the paper speaks of the batch.
    """
    scores_B, group_of_B = _scores_and_groups(scores, groups, mask)
    deviations_B, _ = group_deviations(scores_B, group_of_B)
    sound_BT = mask & ~scores_B.isnan()[:, None]
    whitened_BT = whiten(_on_tokens(deviations_B, scores, mask), sound_BT, eps=eps)
    return whitened_BT.masked_fill(mask & ~sound_BT, torch.nan)


@torch.no_grad()
def opo(scores: Tensor, groups: Tensor, mask: Tensor) -> Tensor:
    """Returns OPO advantages: the score minus the length-weighted group mean, a variance-minimizing baseline.

        A_i = r_i - sum_j(l_j r_j) / sum_j(l_j)      over the group; l_j the number of true positions of row j

    Arguments: see the top of the file.
    Returns: [B, T]. A group whose scores are all equal gives 0. A row without tokens has no weight.

    Hao et al. 2025, https://arxiv.org/abs/2505.23585, the optimal baseline for gradients of tokens that are about
    orthogonal and of equal norm. Deviation: the length counts the tokens that the policy chose, not a tool's output.
    """
    scores_B, group_of_B = _scores_and_groups(scores, groups, mask)
    above_low_B = scores_B - group_extremes(scores_B, group_of_B)[0]
    lengths_B = mask.sum(-1, dtype=torch.float64)
    baselines_B = group_sums(lengths_B * above_low_B, group_of_B) / group_sums(lengths_B, group_of_B)
    return _on_tokens(above_low_B - baselines_B, scores, mask)


@torch.no_grad()
def gpg(scores: Tensor, groups: Tensor, mask: Tensor, *, normalize_std: bool = False, eps: float = 1e-4) -> Tensor:
    """Returns GPG advantages: score minus group mean, rescaled to compensate for groups without differences.

        A_i = alpha (r_i - mean(r)) / F      alpha = B / (B - M), M the rows in groups whose scores are all equal

    Arguments (see the top of the file), and:
        normalize_std: F is the group's standard deviation (unbiased) plus eps; false is F = 1, the paper's choice.
        eps: in units of the score.
    Returns: [B, T]. A group whose scores are all equal gives 0; where that is every group, alpha is of no account.

    Chu et al. 2025, https://arxiv.org/abs/2504.02546, accurate gradient estimation, where B and M count groups and
    alpha multiplies the loss: with groups of equal size it is the same. Deviations: rows are counted; a group of one
    counts in M. One published implementation counts rows with score 0 instead, which depends on where the zero of the
    score lies. The paper's threshold below which a batch is topped up with new groups is `full_batches`.
    """
    scores_B, group_of_B = _scores_and_groups(scores, groups, mask)
    deviations_B, variances_B = group_deviations(scores_B, group_of_B)
    low_B, high_B = group_extremes(scores_B, group_of_B)
    alpha = (~scores_B.isnan()).sum() / (high_B > low_B).sum().clamp(min=1)
    if normalize_std:
        deviations_B = deviations_B / _scale(variances_B, eps)
    return _on_tokens(alpha * deviations_B, scores, mask)


@torch.no_grad()
def pass_at_k(scores: Tensor, groups: Tensor, mask: Tensor, *, k: int | None = None) -> Tensor:
    """Returns advantages for the gradient of E[max of k scores], which is pass@k for scores of 0 and 1.

        A_i = sum over sets S of k rows of the group that hold i of (max(S) - max(S without i)) / (n choose k)

    For k = n, the default, only a single best row has one, by how much it exceeds the second best. It is computed in
    closed form: with the scores in order, row l (from 0) above the row before it by g_l,
    A_i = sum over l <= i of g_l (l choose k - 1) / (n choose k).

    Arguments (see the top of the file), and:
        k: 2 or more, or None for the size of each row's group.
    Returns: [B, T]; the sum over the group's rows of A_i times the gradient of log p is without bias. So aggregate with
        a sum over rows, or scale by the group's size. Equal scores get equal advantages; a group whose scores are all
        equal gives 0. So does one of fewer than k rows: it has no set of k.
    Raises: ValueError on a k below 2 too: best-of-one has no other row to compare with, use `rloo`.

    Tang et al. 2025, https://arxiv.org/abs/2503.19595, for k = n; Walder and Karkhanis 2025,
    https://arxiv.org/abs/2505.15201, for k < n with their leave-one-out baseline over sets of k - 1. Deviation: the
    advantages are not divided by the group's standard deviation, which one implementation offers.
    """
    if k is not None and k < 2:
        raise ValueError(f"k is {k}, it must be 2 or more, or None for the size of the group; for one sample use rloo")
    scores_B, group_of_B = _scores_and_groups(scores, groups, mask)
    sizes_B = group_sizes(group_of_B)
    by_score_B = scores_B.argsort(stable=True)
    order_B = by_score_B[group_of_B[by_score_B].argsort(stable=True)]
    ordered_B, group_B, n_B = scores_B[order_B], group_of_B[order_B], sizes_B[order_B]
    positions_B = torch.arange(len(scores_B), device=scores_B.device)
    starts_B = group_extremes(positions_B, group_B)[0]
    below_B = (positions_B - starts_B).double()
    k_B = n_B if k is None else torch.full_like(n_B, k)
    weights_B = torch.where(n_B >= k_B, (_log_choose(below_B, k_B - 1) - _log_choose(n_B, k_B)).exp(), 0)
    gaps_B = torch.where(below_B > 0, ordered_B - ordered_B.roll(1), 0)
    # A line of the table for each group: a sum over all of them would lose the digits of small ones beside large ones.
    cells_B = group_B, below_B.long()
    table_GN = gaps_B.new_zeros(*(int(x.max()) + 1 if len(scores_B) else 0 for x in cells_B))
    table_GN[cells_B] = gaps_B * weights_B
    advantages_B = torch.empty_like(gaps_B)
    advantages_B[order_B] = table_GN.cumsum(1)[cells_B]
    return _on_tokens(advantages_B.where(~scores_B.isnan(), torch.nan), scores, mask)


@torch.no_grad()
def gdpo(
    scores: Tensor,
    groups: Tensor,
    mask: Tensor,
    *,
    weights: Sequence[float] | None = None,
    eps: float = 1e-4,
) -> Tensor:
    """Returns GDPO advantages: rewards normalized per group, summed, and normalized over the batch.

        a_ik = (r_ik - mean(r_k)) / (std(r_k) + eps)      over the rows of the group of row i, for each reward k
        s_i = sum_k w_k a_ik        A_i = (s_i - mean(s)) / (std(s) + eps)      over all rows of the batch

    Arguments (see the top of the file), except:
        scores: [B, K], a column per reward, K at least 1.
        weights: K numbers; None is 1 for each. They act on normalized rewards, so scales of rewards do not matter.
        eps: added to standard deviations.
    Returns: [B, T]. A reward that is constant within a group adds nothing there.
    Raises: ValueError on a number of weights that is not K too.

    Liu et al. 2026, https://arxiv.org/abs/2601.05242, group reward-decoupled normalisation with batch-wise
    normalisation of the sum. Deviations: standard deviations are unbiased, the paper leaves them open; the batch is
    its rows, one published implementation weighs rows by their tokens.
    """
    if scores.dim() != 2 or scores.shape[1] == 0:
        raise ValueError(f"scores has shape {list(scores.shape)}, it must be [B, K]: a column per reward")
    num_rewards = scores.shape[1]
    if weights is not None and len(weights) != num_rewards:
        raise ValueError(f"weights has {len(weights)} numbers, it must have one per reward, {num_rewards}")
    _, group_of_B = _scores_and_groups(scores[:, 0], groups, mask)
    scores_BK = _sound(scores.double(), group_of_B)
    deviations_BK, variances_BK = group_deviations(scores_BK, group_of_B)
    weights_K = torch.ones(num_rewards) if weights is None else torch.tensor(weights)
    sums_B = (deviations_BK / _scale(variances_BK, eps)) @ weights_K.to(deviations_BK)
    # Their mean is 0, group by group: to subtract it would only turn exact zeros into rounding errors.
    sound_B = ~sums_B.isnan()
    std = (sums_B.where(sound_B, 0).square().sum() / (sound_B.sum() - 1).clamp(min=1)).sqrt()
    return _on_tokens(sums_B / (std + eps), scores, mask)


def _scores_and_groups(scores: Tensor, groups: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the checked scores (float64 [B]) and the group index of each row (int64 [B])."""
    masked_tokens(mask)
    scores_B, groups_B = masked_rows(mask, scores=scores, groups=groups)
    group_of_B = group_index(groups_B)
    return _sound(scores_B.double(), group_of_B), group_of_B


def _sound(scores: Tensor, group_of_B: Tensor) -> Tensor:
    """Returns the scores, with NaN for all rows of a group that has a non-finite score."""
    return scores.where(group_sums((~scores.isfinite()).long(), group_of_B) == 0, torch.nan)


def _scale(variances: Tensor, eps: float) -> Tensor:
    """Returns the standard deviation plus eps, always above 0."""
    if not eps >= 0:
        raise ValueError(f"eps is {eps}, it must be 0 or more, in units of the score")
    return (variances.sqrt() + eps).clamp(min=torch.finfo(variances.dtype).tiny)


def _on_tokens(advantages_B: Tensor, scores: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, advantages_B.to(at_least_float32(scores).dtype)[:, None], 0)


def _log_choose(n: Tensor, k: Tensor) -> Tensor:
    """Returns log(n choose k); -inf if k > n."""
    n_or_k = torch.maximum(n, k)
    logs = torch.lgamma(n_or_k + 1) - torch.lgamma(k + 1) - torch.lgamma(n_or_k - k + 1)
    return torch.where(k > n, -torch.inf, logs)
