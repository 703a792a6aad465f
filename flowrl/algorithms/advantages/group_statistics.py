"""Rows that belong together, by an id: sums, extremes and deviations within a group, for every row of it.

Shape suffixes: B rows, G groups, ... any further dimensions, each treated alone.

Ids are arbitrary integers; groups need be neither contiguous nor of equal size. Results stand at the rows, not at the
groups, so no number of groups has to be known, and permuting the rows permutes them.
"""

import torch
from torch import Tensor


def group_index(groups: Tensor) -> Tensor:
    """int64 [B]: the ids replaced by 0 to G - 1, in the order of the ids.

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
    """[B, ...]: at each row the sum of `values` over its group.

    Arguments:
        values: [B, ...].
        group_of: int64 [B], of `group_index`, or any number below `num_groups`.
        num_groups: an upper bound of the number of groups; None is the number of rows. A bound that is known without
            looking at `group_of` spares a device synchronisation.
    """
    sums = values.new_zeros(_table_shape(values, num_groups)).index_add_(0, group_of, values)
    return sums[group_of]


def group_extremes(values: Tensor, group_of: Tensor, num_groups: int | None = None) -> tuple[Tensor, Tensor]:
    """([B, ...], [B, ...]): at each row the smallest and the largest of `values` in its group; arguments as above."""
    index = group_of.reshape(-1, *[1] * (values.dim() - 1)).expand_as(values)
    table = values.new_zeros(_table_shape(values, num_groups))
    low = table.scatter_reduce(0, index, values, "amin", include_self=False)
    high = table.scatter_reduce(0, index, values, "amax", include_self=False)
    return low[group_of], high[group_of]


def group_sizes(group_of: Tensor) -> Tensor:
    """float64 [B]: at each row the number of rows of its group."""
    return group_sums(torch.ones_like(group_of, dtype=torch.float64), group_of)


def group_deviations(values: Tensor, group_of: Tensor) -> tuple[Tensor, Tensor]:
    """([B, ...], [B, ...]): the value minus the mean of its group, and that group's unbiased variance.

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
