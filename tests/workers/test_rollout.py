"""GPU transports of the rollout worker without an engine: ranks in a transfer group, and no replayed transfers."""

from typing import Any

import pytest

from flowrl.config import ReplicaSizes
from flowrl.controller.placement.plan import Mesh
from flowrl.controller.worker import WorkerContext
from flowrl.workers import Rollout


class RecordingEngine:
    """Records the indices with which it would join a transfer group."""

    def __init__(self) -> None:
        self.ranks: list[int] = []

    def join_transfer_group(self, group: Any, first: int) -> None:
        self.ranks.append(first)


def rollout(rank: int = 0, *, world_size: int = 1, leads: int = 1, replaced: bool = False) -> Any:
    """Returns a rollout worker without starting an engine."""
    mesh = Mesh(world_size, 1, 1, 1)
    worker: Any = Rollout.__new__(Rollout)
    worker.context = WorkerContext(
        "rollout", rank, world_size, rank, 0, "cpu", mesh, replaced=replaced, replica=ReplicaSizes(leads)
    )
    worker.engine = RecordingEngine()
    return worker


@pytest.mark.parametrize(
    ("method", "arguments"),
    [("load_ipc", ([], 1, 0, 1)), ("load_broadcast", (None, 1, 0, 1)), ("join_transfer_group", ({},))],
)
def test_recovered_process_rejects_gpu_transfers(method: str, arguments: tuple) -> None:
    worker = rollout(replaced=True)
    with pytest.raises(RuntimeError, match=r"rollout\.transfer\.via: object_store"):
        getattr(worker, method)(*arguments)
    assert not worker.engine.ranks


@pytest.mark.parametrize("leads", [1, 2, 4])
def test_the_devices_of_all_replicas_join_a_transfer_group_in_order(leads: int) -> None:
    replicas = [rollout(rank, world_size=3, leads=leads) for rank in range(3)]
    for worker in replicas:
        worker.join_transfer_group({})
    assert [worker.engine.ranks for worker in replicas] == [[0], [leads], [2 * leads]]
