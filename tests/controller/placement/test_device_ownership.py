"""Processes of one device make room for each other, in the order of submission."""

import os
import signal
from pathlib import Path

import pytest

from flowrl.controller.cluster import Cluster
from flowrl.controller.errors import FlowError
from flowrl.controller.placement.device_ownership import DeviceOwnership
from flowrl.controller.placement.plan import Slot
from tests.conftest import ClusterMaker
from tests.controller.moving import Moving, Stuck, Training

HOST = Slot("main", 0, 0, 0, device=0)
LEADER = Slot("main/rollout", 0, 0, 0, device=0, device_pool="main", tp_devices=(1,))
NEXT = Slot("main", 1, 0, 1, device=1)
ALONE = Slot("other", 0, 0, 0, device=2)
ELSEWHERE = Slot("far", 0, 1, 0, device=0)


def made(**yields: bool) -> DeviceOwnership:
    """A ledger of all slots, in which workers were made that yield or not."""
    ledger = DeviceOwnership([HOST, LEADER, NEXT, ALONE, ELSEWHERE])
    slots = {"host": HOST, "leader": LEADER, "next": NEXT, "alone": ALONE}
    for name, does in yields.items():
        ledger.claim_for_worker(slots[name], does)
    return ledger


def test_a_called_process_owns_the_device_until_another_is_called():
    ledger = made(host=True, leader=True)
    assert ledger.claim(HOST) == [LEADER]
    assert ledger.claim(HOST) == []
    assert ledger.claim(LEADER) == [HOST]
    assert ledger.claim(LEADER) == []


def test_a_leader_of_several_devices_waits_for_evictions_on_each():
    ledger = made(host=True, next=True, leader=True)
    ledger.claim(HOST)
    assert ledger.claim(NEXT) == [], "they have a device each"
    assert ledger.claim(LEADER) == [HOST, NEXT]
    assert ledger.claim(NEXT) == [LEADER]
    assert ledger.claim(HOST) == [], "the leader has left both"


def test_a_process_that_cannot_offload_is_awaited():
    """What it is doing takes memory beside what it holds."""
    ledger = made(host=False, leader=True)
    assert ledger.claim(HOST) == [LEADER]
    assert ledger.claim(LEADER) == [HOST]
    assert ledger.claim(HOST) == [LEADER]


def test_without_offload_no_process_waits():
    ledger = made(host=False, leader=False)
    assert [ledger.claim(slot) for slot in (HOST, LEADER, NEXT, LEADER, HOST)] == [[]] * 5


def test_exclusive_devices_are_not_tracked():
    ledger = made(alone=True, leader=True)
    assert ledger.is_shared(HOST) and ledger.is_shared(LEADER) and ledger.is_shared(NEXT)
    assert not ledger.is_shared(ALONE) and not ledger.is_shared(ELSEWHERE)
    assert ledger.claim(ALONE) == []


def test_evictions_name_evicted_and_evicting_process():
    ledger = made(host=False, leader=True)
    assert ledger.is_evicted_by([LEADER], [HOST]) and ledger.is_evicted_by([ALONE, LEADER], [ALONE, NEXT])
    assert not ledger.is_evicted_by([HOST], [LEADER]) and not ledger.is_evicted_by([LEADER], [ALONE])


class Two:
    """A role that trains, and one in a process of its own on the same device."""

    def __init__(self, open_cluster: ClusterMaker, backend: str, folder: Path, cls=Moving, **yields: bool) -> None:
        self.diary = folder / "diary"
        roles = dict.fromkeys(("actor", "rollout"), "main")
        self.cluster: Cluster = open_cluster(backend, {"main": [1]}, roles, dedicated=("rollout",))
        self.actor = self.cluster.group("actor", Training, self.diary, yields.get("actor", True))
        self.rollout = self.cluster.group("rollout", cls, self.diary, yields.get("rollout", True))

    def lines(self) -> list[str]:
        self.cluster.wait_for_calls()
        return self.diary.read_text().splitlines()


def test_processes_own_the_device_in_the_order_of_submission(
    open_cluster: ClusterMaker, backend, tmp_path: Path
) -> None:
    two = Two(open_cluster, backend, tmp_path)
    for _ in range(2):
        answered = two.rollout.work.submit()
        weights = two.actor.work.submit(answered, seconds=0.2)
        two.actor.work.submit(weights)
        two.rollout.load.submit(weights)
    a_step = [
        *("rollout comes with weights and cache", "rollout works", "rollout leaves"),
        *("actor comes with weights and cache", "actor works", "actor works", "actor leaves"),
        *("rollout comes with weights", "rollout loads"),
    ]
    first = ["actor starts", "actor leaves", "rollout starts", *a_step[1:]]
    assert two.lines() == [*first, "rollout comes with cache", *a_step[1:]]


def test_a_call_without_device_memory_evicts_nothing(open_cluster: ClusterMaker, backend, tmp_path: Path) -> None:
    two = Two(open_cluster, backend, tmp_path)
    two.actor.work()
    before = two.lines()
    assert two.rollout.look() == [["cache", "weights"]]
    assert two.lines() == before


def test_a_process_that_cannot_offload_stays_on_the_device(open_cluster: ClusterMaker, backend, tmp_path: Path) -> None:
    two = Two(open_cluster, backend, tmp_path, actor=False)
    assert two.rollout.is_evicted_by(two.actor) and not two.actor.is_evicted_by(two.rollout)
    for _ in range(2):
        two.actor.work.submit(seconds=0.2)
        two.rollout.work.submit()
    turn = ["rollout leaves", "actor works", "rollout comes with weights and cache", "rollout works"]
    assert two.lines() == ["actor starts", "rollout starts", *turn, *turn]


def test_without_offload_nothing_is_evicted(open_cluster: ClusterMaker, backend, tmp_path: Path) -> None:
    two = Two(open_cluster, backend, tmp_path, actor=False, rollout=False)
    assert not two.rollout.is_evicted_by(two.actor)
    two.rollout.work()
    two.actor.work()
    assert sorted(two.lines()) == ["actor starts", "actor works", "rollout starts", "rollout works"]


def test_a_failed_eviction_fails_the_waiting_call(ray_session, open_cluster, tmp_path: Path) -> None:
    two = Two(open_cluster, "ray", tmp_path, Stuck)
    with pytest.raises(FlowError, match=r"rollout.evict failed on rank 0 .*the host has no room"):
        two.actor.work.submit().get()


@pytest.mark.slow
def test_a_replaced_process_is_loaded_at_its_next_call(ray_session, open_cluster, tmp_path: Path) -> None:
    two = Two(open_cluster, "ray", tmp_path)
    two.rollout.load([1]).get()
    (process,) = two.rollout.work().get()
    two.actor.work().get()
    before = len(two.lines())
    os.kill(process, signal.SIGKILL)
    two.actor.work().get()
    (process,) = two.rollout.work().get()
    again = ["rollout starts", "rollout loads", "rollout works"]
    assert two.lines()[before:] == ["actor works", "actor leaves", *again]
    os.kill(process, signal.SIGKILL)
    two.actor.work().get()
    came = ["actor comes with weights and cache", "actor works"]
    assert two.lines()[before + 5 :] == came, "a process without workers has nothing to leave with"
    two.rollout.work().get()
    assert two.lines()[before + 7 :] == ["actor leaves", *again]
