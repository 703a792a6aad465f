"""Group statistics, and advantage estimators that compare the samples of one prompt.

Shape suffixes: B rows, T token positions, K rewards, G groups. "..." stands for further dimensions, which are processed
independently.

All estimators have the arguments

    scores: [B], one score per row, of the whole batch. All rows of a group must be in the same call.
    groups: integer [B], group ids. Groups may be interleaved and differ in size.
    mask: bool [B, T], tokens that receive the advantage. Rows without true positions still count in their group.

All estimators return advantages [B, T] in at least float32, which are 0 where the mask is false and carry no gradient.
They raise ValueError for settings out of range, mismatched shapes, a mask that is not bool, or group ids that are not
integers. Statistics are in float64.

A group of equal scores has advantage 0. A group of one row also has advantage 0; other implementations return the raw
score or NaN. A non-finite score makes the advantages of its group NaN and does not affect other groups.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from flowrl.algorithms.advantages.estimators import whiten
from flowrl.algorithms.masking import at_least_float32, masked_rows, masked_tokens
from flowrl.algorithms.registry import Annotated, ColumnNames, Constant, Ge, Numbers, advantage_estimators


def group_index(groups: Tensor) -> Tensor:
    """Returns the group index of each row, int64 [B]. Indices are 0 to G - 1 in ascending order of the group ids.

    Raises ValueError unless `groups` is an integer tensor [B].
    """
    if groups.is_floating_point() or groups.is_complex() or groups.dtype == torch.bool:
        raise ValueError(f"groups is {groups.dtype}, but group ids must be integers")
    if groups.dim() != 1:
        raise ValueError(f"groups has shape {list(groups.shape)}, but must be [B]: one id per row")
    return torch.unique(groups, return_inverse=True)[1]


def group_sums(values: Tensor, group_of: Tensor, num_groups: int | None = None) -> Tensor:
    """Returns for each row the sum of `values` [B, ...] over its group, [B, ...].

    Args:
        group_of: int64 [B], result of `group_index`.
        num_groups: upper bound of the number of groups; defaults to the number of rows.
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
    """Returns the size of each row's group, float64 [B]."""
    return group_sums(torch.ones_like(group_of, dtype=torch.float64), group_of)


def group_deviations(values: Tensor, group_of: Tensor) -> tuple[Tensor, Tensor]:
    """Returns each row's deviation from its group's mean, and the unbiased variance of each row's group.

    The arguments are those of `group_sums`, with float64 values. Both results are exactly 0 for groups of equal values
    and for groups of one row.
    """
    # Subtracting the minimum makes equal values exactly 0, regardless of rounding of the mean.
    above_low = values - group_extremes(values, group_of)[0]
    sizes = group_sizes(group_of).reshape(-1, *[1] * (values.dim() - 1))
    deviations = above_low - group_sums(above_low, group_of) / sizes
    variances = group_sums(deviations.square(), group_of) / (sizes - 1).clamp(min=1)
    return deviations, variances


def _table_shape(values: Tensor, num_groups: int | None) -> tuple[int, ...]:
    return (len(values) if num_groups is None else num_groups, *values.shape[1:])


@advantage_estimators.register("grpo")
@torch.no_grad()
def grpo(
    scores: Tensor, groups: Tensor, mask: Tensor, *, normalize_std: bool = True, eps: Constant[float] = 1e-4
) -> Tensor:
    """Returns GRPO advantages: the score minus the group mean, optionally divided by the standard deviation.

        A_i = (r_i - mean(r)) / (std(r) + eps)      mean and std over the group of row i

    Args (the module docstring describes the others):
        normalize_std: Divide by the standard deviation of the group's scores. False gives Dr. GRPO.
        eps: >= 0, in units of the score. Suppresses numerical noise: a spread of 1e-7 gives advantages near 1e-3.
    Returns: [B, T].

    GRPO: Shao et al. 2024, https://arxiv.org/abs/2402.03300, section 4.1.2 (outcome supervision). Dr. GRPO: Liu et al.
    2025, https://arxiv.org/abs/2503.20783, section 3.2. The standard deviation is unbiased (n - 1), as in most
    implementations. The paper does not specify this.
    """
    scores_B, group_of_B = _scores_and_groups(scores, groups, mask)
    deviations_B, variances_B = group_deviations(scores_B, group_of_B)
    return _on_tokens(deviations_B / _scale(variances_B, eps) if normalize_std else deviations_B, scores, mask)


@advantage_estimators.register("rloo", kl_penalty=True)
@torch.no_grad()
def rloo(scores: Tensor, groups: Tensor, mask: Tensor) -> Tensor:
    """Returns leave-one-out advantages: the score minus the mean of the group's other scores.

        A_i = r_i - (sum of r_j for j != i) / (n - 1) = (r_i - mean(r)) n / (n - 1)      over the n rows of the group

    The module docstring describes the arguments. If the run uses a KL penalty, the scores must include it.

    Kool et al. 2019, "Buy 4 REINFORCE samples, get a baseline for free!". For language models: Ahmadian et al. 2024,
    https://arxiv.org/abs/2402.14740, the RLOO estimator.
    """
    scores_B, group_of_B = _scores_and_groups(scores, groups, mask)
    sizes_B = group_sizes(group_of_B)
    deviations_B, _ = group_deviations(scores_B, group_of_B)
    return _on_tokens(deviations_B * sizes_B / (sizes_B - 1).clamp(min=1), scores, mask)


@advantage_estimators.register("reinforce_plus_plus_baseline")
@torch.no_grad()
def reinforce_plus_plus_baseline(
    scores: Tensor, groups: Tensor, mask: Tensor, trained_mask: Tensor | None = None, *, eps: Constant[float] = 1e-8
) -> Tensor:
    """Returns REINFORCE++ advantages with a group baseline: score minus group mean, whitened over trained tokens.

        A = whiten(r_i - mean(r))      mean over the group, whitening over the trained tokens of all groups

    Args (the module docstring describes the others):
        trained_mask: bool [B, T], the tokens of the mask that the loss trains on. The scores of all rows count in the
            mean of their group. The advantages of other tokens are 0. None: all tokens of the mask.
        eps: small number that `whiten` adds to the variance.
    Returns: [B, T]. A group of equal scores contributes 0 to the whitening, but its advantage may differ from 0
        afterwards.

    Hu et al. 2025, https://arxiv.org/abs/2501.03262, REINFORCE++ with baseline. Whitening weights each row by its
    number of tokens, as in the published code. The paper does not specify the weights.
    """
    scores_B, group_of_B = _scores_and_groups(scores, groups, mask)
    deviations_B, _ = group_deviations(scores_B, group_of_B)
    trained_BT = mask if trained_mask is None else masked_tokens(mask, trained_mask=trained_mask)[0].bool()
    is_finite_BT = trained_BT & ~scores_B.isnan()[:, None]
    whitened_BT = whiten(_on_tokens(deviations_B, scores, mask), is_finite_BT, eps=eps)
    return whitened_BT.masked_fill(trained_BT & ~is_finite_BT, torch.nan)


@advantage_estimators.register("opo")
@torch.no_grad()
def opo(scores: Tensor, groups: Tensor, mask: Tensor) -> Tensor:
    """Returns OPO advantages: the score minus the length-weighted group mean, which minimizes the variance.

        A_i = r_i - sum_j(l_j r_j) / sum_j(l_j)      over the rows j of the group; l_j is the length of row j

    The length of a row is the number of positions where its mask is true. The module docstring describes the arguments.

    Hao et al. 2025, https://arxiv.org/abs/2505.23585. The baseline is optimal if token gradients are orthogonal and
    have equal norms. Deviation from the paper: the length excludes tokens that the policy did not sample.
    """
    scores_B, group_of_B = _scores_and_groups(scores, groups, mask)
    above_low_B = scores_B - group_extremes(scores_B, group_of_B)[0]
    lengths_B = mask.sum(-1, dtype=torch.float64)
    baselines_B = group_sums(lengths_B * above_low_B, group_of_B) / group_sums(lengths_B, group_of_B)
    return _on_tokens(above_low_B - baselines_B, scores, mask)


@advantage_estimators.register("gpg")
@torch.no_grad()
def gpg(
    scores: Tensor, groups: Tensor, mask: Tensor, *, normalize_std: bool = False, eps: Constant[float] = 1e-4
) -> Tensor:
    """Returns GPG advantages: score minus group mean, scaled up to compensate for groups with equal scores.

        A_i = alpha (r_i - mean(r)) / F      alpha = B / (B - M)

    B is the number of rows. M is the number of rows in groups whose scores are all equal, including groups of one row.
    F is 1 (paper). With normalize_std, F is the unbiased standard deviation of the group plus eps.

    Args (the module docstring describes the others):
        normalize_std: Divide by the standard deviation of the group's scores.
        eps: >= 0, in units of the score.
    Returns: [B, T].

    Chu et al. 2025, https://arxiv.org/abs/2504.02546. Deviation from the paper: B and M count rows instead of groups.
    Both counts give the same alpha for groups of equal size.
    """
    scores_B, group_of_B = _scores_and_groups(scores, groups, mask)
    deviations_B, variances_B = group_deviations(scores_B, group_of_B)
    low_B, high_B = group_extremes(scores_B, group_of_B)
    alpha = (~scores_B.isnan()).sum(dtype=torch.float64) / (high_B > low_B).sum().clamp(min=1)
    if normalize_std:
        deviations_B = deviations_B / _scale(variances_B, eps)
    return _on_tokens(alpha * deviations_B, scores, mask)


def _check_k(k: int | None, samples_per_prompt: int) -> None:
    if k is not None and k > samples_per_prompt:
        raise ValueError(
            f"algorithm.k is {k}, more than samples_per_prompt ({samples_per_prompt}), so every advantage would be 0: "
            f"set it to at most {samples_per_prompt}"
        )


@advantage_estimators.register("pass_at_k", checks=(_check_k,))
@torch.no_grad()
def pass_at_k(
    scores: Tensor,
    groups: Tensor,
    mask: Tensor,
    *,
    k: Annotated[int, Ge(2)] | None = None,
    normalize_std: bool = False,
    eps: Constant[float] = 1e-4,
) -> Tensor:
    """Returns advantages whose policy gradient maximizes E[max of k scores]. For scores of 0 and 1, this is pass@k.

        A_i = sum over sets S of k rows of the group that include i of (max(S) - max(S without i)) / (n choose k)

    In closed form, sort the n scores of the group (indices from 0). g_l is score l minus score l - 1, and g_0 is 0:

        A_i = sum over l <= i of g_l (l choose k - 1) / (n choose k)

    For k = n, only a unique best row has an advantage.

    Args (the module docstring describes the others):
        k: Samples per set; null uses the group size.
        normalize_std: Divide by the standard deviation of the group's scores.
        eps: >= 0, in units of the score, added to the standard deviation.
    Returns: [B, T]. The advantages are 0 for groups of fewer than k rows.

    Without normalize_std, the sum of A_i grad(log p) over a group is unbiased. Therefore aggregate with a sum over
    rows, or scale by the group size.

    k = n: Tang et al. 2025, https://arxiv.org/abs/2503.19595. k < n: Walder and Karkhanis 2025,
    https://arxiv.org/abs/2505.15201, with a leave-one-out baseline over sets of k - 1. verl's pass@k estimator
    equals k = n with normalize_std. If several rows are best, all advantages are 0 in both.
    """
    if k is not None and k < 2:
        raise ValueError(f"k is {k}, but must be 2 or more, or None for the group size; use rloo for one sample")
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
    # One table row per group: a cumulative sum over all groups would lose the precision of small gaps.
    cells_B = group_B, below_B.long()
    table_GN = gaps_B.new_zeros(*(int(x.max()) + 1 if len(scores_B) else 0 for x in cells_B))
    table_GN[cells_B] = gaps_B * weights_B
    advantages_B = torch.empty_like(gaps_B)
    advantages_B[order_B] = table_GN.cumsum(1)[cells_B]
    if normalize_std:
        advantages_B = advantages_B / _scale(group_deviations(scores_B, group_of_B)[1], eps)
    return _on_tokens(advantages_B.where(~scores_B.isnan(), torch.nan), scores, mask)


def reward_table(columns: Mapping[str, Tensor], *, reward_columns: ColumnNames = ("scores",)) -> Tensor:
    """Returns the rewards [B, K] of the columns `reward_columns`, each [B].

    NaN means that a reward does not apply to the data source of the group. It becomes 0: a constant contributes
    nothing.

    Args:
        columns: the columns by name.
        reward_columns: Columns with rewards. Each column has one reward per sequence.
    """
    rewards_BK = torch.stack([columns[name].float() for name in reward_columns], dim=-1)
    return rewards_BK.where(~rewards_BK.isnan(), 0)


def weighted_sum(scores: Tensor, reward_weights: Sequence[float] | None = None) -> Tensor:
    """Returns the sum [B] of the rewards `scores` [B, K] with the weights. By default, all weights are 1."""
    return scores @ torch.tensor(reward_weights or [1.0] * scores.shape[1]).to(scores)


def _check_weights(reward_columns: Sequence[str], reward_weights: Sequence[float] | None) -> None:
    if reward_weights and len(reward_weights) != len(reward_columns):
        raise ValueError(f"reward_weights must have {len(reward_columns)} numbers, one per entry of reward_columns")


def _check_shaping(reward_columns: Sequence[str], shaping: Sequence[object]) -> None:
    if shaping and tuple(reward_columns) != ("scores",):
        raise ValueError(
            f"shaping changes the column scores only, but reward_columns is {', '.join(reward_columns)}: "
            "remove shaping, or compute the shaped reward as a column"
        )


@advantage_estimators.register(
    "gdpo", prepare={"scores": reward_table, "reward": weighted_sum}, checks=(_check_weights, _check_shaping)
)
@torch.no_grad()
def gdpo(
    scores: Tensor,
    groups: Tensor,
    mask: Tensor,
    *,
    reward_weights: Numbers | None = None,
    eps: Constant[float] = 1e-4,
) -> Tensor:
    """Returns GDPO advantages: rewards normalized per group, summed, and normalized over the batch.

        a_ik = (r_ik - mean(r_k)) / (std(r_k) + eps)      mean and std over the group of row i, for each reward k
        s_i = sum_k w_k a_ik        A_i = (s_i - mean(s)) / (std(s) + eps)      mean and std over all rows of the batch

    Args (the module docstring describes the others):
        scores: [B, K], one column per reward, K >= 1.
        reward_weights: Weight of each reward after normalization; null weights all rewards by 1.
        eps: >= 0, added to the standard deviations.
    Returns: [B, T]. A reward that is constant within a group contributes 0 to the group's advantages.

    Liu et al. 2026, https://arxiv.org/abs/2601.05242. Standard deviations are unbiased and computed over rows. The
    paper does not specify this.
    """
    if scores.dim() != 2 or scores.shape[1] == 0:
        raise ValueError(f"scores has shape {list(scores.shape)}, but must be [B, K]: a column per reward")
    num_rewards = scores.shape[1]
    if reward_weights is not None and len(reward_weights) != num_rewards:
        raise ValueError(
            f"reward_weights has {len(reward_weights)} numbers, but must have one per reward, {num_rewards}"
        )
    _, group_of_B = _scores_and_groups(scores[:, 0], groups, mask)
    scores_BK = _mask_non_finite(scores.double(), group_of_B)
    deviations_BK, variances_BK = group_deviations(scores_BK, group_of_B)
    weights_K = torch.ones(num_rewards) if reward_weights is None else torch.tensor(reward_weights)
    sums_B = (deviations_BK / _scale(variances_BK, eps)) @ weights_K.to(deviations_BK)
    # The mean is not subtracted: it is 0 for each group up to rounding errors.
    is_finite_B = ~sums_B.isnan()
    std = (sums_B.where(is_finite_B, 0).square().sum() / (is_finite_B.sum() - 1).clamp(min=1)).sqrt()
    return _on_tokens(sums_B / (std + eps), scores, mask)


def _scores_and_groups(scores: Tensor, groups: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Checks the scores and group ids. Returns the scores (float64 [B]) and the group index of each row (int64 [B])."""
    masked_tokens(mask)
    scores_B, groups_B = masked_rows(mask, scores=scores, groups=groups)
    group_of_B = group_index(groups_B)
    return _mask_non_finite(scores_B.double(), group_of_B), group_of_B


def _mask_non_finite(scores: Tensor, group_of_B: Tensor) -> Tensor:
    """Returns the scores, where a non-finite score sets all scores of its group to NaN."""
    return scores.where(group_sums((~scores.isfinite()).long(), group_of_B) == 0, torch.nan)


def _scale(variances: Tensor, eps: float) -> Tensor:
    """Returns sqrt(variance) + eps, which is always above 0."""
    if not eps >= 0:
        raise ValueError(f"eps is {eps}, but must be 0 or more, in units of the score")
    return (variances.sqrt() + eps).clamp(min=torch.finfo(variances.dtype).tiny)


def _on_tokens(advantages_B: Tensor, scores: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, advantages_B.to(at_least_float32(scores).dtype)[:, None], 0)


def _log_choose(n: Tensor, k: Tensor) -> Tensor:
    """Returns log(n choose k); -inf if k > n."""
    n_or_k = torch.maximum(n, k)
    logs = torch.lgamma(n_or_k + 1) - torch.lgamma(k + 1) - torch.lgamma(n_or_k - k + 1)
    return torch.where(k > n, -torch.inf, logs)
