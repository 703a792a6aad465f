"""Idle callbacks: functions that run while the driver waits."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from flowrl import Cluster, Future
from flowrl.controller.calls import calls as calls_module
from flowrl.controller.errors import FlowError, WorkerError
from tests.conftest import BackendName, ClusterMaker
from tests.controller.faulty_workers import RaisingWorker


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


def test_callbacks_run_while_the_driver_waits_for_a_call(cluster: Cluster, monkeypatch: pytest.MonkeyPatch):
    """Completed calls trigger it: polls are too rare in this test."""
    first, second = cluster.group("first", RaisingWorker), cluster.group("second", RaisingWorker)
    chain = Chain(lambda: first.add_one.submit(1), 20)
    cluster.calls.add_idle_callback(chain)
    first.add_one(1).get()
    monkeypatch.setattr(calls_module, "POLL_INTERVAL_S", 600.0)
    while chain.done < 20:
        second.sleep(0.2).get()


def test_the_driver_waits_for_a_condition_that_a_callback_makes_true(cluster: Cluster, monkeypatch: pytest.MonkeyPatch):
    first = cluster.group("first", RaisingWorker)
    first.add_one(1).get()
    monkeypatch.setattr(calls_module, "POLL_INTERVAL_S", 600.0)
    chain = Chain(lambda: first.add_one.submit(1), 20)
    cluster.calls.add_idle_callback(chain)
    cluster.calls.wait_until(lambda: chain.done == 20)


def test_callbacks_run_when_a_wait_ends_and_not_without_a_wait(cluster: Cluster):
    called: list[bool] = []
    future = cluster.group("first", RaisingWorker).sleep(0.1)

    def callback() -> list[Future]:
        called.append(future.done())
        return []

    cluster.calls.add_idle_callback(callback)
    future.get()
    count = len(called)
    assert count >= 2 and called[-1]
    future.get()
    assert len(called) == count


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


def test_an_error_of_a_callback_is_raised_by_the_wait(cluster: Cluster):
    first = cluster.group("first", RaisingWorker)

    def callback() -> list[Future]:
        raise ArithmeticError("no such schedule")

    stop = cluster.calls.add_idle_callback(callback)
    with pytest.raises(ArithmeticError, match=r"\bschedule\b"):
        first.add_one(1).get()
    stop()
    assert first.add_one(1).get() == [2]


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


def test_a_wait_for_a_condition_raises_a_failure(ray_session: None, open_cluster: ClusterMaker):
    cluster = open_cluster("ray", {"a": [1]}, {"first": "a"}, num_threads=1)
    cluster.group("first", RaisingWorker).fail_on(0)
    with pytest.raises(WorkerError, check=lambda error: (error.role, error.rank) == ("first", 0)):
        cluster.calls.wait_until(lambda: False)


def test_a_wait_for_a_condition_ends_with_its_cluster(cluster: Cluster):
    cluster.close()
    with pytest.raises(FlowError):
        cluster.calls.wait_until(lambda: False)
    cluster.calls.wait_until(lambda: True)
