"""Roles on parts of a pool, on several pools, and several of each in one process."""

import pytest

from flowrl import Batch
from flowrl.controller.errors import WorkerError
from tests.conftest import BackendName, ClusterMaker
from tests.controller.faulty_workers import RaisingWorker
from tests.controller.workers import Arithmetic, Summing

POOLS = {"a": [2], "b": [1], "c": [1]}
ROLES = {"all": "a+b", "front": "a[0:1]", "back": "a[1:2]+b", "pair": {"pool": "a", "tp": 2}, "other": "c"}
BATCH = {"x": [1, 2, 3, 4, 5]}


@pytest.mark.slow
def test_meshes_that_overlap_sum_over_their_own_ranks(ray_session: None, open_cluster: ClusterMaker):
    cluster = open_cluster("ray", POOLS, ROLES, num_threads=1)
    groups = {role: cluster.group(role, Summing, factor) for role, factor in (("all", 1), ("back", 10), ("pair", 100))}
    futures = [(role, groups[role].total(x)) for x in (1, 2, 3) for role in ("pair", "all", "back")]
    totals = [(role, future.get()) for role, future in futures]
    expected = {"all": [6] * 3, "back": [30] * 2, "pair": [300] * 2}
    assert totals == [(role, [x * t for t in expected[role]]) for x in (1, 2, 3) for role in ("pair", "all", "back")]


def test_roles_of_one_process_reach_each_other_with_different_ranks(backend: BackendName, open_cluster: ClusterMaker):
    cluster = open_cluster(backend, POOLS, ROLES, num_threads=1)
    everywhere, back = cluster.group("all", Arithmetic, 2), cluster.group("back", Arithmetic, 3)
    assert everywhere.identify() == [(0, 3, 1), (1, 3, 1), (2, 3, 1)]
    assert back.identify() == [(0, 2, 1), (1, 2, 1)]
    assert back.peer_factor("all") == [2, 2]
    assert everywhere.peer_factor("back") == [None, 3, 3]
    assert back.is_colocated_in(everywhere) and not everywhere.is_colocated_in(back)
    if backend == "ray":
        assert back.process_id() == everywhere.process_id()[1:]


@pytest.mark.slow
def test_rows_are_sent_from_part_of_a_pool_to_several_pools(backend: BackendName, open_cluster: ClusterMaker):
    cluster = open_cluster(backend, POOLS, ROLES, num_threads=1)
    front, everywhere = cluster.group("front", Arithmetic, 3), cluster.group("all", Arithmetic, 2)
    batch = Batch.from_columns(BATCH)
    batch["x"] = front.scaled(batch)
    assert everywhere.scaled(batch).get("y").tolist() == [6, 12, 18, 24, 30]


def test_pools_that_a_role_spans_fail_together_and_others_continue(open_cluster: ClusterMaker):
    cluster = open_cluster("faulty", POOLS, ROLES, num_threads=1)
    front, back, other = (cluster.group(role, RaisingWorker) for role in ("front", "back", "other"))
    with pytest.raises(WorkerError, match=r"back\.fail_on .*rank 1 .*node 0\b.*KeyError"):
        back.fail_on(1).get()
    with pytest.raises(WorkerError, match=r"back\.fail_on .*rank 1\b"):
        front.add_one(1)
    assert other.add_one(1).get() == [2]
