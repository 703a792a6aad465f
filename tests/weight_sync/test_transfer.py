"""Which way weights take, for every way that actor and rollout can lie to each other."""

from typing import Any

import pytest

from flowrl.config import Placement, RolloutConfig, RunConfig, ScheduleConfig
from flowrl.controller.placement.plan import Inventory, PlacementError, plan
from flowrl.weight_sync.transfer import takes_one_by_one, transport_of


def way(
    kind: Any,
    actor: str,
    rollout: str,
    *,
    engine: str = "vllm",
    via: str = "auto",
    tp: int = 1,
    nodes: tuple = (8,),
    one_by_one: bool = False,
) -> str:
    place: dict[str, Any] = {"pool": rollout, "tp": tp}
    roles = {"actor": actor, "rollout": place} | ({} if "b" in actor + rollout else {"reward": "b"})
    placement = Placement.model_validate({"device": kind, "pools": {"a": [4], "b": [4]}, "roles": roles})
    config = RolloutConfig.model_validate({"engine": engine, "max_response_tokens": 1, "transfer": {"via": via}})
    made = plan(placement, Inventory(nodes, kind), dedicated=("rollout",) if engine == "vllm" else ())
    return transport_of(made.roles["actor"], made.roles["rollout"], kind, config, one_by_one=one_by_one)


@pytest.mark.parametrize(
    ("kind", "actor", "rollout", "settings", "expected"),
    [
        ("cpu", "a", "a", {"engine": "hf"}, "shared"),
        ("cuda", "a", "a", {"engine": "hf"}, "shared"),
        ("cpu", "a", "b", {"engine": "hf"}, "object_store"),
        ("cuda", "a", "b", {"engine": "hf"}, "object_store"),
        ("cuda", "a", "a[0:2]", {"engine": "hf"}, "object_store"),
        ("cpu", "a", "a", {}, "object_store"),
        ("cpu", "a", "b", {}, "object_store"),
        ("cuda", "a", "a", {}, "cuda_ipc"),
        ("cuda", "a+b", "a+b", {}, "cuda_ipc"),
        ("cuda", "a+b", "b", {}, "object_store"),
        ("cuda", "a", "b", {}, "nccl"),
        ("cuda", "a", "b", {"tp": 2}, "nccl"),
        ("cuda", "a", "b", {"tp": 4, "nodes": (4, 4)}, "nccl"),
        ("cuda", "a[0:2]", "a[1:]", {}, "object_store"),
        ("cuda", "a", "b", {"via": "object_store"}, "object_store"),
        ("cuda", "a", "a", {"via": "object_store"}, "object_store"),
        ("cuda", "a", "a", {"via": "cuda_ipc"}, "cuda_ipc"),
        ("cuda", "a", "b", {"via": "nccl"}, "nccl"),
    ],
)
def test_weights_take_the_best_way_there_is(
    kind: str, actor: str, rollout: str, settings: dict[str, Any], expected: str
) -> None:
    assert way(kind, actor, rollout, **settings) == expected


@pytest.mark.parametrize(
    ("kind", "actor", "rollout", "via", "sentence"),
    [
        ("cpu", "a", "b", "nccl", "rollout.transfer.via is nccl, but the devices are of kind cpu: set"),
        ("cpu", "a", "a", "cuda_ipc", "rollout.transfer.via is cuda_ipc, but the devices are of kind cpu: set"),
        ("cuda", "a", "b", "cuda_ipc", "rollout and actor are not on the same GPUs, and memory is shared within a GPU"),
        ("cuda", "a", "a", "nccl", "rollout is on GPUs of actor, and NCCL takes one process per GPU: set"),
        ("cuda", "a[0:2]", "a[1:]", "nccl", "some of the GPUs of rollout are those of actor"),
    ],
)
def test_a_way_that_cannot_be_is_refused(kind: str, actor: str, rollout: str, via: str, sentence: str) -> None:
    with pytest.raises(PlacementError, match=sentence):
        way(kind, actor, rollout, via=via)


def test_replicas_that_take_weights_one_by_one_have_no_way_that_all_take_together() -> None:
    assert way("cuda", "a", "b", one_by_one=True) == "object_store"
    assert way("cpu", "a", "a", engine="hf", one_by_one=True) == "shared"
    with pytest.raises(
        PlacementError, match=r"rollout.transfer.via is nccl, by which all replicas .*schedule.interrupt: true"
    ):
        way("cuda", "a", "b", via="nccl", one_by_one=True)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ({"kind": "sync"}, False),
        ({"kind": "async"}, False),
        ({"kind": "async", "interrupt": False}, True),
        ({"kind": "async", "interrupt": False, "max_staleness": 0}, False),
    ],
)
def test_a_schedule_says_whether_replicas_take_weights_one_by_one(schedule: dict[str, Any], expected: bool) -> None:
    class Scheduled(RunConfig):
        schedule: ScheduleConfig

    config = Scheduled.model_validate({"output": "out", "steps": 1, "schedule": schedule})
    assert takes_one_by_one(config) is expected


def test_weights_that_do_not_travel_are_sent_no_way() -> None:
    with pytest.raises(PlacementError, match=r"via is object_store, but rollout is in the processes of actor and"):
        way("cpu", "a", "a", engine="hf", via="object_store")
