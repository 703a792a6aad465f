"""The failure table of docs/architecture.md with real processes: what fails when, and what the driver is told."""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from flowrl import Batch, Cluster, FlowError, WorkerGroup
from flowrl.controller.errors import DeadlineError, ProcessLost, WorkerError
from flowrl.controller.failures.failures import LIVENESS_INTERVAL_S
from tests.conftest import ClusterMaker
from tests.controller.failing import Failing
from tests.controller.faults import DEADLINE_S, Doubling, Faulty, Judge, Recovering, Summing
from tests.controller.workers import Arithmetic

TOLD_WITHIN_S = 5.0

CAUSES = {
    "raise": (WorkerError, "KeyError: 'nothing there'"),
    "kill": (ProcessLost, "its process has ended"),
    "spin": (DeadlineError, "deadline of 2 s, in commit"),
    "spin_in_c": (DeadlineError, "deadline of 2 s, in commit"),
    "unpicklable": (WorkerError, "its result cannot be pickled"),
}


@pytest.fixture
def pair(ray_session: None, open_cluster: ClusterMaker) -> Cluster:
    return open_cluster("ray", {"main": [2]}, {"first": "main", "second": "main"}, num_threads=1, call_timeout_s=120.0)


def check(error: FlowError, fault: str, role: str, method: str, began_s: float) -> None:
    kind, cause = CAUSES[fault]
    assert isinstance(error, WorkerError) and type(error) is kind
    assert (error.role, error.rank, error.node, error.method) == (role, 1, 0, method)
    assert cause in error.cause
    late_s = DEADLINE_S if kind is DeadlineError else 0.0
    assert time.monotonic() - began_s < TOLD_WITHIN_S + late_s


def check_ended(process_ids: list[int]) -> None:
    """The processes of a set that failed are ended, those that did not fail too."""
    deadline = time.monotonic() + 5
    while any(map(psutil.pid_exists, process_ids)):
        assert time.monotonic() < deadline, "processes of a broken host set go on"
        time.sleep(0.05)


SPIN = pytest.param("spin", marks=pytest.mark.slow)
"""It sticks as `spin_in_c` does, but its interpreter still answers."""


@pytest.mark.parametrize("fault", ["raise", "kill", SPIN, "spin_in_c", "unpicklable"])
def test_a_rank_that_fails_while_it_computes(pair: Cluster, fault: str):
    group = pair.group("first", Faulty)
    ids = group.process_id()
    began_s = time.monotonic()
    with pytest.raises(FlowError) as caught:
        group.compute(fault).get()
    check(caught.value, fault, "first", "compute", began_s)
    check_ended(ids)


@pytest.mark.parametrize("fault", ["raise", "kill", SPIN, "spin_in_c"])
def test_a_rank_that_fails_while_its_peer_waits_in_a_collective(pair: Cluster, fault: str):
    group = pair.group("first", Faulty)
    ids = group.process_id()
    began_s = time.monotonic()
    with pytest.raises(FlowError) as caught:
        group.gather(fault).get()
    check(caught.value, fault, "first", "gather", began_s)
    assert ("; rank 0 waits for it" in str(caught.value)) == fault.startswith("spin")
    check_ended(ids)


@pytest.mark.parametrize("fault", ["raise", "kill", SPIN, "spin_in_c"])
def test_a_rank_that_fails_while_it_is_made(ray_session: None, open_cluster: ClusterMaker, fault: str):
    cluster = open_cluster(
        "ray", {"main": [2]}, {"first": "main", "second": "main"}, num_threads=1, call_timeout_s=120.0
    )
    ids = cluster.group("first", Faulty).process_id()
    cluster.calls.timeout_s = DEADLINE_S  # the processes are there: only the constructor is left to run
    began_s = time.monotonic()
    cluster.group("second", Faulty, fault)
    with pytest.raises(FlowError) as caught:
        cluster.wait_for_calls()
    check(caught.value, fault, "second", "__init__", began_s)
    check_ended(ids)


@pytest.mark.parametrize("method", ["compute", "gather"])
def test_a_process_that_is_killed_between_calls(pair: Cluster, method: str):
    group = pair.group("first", Faulty)
    ids = group.process_id()
    os.kill(ids[1], signal.SIGKILL)
    began_s = time.monotonic()
    with pytest.raises(FlowError) as caught:
        getattr(group, method)("nothing").get()
    check(caught.value, "kill", "first", method, began_s)
    check_ended(ids)


@pytest.mark.parametrize(
    ("method", "cause"),
    [
        ("misnamed", "declares writes=(y) but returned z"),
        ("short", "declares rows=2, which is 4 rows here, but returned 2"),
    ],
)
def test_a_rank_whose_result_breaks_its_contract(pair: Cluster, method: str, cause: str):
    group = pair.group("first", Faulty)
    ids = group.process_id()
    with pytest.raises(WorkerError) as caught:
        getattr(group, method)(Batch.from_columns({"x": [1, 2, 3, 4]})).get("y")
    assert (caught.value.role, caught.value.rank, caught.value.method) == ("first", 1, method)
    assert cause in caught.value.cause
    check_ended(ids)


def test_every_later_call_and_every_colocated_role_tells_the_first_cause(pair: Cluster):
    first, second = pair.group("first", Faulty), pair.group("second", Faulty)
    waiting = second.compute("nothing")
    with pytest.raises(WorkerError) as caught:
        first.compute("raise").get()
    for _ in range(2):
        with pytest.raises(WorkerError) as again:
            second.compute("nothing")
        assert again.value is caught.value
    waiting.get()


def test_a_driver_that_looks_late_is_told_the_same_cause(pair: Cluster):
    group = pair.group("first", Faulty)
    group.process_id()
    late = group.gather("raise")
    time.sleep(3)
    with pytest.raises(WorkerError) as caught:
        late.get()
    assert (caught.value.rank, caught.value.cause) == (1, CAUSES["raise"][1])


def test_a_rank_that_waits_for_one_in_another_method_is_not_blamed(pair: Cluster):
    group = pair.group("first", Faulty)
    group.process_id()
    group.linger(60.0)
    with pytest.raises(DeadlineError) as caught:
        group.gather("nothing").get()
    assert (caught.value.rank, caught.value.method) == (1, "linger")
    assert "still running, in linger" in caught.value.cause
    assert "while first.gather on rank 0 waits for it past its deadline of 2 s" in caught.value.cause


def test_every_set_tells_its_own_failure(ray_session: None, open_cluster: ClusterMaker):
    cluster = open_cluster("ray", {"a": [1], "b": [1]}, {"first": "a", "second": "b"})
    for role in ("first", "second"):
        group = cluster.group(role, Failing)
        with pytest.raises(WorkerError, match=f"{role}.fail_on failed"):
            group.fail_on(0).get()


def test_a_call_whose_rows_are_known_too_late_tells_the_failure(ray_session: None, open_cluster: ClusterMaker):
    """The number of rows is waited for, and meanwhile the processes that it is for have ended."""
    roles = {"first": "a", "busy": "a", "second": "b"}
    cluster = open_cluster("ray", {"a": [1], "b": [1]}, roles, num_threads=1)
    first, second, busy = (
        cluster.group("first", Arithmetic),
        cluster.group("second", Failing),
        cluster.group("busy", Failing),
    )
    batch = Batch.from_columns({"x": [1, 2]}, {"ids": [1, 2]}, [1, 1])
    first.process_id()
    second.add_one(1).get()
    busy.sleep(3.0)
    second.fail_on(0)
    with pytest.raises(WorkerError, match=r"second\.fail_on failed on rank 0"):
        second.run(lambda worker, table: None, first.keep_even(batch))


def test_the_stack_of_the_silent_rank_is_told(pair: Cluster):
    group = pair.group("first", Faulty)
    with pytest.raises(DeadlineError) as caught:
        group.gather("spin").get()
    assert [line.split(" in ")[-1] for line in caught.value.remote_traceback.splitlines()] == ["gather", "commit"]


# Processes that hold nothing of their own are replaced.


@pytest.fixture
def replaceable(ray_session: None, open_cluster: ClusterMaker) -> tuple[Cluster, list[str]]:
    said: list[str] = []
    roles = {"judge": "judges", "reader": "readers"}
    cluster = open_cluster("ray", {"judges": [2], "readers": [1]}, roles, num_threads=1, notify=said.append)
    return cluster, said


def doubled(cluster: Cluster, judge: WorkerGroup, fault: str | None, once: Path | None) -> list[int]:
    """What a second role makes of the judge's scores, by references that were handed on before they were there."""
    reader = cluster.group("reader", Doubling)
    batch = Batch.from_columns({"x": [1, 2, 3, 4]})
    return reader.double(judge.score(batch, fault, once)).get("double").tolist()


@pytest.mark.parametrize("fault", ["kill", SPIN, "spin_in_c"])
def test_a_stateless_process_lost_in_a_call_is_replaced(
    replaceable: tuple[Cluster, list[str]], fault: str, tmp_path: Path
):
    cluster, said = replaceable
    judge = cluster.group("judge", Judge, 10)
    judge.load(1).get()
    assert doubled(cluster, judge, fault, tmp_path / "once") == [22, 42, 62, 82]
    cluster.wait_for_calls()
    assert any("lost its process; another took its place" in line for line in said)
    assert any("deadline of 2 s, in commit" in line for line in said) == (fault != "kill")


def test_a_replaced_process_is_told_of_when_it_is_lost_and_not_when_another_works(
    ray_session: None, open_cluster: ClusterMaker, tmp_path: Path
) -> None:
    said: list[str] = []
    cluster = open_cluster("ray", {"judges": [1]}, {"judge": "judges"}, num_threads=1, notify=said.append)
    judge = cluster.group("judge", Recovering, tmp_path / "lines", 10.0)
    judge.load(7).get()
    (process_id,), batch = judge.process_id(), Batch.from_columns({"x": [1, 2]})
    started = time.monotonic()
    cluster.calls.wait_until(
        lambda: time.monotonic() > started + 2 * LIVENESS_INTERVAL_S
    )  # it looks only while it waits
    del said[:]
    os.kill(process_id, signal.SIGKILL)
    killed = time.monotonic()
    scored = judge.score(batch)
    while not said and time.monotonic() < killed + 8:
        with suppress(TimeoutError):
            cluster.calls.wait(cluster.calls.in_flight(), 0.5)
    assert time.monotonic() < killed + 5
    assert said == ["judge on rank 0 (node 0) lost its process in score; another is started"]
    assert scored.get("score").tolist() == [8, 9]


def test_a_stateless_process_lost_between_calls_is_replaced(replaceable: tuple[Cluster, list[str]]):
    cluster, _ = replaceable
    judge = cluster.group("judge", Judge, 10)
    judge.load(1).get()
    for process_id in judge.process_id():
        os.kill(process_id, signal.SIGKILL)
    assert doubled(cluster, judge, None, None) == [22, 42, 62, 82]


def test_a_stateless_process_lost_while_it_is_made_is_replaced(replaceable: tuple[Cluster, list[str]], tmp_path: Path):
    cluster, _ = replaceable
    judge = cluster.group("judge", Judge, 10, "kill", tmp_path / "once")
    assert doubled(cluster, judge, None, None) == [20, 40, 60, 80]


def test_calls_to_a_replaced_process_see_the_state_of_their_own_time(
    replaceable: tuple[Cluster, list[str]], tmp_path: Path
):
    """A new process may be given the calls that wait in any order."""
    cluster, _ = replaceable
    judge = cluster.group("judge", Judge, 1)
    batch = Batch.from_columns({"x": [0, 0]})
    results = [judge.score(batch, "kill", tmp_path / "once")]
    for offset in (10, 20, 30):
        judge.load(offset)
        results.append(judge.score(batch))
    assert [result.get("score").tolist() for result in results] == [[0, 0], [10, 10], [20, 20], [30, 30]]


def test_a_state_in_parts_is_given_again_from_its_beginning(
    replaceable: tuple[Cluster, list[str]], tmp_path: Path
) -> None:
    """The process is lost between two parts, or in one of them, while calls before and after wait."""
    cluster, _ = replaceable
    summing = cluster.group("judge", Summing, 1)
    batch = Batch.from_columns({"x": [0, 0]})
    results = [summing.score(batch)]
    for offset, lost in ((10, None), (20, "score"), (30, "load")):
        summing.load_part(offset, 0)
        if lost == "score":
            results.append(summing.score(batch, "kill", tmp_path / lost))
        summing.load_part(1, 1, "kill" if lost == "load" else None, tmp_path / f"{lost}-part")
        summing.load_part(2, 2)
        results.append(summing.score(batch))
    found = [result.get("score").tolist() for result in results]
    assert found == [[0, 0], [13, 13], [20, 20], [23, 23], [33, 33]]


def test_what_a_stateless_worker_raises_is_told_and_not_tried_again(replaceable: tuple[Cluster, list[str]]):
    cluster, _ = replaceable
    judge = cluster.group("judge", Judge, 1)
    with pytest.raises(WorkerError, match="KeyError: 'nothing there'"):
        judge.score(Batch.from_columns({"x": [1]}), "raise").get("score")


def test_a_process_that_is_lost_again_and_again_ends_the_run(replaceable: tuple[Cluster, list[str]]):
    cluster, _ = replaceable
    judge = cluster.group("judge", Judge, 1)
    with pytest.raises(ProcessLost, match=r"judge\.score failed on rank [01] .*its process has ended"):
        judge.score(Batch.from_columns({"x": [1]}), "kill").get("score")


def test_a_call_that_sticks_again_and_again_is_told_with_its_stack(ray_session: None, open_cluster: ClusterMaker):
    said: list[str] = []
    cluster = open_cluster("ray", {"judges": [1]}, {"judge": "judges"}, num_threads=1, restarts=1, notify=said.append)
    judge = cluster.group("judge", Judge, 1)
    with pytest.raises(
        DeadlineError, match=r"judge\.score failed on rank 0 .*: not done after its deadline of 2 s, in commit"
    ):
        judge.score(Batch.from_columns({"x": [1]}), "spin").get("score")
    late = [line for line in said if line.startswith("judge.score")]
    assert len(late) == 2 and all("in commit" in line for line in late), said


def test_a_new_process_has_the_time_of_a_constructor_and_makes_its_worker_once(
    replaceable: tuple[Cluster, list[str]], tmp_path: Path
):
    cluster, said = replaceable
    judge = cluster.group("judge", Recovering, tmp_path / "lines", DEADLINE_S * 2)
    judge.load(7)
    os.kill(judge.process_id()[0], signal.SIGKILL)
    lines_before = len((tmp_path / "lines").read_text().splitlines())
    assert judge.score(Batch.from_columns({"x": [1, 2]})).get("score").tolist() == [8, 9]
    assert len((tmp_path / "lines").read_text().splitlines()) == lines_before + 1
    assert [line for line in said if "deadline" in line] == []


def test_a_new_process_that_cannot_make_its_worker_ends_the_run(
    ray_session: None, open_cluster: ClusterMaker, tmp_path: Path
):
    cluster = open_cluster("ray", {"judges": [1]}, {"judge": "judges"}, num_threads=1)
    judge = cluster.group("judge", Recovering, tmp_path / "lines", "no weights any more")
    os.kill(judge.process_id()[0], signal.SIGKILL)
    score = judge.score(Batch.from_columns({"x": [1]}))
    with pytest.raises(WorkerError, match=r"judge\.__init__ failed on rank 0 .*ArithmeticError: no weights any more"):
        score.get("score")
    with pytest.raises(WorkerError, match="no weights any more"):
        judge.load(1)
