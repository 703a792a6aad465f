"""Calls of a single replica of a group."""

import pytest

from flowrl import Batch, Cluster, ContractError
from flowrl.controller.errors import WorkerError
from tests.conftest import BackendName, ClusterMaker
from tests.controller.replica_workers import Replica
from tests.controller.workers import Arithmetic
from tests.slow_cases import one_of

BATCH = Batch.from_columns({"x": [1, 2, 3]})


SEVERAL_REPLICAS = pytest.mark.parametrize("backend", one_of("faulty", "ray"), indirect=True)
"""The inline backend has one replica."""


@pytest.fixture
def cluster(backend: BackendName, open_cluster: ClusterMaker) -> Cluster:
    roles = {"rollout": "makers", "pairs": {"pool": "makers", "tp": 2}}
    return open_cluster(backend, {"makers": [4]}, roles, num_threads=1)


@SEVERAL_REPLICAS
def test_a_call_of_a_replica_runs_only_on_its_rank(cluster: Cluster):
    group = cluster.group("rollout", Replica)
    everyone = group.identify()
    assert group.replica(2).identify() == [everyone[2]] == [(2, 4, everyone[2][2])]
    cluster.wait_for_calls()
    last = cluster.calls.events[-1]
    assert (last.role, last.rank, last.method) == ("rollout", 2, "identify")


@SEVERAL_REPLICAS
def test_a_replica_receives_and_returns_full_batches(cluster: Cluster):
    group = cluster.group("rollout", Replica)
    group.replica(1).load(10)
    assert group.replica(1).shifted(BATCH).get("y").tolist() == [11, 12, 13]
    assert group.replica(0).shifted(BATCH).get("y").tolist() == [1, 2, 3]
    assert group.replica(1).shifted(BATCH).apply(_doubled, ("y",), ("z",)).get("z").tolist() == [22, 24, 26]


def _doubled(table):
    from flowrl import make_tensordict  # noqa: PLC0415 (runs in another process)

    return make_tensordict({"z": table["rows", "y"] * 2})


@SEVERAL_REPLICAS
def test_a_replica_of_several_ranks_calls_all_of_them(cluster: Cluster):
    pairs = cluster.group("pairs", Replica)
    ranks = [rank for rank, _, _ in pairs.replica(1).identify()]
    assert (pairs.mesh.dp, ranks) == (2, [2, 3])
    assert pairs.replica(1).shifted(BATCH).num_rows == 3


@SEVERAL_REPLICAS
def test_an_error_names_the_rank_of_the_role(cluster: Cluster):
    group = cluster.group("rollout", Replica)
    with pytest.raises(WorkerError, check=lambda error: (error.method, error.rank) == ("commit", 3)):
        group.replica(3).commit("raise").get()


def test_there_is_one_view_of_each_replica(backend: BackendName, open_cluster: ClusterMaker):
    group = open_cluster(backend, {"makers": [1]}, {"rollout": "makers"}).group("rollout", Replica)
    assert group.replica(0) is group.replica(0)
    assert group.replica(0).add_item(3).get() == [[3]]
    with pytest.raises(ContractError, match="replica 1"):
        group.replica(1)


def test_only_replicated_workers_have_replica_views(open_cluster: ClusterMaker):
    group = open_cluster("inline", {"main": [2]}, {"actor": "main"}).group("actor", Arithmetic)
    with pytest.raises(ContractError, match="replicated"):
        group.replica(0)
