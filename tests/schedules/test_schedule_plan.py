"""Schedules and routes that a plan rejects, and the data flow graph of `flowrl plan`, whose text is the feature."""

from pathlib import Path
from typing import Any, get_args

import pytest

from flowrl.config import ConfigError, Placement, load
from flowrl.controller.placement.plan import Inventory, PlacementError, plan
from flowrl.controller.placement.weight_transport import Transport
from flowrl.schedules.schedule_plan import _TRANSPORT_LABELS, check_routes, check_schedule, render_graph, trainer_routes
from recipes.grpo.config import GRPOConfig
from recipes.ppo.config import PPOConfig
from tests.configs import plan_run, ppo_settings
from tests.errors import rejects

ROOT = Path(__file__).parents[2]
WITH_KL = {"estimator": "gae", "kl_coef": 0.1}
PPO = ppo_settings(schedule={"kind": "async"}, algorithm=WITH_KL)
SYNC = ppo_settings(algorithm=WITH_KL)
VLLM: dict[str, Any] = {"max_response_tokens": 8, "engine": "vllm"}
ALONE = {"pools": {"trainers": [2]}, "roles": dict.fromkeys(PPOConfig.possible_roles(), "trainers")}


def placed(placement: dict[str, Any] | None = None, **settings: Any) -> dict[str, Any]:
    """Returns settings with two rollout devices and two trainer devices; `role=pool` moves a role."""
    roles = dict.fromkeys(("actor", "critic", "reference", "reward"), "trainers") | {"rollout": "makers"}
    roles |= {role: settings.pop(role) for role in list(roles) if isinstance(settings.get(role), str)}
    pools = {name: [2] for name in ("makers", "trainers") if any(name in pool for pool in roles.values())}
    return PPO | {"placement": {"device": "cpu", "pools": pools, "roles": roles} | (placement or {})} | settings


def routed(*feeds: list[int], **settings: Any) -> dict[str, Any]:
    return placed({"routes": {"rollout": list(feeds)}}, **settings)


@pytest.mark.parametrize(
    ("settings", "pattern"),
    [
        (placed(rollout="trainers"), "schedule.kind.*actor.*trainers"),
        (placed(rollout="makers+trainers"), "schedule.kind.*actor.*trainers"),
        (placed(ALONE, rollout=VLLM), "schedule.kind.*actor.*trainers"),
        (placed(critic="makers"), "schedule.kind.*critic.*makers"),
        (routed([0], [1], schedule={"kind": "sync"}), "placement.routes.*schedule.kind"),
        (routed([0], [1], schedule={"kind": "one_step_off"}), "placement.routes.*schedule.kind"),
        (routed([0], [1], schedule={"kind": "async", "max_staleness": 0}), "placement.routes.*schedule.max_staleness"),
        (routed([0], [1], schedule={"kind": "async", "overprovision": 1}), "schedule.overprovision.*placement.routes"),
        (routed([0], [1], dynamic_sampling={}, samples_per_prompt=2), "dynamic_sampling.*placement.routes"),
        (routed([0]), r"placement.routes.rollout\b.* 1\b.* 2\b"),
        (routed([0], [1], [1]), r"placement.routes.rollout\b.* 3\b.* 2\b"),
        (routed([0, 1], []), r"placement.routes.rollout\.1\b"),
        (routed([0], [0, 2]), r"placement.routes.rollout\.1\b.* 2\b.*\b0\b.*\b1\b"),
        (routed([1], [1]), r"placement.routes.rollout\b.* 0\b"),
        (routed([0, 0], [1]), r"placement.routes.rollout\.0\b.*\[0, 0\]"),
        (routed([0], [1], batch_size=6), r"placement.routes.*batch_size.*\b3\b.*\b2\b"),
        (routed([0], [1], minibatch_size=3), r"placement.routes.*minibatch_size .*\b3\b.*\b2\b"),
        (placed({"routes": {"critic": [[0]]}}), "placement.routes.critic"),
        (placed({"routes": {}}), "placement.routes"),
    ],
)
def test_invalid_schedules_and_routes_are_rejected(settings: dict[str, Any], pattern: str):
    with pytest.raises(ConfigError, match=pattern):
        plan_run(PPOConfig.model_validate(settings))


DROPS = {"transfer": {"drop_weights": True}}


@pytest.mark.parametrize(
    ("settings", "facts"),
    [
        ({"rollout": VLLM | DROPS}, ["schedule.kind", "async"]),
        ({"rollout": VLLM | DROPS, "schedule": {"kind": "one_step_off"}}, ["schedule.kind", "one_step_off"]),
        ({"rollout": VLLM | DROPS, "schedule": {"kind": "sync"}}, ["rollout.vllm.sleep"]),
        ({"rollout": {"max_response_tokens": 8} | DROPS, "schedule": {"kind": "sync"}}, []),
    ],
)
def test_weights_are_dropped_only_by_a_rollout_that_sleeps_until_a_sync(settings: dict[str, Any], facts: list[str]):
    with rejects("rollout.transfer.drop_weights", *facts, error=ConfigError):
        plan_run(PPOConfig.model_validate(placed(**settings)))
    sleeping = VLLM | DROPS | {"vllm": {"sleep": True}}
    assert plan_run(PPOConfig.model_validate(placed(rollout=sleeping, schedule={"kind": "sync"})))


@pytest.mark.parametrize("kind", ["sync", "one_step_off"])
def test_batch_schedules_may_share_devices(kind: str):
    assert plan_run(PPOConfig.model_validate(placed(rollout="trainers", schedule={"kind": kind})))


def test_a_frozen_role_may_share_the_rollout_devices():
    config = PPOConfig.model_validate(placed(reference="makers", reward="makers"))
    assert trainer_routes(config, plan_run(config)) is None


def share_rollout_devices(role: str, device: str, **vllm: bool) -> dict[str, Any]:
    """Returns settings with a role on the devices of a vLLM rollout."""
    settings = placed({"device": device}, **{role: "makers"})
    rollout = VLLM | ({"vllm": vllm} if vllm else {})
    return settings | {"rollout": rollout, "devices": [4]}


@pytest.mark.parametrize("role", ["reference", "reward"])
@pytest.mark.parametrize(("device", "vllm"), [("cuda", {}), ("cuda", {"sleep": True}), ("cpu", {"sleep": True})])
def test_vllm_with_sleep_cannot_share_devices_while_streaming(role: str, device: str, vllm: dict[str, bool]):
    with pytest.raises(ConfigError, match=f"{role}.*rollout.vllm.sleep: false"):
        plan_run(PPOConfig.model_validate(share_rollout_devices(role, device, **vllm)))


@pytest.mark.parametrize(
    "settings",
    [
        share_rollout_devices("reference", "cuda", sleep=False),
        share_rollout_devices("reference", "cpu"),
        share_rollout_devices("reference", "cuda") | {"rollout": PPO["rollout"]},
        share_rollout_devices("reference", "cuda") | {"schedule": {"kind": "async", "max_staleness": 0}},
        share_rollout_devices("reference", "cuda") | {"schedule": {"kind": "one_step_off"}},
    ],
)
def test_rollouts_without_sleep_or_streaming_may_share_devices(settings: dict[str, Any]):
    assert plan_run(PPOConfig.model_validate(settings))


def detached_vllm(interrupt: bool, via: str = "auto") -> PPOConfig:
    """Returns a config of vLLM on dedicated GPUs."""
    schedule = {"kind": "async", "interrupt": interrupt}
    settings = placed({"device": "cuda"}, schedule=schedule, devices=[4])
    return PPOConfig.model_validate(settings | {"rollout": VLLM | {"transfer": {"via": via}}})


def test_nccl_requires_interrupt():
    with pytest.raises(PlacementError, match=r"nccl.*schedule\.interrupt"):
        plan_run(detached_vllm(False, "nccl"))
    assert plan_run(detached_vllm(True, "nccl")) and plan_run(detached_vllm(False))


@pytest.mark.parametrize(
    ("routes", "pattern"),
    [
        ({"rollout": [[0], [7]]}, r"placement.routes.rollout\.1\b.* 7\b"),
        ({"actor": [[0]]}, "placement.routes.actor"),
    ],
)
def test_routes_of_a_placement_file_are_checked(routes: dict[str, Any], pattern: str):
    placement = Placement.model_validate(placed({"routes": routes})["placement"])
    with pytest.raises(ConfigError, match=pattern):
        check_routes(placement, plan(placement, Inventory((4,), "cpu")))


def test_trainer_routes_invert_the_placement():
    config = PPOConfig.model_validate(routed([0], [0, 1]))
    assert trainer_routes(config, plan_run(config)) == ((0, 1), (1,))


@pytest.mark.parametrize(
    ("name", "engine", "num_replicas", "num_trainers"),
    [
        ("detached_2m1t", "hf", 2, 1),
        ("detached_2m2t", "hf", 2, 2),
        ("detached_tp_maker", "vllm", 1, 2),
        ("detached_pp_trainer", "hf", 2, 1),
    ],
)
def test_the_detached_placements_are_planned(name: str, engine: str, num_replicas: int, num_trainers: int):
    placement = load(ROOT / f"placement/{name}.yaml", ["device=cpu"], Placement)
    rollout = {"rollout": {"max_response_tokens": 8, "engine": engine}}
    config = GRPOConfig.model_validate(
        {name: value for name, value in PPO.items() if name != "critic"}
        | rollout
        | {"algorithm": {"estimator": "grpo"}, "placement": placement}
    )
    planned = plan(placement, Inventory((8,), "cpu"), config.roles, config.dedicated_roles())
    check_schedule(config, planned)
    assert (planned.roles["rollout"].mesh.dp, planned.roles["actor"].mesh.dp) == (num_replicas, num_trainers)


# Graph.


def drawn(replicas: int, trainers: int, schedule: dict[str, Any] | None = None, **placement: Any) -> str:
    """Returns the graph of a placement. With 0 replicas the rollout shares the trainers' devices."""
    pools = {"trainers": [trainers]} | ({"makers": [replicas]} if replicas else {})
    roles = dict.fromkeys(PPOConfig.possible_roles(), "trainers") | ({"rollout": "makers"} if replicas else {})
    where = {"device": "cpu", "pools": dict(reversed(pools.items())), "roles": roles} | placement
    config = PPOConfig.model_validate(SYNC | {"placement": where, "schedule": schedule or {"kind": "async"}})
    return render_graph(config, plan_run(config))


def test_two_replicas_and_one_trainer():
    assert drawn(2, 1) == (
        "schedule: async; max staleness 1, weight updates between two tokens\n"
        "rollout 0  0:0 --+--  (1) rollouts: 4 prompts x 2 samples per step, at most 8 untrained  ----> actor 0  0:2\n"
        "rollout 1  0:1 --+\n"
        "  ^                                                                                            |\n"
        "  +-------------------------------  (2) weights: object store  --------------------------------+"
    )


def test_two_replicas_and_two_trainers():
    assert drawn(2, 2, {"kind": "async", "max_staleness": 3, "interrupt": False}).splitlines()[:3] == [
        "schedule: async; max staleness 3, weight updates when a replica is idle",
        "rollout 0  0:0 --+--  (1) rollouts: 4 prompts x 2 samples per step, at most 16 untrained  --+-> actor 0  0:2",
        "rollout 1  0:1 --+                                                                          +-> actor 1  0:3",
    ]


def test_routes_are_drawn():
    assert drawn(2, 2, routes={"rollout": [[0], [0, 1]]}).splitlines()[1:] == [
        "rollout 0  0:0 --  (1) rollouts  --> actor 0  0:2",
        "rollout 1  0:1 --  (1) rollouts  --> actor 0  0:2, actor 1  0:3",
        "(2) weights: object store, from all actor ranks to all replicas",
    ]


@pytest.mark.parametrize(
    ("replicas", "schedule", "text"),
    [
        (0, {"kind": "sync"}, "schedule: sync; each step generates, then trains"),
        (2, {"kind": "async", "max_staleness": 0}, "schedule: async with max_staleness 0 (same as sync); each step"),
        (2, {"kind": "one_step_off"}, "schedule: one_step_off; generates the next step while a step trains"),
        (0, {"kind": "one_step_off"}, "trains; generation and training alternate on shared devices"),
        (
            2,
            {"kind": "async", "max_concurrent": 3, "overprovision": 2},
            "at most 3 concurrent prompts, over-provisioned by 2 prompts",
        ),
        (2, {"kind": "async", "max_concurrent": 1}, "at most 1 concurrent prompts, weight"),
    ],
)
def test_the_first_line_describes_the_schedule(replicas: int, schedule: dict[str, Any], text: str):
    assert text in drawn(replicas, 1, schedule).splitlines()[0]


def test_every_transport_has_a_label():
    assert set(_TRANSPORT_LABELS) == set(get_args(Transport))


def test_shared_weights_have_no_transport():
    assert "(2) weights: none " in drawn(0, 2, {"kind": "sync"})


@pytest.mark.parametrize(
    ("schedule", "transport"),
    [
        ({"kind": "async"}, "NCCL"),
        ({"kind": "async", "interrupt": False}, "object store"),
        ({"kind": "sync"}, "NCCL"),
    ],
)
def test_the_weight_transport_is_drawn(schedule: dict[str, Any], transport: str):
    roles = dict.fromkeys(PPOConfig.possible_roles(), "trainers") | {"rollout": "makers"}
    where = {"device": "cuda", "pools": {"makers": [2], "trainers": [2]}, "roles": roles}
    vllm = {"rollout": {"max_response_tokens": 8, "engine": "vllm"}, "devices": [4]}
    config = PPOConfig.model_validate(SYNC | vllm | {"placement": where, "schedule": schedule})
    assert f"(2) weights: {transport}" in render_graph(config, plan_run(config))


def test_many_ranks_are_abbreviated():
    lines = drawn(64, 64, {"kind": "sync"}).splitlines()
    assert len(lines) == 1 + 6 + 2 and lines[5].startswith("...") and lines[6].startswith("rollout 63")
    assert len(lines[-1]) == len(lines[-2])
