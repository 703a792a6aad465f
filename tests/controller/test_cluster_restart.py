"""`Cluster.restart`: failed and stateful processes start again, recoverable ones stay."""

import os
import signal

import pytest

from flowrl import Batch, Cluster, WorkerGroup
from flowrl.controller.errors import FlowError, ProcessLost
from tests.conftest import ClusterMaker
from tests.controller.faulty_workers import Faulty, Scorer
from tests.controller.replica_workers import Replica, StatefulReplica
from tests.controller.test_replica import _doubled

BATCH = Batch.from_columns({"x": [1, 2]})
POOLS = {"train": [2], "rest": [1], "judges": [1]}
ROLES = {"actor": "train", "critic": "rest", "rollout": "judges", "judge": "judges"}


@pytest.fixture
def cluster(ray_session: None, open_cluster: ClusterMaker) -> Cluster:
    return open_cluster("ray", POOLS, ROLES, num_threads=1, call_timeout_s=120.0)


def make_groups(cluster: Cluster, factor: int = 10) -> dict[str, WorkerGroup]:
    groups = {"actor": cluster.group("actor", Faulty), "critic": cluster.group("critic", StatefulReplica)}
    return groups | {"rollout": cluster.group("rollout", Replica), "judge": cluster.group("judge", Scorer, factor)}


def get_process_ids(groups: dict[str, WorkerGroup]) -> dict[str, list[int]]:
    ids = {role: groups[role].process_id() for role in ("actor", "judge")}
    return ids | {role: [groups[role].identify()[0][2]] for role in ("critic", "rollout")}


def fail(actor: WorkerGroup, fault: str = "kill") -> None:
    with pytest.raises(FlowError):
        actor.gather(fault).get()


def test_recoverable_processes_are_retained_and_others_restart(cluster: Cluster):
    groups = make_groups(cluster)
    before = get_process_ids(groups)
    assert groups["rollout"].add_item(5).get() == [[5]]
    fail(groups["actor"])
    assert cluster.restart() == ("rollout", "judge")
    restarted = make_groups(cluster)
    after = get_process_ids(restarted)
    assert restarted["rollout"].add_item(6).get() == [[5, 6]]
    assert {role for role in before if before[role] == after[role]} == {"rollout", "judge"}
    assert not set(after["actor"]) & set(before["actor"]) and after["critic"] != before["critic"]
    assert restarted["actor"].gather("nothing").get() == [2.0, 2.0]


@pytest.mark.slow
def test_a_role_with_other_arguments_is_constructed_again_in_its_process(cluster: Cluster):
    groups = make_groups(cluster)
    before = get_process_ids(groups)
    groups["judge"].load(1).get()
    fail(groups["actor"], "raise")
    cluster.restart()
    restarted = make_groups(cluster, factor=20)
    assert restarted["judge"].score(BATCH).get("score").tolist() == [20, 40]
    assert get_process_ids(restarted)["judge"] == before["judge"]
    os.kill(before["judge"][0], signal.SIGKILL)
    assert restarted["judge"].score(BATCH).get("score").tolist() == [20, 40]


@pytest.mark.slow
def test_a_recoverable_process_that_failed_restarts(cluster: Cluster):
    groups = make_groups(cluster)
    before = get_process_ids(groups)
    fail(groups["actor"])
    with pytest.raises(FlowError):
        groups["judge"].score(BATCH, "raise").get("score")
    assert cluster.restart() == ()
    restarted = make_groups(cluster)
    assert get_process_ids(restarted)["judge"] != before["judge"]
    assert restarted["judge"].score(BATCH).get("score").tolist() == [10, 20]


@pytest.mark.slow
def test_calls_of_retained_processes_are_awaited_and_dropped(cluster: Cluster):
    groups = make_groups(cluster)
    get_process_ids(groups)
    called: list[bool] = []
    cluster.calls.add_idle_callback(lambda: called.append(True) or [])
    napping, lost = groups["rollout"].nap(2.0), groups["rollout"].score(BATCH, "kill")
    reading = groups["judge"].score(groups["critic"].shifted(BATCH).rename({"y": "x"}))
    fail(groups["actor"])
    count = len(called)
    assert cluster.restart() == ("rollout", "judge")
    assert napping.done() and lost.done() and reading.done() and not cluster.calls.in_flight()
    restarted = make_groups(cluster)
    assert restarted["rollout"].shifted(BATCH).apply(_doubled, ("y",), ("z",)).get("z").tolist() == [2, 4]
    assert len(called) == count and all(event.role != "actor" for event in cluster.calls.events)


@pytest.mark.slow
def test_a_state_that_failed_before_a_restart_is_not_required_after_it(cluster: Cluster):
    groups = make_groups(cluster)
    before = get_process_ids(groups)
    groups["rollout"].load(10).get()
    groups["rollout"].load(groups["actor"].compute("raise"))
    groups["rollout"].shifted(BATCH)
    with pytest.raises(FlowError):
        cluster.wait_for_calls()
    assert cluster.restart() == ("rollout", "judge")
    restarted = make_groups(cluster)
    assert get_process_ids(restarted)["rollout"] == before["rollout"] and restarted["rollout"].add_item(1).get() == [
        [1]
    ]
    restarted["rollout"].load(20)
    assert restarted["rollout"].shifted(BATCH).get("y").tolist() == [21, 22] and restarted["rollout"].add_item(
        2
    ).get() == [[1, 2]]


@pytest.mark.slow
def test_a_cluster_restarts_more_than_once(cluster: Cluster):
    groups = make_groups(cluster)
    before = get_process_ids(groups)
    for _ in range(3):
        with pytest.raises(ProcessLost):
            groups["critic"].commit("kill").get()
        assert cluster.restart() == ("rollout", "judge")
        groups = make_groups(cluster)
        after = get_process_ids(groups)
        assert (after["rollout"], after["judge"]) == (before["rollout"], before["judge"])
