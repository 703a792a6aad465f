"""Idle callbacks: functions that run while the driver waits, and on a thread while it computes."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tensordict import TensorDict

from flowrl import Cluster, Dispatch, Future, Worker, make_tensordict, register
from flowrl.controller.calls import calls as calls_module
from flowrl.controller.calls import event_pump
from flowrl.controller.errors import DeadlineError, FlowError, WorkerError
from tests.conftest import BackendName, ClusterMaker
from tests.controller.faulty_workers import DEADLINE_S, RaisingWorker
from tests.slow_cases import INLINE_BY_DEFAULT


@pytest.fixture
def cluster(backend: BackendName, open_cluster: ClusterMaker) -> Cluster:
    return open_cluster(backend, {"a": [1], "b": [1]}, {"first": "a", "second": "b"}, num_threads=1)


class Chain:
    """Submits `length` calls, each when the previous one is done."""

    def __init__(self, submit: Callable[[], Future], length: int) -> None:
        self.submit, self.length, self.done = submit, length, 0
        self.now: Future | None = None

    def __call__(self) -> list[Future]:
        if self.now is not None and self.now.done():
            self.now.get()
            self.now, self.done = None, self.done + 1
        if self.now is None and self.done < self.length:
            self.now = self.submit()
        return [self.now] if self.now is not None else []


@pytest.mark.parametrize("backend", ["inline", "ray"], indirect=True)
def test_callbacks_run_while_the_driver_waits_for_a_call(cluster: Cluster, monkeypatch: pytest.MonkeyPatch):
    """Completed calls trigger it: polls are too rare in this test."""
    first, second = cluster.group("first", RaisingWorker), cluster.group("second", RaisingWorker)
    chain = Chain(lambda: first.add_one.submit(1), 20)
    cluster.calls.add_idle_callback(chain)
    first.add_one(1).get()
    monkeypatch.setattr(calls_module, "POLL_INTERVAL_S", 600.0)
    while chain.done < 20:
        second.sleep(0.2).get()


@INLINE_BY_DEFAULT
def test_the_driver_waits_for_a_condition_that_a_callback_makes_true(cluster: Cluster, monkeypatch: pytest.MonkeyPatch):
    first = cluster.group("first", RaisingWorker)
    first.add_one(1).get()
    monkeypatch.setattr(calls_module, "POLL_INTERVAL_S", 600.0)
    chain = Chain(lambda: first.add_one.submit(1), 20)
    cluster.calls.add_idle_callback(chain)
    cluster.calls.wait_until(lambda: chain.done == 20)


def test_inline_callbacks_run_when_a_wait_ends_and_not_without_a_wait(open_cluster: ClusterMaker):
    cluster = open_cluster("inline", {"a": [1]}, {"first": "a"}, num_threads=1)
    called: list[bool] = []
    future = cluster.group("first", RaisingWorker).sleep(0.1)

    def callback() -> list[Future]:
        called.append(future.done())
        return []

    cluster.calls.add_idle_callback(callback)
    cluster.calls.wait_until(lambda: len(called) >= 2)
    count = len(called)
    assert called[-1]
    future.get()
    time.sleep(0.3)
    assert len(called) == count and pump_threads() == []


@pytest.mark.slow
def test_a_callback_may_wait_and_is_never_nested(cluster: Cluster):
    first, second = cluster.group("first", RaisingWorker), cluster.group("second", RaisingWorker)
    depths, depth = [], 0

    def callback() -> list[Future]:
        nonlocal depth
        depth += 1
        depths.append(depth)
        assert second.add_one.submit(len(depths)).get() == [len(depths) + 1]
        depth -= 1
        return []

    cluster.calls.add_idle_callback(callback)
    first.sleep(0.3).get()
    assert set(depths) == {1} and len(depths) >= 2


@pytest.mark.slow
def test_threads_do_not_run_callbacks_concurrently(cluster: Cluster):
    first = cluster.group("first", RaisingWorker)
    inside, overlapping = threading.Lock(), []

    def callback() -> list[Future]:
        overlapping.append(not inside.acquire(blocking=False))
        first.add_one.submit(1).get()
        inside.release()
        return []

    cluster.calls.add_idle_callback(callback)
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda x: first.add_one.submit(x).get(), range(20))) == [[x + 1] for x in range(20)]
    assert not any(overlapping)


@INLINE_BY_DEFAULT
def test_an_error_of_a_callback_is_raised_by_the_wait(cluster: Cluster):
    first = cluster.group("first", RaisingWorker)

    def callback() -> list[Future]:
        raise ArithmeticError("no such schedule")

    stop = cluster.calls.add_idle_callback(callback)
    with pytest.raises(ArithmeticError, match=r"\bschedule\b"):
        first.add_one(1).get()
    stop()
    assert first.add_one(1).get() == [2]


@INLINE_BY_DEFAULT
def test_resolved_results_do_not_cause_a_busy_loop(cluster: Cluster):
    done = cluster.group("first", RaisingWorker).add_one(1)
    done.get()
    count = 0

    def callback() -> list[Future]:
        nonlocal count
        count += 1
        return [done]

    cluster.calls.add_idle_callback(callback)
    started_s = time.monotonic()
    cluster.calls.wait_until(lambda: count >= 10, 60)
    num_polls = (time.monotonic() - started_s) / calls_module.POLL_INTERVAL_S
    assert count <= num_polls + 4, "resolved results trigger only one run"


def test_a_wait_for_a_condition_raises_a_failure(open_cluster: ClusterMaker):
    cluster = open_cluster("faulty", {"a": [1]}, {"first": "a"}, num_threads=1)
    cluster.group("first", RaisingWorker).fail_on(0)
    with pytest.raises(WorkerError, check=lambda error: (error.role, error.rank) == ("first", 0)):
        cluster.calls.wait_until(lambda: False)


@INLINE_BY_DEFAULT
def test_a_wait_for_a_condition_ends_with_its_cluster(cluster: Cluster):
    cluster.close()
    with pytest.raises(FlowError):
        cluster.calls.wait_until(lambda: False)
    cluster.calls.wait_until(lambda: True)


def pump_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "flowrl-event-pump"]


@pytest.fixture
def remote(ray_session: None, open_cluster: ClusterMaker) -> Cluster:
    return open_cluster("ray", {"a": [1], "b": [1]}, {"first": "a", "second": "b"}, num_threads=1)


def test_callbacks_run_while_the_driver_computes(remote: Cluster):
    """Completed calls trigger them: with the interval alone, there would be 20 runs in this time."""
    first = remote.group("first", RaisingWorker)
    first.add_one(1).get()
    chain = Chain(lambda: first.add_one.submit(1), 200)
    stop = remote.calls.add_idle_callback(chain)
    until_s = time.monotonic() + 30
    while chain.done < 100 and time.monotonic() < until_s:
        time.sleep(0.05)
    assert chain.done >= 100
    assert len(pump_threads()) == 1
    stop()
    assert pump_threads() == []


def test_closing_a_cluster_ends_the_thread(remote: Cluster):
    first = remote.group("first", RaisingWorker)
    remote.calls.add_idle_callback(Chain(lambda: first.add_one.submit(1), 10**6))
    time.sleep(0.2)
    remote.close()
    assert pump_threads() == []


@pytest.mark.slow
def test_an_error_on_the_thread_is_raised_once_by_the_next_call(remote: Cluster):
    first = remote.group("first", RaisingWorker)
    first.add_one(1).get()
    raised = threading.Event()

    def callback() -> list[Future]:
        if threading.current_thread() is threading.main_thread():
            return []
        raised.set()
        raise ArithmeticError("no such schedule")

    stop = remote.calls.add_idle_callback(callback)
    assert raised.wait(30)
    until_s = time.monotonic() + 30
    while pump_threads() and time.monotonic() < until_s:
        time.sleep(0.01)
    with pytest.raises(ArithmeticError) as caught:
        first.add_one.submit(1)
    assert "callback" in [entry.name for entry in caught.traceback]
    assert first.add_one.submit(1).get() == [2]
    stop()


@pytest.mark.slow
def test_a_failure_while_the_driver_computes_is_raised_by_the_next_call_of_any_group(remote: Cluster):
    first, second = remote.group("first", RaisingWorker), remote.group("second", RaisingWorker)
    second.add_one(1).get()
    remote.calls.add_idle_callback(list)
    first.fail_on(0)
    until_s = time.monotonic() + 30
    while pump_threads() and time.monotonic() < until_s:
        time.sleep(0.01)
    with pytest.raises(WorkerError, check=lambda error: (error.role, error.rank) == ("first", 0)):
        second.add_one.submit(1)


@pytest.mark.slow
def test_a_call_that_passes_its_deadline_while_the_driver_computes_is_raised_by_the_next_call(remote: Cluster):
    first, second = remote.group("first", RaisingWorker), remote.group("second", RaisingWorker)
    assert first.add_one(1).get() == second.add_one(1).get() == [2]
    remote.calls.timeout_s = DEADLINE_S
    remote.calls.add_idle_callback(list)
    first.sleep(3600.0)
    until_s = time.monotonic() + 60
    while pump_threads() and time.monotonic() < until_s:
        time.sleep(0.01)
    assert pump_threads() == []
    with pytest.raises(DeadlineError) as caught:
        second.add_one.submit(1)
    assert (caught.value.role, caught.value.rank, caught.value.method) == ("first", 0, "sleep")
    assert caught.value.remote_traceback.rstrip().endswith("in sleep")


@pytest.mark.slow
@pytest.mark.parametrize("is_waiting", [True, False])
def test_a_callback_may_remove_itself(remote: Cluster, monkeypatch: pytest.MonkeyPatch, is_waiting: bool):
    """The callback must not wait for the end of the thread, which needs the lock that the callback holds."""
    monkeypatch.setattr(event_pump, "_JOIN_TIMEOUT_S", 600.0)
    added, removed = threading.Event(), threading.Event()

    def callback() -> list[Future]:
        if added.is_set() and (threading.current_thread() is threading.main_thread()) == is_waiting:
            remove()
            removed.set()
        return []

    remove = remote.calls.add_idle_callback(callback)
    added.set()
    if is_waiting:
        remote.calls.wait_until(removed.is_set, 30)
    assert removed.wait(30)
    until_s = time.monotonic() + 30
    while pump_threads() and time.monotonic() < until_s:
        time.sleep(0.01)
    assert pump_threads() == []


@pytest.mark.slow
def test_a_wait_for_the_size_of_a_batch_does_not_block_a_callback_that_reads_a_size(remote: Cluster):
    """Both read the sizes of blocks, of which one is computed later."""
    first, second = remote.group("first", SizedWorker), remote.group("second", SizedWorker)
    done = second.make(0.0)
    assert len(done) == 2
    num_read = 0

    def callback() -> list[Future]:
        nonlocal num_read
        num_read += len(second.make(0.0))
        return []

    stop = remote.calls.add_idle_callback(callback)
    assert [len(first.make(0.05)) for _ in range(10)] == [2] * 10
    stop()
    assert num_read >= 20


class SizedWorker(Worker):
    @register(Dispatch.COLLECT, blocking=False, rows="unknown", writes=("x",))
    def make(self, seconds: float) -> TensorDict:
        time.sleep(seconds)
        return make_tensordict({"x": torch.arange(2)})
