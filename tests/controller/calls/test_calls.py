from concurrent.futures import ThreadPoolExecutor

import pytest

from flowrl import Batch
from flowrl.controller.calls.calls import MAX_EVENTS
from flowrl.controller.errors import FlowError
from tests.conftest import BackendName, ClusterMaker
from tests.controller.conftest import Shared
from tests.controller.faulty_workers import RaisingWorker
from tests.controller.workers import Arithmetic


def test_every_call_on_every_rank_is_an_event(shared: Shared):
    shared.cluster.wait_for_calls()
    before = len(shared.cluster.calls.events)
    shared.second.identify()
    shared.cluster.wait_for_calls()
    new = [(event.role, event.rank, event.method, event.pool) for event in list(shared.cluster.calls.events)[before:]]
    assert [("second", rank, "identify", "two") for rank in (0, 1)] == sorted(new)


def test_times_of_an_event_are_in_order(shared: Shared):
    shared.second.identify()
    event = shared.cluster.calls.events[-1]
    assert event.submitted_ns <= event.started_ns <= event.ended_ns


def test_constructors_are_recorded_as_calls(open_cluster: ClusterMaker):
    cluster = open_cluster("inline", {"main": [2]}, {"actor": "main"})
    cluster.group("actor", RaisingWorker)
    cluster.wait_for_calls()
    assert [(e.role, e.rank, e.method) for e in cluster.calls.events if e.role == "actor"] == [
        ("actor", 0, "__init__"),
        ("actor", 1, "__init__"),
    ]


def test_large_rows_of_the_driver_are_shared_once_for_all_ranks_and_calls(shared: Shared):
    batch = Batch.from_columns({"x": list(range(100_000))})
    rows = batch.column("x").block.shards[0].payload
    shared.first.scaled(batch)
    once = shared.cluster.calls.put_once(rows)  # pyright: ignore[reportArgumentType] (a LocalRef: the driver made it)
    shared.second.scaled(batch)
    assert shared.cluster.calls.put_once(rows) is once  # pyright: ignore[reportArgumentType] (see above)


def test_events_of_different_devices_have_different_labels(open_cluster: ClusterMaker):
    cluster = open_cluster("inline", {"a": [2], "b": [1]}, {"actor": "a", "critic": "b"})
    for role in ("actor", "critic"):
        cluster.group(role, Arithmetic).process_id()
    labels = {(event.role, event.rank): event.device_label for event in cluster.calls.events}
    assert len({labels[key] for key in (("actor", 0), ("actor", 1), ("critic", 0))}) == 3


def test_threads_of_one_driver_may_wait_at_once(shared: Shared):
    def use(number: int) -> list[int]:
        return [shared.first.double(number + i).get() for i in range(10)]

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(use, range(4))) == [[2 * (n + i) for i in range(10)] for n in range(4)]


def test_a_result_is_not_read_after_its_cluster_has_closed(backend: BackendName, open_cluster: ClusterMaker):
    cluster = open_cluster(backend, {"main": [1]}, {"actor": "main"})
    result = cluster.group("actor", RaisingWorker).add_one.submit(1)
    result.get()
    cluster.close()
    with pytest.raises(FlowError):
        result.get()


def test_the_driver_keeps_the_events_of_the_last_calls(open_cluster: ClusterMaker):
    cluster = open_cluster("inline", {"main": [1]}, {"actor": "main"})
    group = cluster.group("actor", RaisingWorker)
    group.add_one(1).get()
    events = cluster.calls.events
    events.extend([events[-1]] * MAX_EVENTS)
    group.sleep(0.0).get()
    assert len(events) == MAX_EVENTS and events[-1].method == "sleep"
