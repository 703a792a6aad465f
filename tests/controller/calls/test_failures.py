"""The failure table of docs/failures.md with real processes: one case per kind, and slow tests of all others.

test_failure_table.py has all cases with simulated processes.
"""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from flowrl import Batch, Cluster, FlowError, Placement, WorkerGroup
from flowrl.controller.calls.failures import LIVENESS_INTERVAL_S
from flowrl.controller.errors import DeadlineError, ProcessLost, WorkerError, WorkerUserError
from tests.conftest import ClusterMaker
from tests.controller.faulty_workers import (
    DEADLINE_S,
    Chunked,
    Doubling,
    Faulty,
    RaisingWorker,
    Scorer,
    SlowRestart,
    StatefulScorer,
)
from tests.controller.workers import Arithmetic
from tests.errors import missing_facts, rejects
from tests.slow_cases import slow

ERRORS = {
    "raise": WorkerError,
    "kill": ProcessLost,
    "spin": DeadlineError,
    "spin_in_c": DeadlineError,
    "unpicklable": WorkerError,
}
DETECTION_S = 60.0
"""Upper bound on the time until a failure is raised; processes that hang would exceed it."""


@pytest.fixture
def pair(ray_session: None, open_cluster: ClusterMaker) -> Cluster:
    return open_cluster("ray", {"main": [2]}, {"first": "main", "second": "main"}, num_threads=1, call_timeout_s=120.0)


def shorten_deadline(cluster: Cluster, fault: str) -> None:
    """Limits the next calls to `DEADLINE_S` if the fault is one that hangs."""
    if fault.startswith("spin"):
        cluster.calls.timeout_s = cluster.calls.start_timeout_s = DEADLINE_S


def check_error(error: FlowError, fault: str, role: str, method: str, started_s: float) -> None:
    assert isinstance(error, WorkerError) and type(error) is ERRORS[fault]
    assert (error.role, error.rank, error.node, error.method) == (role, 1, 0, method)
    if isinstance(error, DeadlineError):
        assert error.remote_traceback.rstrip().endswith("in commit")
        assert not missing_facts(str(error), "start_timeout_s" if method == "__init__" else "call_timeout_s")
    assert time.monotonic() - started_s < DETECTION_S


def check_ended(process_ids: list[int]) -> None:
    """All processes of a failed failure group are ended."""
    deadline = time.monotonic() + 60
    while any(map(psutil.pid_exists, process_ids)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def fail_call(cluster: Cluster, fault: str, method: str) -> FlowError:
    """Calls a method with a fault on rank 1; returns the error after checking it and the end of all processes."""
    group = cluster.group("first", Faulty)
    ids = group.process_id()
    shorten_deadline(cluster, fault)
    started_s = time.monotonic()
    with pytest.raises(FlowError) as caught:
        getattr(group, method)(fault).get()
    check_error(caught.value, fault, "first", method, started_s)
    check_ended(ids)
    return caught.value


@pytest.mark.parametrize("fault", ["raise", slow("kill"), slow("spin"), slow("spin_in_c"), slow("unpicklable")])
def test_a_rank_that_fails_in_a_method(pair: Cluster, fault: str):
    fail_call(pair, fault, "compute")


@pytest.mark.slow
@pytest.mark.parametrize("fault", [slow("raise"), "kill", slow("spin"), slow("spin_in_c")])
def test_a_rank_that_fails_while_its_peer_waits_in_a_collective(pair: Cluster, fault: str):
    error = fail_call(pair, fault, "gather")
    if isinstance(error, DeadlineError):
        frames = [line.split(" in ")[-1] for line in error.remote_traceback.splitlines()]
        assert frames == ["gather", "commit"]


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["raise", slow("kill"), slow("spin"), slow("spin_in_c")])
def test_a_rank_that_fails_in_its_constructor(pair: Cluster, fault: str):
    ids = pair.group("first", Faulty).process_id()
    shorten_deadline(pair, fault)  # the processes have started, so this limits the constructor only
    started_s = time.monotonic()
    pair.group("second", Faulty, fault)
    with pytest.raises(FlowError) as caught:
        pair.wait_for_calls()
    check_error(caught.value, fault, "second", "__init__", started_s)
    check_ended(ids)


@pytest.mark.slow
@pytest.mark.parametrize("method", [pytest.param("compute", marks=pytest.mark.slow), "gather"])
def test_a_process_that_is_killed_between_calls(pair: Cluster, method: str):
    group = pair.group("first", Faulty)
    ids = group.process_id()
    os.kill(ids[1], signal.SIGKILL)
    started_s = time.monotonic()
    with pytest.raises(FlowError) as caught:
        getattr(group, method)("nothing").get()
    check_error(caught.value, "kill", "first", method, started_s)
    check_ended(ids)


@pytest.mark.slow
@pytest.mark.parametrize("method", [pytest.param("misnamed", marks=pytest.mark.slow), "short"])
def test_a_rank_whose_result_violates_its_contract(pair: Cluster, method: str):
    group = pair.group("first", Faulty)
    ids = group.process_id()
    with pytest.raises(WorkerError) as caught:
        getattr(group, method)(Batch.from_columns({"x": [1, 2, 3, 4]})).get("y")
    assert (caught.value.role, caught.value.rank, caught.value.method) == ("first", 1, method)
    assert caught.value.cause.startswith("ContractError")
    check_ended(ids)


@pytest.mark.slow
def test_a_driver_that_waits_late_gets_the_first_cause(pair: Cluster):
    group = pair.group("first", Faulty)
    group.process_id()
    overdue_ids = group.gather("raise")
    time.sleep(3)
    with pytest.raises(WorkerError) as caught:
        overdue_ids.get()
    assert caught.value.rank == 1 and not caught.value.symptom and caught.value.cause.startswith("KeyError")


@pytest.mark.slow
def test_the_deadline_error_names_the_rank_that_its_peers_wait_for(pair: Cluster):
    group = pair.group("first", Faulty)
    group.process_id()
    group.linger(60.0)
    shorten_deadline(pair, "spin")
    with pytest.raises(DeadlineError) as caught:
        group.gather("nothing").get()
    assert (caught.value.rank, caught.value.method) == (1, "linger")
    assert not missing_facts(str(caught.value), "call_timeout_s")
    assert caught.value.remote_traceback.rstrip().endswith("in linger")


@pytest.mark.slow
def test_a_pool_that_fails_while_a_call_waits_for_its_lengths(ray_session: None, open_cluster: ClusterMaker):
    """The driver waits for the number of rows; the processes of the called group end meanwhile."""
    roles = {"first": "a", "busy": "a", "second": "b"}
    cluster = open_cluster("ray", {"a": [1], "b": [1]}, roles, num_threads=1)
    first, second = cluster.group("first", Arithmetic), cluster.group("second", RaisingWorker)
    busy = cluster.group("busy", RaisingWorker)
    batch = Batch.from_columns({"x": [1, 2]}, {"ids": [1, 2]}, [1, 1])
    first.process_id()
    second.add_one(1).get()
    busy.sleep(3.0)
    second.fail_on(0)
    with pytest.raises(WorkerError) as caught:
        second.run(lambda worker, table: None, first.keep_even(batch))
    assert (caught.value.role, caught.value.rank, caught.value.method) == ("second", 0, "fail_on")


@pytest.mark.slow
def test_a_call_of_another_pool_that_reads_a_hanging_call_raises_its_deadline(
    ray_session: None, open_cluster: ClusterMaker
):
    cluster = open_cluster("ray", {"a": [1], "b": [1]}, {"scorer": "a", "reader": "b"}, num_threads=1)
    scorer, reader = cluster.group("scorer", StatefulScorer, 1), cluster.group("reader", Doubling)
    with pytest.raises(DeadlineError) as caught:
        reader.double(scorer.score_with_deadline(BATCH, "spin")).get("double")
    assert (caught.value.role, caught.value.rank, caught.value.method) == ("scorer", 0, "score_with_deadline")
    assert not missing_facts(str(caught.value), "timeout_s", "scorer.score_with_deadline")
    assert caught.value.remote_traceback.rstrip().endswith("in commit")


@pytest.mark.slow
def test_a_call_without_its_state_raises_the_loss_that_caused_it(ray_session: None, open_cluster: ClusterMaker):
    cluster = open_cluster("ray", {"a": [2], "b": [1]}, {"first": "a", "chunked": "b"}, num_threads=1)
    first, chunked = cluster.group("first", Faulty), cluster.group("chunked", Chunked, 1)
    chunked.load_chunk(first.gather_to_one("kill"), 0)
    chunked.load_chunk(1, 1, "raise")  # fails, because it needs chunk 0
    scores = chunked.score(BATCH)
    time.sleep(3.0)  # so that the driver reads all errors at once
    with pytest.raises(ProcessLost) as caught:
        scores.get("score")
    assert (caught.value.role, caught.value.rank, caught.value.method) == ("first", 1, "gather_to_one")


def test_the_deadline_error_names_a_stopped_rank(pair: Cluster):
    group = pair.group("first", Faulty)
    os.kill(group.process_id()[1], signal.SIGSTOP)
    pair.calls.timeout_s = 0.3  # a stopped process is the cause on any machine, also if its peer is slow
    with pytest.raises(DeadlineError) as caught:
        group.gather("nothing").get()
    assert (caught.value.rank, caught.value.method) == (1, "gather")
    assert not missing_facts(str(caught.value), "SIGSTOP")


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "facts"), [("os._exit", ("3",)), ("SIGBUS", ("SIGBUS",)), ("kill", ("SIGKILL",))])
def test_the_error_of_a_lost_process_has_its_exit_code_or_signal(
    ray_session: None, open_cluster: ClusterMaker, fault: str, facts: tuple[str, ...]
):
    cluster = open_cluster("ray", {"a": [1]}, {"scorer": "a"}, num_threads=1)
    with rejects("scorer.score", "rewards.score", "rewards.times_1", *facts, error=ProcessLost):
        cluster.group("scorer", StatefulScorer, 1).score(BATCH, fault).get("score")


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "fact"), [("sys.exit", "sys.exit"), ("interrupt", "KeyboardInterrupt")])
def test_a_method_that_exits_ends_no_process_and_is_named(recoverable: "Recoverable", fault: str, fact: str):
    with rejects("leave", fact, error=WorkerUserError) as caught:
        recoverable.double_scores(fault)
    assert "\n" not in str(caught.value)
    recoverable.cluster.calls.abandon_all(10.0)
    assert recoverable.double_scores() == [22, 42, 62, 82]


# Processes of stateless workers are replaced.


@dataclass
class Recoverable:
    """Groups that the tests of recoveries share: no test may end their failure group."""

    cluster: Cluster
    messages: list[str]
    scorer: WorkerGroup
    chunked: WorkerGroup
    reader: WorkerGroup

    def double_scores(self, fault: str | None = None, once: Path | None = None) -> list[int]:
        """Another role reads the scores by reference, before they are computed."""
        hangs = fault is not None and fault.startswith("spin")
        score = self.scorer.score_with_deadline if hangs else self.scorer.score
        scores = score(Batch.from_columns({"x": [1, 2, 3, 4]}), fault, once)
        return self.reader.double(scores).get("double").tolist()


@pytest.fixture(scope="module")
def shared_recoverable(ray_session: None) -> Iterator[Recoverable]:
    messages: list[str] = []
    roles = {"scorer": "scorers", "chunked": "scorers", "reader": "readers"}
    placement = Placement(device="cpu", pools={"scorers": [2], "readers": [1]}, roles=roles)
    with Cluster(placement, num_threads=1, restarts=30, notify=messages.append) as cluster:
        scorer, chunked = cluster.group("scorer", Scorer, 10), cluster.group("chunked", Chunked, 1)
        yield Recoverable(cluster, messages, scorer, chunked, cluster.group("reader", Doubling))


@pytest.fixture
def recoverable(shared_recoverable: Recoverable) -> Recoverable:
    shared_recoverable.scorer.load(1).get()
    shared_recoverable.cluster.wait_for_calls()
    shared_recoverable.messages.clear()
    return shared_recoverable


@pytest.mark.parametrize("fault", ["kill", slow("spin"), slow("spin_in_c")])
def test_a_stateless_process_lost_in_a_call_is_replaced(recoverable: Recoverable, fault: str, tmp_path: Path):
    before = recoverable.scorer.process_id()
    assert recoverable.double_scores(fault, tmp_path / "once") == [22, 42, 62, 82]
    recoverable.cluster.wait_for_calls()
    assert recoverable.scorer.process_id() != before
    assert any(DeadlineError.__name__ in m or "deadline" in m for m in recoverable.messages) == (fault != "kill")


@pytest.mark.slow
def test_a_stateless_process_lost_between_calls_is_replaced(recoverable: Recoverable):
    for process_id in recoverable.scorer.process_id():
        os.kill(process_id, signal.SIGKILL)
    assert recoverable.double_scores() == [22, 42, 62, 82]


@pytest.mark.slow
def test_calls_to_a_replacement_see_the_state_at_their_submission(recoverable: Recoverable, tmp_path: Path):
    """The waiting calls reach a replacement in any order."""
    batch = Batch.from_columns({"x": [0, 0]})
    results = [recoverable.scorer.score(batch, "kill", tmp_path / "once")]
    for offset in (10, 20, 30):
        recoverable.scorer.load(offset)
        results.append(recoverable.scorer.score(batch))
    assert [result.get("score").tolist() for result in results] == [[1, 1], [10, 10], [20, 20], [30, 30]]


@pytest.mark.slow
def test_a_state_in_chunks_is_replayed_from_chunk_0(recoverable: Recoverable, tmp_path: Path):
    """The process is lost between two chunks, or while it loads one, and calls before and after wait."""
    chunked, batch = recoverable.chunked, Batch.from_columns({"x": [0, 0]})
    results = [chunked.score(batch)]
    for offset, fault_in in ((10, None), (20, "score"), (30, "load")):
        chunked.load_chunk(offset, 0)
        if fault_in == "score":
            results.append(chunked.score(batch, "kill", tmp_path / fault_in))
        chunked.load_chunk(1, 1, "kill" if fault_in == "load" else None, tmp_path / f"{fault_in}-chunk")
        chunked.load_chunk(2, 2)
        results.append(chunked.score(batch))
    assert [r.get("score").tolist() for r in results] == [[0, 0], [13, 13], [20, 20], [23, 23], [33, 33]]


@pytest.fixture
def scorers(ray_session: None, open_cluster: ClusterMaker) -> tuple[Cluster, list[str]]:
    """A cluster with one recoverable process, which a test may end."""
    messages: list[str] = []
    cluster = open_cluster("ray", {"a": [1]}, {"scorer": "a"}, num_threads=1, restarts=1, notify=messages.append)
    return cluster, messages


BATCH = Batch.from_columns({"x": [1, 2]})


@pytest.mark.slow
def test_a_stateless_process_lost_in_its_constructor_is_replaced(scorers: tuple[Cluster, list[str]], tmp_path: Path):
    scorer = scorers[0].group("scorer", Scorer, 10, "kill", tmp_path / "once")
    assert scorer.score(BATCH).get("score").tolist() == [10, 20]


@pytest.mark.slow
def test_a_lost_process_is_reported_when_it_is_lost(scorers: tuple[Cluster, list[str]], tmp_path: Path) -> None:
    """The report does not wait for the replacement, which takes 10 s to start."""
    cluster, messages = scorers
    scorer = cluster.group("scorer", SlowRestart, tmp_path / "lines", 10.0)
    scorer.load(7).get()
    (process_id,) = scorer.process_id()
    started_s = time.monotonic()
    # Liveness is checked only while the driver waits; the process has to be known before it is killed.
    cluster.calls.wait_until(lambda: time.monotonic() > started_s + 2 * LIVENESS_INTERVAL_S)
    messages.clear()
    os.kill(process_id, signal.SIGKILL)
    result = scorer.score(BATCH)
    while not messages:
        with suppress(TimeoutError):
            cluster.calls.wait(cluster.calls.in_flight(), 0.5)
        assert not result.done()
    assert len(messages) == 1 and not missing_facts(messages[0], "scorer", 0, "rewards.score_10")
    assert result.get("score").tolist() == [8, 9]


@pytest.mark.slow
def test_the_report_of_a_process_without_a_call_names_the_users_functions(
    scorers: tuple[Cluster, list[str]], tmp_path: Path
) -> None:
    """Its call may already have been repeated in the replacement."""
    cluster, messages = scorers
    (process_id,) = cluster.group("scorer", SlowRestart, tmp_path / "lines", 10.0).process_id()
    started_s = time.monotonic()
    cluster.calls.wait_until(lambda: time.monotonic() > started_s + 2 * LIVENESS_INTERVAL_S)
    messages.clear()
    os.kill(process_id, signal.SIGKILL)
    cluster.calls.wait_until(lambda: bool(messages), 60.0)
    assert not missing_facts(messages[0], "scorer", 0, "SIGKILL", "rewards.score_10")


@pytest.mark.slow
def test_a_process_that_is_lost_after_every_restart_fails_its_failure_group(scorers: tuple[Cluster, list[str]]):
    scorer = scorers[0].group("scorer", Scorer, 1)
    with pytest.raises(ProcessLost) as caught:
        scorer.score(BATCH, "kill").get("score")
    assert (caught.value.role, caught.value.method) == ("scorer", "score")


@pytest.mark.slow
def test_a_call_that_hangs_again_in_its_replacement_raises_its_deadline(ray_session: None, open_cluster: ClusterMaker):
    messages: list[str] = []
    cluster = open_cluster("ray", {"a": [1]}, {"scorer": "a"}, num_threads=1, restarts=3, notify=messages.append)
    scorer = cluster.group("scorer", Scorer, 1)
    with pytest.raises(DeadlineError) as caught:
        scorer.score_with_deadline(BATCH, "spin").get("score")
    assert (caught.value.role, caught.value.rank, caught.value.method) == ("scorer", 0, "score_with_deadline")
    assert not missing_facts(str(caught.value), "timeout_s", "scorer.score_with_deadline")
    assert caught.value.remote_traceback.rstrip().endswith("in commit")
    assert len([message for message in messages if message.startswith("scorer.score")]) == 1


@pytest.mark.slow
def test_a_stopped_stateless_process_is_replaced_once(scorers: tuple[Cluster, list[str]]):
    cluster, messages = scorers
    scorer = cluster.group("scorer", Scorer, 10)
    (process_id,) = scorer.process_id()
    os.kill(process_id, signal.SIGSTOP)
    assert scorer.score_with_deadline(BATCH).get("score").tolist() == [10, 20]
    assert len([message for message in messages if "SIGSTOP" in message]) == 1
    assert scorer.process_id() != [process_id] and not psutil.pid_exists(process_id)


@pytest.mark.slow
def test_a_process_that_is_lost_in_its_constructor_is_reported_and_replaced(
    scorers: tuple[Cluster, list[str]], tmp_path: Path
):
    cluster, messages = scorers
    messages.clear()
    scorer = cluster.group("scorer", Scorer, 10, "kill", tmp_path / "once")
    assert scorer.score(BATCH).get("score").tolist() == [10, 20]
    facts = ("scorer", "rank 0", "__init__", "SIGKILL")
    assert len([message for message in messages if all(fact in message for fact in facts)]) == 1, messages


@pytest.mark.slow
def test_a_replacement_has_the_time_limit_of_a_constructor_and_makes_its_worker_once(
    scorers: tuple[Cluster, list[str]], tmp_path: Path
):
    cluster, messages = scorers
    scorer = cluster.group("scorer", SlowRestart, tmp_path / "lines", DEADLINE_S * 2)
    scorer.load(7)
    os.kill(scorer.process_id()[0], signal.SIGKILL)
    lines_before = len((tmp_path / "lines").read_text().splitlines())
    assert scorer.score_with_deadline(BATCH).get("score").tolist() == [8, 9]
    constructed_s = (tmp_path / "lines").stat().st_mtime + DEADLINE_S * 2
    assert time.time() - constructed_s < 5
    assert len((tmp_path / "lines").read_text().splitlines()) == lines_before + 1
    assert [message for message in messages if "deadline" in message.replace("score_with_deadline", "")] == []


@pytest.mark.slow
def test_a_replacement_that_cannot_make_its_worker_fails_the_failure_group(
    scorers: tuple[Cluster, list[str]], tmp_path: Path
):
    scorer = scorers[0].group("scorer", SlowRestart, tmp_path / "lines", "no weights")
    os.kill(scorer.process_id()[0], signal.SIGKILL)
    score = scorer.score(BATCH)
    with pytest.raises(WorkerError) as caught:
        score.get("score")
    assert (caught.value.role, caught.value.rank, caught.value.method) == ("scorer", 0, "__init__")
    assert caught.value.cause.startswith("ArithmeticError")
    with pytest.raises(WorkerError) as again:
        scorer.load(1)
    assert again.value is caught.value
