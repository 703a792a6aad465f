"""Computes group sums, extremes, sizes and deviations, returned per row.

Shape suffixes: B rows, G groups, ... further dimensions, processed independently.

Group ids are arbitrary integers; groups may be interleaved and differ in size. Results are per row, so the number of
groups need not be known.
"""

import torch
from torch import Tensor


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
