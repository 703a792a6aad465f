"""What is done while the driver waits."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from flowrl import Cluster, Future
from flowrl.controller.calls import calls as calls_module
from flowrl.controller.errors import FlowError, WorkerError
from tests.conftest import BackendName, ClusterMaker
from tests.controller.failing import Failing


@pytest.fixture
def cluster(backend: BackendName, open_cluster: ClusterMaker) -> Cluster:
    return open_cluster(backend, {"a": [1], "b": [1]}, {"first": "a", "second": "b"}, num_threads=1)


class Chain:
    """Submits a call when the one before it is done, until there were so many."""

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


def test_it_is_done_while_the_driver_waits_for_a_call(cluster: Cluster, monkeypatch: pytest.MonkeyPatch):
    """The end of its own calls wakes it: looking around would take as long as the test may."""
    first, second = cluster.group("first", Failing), cluster.group("second", Failing)
    chain = Chain(lambda: first.add_one.submit(1), 20)
    cluster.calls.add_idle_callback(chain)
    first.add_one(1).get()
    monkeypatch.setattr(calls_module, "POLL_INTERVAL_S", 600.0)
    while chain.done < 20:
        second.sleep(0.2).get()


def test_the_driver_waits_for_what_it_brings_about(cluster: Cluster, monkeypatch: pytest.MonkeyPatch):
    first = cluster.group("first", Failing)
    first.add_one(1).get()
    monkeypatch.setattr(calls_module, "POLL_INTERVAL_S", 600.0)
    chain = Chain(lambda: first.add_one.submit(1), 20)
    cluster.calls.add_idle_callback(chain)
    cluster.calls.wait_until(lambda: chain.done == 20)


def test_it_is_called_when_a_wait_ends_and_not_where_nothing_is_waited_for(cluster: Cluster):
    called: list[bool] = []
    future = cluster.group("first", Failing).sleep(0.1)

    def attend() -> list[Future]:
        called.append(future.done())
        return []

    cluster.calls.add_idle_callback(attend)
    future.get()
    count = len(called)
    assert count >= 2 and called[-1]
    future.get()
    assert len(called) == count


def test_it_may_wait_itself_and_is_never_nested(cluster: Cluster):
    first, second = cluster.group("first", Failing), cluster.group("second", Failing)
    depths, depth = [], 0

    def attend() -> list[Future]:
        nonlocal depth
        depth += 1
        depths.append(depth)
        assert second.add_one.submit(len(depths)).get() == [len(depths) + 1]
        depth -= 1
        return []

    cluster.calls.add_idle_callback(attend)
    first.sleep(0.3).get()
    assert set(depths) == {1} and len(depths) >= 2


def test_threads_that_wait_at_once_do_not_call_it_at_once(cluster: Cluster):
    first = cluster.group("first", Failing)
    inside, overlapping = threading.Lock(), []

    def attend() -> list[Future]:
        overlapping.append(not inside.acquire(blocking=False))
        first.add_one.submit(1).get()
        inside.release()
        return []

    cluster.calls.add_idle_callback(attend)
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda x: first.add_one.submit(x).get(), range(20))) == [[x + 1] for x in range(20)]
    assert not any(overlapping)


def test_what_it_raises_is_raised_in_the_wait(cluster: Cluster):
    first = cluster.group("first", Failing)

    def attend() -> list[Future]:
        raise ArithmeticError("no such schedule")

    stop = cluster.calls.add_idle_callback(attend)
    with pytest.raises(ArithmeticError, match="no such schedule"):
        first.add_one(1).get()
    stop()
    assert first.add_one(1).get() == [2]


def test_results_that_are_there_do_not_make_it_spin(cluster: Cluster):
    done = cluster.group("first", Failing).add_one(1)
    done.get()
    count = 0

    def attend() -> list[Future]:
        nonlocal count
        count += 1
        return [done]

    cluster.calls.add_idle_callback(attend)
    with pytest.raises(TimeoutError, match=r"what the driver waits for has not come after 1 s"):
        cluster.calls.wait_until(lambda: False, 1.0)
    assert 2 <= count <= 1.0 / calls_module.POLL_INTERVAL_S + 4


def test_a_wait_for_a_condition_tells_what_fails_meanwhile(ray_session: None, open_cluster: ClusterMaker):
    cluster = open_cluster("ray", {"a": [1]}, {"first": "a"}, num_threads=1)
    cluster.group("first", Failing).fail_on(0)
    with pytest.raises(WorkerError, match=r"first\.fail_on failed on rank 0"):
        cluster.calls.wait_until(lambda: False)


def test_a_wait_for_a_condition_ends_with_its_cluster(cluster: Cluster):
    cluster.close()
    with pytest.raises(FlowError, match="the cluster is closed"):
        cluster.calls.wait_until(lambda: False)
    cluster.calls.wait_until(lambda: True)
