import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from flowrl import ContractError, FlowError, ResourcePool
from flowrl.controller.placement.plan import PlacementError
from flowrl.controller.worker import Worker
from tests.conftest import BackendName, ClusterMaker
from tests.controller.faulty_backend import CallFault, FaultyBackend
from tests.controller.faulty_workers import RaisingWorker
from tests.controller.workers import Arithmetic


def test_a_role_is_created_once(open_cluster: ClusterMaker):
    cluster = open_cluster("inline", {"main": [1]}, {"actor": "main"})
    cluster.group("actor", RaisingWorker)
    with pytest.raises(ContractError, match="'actor'"):
        cluster.group("actor", RaisingWorker)


def test_a_role_must_be_in_the_placement(open_cluster: ClusterMaker):
    cluster = open_cluster("inline", {"main": [1]}, {"actor": "main"})
    with pytest.raises(ContractError, match="'critic'"):
        cluster.group("critic", RaisingWorker)


def test_a_placement_that_does_not_fit_starts_no_process(open_cluster: ClusterMaker):
    with pytest.raises(PlacementError, match=r"placement\.pools\.main"):
        open_cluster("ray", {"main": [3]}, {"actor": "main"}, devices=(2,))


def test_a_pool_of_the_placement_is_read_back(open_cluster: ClusterMaker):
    cluster = open_cluster("inline", {"main": [2, 1]}, {"actor": "main"}, devices=(2, 2))
    assert cluster.pool("main").devices_per_node == (2, 1)


def test_the_cluster_waits_for_every_call_in_flight(backend: BackendName, open_cluster: ClusterMaker):
    cluster = open_cluster(backend, {"main": [1]}, {"actor": "main"})
    future = cluster.group("actor", RaisingWorker).sleep(0.1)
    cluster.wait_for_calls(timeout_s=60)
    assert future.done() and not cluster.calls.in_flight()


def test_a_closed_cluster_releases_its_processes(backend: BackendName, open_cluster: ClusterMaker):
    for _ in range(2):
        cluster = open_cluster(backend, {"main": [9]}, {"actor": "main"})
        cluster.close()


@pytest.mark.slow
def test_workers_have_the_priority_of_their_driver(ray_session: None, open_cluster: ClusterMaker):
    cluster = open_cluster("ray", {"main": [2]}, {"actor": "main"})
    assert cluster.group("actor", Arithmetic).niceness() == [os.nice(0)] * 2


def is_deterministic(worker: Worker) -> bool:
    return torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("deterministic", [False, True])
def test_every_process_uses_only_deterministic_operations_if_requested(
    backend: BackendName, open_cluster: ClusterMaker, default_algorithms: None, deterministic: bool
):
    cluster = open_cluster(backend, {"main": [1]}, {"actor": "main"}, deterministic=deterministic)
    assert cluster.group("actor", RaisingWorker).run(is_deterministic) == [deterministic]


def get_torch_threads(worker: Worker) -> int:
    return torch.get_num_threads()


def open_pair(backend: BackendName, open_cluster: ClusterMaker, **settings: Any) -> list[int]:
    """Returns the numbers of torch threads of two workers."""
    cluster = open_cluster(backend, {"main": [2]}, {"actor": "main"}, **settings)
    return cluster.group("actor", Arithmetic).run(get_torch_threads)


@pytest.fixture
def own_threads() -> Iterator[None]:
    """Restores the number of torch threads and the CPU affinity of this process."""
    num_threads, cpus = torch.get_num_threads(), os.sched_getaffinity(0)
    yield
    torch.set_num_threads(num_threads)
    os.sched_setaffinity(0, cpus)


def test_every_process_has_the_threads_of_the_environment(
    backend: BackendName, open_cluster: ClusterMaker, own_threads: None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert open_pair(backend, open_cluster) == [3, 3]


def test_the_setting_precedes_the_environment(
    open_cluster: ClusterMaker, own_threads: None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert open_pair("inline", open_cluster, num_threads=2) == [2, 2]


def test_without_the_environment_the_usable_cpus_are_divided(
    backend: BackendName, open_cluster: ClusterMaker, own_threads: None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    num_cpus = len(os.sched_getaffinity(0))
    assert open_pair(backend, open_cluster) == [num_cpus if backend == "inline" else max(1, num_cpus // 2)] * 2


def test_the_affinity_limits_the_number_of_threads(
    open_cluster: ClusterMaker, own_threads: None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
    assert open_pair("inline", open_cluster) == [1, 1]


def get_aligned_roles(worker: Worker) -> frozenset[str]:
    return worker.context.aligned_roles


def test_a_worker_knows_its_rank_aligned_roles(open_cluster: ClusterMaker):
    roles = {"actor": "main", "critic": "main", "first": "main[0:1]", "last": "main[1:2]"}
    cluster = open_cluster("inline", {"main": [2]}, roles)
    groups = {role: cluster.group(role, Arithmetic) for role in roles}
    aligned = {role: group.run(get_aligned_roles) for role, group in groups.items()}
    assert aligned == {
        "actor": [{"critic"}] * 2,
        "critic": [{"actor"}] * 2,
        "first": [frozenset()],
        "last": [frozenset()],
    }


def test_a_closed_cluster_rejects_calls(backend: BackendName, open_cluster: ClusterMaker):
    cluster = open_cluster(backend, {"main": [1]}, {"actor": "main"})
    group = cluster.group("actor", RaisingWorker)
    cluster.close()
    with pytest.raises(FlowError):
        group.add_one(1)


def test_a_call_in_flight_fails_when_the_cluster_closes(open_cluster: ClusterMaker):
    backend = FaultyBackend(CallFault("slow", "actor", "add_one", after_s=60.0))
    cluster = open_cluster(backend, {"main": [1]}, {"actor": "main"})
    future = cluster.group("actor", RaisingWorker).add_one(1)
    cluster.close()
    with pytest.raises(FlowError):
        future.get()


def test_a_resource_pool_counts_its_devices():
    assert ResourcePool((8, 8)).world_size == 16


@pytest.mark.parametrize("counts", [(), (0,), (2, -1)])
def test_a_resource_pool_without_devices_on_a_node_is_rejected(counts: tuple[int, ...]):
    with pytest.raises(PlacementError):
        ResourcePool(counts)
