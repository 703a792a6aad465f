"""Roles of one process offload each other, so that one of them is on the device."""

import time

import pytest
import torch

from flowrl.controller.host.host import Host, ResidentWorker
from flowrl.controller.placement.plan import Mesh
from flowrl.controller.wire import Construction, Request
from flowrl.controller.worker import Contract, Dispatch, Worker, register
from tests.conftest import ClusterMaker


class Resident(Worker):
    """Appends its offloads, onloads and calls to a list that the roles share."""

    def __init__(self, moves: list[str], shares_weights_of: str | None = None) -> None:
        self.moves, self.shares_weights_of = moves, shares_weights_of

    @property
    def weight_owners(self) -> tuple[Worker, ...]:
        owner = None if self.shares_weights_of is None else self.peer(self.shares_weights_of)
        return () if owner is None else (owner,)

    def offload(self, *, keep_weights: bool) -> None:
        self.moves.append(f"{self.context.role} {'offload except weights' if keep_weights else 'offload'}")

    def onload(self) -> None:
        self.moves.append(f"{self.context.role} onload")

    @register(Dispatch.ONE_TO_ALL)
    def work(self) -> None:
        self.moves.append(f"{self.context.role} work")


def test_other_roles_are_offloaded_before_a_role_is_loaded_until_their_next_call(open_cluster: ClusterMaker) -> None:
    moves: list[str] = []
    cluster = open_cluster("inline", {"main": [1]}, dict.fromkeys(("actor", "critic"), "main"))
    actor = cluster.group("actor", Resident, moves)
    critic = cluster.group("critic", Resident, moves)
    assert moves == ["actor offload"], "a constructor needs the device, too"
    moves.clear()
    for group in (actor, actor, critic, actor):
        group.work()
    assert moves == [
        *("critic offload", "actor onload", "actor work", "actor work"),
        *("actor offload", "critic onload", "critic work"),
        *("critic offload", "actor onload", "actor work"),
    ]


class Slow(Resident):
    """Needs 2 ms to leave the device, and 3 ms to return to it."""

    def offload(self, *, keep_weights: bool) -> None:
        time.sleep(0.002)

    def onload(self) -> None:
        time.sleep(0.003)


def test_a_call_reports_the_seconds_in_which_memory_of_its_process_moved(open_cluster: ClusterMaker) -> None:
    cluster = open_cluster("inline", {"main": [1]}, dict.fromkeys(("actor", "critic"), "main"))
    actor, critic = cluster.group("actor", Slow, []), cluster.group("critic", Resident, [])
    for group in (actor, critic, critic):
        group.work()
    loaded, offloaded, resident = (event.usage for event in list(cluster.calls.events)[-3:])
    seconds = [{n: v for n, v in own.items() if n.startswith("seconds/")} for own in (loaded, offloaded, resident)]
    assert [set(own) for own in seconds] == [{"seconds/actor/onload"}, {"seconds/actor/offload"}, set()]
    assert seconds[0]["seconds/actor/onload"] >= 0.003 and seconds[1]["seconds/actor/offload"] >= 0.002


class Sleeping(Resident):
    """Returns to the device in parts, each in 2 ms."""

    def onload(self) -> None:
        time.sleep(0.002)

    @register(Dispatch.ONE_TO_ALL, memory=("weights",))
    def load(self) -> None: ...


def test_the_weights_and_the_rest_of_the_memory_are_phases_of_their_own(open_cluster: ClusterMaker) -> None:
    cluster = open_cluster("inline", {"main": [1]}, dict.fromkeys(("actor", "rollout"), "main"))
    rollout, actor = cluster.group("rollout", Sleeping, []), cluster.group("actor", Resident, [])
    actor.work()
    rollout.load()
    rollout.work()
    actor.work()
    rollout.work()
    names = [name for event in cluster.calls.events for name in event.usage]
    phases = [name.rpartition("/")[2] for name in names if name.startswith("seconds/")]
    assert phases == ["onload_weights", "onload_rest", "onload"]


def test_an_owner_keeps_shared_weights_on_the_device(open_cluster: ClusterMaker) -> None:
    moves: list[str] = []
    roles = ("actor", "critic", "rollout")
    cluster = open_cluster("inline", {"main": [1]}, dict.fromkeys(roles, "main"))
    groups = {role: cluster.group(role, Resident, moves, "actor" if role == "rollout" else None) for role in roles}
    moves.clear()
    groups["rollout"].work()
    assert moves == [
        *("actor offload except weights", "critic offload"),
        *("actor onload", "rollout onload", "rollout work"),
    ]


def test_a_failed_onload_is_retried() -> None:
    class Stuck(Worker):
        fails = True

        def onload(self) -> None:
            if self.fails:
                raise MemoryError("no room")

    worker = Stuck()
    resident = ResidentWorker({"actor": worker})
    for _ in range(2):
        try:
            resident.activate("actor")
        except MemoryError:
            continue
        raise AssertionError("the second call must retry")
    worker.fails = False
    resident.activate("actor")


def construction(cls: type[Worker], *args: object, device: str = "cpu") -> Construction:
    return Construction("actor", cls, args, {}, Mesh(1, 1, 1, 1), 0, 0, 0, device, 1)


def test_an_eviction_releases_cached_memory_after_the_offload() -> None:
    moves: list[str] = []
    host = Host(lambda: moves.append("release"))
    host.construct(construction(Resident, moves))
    host.evict("actor", 0, 0)
    assert moves == ["actor offload", "release"]


class Caching(Worker):
    """Frees tensors of 512 MiB, which stay in torch's cache. A reference cycle holds half of them."""

    @register(Dispatch.ONE_TO_ALL)
    def work(self) -> None:
        cycle: list = [torch.empty(2**28, dtype=torch.uint8, device=self.device) for _ in range(2)]
        cycle[1] = cycle


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_an_eviction_returns_cached_memory_to_the_gpu() -> None:
    host, free = Host(), []
    host.construct(construction(Caching, device="cuda:0"))
    for _ in range(3):
        host.call(Request(0, "actor", 0, 0, "work", {}, Contract(Dispatch.ONE_TO_ALL), returns_batch=False))
        working = torch.cuda.mem_get_info()[0]
        host.evict("actor", 0, 0)
        free.append(torch.cuda.mem_get_info()[0])
        assert free[-1] - working >= 2**29
    assert max(free) - min(free) < 2**20
