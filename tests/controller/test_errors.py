"""Errors of workers as the driver receives them. A failure ends processes, so every test starts its own."""

import pickle
import threading
import time

import pytest

from flowrl import Batch, ContractError, FlowError, WorkerError, WorkerGroup
from flowrl.config import UserError
from flowrl.controller.errors import WorkerUserError
from tests.conftest import BackendName, ClusterMaker
from tests.controller.faulty_backend import CallFault, FaultyBackend
from tests.controller.faulty_workers import RaisingConstructor, RaisingWorker, raises
from tests.slow_cases import INLINE_BY_DEFAULT, slow


@pytest.fixture
def failing(backend: BackendName, open_cluster: ClusterMaker) -> WorkerGroup:
    return open_cluster(backend, {"main": [2]}, {"actor": "main"}).group("actor", RaisingWorker)


@pytest.mark.parametrize("backend", ["inline", "faulty", slow("ray")], indirect=True)
def test_a_failure_names_role_rank_node_and_method(failing: WorkerGroup):
    with pytest.raises(WorkerError) as caught:
        failing.fail_on(1).get()
    error = caught.value
    assert (error.role, error.rank, error.node, error.method) == ("actor", 1, 0, "fail_on")
    assert error.cause == "KeyError: 'nothing there'" and str(error).startswith(error.summary)


@INLINE_BY_DEFAULT
def test_a_failure_carries_the_traceback_of_the_worker(failing: WorkerGroup):
    with pytest.raises(WorkerError) as caught:
        failing.fail_on(0).get()
    assert "faulty_workers.py" in caught.value.remote_traceback and "raise KeyError" in str(caught.value)


@INLINE_BY_DEFAULT
def test_a_user_error_in_a_worker_has_no_traceback(failing: WorkerGroup):
    with pytest.raises(WorkerUserError) as caught:
        failing.refuse()
    assert isinstance(caught.value, UserError)
    assert str(caught.value) == "actor: the folder is empty; give one with a model"


@pytest.mark.parametrize("kind", [WorkerError, WorkerUserError])
def test_errors_are_pickled_with_their_attributes(kind: type[WorkerError]):
    error = kind("actor", 1, 0, "update", "ValueError: no", "Traceback ...")
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.rank) == (kind, str(error), 1)


def test_errors_have_no_terminal_codes_and_a_bounded_length():
    error = WorkerError("actor", 1, 0, "update", "\x1b[31mValueError: " + "text " * 100_000 + "end", "frame " * 100_000)
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error) and len(str(error)) < 20_000
    assert error.cause.startswith("ValueError: text") and error.cause.endswith("text end")


@INLINE_BY_DEFAULT
def test_the_error_of_a_constructor_names_its_rank(backend: BackendName, open_cluster: ClusterMaker):
    cluster = open_cluster(backend, {"main": [2]}, {"actor": "main"})
    with pytest.raises(WorkerError, check=lambda error: (error.method, error.rank) == ("__init__", 1)):
        cluster.group("actor", RaisingConstructor, bad_rank=1).hello()


def test_a_failing_function_of_the_task_worker_is_raised(open_cluster: ClusterMaker):
    cluster = open_cluster("faulty", {"main": [1]}, {"actor": "main"})
    tasks = cluster.group("actor", RaisingWorker).tasks
    assert tasks is not None
    with pytest.raises(WorkerError, check=lambda error: (error.role, error.method) == ("tasks", "reduce")):
        tasks.reduce(raises, Batch.from_columns({"x": [1]}), {}).get()


def test_a_failure_that_was_not_read_is_raised_by_the_next_call(open_cluster: ClusterMaker):
    group = open_cluster("faulty", {"main": [2]}, {"actor": "main"}).group("actor", RaisingWorker)
    failed = group.fail_on(1)
    assert failed.done()
    with pytest.raises(WorkerError, check=lambda error: (error.method, error.rank) == ("fail_on", 1)):
        group.add_one(1)


@pytest.mark.slow
def test_peers_blocked_on_a_failed_rank_are_ended(ray_session: None, open_cluster: ClusterMaker):
    group = open_cluster("ray", {"main": [2]}, {"actor": "main"}).group("actor", RaisingWorker)
    group.add_one(1).get()
    started = time.monotonic()
    with pytest.raises(WorkerError, check=lambda error: error.rank == 1):
        group.fail_on(1, others_sleep_s=300).get()
    assert time.monotonic() - started < 60


def test_a_call_on_a_failed_input_raises_its_cause_and_its_own_group_continues(open_cluster: ClusterMaker):
    cluster = open_cluster("faulty", {"a": [2], "b": [1]}, {"actor": "a", "critic": "b"})
    actor, critic = cluster.group("actor", RaisingWorker), cluster.group("critic", RaisingWorker)
    with pytest.raises(WorkerError, check=lambda error: (error.role, error.rank) == ("actor", 0)):
        critic.add_one(actor.fail_on(0)).get()
    assert critic.add_one(1).get() == [2]


def test_a_deadline_names_the_call_that_is_late(open_cluster: ClusterMaker):
    backend = FaultyBackend(CallFault("slow", "actor", "add_one", after_s=60.0))
    group = open_cluster(backend, {"main": [1]}, {"actor": "main"}).group("actor", RaisingWorker)
    with pytest.raises(TimeoutError, match=r"actor\.add_one.* 0 .*0\.2 s"):
        group.add_one(1).get(timeout_s=0.2)
    assert backend.clock.monotonic() == 0.2


def test_every_error_is_a_flow_error():
    assert issubclass(ContractError, FlowError) and issubclass(WorkerError, FlowError)
    assert issubclass(ContractError, UserError) and not issubclass(WorkerError, UserError)


def test_a_result_that_cannot_be_pickled_is_rejected_inline_too(open_cluster: ClusterMaker):
    group = open_cluster("inline", {"main": [1]}, {"actor": "main"}).group("actor", RaisingWorker)
    with pytest.raises(WorkerError, check=lambda error: error.method == "run_function"):
        group.run(lambda worker: threading.Lock())
