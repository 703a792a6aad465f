"""Sums, extremes and deviations within groups, against literals and NumPy."""

import pytest
import torch
from hypothesis import given
from torch import Tensor
from torch.testing import assert_close

from flowrl.algorithms.advantages.group_statistics import (
    group_deviations,
    group_extremes,
    group_index,
    group_sizes,
    group_sums,
)
from tests.algorithms.strategies import grouped_rows, quick

GROUP_OF = torch.tensor([1, 0, 1, 2])
VALUES = torch.tensor([1.0, 5.0, 4.0, -2.0], dtype=torch.float64)


def test_group_index_numbers_ids_in_their_order():
    assert group_index(torch.tensor([7, -3, 7, 10**12])).tolist() == GROUP_OF.tolist()


@pytest.mark.parametrize("groups", [torch.ones(2), torch.ones(2).bool(), torch.ones(2, dtype=torch.complex64)])
def test_group_index_refuses_ids_that_are_not_integers(groups: Tensor):
    with pytest.raises(ValueError, match="group ids must be integers"):
        group_index(groups)


def test_group_index_refuses_ids_per_token():
    with pytest.raises(ValueError, match=r"groups has shape \[2, 3\], it must be \[B\]"):
        group_index(torch.ones(2, 3).long())


def test_group_sums_extremes_and_sizes_by_hand():
    assert group_sums(VALUES, GROUP_OF).tolist() == [5.0, 5.0, 5.0, -2.0]
    low, high = group_extremes(VALUES, GROUP_OF)
    assert low.tolist() == [1.0, 5.0, 1.0, -2.0] and high.tolist() == [4.0, 5.0, 4.0, -2.0]
    assert group_sizes(GROUP_OF).tolist() == [2.0, 1.0, 2.0, 1.0]


def test_group_deviations_by_hand():
    deviations, variances = group_deviations(VALUES, GROUP_OF)
    assert deviations.tolist() == [-1.5, 0.0, 1.5, 0.0] and variances.tolist() == [4.5, 0.0, 4.5, 0.0]


def test_columns_are_treated_alone():
    columns = torch.stack([VALUES, -2 * VALUES], 1)
    assert_close(group_sums(columns, GROUP_OF)[:, 1], -2 * group_sums(VALUES, GROUP_OF))
    assert_close(group_extremes(columns, GROUP_OF)[0][:, 1], -2 * group_extremes(VALUES, GROUP_OF)[1])
    assert_close(group_deviations(columns, GROUP_OF)[1][:, 1], 4 * group_deviations(VALUES, GROUP_OF)[1])


def test_more_groups_than_rows_may_be_numbered_when_their_number_is_given():
    assert group_sums(VALUES, GROUP_OF + 96, num_groups=100).tolist() == [5.0, 5.0, 5.0, -2.0]


@quick
@given(grouped_rows())
def test_group_deviations_agree_with_numpy(rows: tuple[Tensor, Tensor]):
    values, groups = rows
    deviations, variances = group_deviations(values, group_index(groups))
    for row, group in enumerate(groups):
        x = values[groups == group].numpy()
        assert abs(deviations[row] - (values[row] - x.mean())) < 1e-9
        assert abs(variances[row] - (x.var(ddof=1) if len(x) > 1 else 0)) < 1e-6


@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e300, -7.3])
def test_group_deviations_of_equal_values_are_exactly_zero(value: float):
    deviations, variances = group_deviations(torch.full((7,), value, dtype=torch.float64), torch.zeros(7).long())
    assert not deviations.any() and not variances.any()
