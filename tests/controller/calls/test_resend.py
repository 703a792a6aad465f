"""Calls with `resend=False` to processes that are replaced."""

import os
import signal
import time

import pytest

from flowrl import Batch, Cluster, WorkerGroup
from flowrl.controller.errors import ProcessLost
from tests.conftest import ClusterMaker
from tests.controller.faulty_workers import Doubling
from tests.controller.replica_workers import Replica, StatefulReplica

BATCH = Batch.from_columns({"x": [1, 2]})


@pytest.fixture
def cluster(ray_session: None, open_cluster: ClusterMaker) -> Cluster:
    roles = {"rollout": "makers", "reader": "readers"}
    return open_cluster("ray", {"makers": [2], "readers": [1]}, roles, num_threads=1, restarts=5)


def process_of(replica: WorkerGroup) -> int:
    return replica.identify()[0][2]


def check_lost(error: ProcessLost, rank: int, method: str) -> None:
    assert type(error) is ProcessLost
    assert (error.role, error.rank, error.node, error.method) == ("rollout", rank, 0, method)


@pytest.mark.slow
def test_the_caller_gets_process_lost_and_the_run_continues(cluster: Cluster):
    group = cluster.group("rollout", Replica)
    group.load(10).get()
    replica, other = group.replica(1), group.replica(0)
    for _ in range(3):
        before, during = process_of(replica), other.nap(2.0)
        assert replica.add_item(1).get() == [[1]]
        lost = replica.commit("kill")
        with pytest.raises(ProcessLost) as caught:
            lost.get()
        check_lost(caught.value, 1, "commit")
        assert lost.done()
        assert replica.shifted(BATCH).get("y").tolist() == [11, 12]
        assert process_of(replica) != before and during.get() == 10
    cluster.wait_for_calls()


@pytest.mark.slow
def test_calls_of_a_process_that_restarts_fail_or_run_on_the_new_one(cluster: Cluster):
    group = cluster.group("rollout", Replica)
    group.load(10).get()
    replica = group.replica(0)
    for _ in range(3):
        os.kill(process_of(replica), signal.SIGKILL)
        outcomes = []
        again = replica.shifted(BATCH)
        while not again.done():
            handed = replica.nap(0.0)
            try:
                outcomes.append(handed.get())
            except ProcessLost as error:
                check_lost(error, 0, "nap")
                time.sleep(0.05)
        assert set(outcomes) <= {10}
        assert again.get("y").tolist() == [11, 12]
        assert replica.add_item(7).get() == [[7]]
    assert group.shifted(BATCH).get("y").tolist() == [11, 12]


@pytest.mark.slow
def test_calls_queued_behind_a_lost_call_are_lost_or_sent_again(cluster: Cluster):
    group = cluster.group("rollout", Replica)
    replica = group.replica(0)
    group.load(10).get()
    lost, handed, ordinary = replica.commit("kill"), replica.add_item(1), replica.shifted(BATCH)
    group.load(20)
    later = replica.shifted(BATCH)
    assert ordinary.get("y").tolist() == [11, 12] and later.get("y").tolist() == [21, 22]
    with pytest.raises(ProcessLost):
        lost.get()
    try:
        assert handed.get() == [[1]]
    except ProcessLost as error:
        check_lost(error, 0, "add_item")


@pytest.mark.slow
def test_a_lost_call_whose_result_is_not_read_is_ignored(cluster: Cluster):
    replica = cluster.group("rollout", Replica).replica(0)
    lost = replica.commit("kill")
    assert replica.shifted(BATCH).get("y").tolist() == [1, 2]
    cluster.wait_for_calls()
    cluster.calls.wait_until(lost.done)
    assert replica.add_item(1).get() == [[1]]


@pytest.mark.slow
def test_a_call_on_a_lost_result_raises_process_lost_and_its_process_continues(cluster: Cluster):
    replica, reader = cluster.group("rollout", Replica), cluster.group("reader", Doubling)
    double = reader.double(replica.replica(0).score(BATCH, "kill"))
    with pytest.raises(ProcessLost) as caught:
        double.get("double")
    check_lost(caught.value, 0, "score")
    replica.shifted(BATCH).get("y")  # computed by the new process
    assert reader.double(replica.score(BATCH, "nothing")).get("double").tolist() == [2, 4]


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["spin", "spin_in_c"])
def test_a_call_past_its_deadline_raises_process_lost_with_its_stack(cluster: Cluster, fault: str):
    replica = cluster.group("rollout", Replica).replica(1)
    with pytest.raises(ProcessLost) as caught:
        replica.commit(fault).get()
    check_lost(caught.value, 1, "commit")
    assert "rollout.commit" in caught.value.cause
    assert "in commit" in caught.value.remote_traceback
    assert replica.shifted(BATCH).get("y").tolist() == [1, 2]


@pytest.mark.slow
def test_a_process_that_is_lost_again_and_again_ends_the_run(ray_session: None, open_cluster: ClusterMaker):
    cluster = open_cluster("ray", {"makers": [1]}, {"rollout": "makers"}, num_threads=1, restarts=1)
    replica = cluster.group("rollout", Replica)
    for _ in range(2):
        replica.shifted(BATCH).get("y")
        with pytest.raises(ProcessLost):
            replica.commit("kill").get()
    with pytest.raises(ProcessLost):
        replica.shifted(BATCH).get("y")
    with pytest.raises(ProcessLost):
        cluster.calls.wait_until(lambda: False)


@pytest.mark.slow
def test_a_process_with_unrecoverable_state_is_not_replaced(cluster: Cluster):
    stateful = cluster.group("rollout", StatefulReplica)
    with pytest.raises(ProcessLost) as caught:
        stateful.replica(0).commit("kill").get()
    check_lost(caught.value, 0, "commit")
    with pytest.raises(ProcessLost) as again:
        stateful.identify()
    assert again.value is caught.value
