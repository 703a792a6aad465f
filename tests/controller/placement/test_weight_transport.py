"""Choice of the transport for each placement of actor and rollout."""

from typing import Any

import pytest

from flowrl.config import AnySchedule, Placement, RolloutConfig, RunConfig
from flowrl.controller.placement.plan import Inventory, PlacementError, plan
from flowrl.controller.placement.weight_transport import choose_transport, has_per_replica_updates

SCRIPTED = "tests.engines.rollout.scripted_engine:ScriptedEngine"


def transport(
    kind: Any,
    actor: str,
    rollout: str,
    *,
    engine: str = "vllm",
    via: str = "auto",
    tp: int = 1,
    actor_pp: int = 1,
    nodes: tuple = (8,),
    per_replica: bool = False,
    sends_adapter: bool = False,
) -> str:
    rollout_role: dict[str, Any] = {"pool": rollout, "tp": tp}
    actor_role = {"pool": actor, "pp": actor_pp}
    roles = {"actor": actor_role, "rollout": rollout_role} | ({} if "b" in actor + rollout else {"reward": "b"})
    placement = Placement.model_validate({"device": kind, "pools": {"a": [4], "b": [4]}, "roles": roles})
    config = RolloutConfig.model_validate({"engine": engine, "max_response_tokens": 1, "transfer": {"via": via}})
    planned = plan(placement, Inventory(nodes, kind), dedicated=("rollout",) if engine == "vllm" else ())
    roles_of_plan = planned.roles["actor"], planned.roles["rollout"]
    return choose_transport(*roles_of_plan, kind, config, per_replica=per_replica, sends_adapter=sends_adapter)


@pytest.mark.parametrize(
    ("kind", "actor", "rollout", "settings", "expected"),
    [
        ("cpu", "a", "a", {"engine": "hf"}, "shared"),
        ("cuda", "a", "a", {"engine": "hf"}, "shared"),
        ("cpu", "a", "a", {"engine": "hf", "actor_pp": 2}, "object_store"),
        ("cuda", "a", "a", {"engine": SCRIPTED, "actor_pp": 2}, "object_store"),
        ("cuda", "a", "a", {"actor_pp": 2}, "cuda_ipc"),
        ("cuda", "a", "a", {"engine": SCRIPTED}, "local"),
        ("cpu", "a", "b", {"engine": "hf"}, "object_store"),
        ("cuda", "a", "b", {"engine": SCRIPTED}, "object_store"),
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
        ("cpu", "a", "b", {"via": "gloo"}, "gloo"),
        ("cpu", "a", "a", {"via": "gloo"}, "gloo"),
    ],
)
def test_the_fastest_available_transport_is_chosen(
    kind: str, actor: str, rollout: str, settings: dict[str, Any], expected: str
) -> None:
    assert transport(kind, actor, rollout, **settings) == expected


@pytest.mark.parametrize(
    ("kind", "actor", "rollout", "via", "fix"),
    [
        ("cpu", "a", "b", "nccl", "auto"),
        ("cpu", "a", "a", "cuda_ipc", "auto"),
        ("cuda", "a", "b", "cuda_ipc", "auto"),
        ("cuda", "a", "a", "nccl", "auto"),
        ("cuda", "a[0:2]", "a[1:]", "nccl", "object_store"),
        ("cuda", "a", "b", "gloo", "auto"),
    ],
)
def test_an_impossible_transport_is_rejected(kind: str, actor: str, rollout: str, via: str, fix: str) -> None:
    with pytest.raises(PlacementError, match=rf"rollout\.transfer\.via .*\b{via}\b.* rollout\.transfer\.via: {fix}$"):
        transport(kind, actor, rollout, via=via)


@pytest.mark.parametrize(
    ("kind", "actor", "rollout", "settings", "expected"),
    [
        ("cpu", "a", "a", {"engine": "hf"}, "shared"),
        ("cuda", "a", "a", {"engine": SCRIPTED}, "local"),
        ("cpu", "a", "b", {"engine": "hf"}, "adapter"),
        ("cuda", "a", "b", {}, "nccl"),
        ("cuda", "a", "b", {"engine": "hf"}, "adapter"),
        ("cuda", "a", "b", {"per_replica": True}, "adapter"),
        ("cuda", "a", "b", {"via": "object_store"}, "adapter"),
        ("cuda", "a", "b", {"via": "nccl"}, "nccl"),
        ("cpu", "a", "b", {"via": "gloo"}, "gloo"),
        ("cuda", "a", "a", {}, "cuda_ipc"),
    ],
)
def test_an_adapter_is_sent_instead_of_all_weights_through_the_object_store(
    kind: str, actor: str, rollout: str, settings: dict[str, Any], expected: str
) -> None:
    assert transport(kind, actor, rollout, sends_adapter=True, **settings) == expected


def test_per_replica_updates_exclude_broadcasts() -> None:
    assert transport("cuda", "a", "b", per_replica=True) == "object_store"
    with pytest.raises(PlacementError, match=r"rollout\.transfer\.via .*\bgloo\b.*schedule\.interrupt"):
        transport("cpu", "a", "b", via="gloo", per_replica=True)
    assert transport("cpu", "a", "a", engine="hf", per_replica=True) == "shared"
    with pytest.raises(PlacementError, match=r"rollout\.transfer\.via .*nccl.*schedule\.interrupt: true"):
        transport("cuda", "a", "b", via="nccl", per_replica=True)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ({"kind": "sync"}, False),
        ({"kind": "async"}, False),
        ({"kind": "async", "interrupt": False}, True),
        ({"kind": "async", "interrupt": False, "max_staleness": 0}, False),
    ],
)
def test_schedules_with_per_replica_updates(schedule: dict[str, Any], expected: bool) -> None:
    class Scheduled(RunConfig):
        schedule: AnySchedule

    config = Scheduled.model_validate({"output": "out", "steps": 1, "schedule": schedule})
    assert has_per_replica_updates(config) is expected


def test_shared_weights_have_no_transport() -> None:
    with pytest.raises(PlacementError, match=r"rollout\.transfer\.via .*object_store.*auto$"):
        transport("cpu", "a", "a", engine="hf", via="object_store")
