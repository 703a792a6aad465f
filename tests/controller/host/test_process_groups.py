"""Ranks with a process group. Inline, one rank has the results of all."""

import pytest
import torch

from flowrl import Batch
from tests.controller.conftest import Shared
from tests.engines.closeness import assert_norm_close
from tests.slow_cases import slow


@pytest.mark.parametrize(("role", "total"), [("sum_a", 6), ("sum_b", 60), slow("sum_two", 3)])
def test_ranks_of_a_role_sum_over_each_other(shared: Shared, role: str, total: int):
    size = shared.sums[role].world_size
    expected = [total] * size if shared.backend == "ray" else [10 if role == "sum_b" else 1]
    assert shared.sums[role].total(1).get() == expected


def test_two_roles_of_the_same_processes_do_not_mix(shared: Shared):
    futures = [shared.sums[role].total(x) for x in range(5) for role in ("sum_a", "sum_b")]
    totals = [future.get()[0] for future in futures]
    assert totals[1::2] == [10 * total for total in totals[::2]]


@pytest.mark.parametrize("count", [1, 2, 7])
def test_ranks_without_rows_join_collectives(shared: Shared, count: int):
    x = torch.arange(1, count + 1)
    shares = shared.sums["sum_a"].shares(Batch.from_columns({"x": x})).get("share")
    assert_norm_close(shares, x.double() / x.sum())


def test_an_inline_role_with_a_process_group_has_one_rank(shared: Shared):
    assert shared.sums["sum_a"].world_size == (3 if shared.backend == "ray" else 1)
