"""Another attempt at a program on the same cluster: what failed starts anew, what is sound stays."""

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
ROLES = {"actor": "train", "critic": "rest", "maker": "judges", "judge": "judges"}


@pytest.fixture
def cluster(ray_session: None, open_cluster: ClusterMaker) -> Cluster:
    return open_cluster("ray", POOLS, ROLES, num_threads=1, call_timeout_s=120.0)


def groups(cluster: Cluster, factor: int = 10) -> dict[str, WorkerGroup]:
    made = {"actor": cluster.group("actor", Faulty), "critic": cluster.group("critic", StatefulReplica)}
    return made | {"maker": cluster.group("maker", Replica), "judge": cluster.group("judge", Scorer, factor)}


def processes(made: dict[str, WorkerGroup]) -> dict[str, list[int]]:
    found = {role: made[role].process_id() for role in ("actor", "judge")}
    return found | {role: [made[role].identify()[0][2]] for role in ("critic", "maker")}


def fail(actor: WorkerGroup, fault: str = "kill") -> None:
    with pytest.raises(FlowError):
        actor.gather(fault).get()


def test_sound_processes_that_can_be_replaced_stay_and_others_start_anew(cluster: Cluster):
    made = groups(cluster)
    before = processes(made)
    assert made["maker"].add_item(5).get() == [[5]]
    fail(made["actor"])
    assert cluster.restart() == ("maker", "judge")
    again = groups(cluster)
    after = processes(again)
    assert again["maker"].add_item(6).get() == [[5, 6]]
    assert {role for role in before if before[role] == after[role]} == {"maker", "judge"}
    assert not set(after["actor"]) & set(before["actor"]) and after["critic"] != before["critic"]
    assert again["actor"].gather("nothing").get() == [2.0, 2.0]


def test_a_role_made_with_other_arguments_is_made_anew_where_it_was(cluster: Cluster):
    made = groups(cluster)
    before = processes(made)
    made["judge"].load(1).get()
    fail(made["actor"], "raise")
    cluster.restart()
    again = groups(cluster, factor=20)
    assert again["judge"].score(BATCH).get("score").tolist() == [20, 40]
    assert processes(again)["judge"] == before["judge"]
    os.kill(before["judge"][0], signal.SIGKILL)
    assert again["judge"].score(BATCH).get("score").tolist() == [20, 40]


def test_a_process_that_failed_itself_starts_anew(cluster: Cluster):
    made = groups(cluster)
    before = processes(made)
    fail(made["actor"])
    with pytest.raises(FlowError):
        made["judge"].score(BATCH, "raise").get("score")
    assert cluster.restart() == ()
    again = groups(cluster)
    assert processes(again)["judge"] != before["judge"]
    assert again["judge"].score(BATCH).get("score").tolist() == [10, 20]


def test_what_processes_that_stay_are_at_is_waited_for_and_told_to_nobody(cluster: Cluster):
    made = groups(cluster)
    processes(made)
    called: list[bool] = []
    cluster.calls.add_idle_callback(lambda: called.append(True) or [])
    napping, lost = made["maker"].nap(2.0), made["maker"].score(BATCH, "kill")
    reading = made["judge"].score(made["critic"].shifted(BATCH).rename({"y": "x"}))
    fail(made["actor"])
    count = len(called)
    assert cluster.restart() == ("maker", "judge")
    assert napping.done() and lost.done() and reading.done() and not cluster.calls.in_flight()
    again = groups(cluster)
    assert again["maker"].shifted(BATCH).apply(_doubled, ("y",), ("z",)).get("z").tolist() == [2, 4]
    assert len(called) == count and all(event.role != "actor" for event in cluster.calls.events)


def test_a_state_that_could_not_be_given_is_not_missed(cluster: Cluster):
    made = groups(cluster)
    before = processes(made)
    made["maker"].load(10).get()
    made["maker"].load(made["actor"].compute("raise"))
    made["maker"].shifted(BATCH)
    with pytest.raises(FlowError):
        cluster.wait_for_calls()
    assert cluster.restart() == ("maker", "judge")
    again = groups(cluster)
    assert processes(again)["maker"] == before["maker"] and again["maker"].add_item(1).get() == [[1]]
    again["maker"].load(20)
    assert again["maker"].shifted(BATCH).get("y").tolist() == [21, 22] and again["maker"].add_item(2).get() == [[1, 2]]


def test_it_may_be_begun_again_more_than_once(cluster: Cluster):
    made = groups(cluster)
    before = processes(made)
    for _ in range(3):
        with pytest.raises(ProcessLost):
            made["critic"].commit("kill").get()
        assert cluster.restart() == ("maker", "judge")
        made = groups(cluster)
        after = processes(made)
        assert (after["maker"], after["judge"]) == (before["maker"], before["judge"])
