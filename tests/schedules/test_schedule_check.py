"""What of schedules and routes a plan cannot follow, each in one sentence."""

from pathlib import Path
from typing import Any

import pytest

from flowrl.config import ConfigError, Placement, load
from flowrl.controller.placement.plan import Inventory, PlacementError, plan
from flowrl.run.preflight import plan_run
from flowrl.schedules.schedule_check import check_routes, check_schedule, lanes_of
from recipes.grpo.config import GRPOConfig
from recipes.ppo.config import PPOConfig
from tests.configs import ppo_settings

ROOT = Path(__file__).parents[2]
PPO = ppo_settings(schedule={"kind": "async"})


VLLM: dict[str, Any] = {"max_response_tokens": 8, "engine": "vllm"}
ALONE = {"pools": {"trainers": [2]}, "roles": dict.fromkeys(PPOConfig.roles, "trainers")}


def placed(placement: dict[str, Any] | None = None, **settings: Any) -> dict[str, Any]:
    """Two makers and two trainers, unless a role is named with another pool."""
    roles = dict.fromkeys(("actor", "critic", "reference", "reward"), "trainers") | {"rollout": "makers"}
    roles |= {role: settings.pop(role) for role in list(roles) if isinstance(settings.get(role), str)}
    pools = {name: [2] for name in ("makers", "trainers") if any(name in pool for pool in roles.values())}
    return PPO | {"placement": {"device": "cpu", "pools": pools, "roles": roles} | (placement or {})} | settings


def routed(*feeds: list[int], **settings: Any) -> dict[str, Any]:
    return placed({"routes": {"rollout": list(feeds)}}, **settings)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            placed(rollout="trainers"),
            r"schedule.kind is async, but rollout and actor, which trains, share devices of pool trainers, .* give "
            r"rollout a pool of its own, as placement/detached_2m1t.yaml does, or set schedule.kind: sync",
        ),
        (placed(rollout="makers+trainers"), "rollout and actor, which trains, share devices of pool trainers"),
        (placed(ALONE, rollout=VLLM), "rollout and actor, which trains, share devices of pool trainers"),
        (placed(critic="makers"), "rollout and critic, which trains, share devices of pool makers"),
        (routed([0], [1], schedule={"kind": "sync"}), "but schedule.kind is sync, at which .* split evenly over all"),
        (routed([0], [1], schedule={"kind": "one_step_off"}), "but schedule.kind is one_step_off"),
        (routed([0], [1], schedule={"kind": "async", "max_staleness": 0}), "but schedule.max_staleness is 0"),
        (routed([0], [1], schedule={"kind": "async", "overprovision": 1}), "set schedule.overprovision: 0, or remove"),
        (routed([0]), "placement.routes.rollout has 1 list, but rollout has 2 replicas: give one for each"),
        (routed([0], [1], [1]), "has 3 lists, but rollout has 2 replicas"),
        (routed([0, 1], []), "placement.routes.rollout.1 is empty, so that replica 1 of rollout has no trainer"),
        (routed([0], [0, 2]), "rollout.1 names rank 2, but the data-parallel ranks of actor are 0 to 1"),
        (routed([1], [1]), "names rank 0 of actor nowhere, so that nobody feeds it"),
        (routed([0, 0], [1]), r"rollout.0 is \[0, 0\], which names a rank twice"),
        (routed([0], [1], batch_size=6), "prompts: make it a multiple of 2, or remove placement.routes"),
        (
            routed([0], [1], minibatch_size=3),
            r"each of the 2 data-parallel ranks of actor an equal share of a minibatch, but minibatch_size is 3: make "
            r"it a multiple of 2, or remove placement.routes",
        ),
        (placed({"routes": {"critic": [[0]]}}), "placement.routes.critic is no role that feeds others"),
        (placed({"routes": {}}), "placement.routes is empty"),
    ],
)
def test_what_cannot_be_followed_is_refused(settings: dict[str, Any], sentence: str):
    with pytest.raises(ConfigError, match=sentence):
        plan_run(PPOConfig.model_validate(settings))


@pytest.mark.parametrize("kind", ["sync", "one_step_off"])
def test_schedules_of_whole_batches_may_share_devices(kind: str):
    assert plan_run(PPOConfig.model_validate(placed(rollout="trainers", schedule={"kind": kind})))


def test_a_role_that_does_not_train_may_share_the_makers_devices():
    config = PPOConfig.model_validate(placed(reference="makers", reward="makers"))
    assert lanes_of(config, plan_run(config)) is None


def beside(role: str, device: str, **vllm: bool) -> dict[str, Any]:
    """A role on the makers' devices, which vLLM makes."""
    settings = placed({"device": device}, **{role: "makers"})
    rollout = VLLM | ({"vllm": vllm} if vllm else {})
    return settings | {"rollout": rollout, "devices": [4]}


@pytest.mark.parametrize("role", ["reference", "reward"])
@pytest.mark.parametrize(("device", "vllm"), [("cuda", {}), ("cuda", {"sleep": True}), ("cpu", {"sleep": True})])
def test_vllm_that_leaves_its_devices_to_another_role_does_not_stream(role: str, device: str, vllm: dict[str, bool]):
    sentence = (
        rf"schedule.kind is async, at which vLLM always works on prompts, but {role} is on devices of rollout, pool "
        rf"makers, .* give {role} the pool of actor, trainers, or set rollout.vllm.sleep: false"
    )
    with pytest.raises(ConfigError, match=sentence):
        plan_run(PPOConfig.model_validate(beside(role, device, **vllm)))


@pytest.mark.parametrize(
    "settings",
    [
        beside("reference", "cuda", sleep=False),
        beside("reference", "cpu"),
        beside("reference", "cuda") | {"rollout": PPO["rollout"]},
        beside("reference", "cuda") | {"schedule": {"kind": "async", "max_staleness": 0}},
        beside("reference", "cuda") | {"schedule": {"kind": "one_step_off"}},
    ],
)
def test_rollouts_that_stay_or_finish_share_their_devices(settings: dict[str, Any]):
    assert plan_run(PPOConfig.model_validate(settings))


def together(interrupt: bool, via: str = "auto") -> PPOConfig:
    """vLLM on GPUs of its own."""
    schedule = {"kind": "async", "interrupt": interrupt}
    settings = placed({"device": "cuda"}, schedule=schedule, devices=[4])
    return PPOConfig.model_validate(settings | {"rollout": VLLM | {"transfer": {"via": via}}})


def test_a_way_that_all_take_together_is_refused_where_each_finishes_first():
    with pytest.raises(PlacementError, match=r"via is nccl, .*but schedule.interrupt is false, .*interrupt: true, or"):
        plan_run(together(False, "nccl"))
    assert plan_run(together(True, "nccl")) and plan_run(together(False))


@pytest.mark.parametrize(
    ("routes", "sentence"),
    [
        ({"rollout": [[0], [7]]}, "rollout.1 names rank 7, but the data-parallel ranks of actor are 0 to 1"),
        ({"actor": [[0]]}, "placement.routes.actor is no role that feeds others"),
    ],
)
def test_routes_of_a_placement_by_itself_are_checked(routes: dict[str, Any], sentence: str):
    placement = Placement.model_validate(placed({"routes": routes})["placement"])
    with pytest.raises(ConfigError, match=sentence):
        check_routes(placement, plan(placement, Inventory((4,), "cpu")))


def test_routes_say_who_feeds_each_trainer():
    config = PPOConfig.model_validate(routed([0], [0, 1]))
    assert lanes_of(config, plan_run(config)) == ((0, 1), (1,))


@pytest.mark.parametrize(
    ("name", "engine", "makers", "trainers"),
    [("detached_2m1t", "hf", 2, 1), ("detached_2m2t", "hf", 2, 2), ("detached_tp_maker", "vllm", 1, 2)],
)
def test_the_detached_placements_are_planned(name: str, engine: str, makers: int, trainers: int):
    placement = load(ROOT / f"placement/{name}.yaml", ["device=cpu"], Placement)
    rollout = {"rollout": {"max_response_tokens": 8, "engine": engine}}
    config = GRPOConfig.model_validate(
        {name: value for name, value in PPO.items() if name != "critic"}
        | rollout
        | {"algorithm": {"estimator": "grpo"}, "placement": placement}
    )
    planned = plan(placement, Inventory((8,), "cpu"), GRPOConfig.roles, config.apart())
    check_schedule(config, planned)
    assert (planned.roles["rollout"].mesh.dp, planned.roles["actor"].mesh.dp) == (makers, trainers)
