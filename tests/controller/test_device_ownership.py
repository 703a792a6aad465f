"""Processes that share a device evict each other in the order of submission."""

import os
import signal
from pathlib import Path

import pytest

from flowrl.controller.cluster import Cluster
from flowrl.controller.errors import FlowError
from flowrl.controller.group import DeviceOwnership
from flowrl.controller.placement.plan import Slot
from tests.conftest import ClusterMaker
from tests.controller.moving import Moving, Slow, Stuck, Training

HOST = Slot("main", 0, 0, 0, device=0)
LEADER = Slot("main/rollout", 0, 0, 0, device=0, device_pool="main", other_devices=(1,))
NEXT = Slot("main", 1, 0, 1, device=1)
ALONE = Slot("other", 0, 0, 0, device=2)
ELSEWHERE = Slot("far", 0, 1, 0, device=0)


def ownership_of(**can_offload: bool) -> DeviceOwnership:
    """Returns the ownership of all slots; `can_offload` has a value per worker."""
    ledger = DeviceOwnership([HOST, LEADER, NEXT, ALONE, ELSEWHERE])
    slots = {"host": HOST, "leader": LEADER, "next": NEXT, "alone": ALONE}
    for name, value in can_offload.items():
        ledger.claim_for_worker(slots[name], value)
    return ledger


def test_a_called_process_owns_the_device_until_another_is_called():
    ledger = ownership_of(host=True, leader=True)
    assert ledger.claim(HOST) == [LEADER]
    assert ledger.claim(HOST) == []
    assert ledger.claim(LEADER) == [HOST]
    assert ledger.claim(LEADER) == []


def test_a_leader_of_several_devices_waits_for_evictions_on_each():
    ledger = ownership_of(host=True, next=True, leader=True)
    ledger.claim(HOST)
    assert ledger.claim(NEXT) == [], "each has its own device"
    assert ledger.claim(LEADER) == [HOST, NEXT]
    assert ledger.claim(NEXT) == [LEADER]
    assert ledger.claim(HOST) == [], "the leader has been evicted from both"


def test_a_process_that_cannot_offload_is_awaited():
    """Its running call uses device memory."""
    ledger = ownership_of(host=False, leader=True)
    assert ledger.claim(HOST) == [LEADER]
    assert ledger.claim(LEADER) == [HOST]
    assert ledger.claim(HOST) == [LEADER]


def test_a_process_that_joins_evicts_nobody_until_it_is_called_alone():
    ledger = ownership_of(host=True, leader=True)
    ledger.claim(HOST)
    ledger.join(LEADER)
    assert ledger.claim(LEADER) == [HOST]
    ledger.claim(HOST)
    ledger.join(LEADER)
    assert ledger.claim(HOST) == [LEADER], "both own the device"


def test_without_offload_no_process_waits():
    ledger = ownership_of(host=False, leader=False)
    assert [ledger.claim(slot) for slot in (HOST, LEADER, NEXT, LEADER, HOST)] == [[]] * 5


def test_exclusive_devices_are_not_tracked():
    ledger = ownership_of(alone=True, leader=True)
    assert ledger.is_shared(HOST) and ledger.is_shared(LEADER) and ledger.is_shared(NEXT)
    assert not ledger.is_shared(ALONE) and not ledger.is_shared(ELSEWHERE)
    assert ledger.claim(ALONE) == []


def test_evictions_name_evicted_and_evicting_process():
    ledger = ownership_of(host=False, leader=True)
    assert ledger.is_evicted_by([LEADER], [HOST]) and ledger.is_evicted_by([ALONE, LEADER], [ALONE, NEXT])
    assert not ledger.is_evicted_by([HOST], [LEADER]) and not ledger.is_evicted_by([LEADER], [ALONE])


class Two:
    """An actor, and a rollout in a dedicated process on the same device."""

    def __init__(self, open_cluster: ClusterMaker, backend: str, folder: Path, cls=Moving, **can_offload: bool) -> None:
        self.diary = folder / "diary"
        roles = dict.fromkeys(("actor", "rollout"), "main")
        self.cluster: Cluster = open_cluster(backend, {"main": [1]}, roles, dedicated=("rollout",))
        self.actor = self.cluster.group("actor", Training, self.diary, can_offload.get("actor", True))
        self.rollout = self.cluster.group("rollout", cls, self.diary, can_offload.get("rollout", True))

    def lines(self) -> list[str]:
        self.cluster.wait_for_calls()
        return self.diary.read_text().splitlines()


def test_processes_own_the_device_in_the_order_of_submission(
    open_cluster: ClusterMaker, backend, tmp_path: Path
) -> None:
    two = Two(open_cluster, backend, tmp_path)
    for _ in range(2):
        responses = two.rollout.work.submit()
        weights = two.actor.work.submit(responses, seconds=0.2)
        two.actor.work.submit(weights)
        two.rollout.load.submit(weights)
    one_step = [
        *("rollout onload weights and cache", "rollout work", "rollout offload"),
        *("actor onload weights and cache", "actor work", "actor work", "actor offload"),
        *("rollout onload weights", "rollout load"),
    ]
    first = ["actor start", "actor offload", "rollout start", *one_step[1:]]
    assert two.lines() == [*first, "rollout onload cache", *one_step[1:]]


def test_a_call_without_device_memory_evicts_nothing(open_cluster: ClusterMaker, backend, tmp_path: Path) -> None:
    two = Two(open_cluster, backend, tmp_path)
    two.actor.work()
    before = two.lines()
    assert two.rollout.look() == [["cache", "weights"]]
    assert two.lines() == before


@pytest.mark.slow
def test_a_process_that_cannot_offload_stays_on_the_device(open_cluster: ClusterMaker, backend, tmp_path: Path) -> None:
    two = Two(open_cluster, backend, tmp_path, actor=False)
    assert two.rollout.is_evicted_by(two.actor) and not two.actor.is_evicted_by(two.rollout)
    for _ in range(2):
        two.actor.work.submit(seconds=0.2)
        two.rollout.work.submit()
    one_turn = ["rollout offload", "actor work", "rollout onload weights and cache", "rollout work"]
    assert two.lines() == ["actor start", "rollout start", *one_turn, *one_turn]


@pytest.mark.slow
def test_without_offload_nothing_is_evicted(open_cluster: ClusterMaker, backend, tmp_path: Path) -> None:
    two = Two(open_cluster, backend, tmp_path, actor=False, rollout=False)
    assert not two.rollout.is_evicted_by(two.actor)
    two.rollout.work()
    two.actor.work()
    assert sorted(two.lines()) == ["actor start", "actor work", "rollout start", "rollout work"]


@pytest.mark.slow
def test_a_failed_eviction_fails_the_waiting_call(ray_session, open_cluster, tmp_path: Path) -> None:
    two = Two(open_cluster, "ray", tmp_path, Stuck)
    with pytest.raises(FlowError, match=r"rollout\.evict .*rank 0\b.*MemoryError"):
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
    recovery = ["rollout start", "rollout load", "rollout work"]
    assert two.lines()[before:] == ["actor work", "actor offload", *recovery]
    os.kill(process, signal.SIGKILL)
    two.actor.work().get()
    expected = ["actor onload weights and cache", "actor work"]
    assert two.lines()[before + 5 :] == expected, "a process without workers is not offloaded"
    two.rollout.work().get()
    assert two.lines()[before + 7 :] == ["actor offload", *recovery]


@pytest.mark.parametrize("ranks", ["each other", "alone"])
def test_every_process_on_the_devices_of_a_leader_waits_for_its_eviction(
    ranks: str, ray_session: None, open_cluster: ClusterMaker, tmp_path: Path
) -> None:
    """Each rank of the actor is on one of the two devices. The calls are not collective."""
    roles = {"actor": "main", "rollout": {"pool": "main", "tp": 2}}
    cluster: Cluster = open_cluster("ray", {"main": [2]}, roles, dedicated=("rollout",), num_threads=1)
    diary = tmp_path / "diary"
    actor = cluster.group("actor", Moving, diary, False)
    rollout = cluster.group("rollout", Slow, diary)
    for _ in range(2):
        rollout.work.submit()
        if ranks == "alone":
            for rank in (1, 0):
                actor.replica(rank).work.submit()
        else:
            actor.work.submit()
    cluster.wait_for_calls()
    turn = ["rollout work", "rollout offload", "actor work", "actor work", "rollout onload weights and cache"]
    lines = [line for line in diary.read_text().splitlines() if "start" not in line]
    assert lines == [*turn, *turn[:-1]]


def test_an_eviction_is_awaited_once_by_each_process_on_the_devices(open_cluster: ClusterMaker, tmp_path: Path) -> None:
    two = Two(open_cluster, "inline", tmp_path)
    eviction = two.cluster._eviction
    (actor,), (rollout,) = two.actor.slots, two.rollout.slots
    eviction.before(rollout)
    assert len(eviction.before(actor)) == 1
    assert eviction.before(actor) == []
    assert eviction.before_joining(rollout) == []
    assert len(eviction.before(rollout)) == 1
