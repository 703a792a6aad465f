"""Failures in workers, as the driver sees them. Every test has processes of its own, which a failure ends."""

import pickle
import threading
import time

import pytest

from flowrl import Batch, ContractError, FlowError, WorkerError, WorkerGroup
from flowrl.config import UserError
from flowrl.controller.errors import WorkerUserError
from tests.conftest import BackendName, ClusterMaker
from tests.controller.failing import Failing, Unmakeable, raises


@pytest.fixture
def failing(backend: BackendName, open_cluster: ClusterMaker) -> WorkerGroup:
    return open_cluster(backend, {"main": [2]}, {"actor": "main"}).group("actor", Failing)


def test_a_failure_names_role_rank_node_and_method(failing: WorkerGroup):
    with pytest.raises(
        WorkerError, match=r"actor.fail_on failed on rank 1 \(node 0\): KeyError: 'nothing there'"
    ) as caught:
        failing.fail_on(1).get()
    error = caught.value
    assert (error.role, error.rank, error.node, error.method) == ("actor", 1, 0, "fail_on")


def test_a_failure_carries_the_traceback_of_the_worker(failing: WorkerGroup):
    with pytest.raises(WorkerError) as caught:
        failing.fail_on(0).get()
    assert "failing.py" in caught.value.remote_traceback and "raise KeyError" in str(caught.value)


def test_a_refusal_in_a_worker_is_one_sentence(failing: WorkerGroup):
    with pytest.raises(WorkerUserError) as caught:
        failing.refuse()
    assert isinstance(caught.value, UserError)
    assert str(caught.value) == "actor: the folder is empty; give one with a model"


@pytest.mark.parametrize("kind", [WorkerError, WorkerUserError])
def test_errors_survive_the_way_between_processes(kind: type[WorkerError]):
    error = kind("actor", 1, 0, "update", "ValueError: no", "Traceback ...")
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.rank) == (kind, str(error), 1)


def test_a_constructor_that_raises_is_told_with_its_role(backend: BackendName, open_cluster: ClusterMaker):
    cluster = open_cluster(backend, {"main": [2]}, {"actor": "main"})
    with pytest.raises(WorkerError, match=r"actor.__init__ failed on rank 1 \(node 0\): ZeroDivisionError: no weights"):
        cluster.group("actor", Unmakeable, bad_rank=1).hello()


def test_a_failing_function_beside_the_data_is_told(ray_session: None, open_cluster: ClusterMaker):
    cluster = open_cluster("ray", {"main": [1]}, {"actor": "main"})
    tasks = cluster.group("actor", Failing).tasks
    assert tasks is not None
    with pytest.raises(WorkerError, match=r"tasks.reduce failed on rank 0 .*ArithmeticError: bad sum"):
        tasks.reduce(raises, Batch.from_columns({"x": [1]}), {}).get()


def test_a_failure_nobody_looked_at_raises_at_the_next_call(ray_session: None, open_cluster: ClusterMaker):
    group = open_cluster("ray", {"main": [2]}, {"actor": "main"}).group("actor", Failing)
    failed = group.fail_on(1)
    while not failed.done():
        time.sleep(0.01)
    with pytest.raises(WorkerError, match="KeyError: 'nothing there'"):
        group.add_one(1)


def test_peers_that_would_wait_for_ever_are_ended(ray_session: None, open_cluster: ClusterMaker):
    group = open_cluster("ray", {"main": [2]}, {"actor": "main"}).group("actor", Failing)
    group.add_one(1).get()
    started = time.monotonic()
    with pytest.raises(WorkerError, match="rank 1"):
        group.fail_on(1, others_sleep_s=300).get()
    assert time.monotonic() - started < 5


def test_a_group_given_a_failed_result_tells_the_first_cause_and_lives_on(
    ray_session: None, open_cluster: ClusterMaker
):
    cluster = open_cluster("ray", {"a": [2], "b": [1]}, {"actor": "a", "critic": "b"})
    actor, critic = cluster.group("actor", Failing), cluster.group("critic", Failing)
    with pytest.raises(WorkerError, match=r"actor.fail_on failed on rank 0"):
        critic.add_one(actor.fail_on(0)).get()
    assert critic.add_one(1).get() == [2]


def test_a_deadline_names_the_call_that_is_late(ray_session: None, open_cluster: ClusterMaker):
    group = open_cluster("ray", {"main": [1]}, {"actor": "main"}).group("actor", Failing)
    group.add_one(1).get()
    with pytest.raises(TimeoutError, match=r"actor.sleep on rank 0 is not done after 0.2 s"):
        group.sleep(60.0).get(timeout_s=0.2)


def test_every_error_is_a_flow_error():
    assert issubclass(ContractError, FlowError) and issubclass(WorkerError, FlowError)
    assert issubclass(ContractError, UserError) and not issubclass(WorkerError, UserError)


def test_a_result_that_cannot_leave_its_process_is_told_inline_too(open_cluster: ClusterMaker):
    group = open_cluster("inline", {"main": [1]}, {"actor": "main"}).group("actor", Failing)
    with pytest.raises(WorkerError, match=r"actor\.run_function failed on rank 0 .*: its result cannot be pickled"):
        group.run(lambda worker: threading.Lock())
