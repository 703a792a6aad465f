"""What is asked of actor and rollout, and in which order, for each way that weights can take."""

import inspect
from pathlib import Path
from typing import Any

import pytest

from flowrl.config import ActorConfig, Placement, RolloutConfig, RunConfig, ScheduleConfig
from flowrl.controller.placement.plan import Inventory, Mesh, PlacementError, plan
from flowrl.controller.worker import get_registered_methods
from flowrl.weight_sync.sync import WeightSync
from flowrl.workers import Actor, Rollout
from tests.conftest import ClusterMaker
from tests.weight_sync.syncing_workers import Receiving, Sending, read

HOW = {"chunk_mb": 2.0, "dtype": None}
PARTS = range(Sending.CHUNKS)


class SplitRun(RunConfig):
    roles = ("actor", "rollout")

    actor: ActorConfig
    rollout: RolloutConfig
    schedule: ScheduleConfig = ScheduleConfig()


class Two:
    """An actor of two ranks and a rollout, on the CPU, with a WeightSync that takes the devices to be of a kind."""

    def __init__(
        self,
        open_cluster: ClusterMaker,
        folder: Path,
        rollout: str | dict[str, Any] = "other",
        *,
        backend: Any = "inline",
        kind: Any = "cuda",
        via: str = "auto",
        leaves: bool = False,
        meets: bool = False,
        dedicated: tuple[str, ...] = ("rollout",),
        schedule: dict[str, Any] | None = None,
    ) -> None:
        self.diary = folder / "diary"
        self.diary.touch()
        pools: dict[str, Any] = {"main": [2]} | ({} if rollout == "main" else {"other": [4]})
        roles = {"actor": "main", "rollout": rollout}
        self.cluster = open_cluster(backend, pools, roles, dedicated=dedicated)
        settings = {"yields": leaves, "peers": 4 if meets else 0}
        self.actor = self.cluster.group("actor", Sending, self.diary, **settings)
        self.rollout = self.cluster.group("rollout", Receiving, self.diary, peers=1 if meets else 0)
        placement = Placement.model_validate({"device": kind, "pools": pools, "roles": roles})
        config = SplitRun.model_validate(
            {
                "output": "out",
                "steps": 1,
                "placement": placement,
                "schedule": schedule or {},
                "actor": {"model": {"path": "m"}, "optimizer": {"lr": 1.0}},
                "rollout": {
                    "engine": "vllm",
                    "max_response_tokens": 1,
                    "transfer": {"via": via, "chunk_mb": HOW["chunk_mb"]},
                },
            }
        )
        self.weight_sync = WeightSync(config, plan(placement, Inventory((8,), kind), dedicated=dedicated))

    def send(self, version: int) -> list[list[Any]]:
        """What this made the two write: role, rank, method, arguments."""
        before = len(read(self.diary))
        self.weight_sync.send(self.actor, self.rollout, version)
        self.cluster.wait_for_calls()
        return read(self.diary)[before:]


def calls(lines: list[list[Any]]) -> list[tuple[str, str]]:
    """Role and method of each call, to however many ranks it goes."""
    found = [(role, method) for role, rank, method, _ in lines if rank == 0]
    assert set(found) == {(role, method) for role, _, method, _ in lines}
    return found


def arguments(lines: list[list[Any]], method: str, rank: int = 0) -> list[dict[str, Any]]:
    return [given for _, of, name, given in lines if (of, name) == (rank, method)]


@pytest.mark.parametrize(("stands_in", "real"), [(Sending, Actor), (Receiving, Rollout)])
def test_the_two_are_declared_as_the_real_ones(stands_in: type, real: Any) -> None:
    if real is Rollout:
        real = Rollout.select_class(Mesh(1, 1, 1, 1), RolloutConfig(engine="vllm", max_response_tokens=1))
    methods = get_registered_methods(real)
    for name, (function, contract) in get_registered_methods(stands_in).items():
        assert contract == methods[name][1], name
        assert _parameters(function) == _parameters(methods[name][0]), name


def _parameters(function: Any) -> list[tuple[str, Any]]:
    return [(each.name, each.default) for each in inspect.signature(function).parameters.values()]


def test_through_the_object_store_all_parts_leave_before_the_first_arrives(
    open_cluster: ClusterMaker, tmp_path: Path
) -> None:
    two = Two(open_cluster, tmp_path, kind="cpu")
    lines = two.send(7)
    leave, arrive = ("actor", "weights"), ("rollout", "load_weights")
    assert calls(lines) == [("actor", "num_chunks"), *[leave] * 3, *[arrive] * 3]
    for rank in range(2):
        assert arguments(lines, "weights", rank) == [{"chunk": part, **HOW} for part in PARTS]
    expected = [{"weights": {"part": part}, "version": 7, "chunk": part, "of": 3} for part in PARTS]
    assert [arguments(lines, "load_weights", rank) for rank in range(4)] == [expected] * 4


def test_a_part_is_shared_when_the_one_before_it_is_read_and_the_last_is_released(
    open_cluster: ClusterMaker, tmp_path: Path
) -> None:
    two = Two(open_cluster, tmp_path, "main")
    lines = two.send(7)
    a_part = [("actor", "share_weights"), ("rollout", "load_shared")]
    assert calls(lines) == [("actor", "num_chunks"), *a_part * 3, ("actor", "release_weights")]
    have_read = [[f"{rank} has read {part} of 7" for rank in range(2)] for part in PARTS]
    for rank in range(2):
        shared = arguments(lines, "share_weights", rank)
        assert shared == [{"chunk": i, **HOW, "after": have_read[i - 1] if i else None} for i in PARTS]
        loaded = arguments(lines, "load_shared", rank)
        parts = [[f"part {part} on rank {of}" for of in range(2)] for part in PARTS]
        assert loaded == [{"parts": parts[i], "version": 7, "chunk": i, "of": 3} for i in PARTS]
        assert arguments(lines, "release_weights", rank) == [{"after": have_read[-1]}]


def test_no_process_shares_a_part_while_another_reads_the_one_before(
    ray_session: None, open_cluster: ClusterMaker, tmp_path: Path
) -> None:
    two = Two(open_cluster, tmp_path, "main", backend="ray", meets=True)
    done = [method for _, _, method, _ in two.send(1)[1:]]
    assert done == [*(["share_weights"] * 2 + ["load_shared"] * 2) * 3, *["release_weights"] * 2]


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_link_is_joined_once_by_every_device_and_parts_are_received_before_they_are_sent(
    tp: int, open_cluster: ClusterMaker, tmp_path: Path
) -> None:
    two = Two(open_cluster, tmp_path, {"pool": "other", "tp": tp})
    lines = two.send(7)
    joined = [("actor", "open_link"), ("rollout", "join_link"), ("actor", "join_link")]
    a_part = [("rollout", "load_sent"), ("actor", "send_weights")]
    found = calls(lines)
    assert found == [("actor", "num_chunks"), *joined, *[("actor", "describe_weights")] * 3, *a_part * 3]
    link = {"host": "there", "port": 1234, "world_size": 1 + 4, "buffer_bytes": 2_000_000}
    replicas = range(4 // tp)
    assert [line[3] for line in lines if line[2] == "join_link"] == [{"link": link}] * (len(replicas) + 1)
    expected = [{"described": f"description {i}", "version": 7, "chunk": i, "of": 3} for i in PARTS]
    assert [arguments(lines, "load_sent", rank) for rank in replicas] == [expected] * len(replicas)
    # All ranks of the actor put a part together; its first sends it.
    assert [arguments(lines, "send_weights", rank) for rank in range(2)] == [[{"chunk": i, **HOW} for i in PARTS]] * 2


def test_who_joins_sends_and_receives_meets_the_others(
    ray_session: None, open_cluster: ClusterMaker, tmp_path: Path
) -> None:
    two = Two(open_cluster, tmp_path, backend="ray", meets=True)
    for version in (1, 2):
        lines = two.send(version)
        assert [each["version"] for each in arguments(lines, "load_sent", 3)] == [version] * 3


@pytest.mark.parametrize(
    ("rollout", "kind", "once"),
    [
        ("other", "cpu", ["num_chunks"]),
        ("main", "cuda", ["num_chunks"]),
        ("other", "cuda", ["num_chunks", "open_link", "join_link", "describe_weights"]),
    ],
)
def test_a_second_version_uses_what_the_first_found_out(
    rollout: str, kind: str, once: list[str], open_cluster: ClusterMaker, tmp_path: Path
) -> None:
    two = Two(open_cluster, tmp_path, rollout, kind=kind)
    first, second = two.send(1), two.send(2)
    assert set(once) <= {method for _, method in calls(first)}
    assert calls(second) == [call for call in calls(first) if call[1] not in once]
    (loads,) = {name for role, name in calls(second) if role == "rollout"}
    assert {given["version"] for given in arguments(second, loads)} == {2}


def test_in_two_halves_a_version_leaves_and_is_given_to_who_takes_it_later(
    open_cluster: ClusterMaker, tmp_path: Path
) -> None:
    two = Two(open_cluster, tmp_path, kind="cpu")
    two.weight_sync.open(two.actor, two.rollout)
    version = two.weight_sync.export(two.actor, two.rollout, 7)
    assert version.ready() and not two.weight_sync.goes_to_all(two.actor, two.rollout)
    assert calls(read(two.diary)) == [("actor", "num_chunks"), *[("actor", "weights")] * 3]
    before = len(read(two.diary))
    loads, compared = version.deliver(two.rollout)
    assert len(loads) == Sending.CHUNKS and compared is None
    assert calls(read(two.diary)[before:]) == [("rollout", "load_weights")] * 3


def test_through_a_link_the_actor_sends_when_it_comes_to_it_and_all_receive_together(
    open_cluster: ClusterMaker, tmp_path: Path
) -> None:
    two = Two(open_cluster, tmp_path)
    two.weight_sync.open(two.actor, two.rollout)
    before = len(read(two.diary))
    version = two.weight_sync.export(two.actor, two.rollout, 7)
    assert calls(read(two.diary)[before:]) == [("actor", "num_chunks"), *[("actor", "send_weights")] * 3]
    assert version.ready() and two.weight_sync.goes_to_all(two.actor, two.rollout)
    before = len(read(two.diary))
    version.deliver(two.rollout)
    assert calls(read(two.diary)[before:]) == [("rollout", "load_sent")] * 3


@pytest.mark.parametrize("via", ["auto", "nccl"])
def test_replicas_that_finish_first_take_weights_one_by_one(
    via: str, open_cluster: ClusterMaker, tmp_path: Path
) -> None:
    two = Two(open_cluster, tmp_path, via=via, schedule={"kind": "async", "interrupt": False})
    if via == "auto":
        assert not two.weight_sync.goes_to_all(two.actor, two.rollout)
        return
    with pytest.raises(
        PlacementError, match=r"transfer\.via is nccl, .*interrupt is false.*set schedule\.interrupt: true"
    ):
        two.weight_sync.open(two.actor, two.rollout)


def test_what_a_version_needs_to_know_is_asked_before_it(open_cluster: ClusterMaker, tmp_path: Path) -> None:
    two = Two(open_cluster, tmp_path, kind="cpu")
    two.weight_sync.prepare(two.actor, two.rollout)
    assert calls(read(two.diary)) == [("actor", "num_chunks")]
    assert ("actor", "num_chunks") not in calls(two.send(1))


def test_in_the_same_processes_weights_only_change_their_number(open_cluster: ClusterMaker, tmp_path: Path) -> None:
    two = Two(open_cluster, tmp_path, "main", dedicated=())
    two.weight_sync.prepare(two.actor, two.rollout)
    lines = two.send(7)
    assert lines == [["rollout", rank, "set_version", {"version": 7}] for rank in range(2)]
    assert read(two.diary) == lines


def test_weights_of_an_actor_that_leaves_its_devices_go_through_the_object_store(
    open_cluster: ClusterMaker, tmp_path: Path
) -> None:
    two = Two(open_cluster, tmp_path, "main", leaves=True)
    assert {name for role, name in calls(two.send(1)) if role == "rollout"} == {"load_weights"}


def test_memory_of_an_actor_that_leaves_its_devices_cannot_be_asked_for(
    open_cluster: ClusterMaker, tmp_path: Path
) -> None:
    two = Two(open_cluster, tmp_path, "main", leaves=True, via="cuda_ipc")
    with pytest.raises(PlacementError, match=r"rollout\.transfer\.via is cuda_ipc, but .*offload: idle.*via: auto"):
        two.weight_sync.prepare(two.actor, two.rollout)


def test_memory_of_an_actor_that_stays_can_be_asked_for(open_cluster: ClusterMaker, tmp_path: Path) -> None:
    two = Two(open_cluster, tmp_path, "main", via="cuda_ipc")
    assert ("rollout", "load_shared") in calls(two.send(1))
