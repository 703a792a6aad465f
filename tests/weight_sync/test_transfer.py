"""Calls of actor and rollout during a weight sync, and their order, for each transport."""

import inspect
from pathlib import Path
from typing import Any

import pytest

from flowrl.config import ActorConfig, AnySchedule, Placement, RolloutConfig, RunConfig
from flowrl.config.schedule import SyncSchedule
from flowrl.controller.placement.plan import Inventory, PlacementError, plan
from flowrl.controller.worker import get_registered_methods
from flowrl.weight_sync.transfer import WeightSync
from flowrl.workers import Actor, Rollout
from tests.conftest import ClusterMaker
from tests.weight_sync.syncing_workers import RecordingActor, RecordingRollout, read

HOW = {"bucket_mb": 2.0, "dtype": "bfloat16"}
BUCKETS = range(RecordingActor.BUCKETS)


class SplitRun(RunConfig):
    actor: ActorConfig
    rollout: RolloutConfig
    schedule: AnySchedule = SyncSchedule()


class SyncPair:
    """An actor of pair ranks and a rollout on the CPU, with a WeightSync for a placement on `kind` devices."""

    def __init__(
        self,
        open_cluster: ClusterMaker,
        folder: Path,
        rollout: str | dict[str, Any] = "other",
        *,
        backend: Any = "inline",
        kind: Any = "cuda",
        via: str = "auto",
        offloads: bool = False,
        meets: bool = False,
        dedicated: tuple[str, ...] = ("rollout",),
        schedule: dict[str, Any] | None = None,
        lora: dict[str, Any] | None = None,
    ) -> None:
        self.log = folder / "log"
        self.log.touch()
        pools: dict[str, Any] = {"main": [2]} | ({} if rollout == "main" else {"other": [4]})
        roles = {"actor": "main", "rollout": rollout}
        self.cluster = open_cluster(backend, pools, roles, dedicated=dedicated)
        settings = {"yields": offloads, "peers": 4 if meets else 0}
        self.actor = self.cluster.group("actor", RecordingActor, self.log, **settings)
        self.rollout = self.cluster.group("rollout", RecordingRollout, self.log, peers=1 if meets else 0)
        placement = Placement.model_validate({"device": kind, "pools": pools, "roles": roles})
        config = SplitRun.model_validate(
            {
                "output": "out",
                "steps": 1,
                "placement": placement,
                "schedule": schedule or {},
                "actor": {"model": {"path": "m"}, "optimizer": {"lr": 1.0}, "lora": lora},
                "rollout": {
                    "engine": "vllm",
                    "max_response_tokens": 1,
                    "transfer": {"via": via, "bucket_mb": HOW["bucket_mb"]},
                    "vllm": {"dtype": HOW["dtype"]},
                },
            }
        )
        self.weight_sync = WeightSync(config, plan(placement, Inventory((8,), kind), dedicated=dedicated))

    def send(self, version: int) -> list[list[Any]]:
        """Returns the calls of one sync: [role, rank, method, arguments]."""
        before = len(read(self.log))
        self.weight_sync.send(self.actor, self.rollout, version)
        self.cluster.wait_for_calls()
        return read(self.log)[before:]


def calls(lines: list[list[Any]]) -> list[tuple[str, str]]:
    """Returns role and method of each call, once for all ranks."""
    methods = [(role, method) for role, rank, method, _ in lines if rank == 0]
    assert set(methods) == {(role, method) for role, _, method, _ in lines}
    return methods


def arguments(lines: list[list[Any]], method: str, rank: int = 0) -> list[dict[str, Any]]:
    return [kwargs for _, of, name, kwargs in lines if (of, name) == (rank, method)]


@pytest.mark.parametrize(("recording", "real"), [(RecordingActor, Actor), (RecordingRollout, Rollout)])
def test_recording_workers_have_the_contracts_of_the_real_ones(recording: type, real: Any) -> None:
    methods = get_registered_methods(real)
    for name, (function, contract) in get_registered_methods(recording).items():
        assert contract == methods[name][1], name
        assert _parameters(function) == _parameters(methods[name][0]), name


def _parameters(function: Any) -> list[tuple[str, Any]]:
    return [(each.name, each.default) for each in inspect.signature(function).parameters.values()]


def test_object_store_exports_all_buckets_before_the_first_load(open_cluster: ClusterMaker, tmp_path: Path) -> None:
    pair = SyncPair(open_cluster, tmp_path, kind="cpu")
    lines = pair.send(7)
    export, load = ("actor", "weights"), ("rollout", "load_weights")
    assert calls(lines) == [("actor", "num_buckets"), *[export] * 3, *[load] * 3]
    for rank in range(2):
        assert arguments(lines, "weights", rank) == [{"bucket": i, **HOW} for i in BUCKETS]
    expected = [{"weights": {"bucket": i}, "version": 7, "bucket": i, "of": 3} for i in BUCKETS]
    assert [arguments(lines, "load_weights", rank) for rank in range(4)] == [expected] * 4


@pytest.mark.parametrize(("kind", "via"), [("cpu", "auto"), ("cuda", "object_store")])
def test_of_an_actor_with_lora_only_the_adapter_is_sent(
    kind: str, via: str, open_cluster: ClusterMaker, tmp_path: Path
) -> None:
    pair = SyncPair(open_cluster, tmp_path, kind=kind, via=via, lora={"rank": 3})
    pair.weight_sync.prepare(pair.actor, pair.rollout)
    for version in (7, 8):
        lines = pair.send(version)
        assert calls(lines) == [("actor", "adapter"), ("rollout", "load_adapter")]
        expected = {"adapter": {"adapter": 0}, "rank": 3, "bucket_mb": HOW["bucket_mb"], "version": version}
        assert [arguments(lines, "load_adapter", rank) for rank in range(4)] == [[expected]] * 4


def test_an_adapter_is_exported_first_and_loaded_later(open_cluster: ClusterMaker, tmp_path: Path) -> None:
    pair = SyncPair(open_cluster, tmp_path, kind="cpu", lora={"rank": 3})
    pair.weight_sync.connect(pair.actor, pair.rollout)
    version = pair.weight_sync.export(pair.actor, pair.rollout, 7)
    assert not pair.weight_sync.updates_all_replicas(pair.actor, pair.rollout)
    assert calls(read(pair.log)) == [("actor", "adapter")]
    version.send(pair.rollout)
    assert calls(read(pair.log)[2:]) == [("rollout", "load_adapter")]


def test_cuda_ipc_shares_a_bucket_after_the_previous_one_was_loaded(open_cluster: ClusterMaker, tmp_path: Path) -> None:
    pair = SyncPair(open_cluster, tmp_path, "main")
    lines = pair.send(7)
    bucket_calls = [("actor", "share_weights"), ("rollout", "load_ipc")]
    first_calls, last_call = [("actor", "num_buckets"), ("actor", "begin_sharing")], ("actor", "release_weights")
    assert calls(lines) == [*first_calls, *bucket_calls * 3, last_call]
    begun = [f"{rank} has begun" for rank in range(2)]
    loaded_buckets = [[f"{rank} has loaded {i} of 7" for rank in range(2)] for i in BUCKETS]
    for rank in range(2):
        shared = arguments(lines, "share_weights", rank)
        assert shared == [{"bucket": i, **HOW, "after": loaded_buckets[i - 1] if i else begun} for i in BUCKETS]
        loaded = arguments(lines, "load_ipc", rank)
        buckets = [[f"bucket {i} on rank {of}" for of in range(2)] for i in BUCKETS]
        assert loaded == [{"shared": buckets[i], "version": 7, "bucket": i, "of": 3} for i in BUCKETS]
        assert arguments(lines, "release_weights", rank) == [{"after": loaded_buckets[-1]}]


@pytest.mark.slow
def test_no_rank_shares_a_bucket_while_another_loads_the_previous_one(
    ray_session: None, open_cluster: ClusterMaker, tmp_path: Path
) -> None:
    pair = SyncPair(open_cluster, tmp_path, "main", backend="ray", meets=True)
    done = [method for _, _, method, _ in pair.send(1)[1:]]
    buckets = (["share_weights"] * 2 + ["load_ipc"] * 2) * 3
    assert done == [*["begin_sharing"] * 2, *buckets, *["release_weights"] * 2]


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_nccl_group_is_joined_once_and_buckets_are_received_before_they_are_sent(
    tp: int, open_cluster: ClusterMaker, tmp_path: Path
) -> None:
    pair = SyncPair(open_cluster, tmp_path, {"pool": "other", "tp": tp})
    lines = pair.send(7)
    joined = [("actor", "open_transfer_group"), ("rollout", "join_transfer_group"), ("actor", "join_transfer_group")]
    bucket_calls = [("rollout", "load_broadcast"), ("actor", "broadcast_weights")]
    actual = calls(lines)
    assert actual == [("actor", "num_buckets"), *joined, *[("actor", "describe_weights")] * 3, *bucket_calls * 3]
    assert arguments(lines, "open_transfer_group") == [{"num_receivers": 4, "all_send": False}]
    replicas = range(4 // tp)
    joins = [line[3] for line in lines if line[2] == "join_transfer_group"]
    assert joins == [{"group": "the group"}] * (len(replicas) + 2)
    expected = [{"metadata": f"description {i}", "version": 7, "bucket": i, "of": 3} for i in BUCKETS]
    assert [arguments(lines, "load_broadcast", rank) for rank in replicas] == [expected] * len(replicas)
    # All actor ranks gather a bucket; rank 0 sends it.
    assert [arguments(lines, "broadcast_weights", rank) for rank in range(2)] == [
        [{"bucket": i, **HOW} for i in BUCKETS]
    ] * 2


def test_nccl_calls_run_at_the_same_time_on_all_members(
    ray_session: None, open_cluster: ClusterMaker, tmp_path: Path
) -> None:
    pair = SyncPair(open_cluster, tmp_path, backend="ray", meets=True)
    for version in (1, 2):
        lines = pair.send(version)
        assert [each["version"] for each in arguments(lines, "load_broadcast", 3)] == [version] * 3


@pytest.mark.parametrize(
    ("rollout", "kind", "once"),
    [
        ("other", "cpu", ["num_buckets"]),
        ("main", "cuda", ["num_buckets"]),
        ("other", "cuda", ["num_buckets", "open_transfer_group", "join_transfer_group", "describe_weights"]),
    ],
)
def test_a_second_sync_reuses_the_setup_of_the_first(
    rollout: str, kind: str, once: list[str], open_cluster: ClusterMaker, tmp_path: Path
) -> None:
    pair = SyncPair(open_cluster, tmp_path, rollout, kind=kind)
    first, second = pair.send(1), pair.send(2)
    assert set(once) <= {method for _, method in calls(first)}
    assert calls(second) == [call for call in calls(first) if call[1] not in once]
    (loads,) = {name for role, name in calls(second) if role == "rollout" and name.startswith("load")}
    assert {kwargs["version"] for kwargs in arguments(second, loads)} == {2}


def test_a_snapshot_is_exported_first_and_loaded_later(open_cluster: ClusterMaker, tmp_path: Path) -> None:
    pair = SyncPair(open_cluster, tmp_path, kind="cpu")
    pair.weight_sync.connect(pair.actor, pair.rollout)
    version = pair.weight_sync.export(pair.actor, pair.rollout, 7)
    assert version.is_ready() and not pair.weight_sync.updates_all_replicas(pair.actor, pair.rollout)
    assert calls(read(pair.log)) == [("actor", "num_buckets"), *[("actor", "weights")] * 3]
    before = len(read(pair.log))
    loads, compared = version.send(pair.rollout)
    assert len(loads) == RecordingActor.BUCKETS and compared is None
    assert calls(read(pair.log)[before:]) == [("rollout", "load_weights")] * 3


def test_an_nccl_snapshot_is_ready_when_the_actor_reaches_the_broadcast(
    open_cluster: ClusterMaker, tmp_path: Path
) -> None:
    pair = SyncPair(open_cluster, tmp_path)
    pair.weight_sync.connect(pair.actor, pair.rollout)
    before = len(read(pair.log))
    version = pair.weight_sync.export(pair.actor, pair.rollout, 7)
    assert calls(read(pair.log)[before:]) == [("actor", "num_buckets"), *[("actor", "broadcast_weights")] * 3]
    assert version.is_ready() and pair.weight_sync.updates_all_replicas(pair.actor, pair.rollout)
    before = len(read(pair.log))
    version.send(pair.rollout)
    assert calls(read(pair.log)[before:]) == [("rollout", "load_broadcast")] * 3


@pytest.mark.parametrize("via", ["auto", "nccl"])
def test_per_replica_updates_do_not_use_nccl(via: str, open_cluster: ClusterMaker, tmp_path: Path) -> None:
    pair = SyncPair(open_cluster, tmp_path, via=via, schedule={"kind": "async", "interrupt": False})
    if via == "auto":
        assert not pair.weight_sync.updates_all_replicas(pair.actor, pair.rollout)
        return
    with pytest.raises(PlacementError, match=r"transfer\.via .*nccl.*schedule\.interrupt: true"):
        pair.weight_sync.connect(pair.actor, pair.rollout)


def test_prepare_requests_the_number_of_buckets(open_cluster: ClusterMaker, tmp_path: Path) -> None:
    pair = SyncPair(open_cluster, tmp_path, kind="cpu")
    pair.weight_sync.prepare(pair.actor, pair.rollout)
    assert calls(read(pair.log)) == [("actor", "num_buckets")]
    assert ("actor", "num_buckets") not in calls(pair.send(1))


def test_shared_weights_only_change_their_version(open_cluster: ClusterMaker, tmp_path: Path) -> None:
    pair = SyncPair(open_cluster, tmp_path, "main", dedicated=())
    pair.weight_sync.prepare(pair.actor, pair.rollout)
    lines = pair.send(7)
    assert lines == [["rollout", rank, "set_version", {"version": 7}] for rank in range(2)]
    assert read(pair.log) == lines


def test_an_actor_that_offloads_uses_the_object_store(open_cluster: ClusterMaker, tmp_path: Path) -> None:
    pair = SyncPair(open_cluster, tmp_path, "main", offloads=True)
    assert {name for role, name in calls(pair.send(1)) if role == "rollout"} == {"load_weights"}


@pytest.mark.parametrize("offloads", [True, False])
def test_an_actor_that_offloads_also_uses_cuda_ipc_on_request(
    offloads: bool, open_cluster: ClusterMaker, tmp_path: Path
) -> None:
    pair = SyncPair(open_cluster, tmp_path, "main", offloads=offloads, via="cuda_ipc")
    assert ("rollout", "load_ipc") in calls(pair.send(1))
