"""A rollout with vLLM as far as it goes without: its ranks in a link, and what a lost process cannot have again."""

from typing import Any

import pytest

from flowrl.config import RolloutConfig
from flowrl.controller.placement.plan import Mesh
from flowrl.controller.worker import WorkerContext
from flowrl.workers import Rollout

CONFIG = RolloutConfig(engine="vllm", max_response_tokens=1)


class Joining:
    """An engine that says where it would join a link."""

    def __init__(self) -> None:
        self.ranks: list[int] = []

    def join_link(self, link: Any, first_rank: int) -> None:
        self.ranks.append(first_rank)


def rollout(rank: int = 0, *, world_size: int = 1, leads: int = 1, replaced: bool = False) -> Any:
    """Rank of a rollout, in its place; vLLM is not started."""
    mesh = Mesh(world_size, 1, 1, 1)
    worker: Any = Rollout.select_class(mesh, CONFIG).__new__(Rollout.select_class(mesh, CONFIG))
    worker.context = WorkerContext(
        "rollout", rank, world_size, rank, 0, "cpu", mesh, replaced=replaced, num_tp_devices=leads
    )
    worker.engine = Joining()
    return worker


@pytest.mark.parametrize(
    ("method", "arguments"), [("load_shared", ([], 1, 0, 1)), ("load_sent", (None, 1, 0, 1)), ("join_link", ({},))]
)
def test_what_came_from_gpu_to_gpu_is_refused_by_a_process_that_took_a_lost_ones_place(
    method: str, arguments: tuple
) -> None:
    worker = rollout(replaced=True)
    sentence = r"^the rollout's process was lost, .*\(resume: auto\), or set rollout\.transfer\.via: object_store$"
    with pytest.raises((ValueError, RuntimeError), match=sentence):
        getattr(worker, method)(*arguments)
    assert not worker.engine.ranks


@pytest.mark.parametrize("leads", [1, 2, 4])
def test_replicas_join_a_link_after_the_actor_each_behind_the_devices_of_those_before(leads: int) -> None:
    replicas = [rollout(rank, world_size=3, leads=leads) for rank in range(3)]
    for worker in replicas:
        worker.join_link({})
    assert [worker.engine.ranks for worker in replicas] == [[1], [1 + leads], [1 + 2 * leads]]
