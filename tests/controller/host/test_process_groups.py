"""Ranks with a process group. Inline, one rank has the results of all."""

import os
from datetime import timedelta

import pytest
import torch

from flowrl import Batch
from flowrl.controller.worker import Worker
from tests.controller.conftest import Shared
from tests.engines.closeness import assert_norm_close
from tests.slow_cases import slow

# The processes of a FaultyBackend are simulated, and have no process group.
pytestmark = pytest.mark.parametrize("backend", ["inline", "ray"], indirect=True)


@pytest.mark.parametrize(("role", "total"), [("sum_a", 6), ("sum_b", 60), slow("sum_two", 3)])
def test_ranks_of_a_role_sum_over_each_other(shared: Shared, role: str, total: int):
    size = shared.sums[role].world_size
    expected = [total] * size if shared.backend == "ray" else [10 if role == "sum_b" else 1]
    assert shared.sums[role].total(1).get() == expected


def test_two_roles_of_the_same_processes_do_not_mix(shared: Shared):
    futures = [shared.sums[role].total(x) for x in range(5) for role in ("sum_a", "sum_b")]
    totals = [future.get()[0] for future in futures]
    assert totals[1::2] == [10 * total for total in totals[::2]]


def timeout_of_collectives(worker: Worker) -> timedelta:
    assert worker.context.process_group is not None
    return worker.context.process_group._get_backend(torch.device("cpu")).options._timeout


def network_interfaces(worker: Worker) -> tuple[str, str]:
    return os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]


def test_calls_end_before_their_collectives(shared: Shared):
    """The error of a call names the rank that is late. The error of a collective is that of a rank that waits."""
    if shared.backend == "inline":
        pytest.skip("one rank has no collectives")
    calls = shared.cluster.calls
    assert calls.timeout_s and calls.start_timeout_s
    for timeout in shared.sums["sum_a"].run(timeout_of_collectives):
        assert timeout.total_seconds() > max(calls.timeout_s, calls.start_timeout_s)


def test_gloo_and_nccl_use_the_interface_of_the_address_of_the_node(shared: Shared):
    if shared.backend == "inline":
        pytest.skip("one rank has no collectives")
    assert shared.sums["sum_two"].run(network_interfaces) == [("lo", "=lo")] * 2


@pytest.mark.parametrize("count", [1, 2, 7])
def test_ranks_without_rows_join_collectives(shared: Shared, count: int):
    x = torch.arange(1, count + 1)
    shares = shared.sums["sum_a"].shares(Batch.from_columns({"x": x})).get("share")
    assert_norm_close(shares, x.double() / x.sum())


def test_an_inline_role_with_a_process_group_has_one_rank(shared: Shared):
    assert shared.sums["sum_a"].world_size == (3 if shared.backend == "ray" else 1)
