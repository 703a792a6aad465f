"""What of schedules and routes a plan cannot follow, each in one sentence."""

from pathlib import Path
from typing import Any

import pytest

from flowrl.config import ConfigError, Placement, load
from flowrl.controller.plan import Inventory, plan
from flowrl.run.schedule_check import check_schedule, lanes_of
from flowrl.run.start import plan_run
from recipes.grpo.config import GRPOConfig
from recipes.ppo.config import PPOConfig

ROOT = Path(__file__).parents[2]
TRAINED = {"model": {"path": "m"}, "optimizer": {"lr": 1e-4}}
PPO: dict[str, Any] = {
    "output": "runs/test",
    "steps": 1,
    "rows_per_step": 8,
    "minibatch_rows": 4,
    "samples_per_prompt": 2,
    "actor": TRAINED,
    "critic": TRAINED,
    "reference": {"model": {"path": "m"}},
    "reward": {"function": "rewards:score"},
    "rollout": {"max_response_tokens": 8},
    "data": {"train": "train.jsonl", "max_prompt_tokens": 8},
    "algorithm": {"estimator": "gae"},
    "schedule": {"kind": "async"},
}


VLLM = {"max_response_tokens": 8, "engine": "vllm"}
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
        (routed([0], [1], schedule={"kind": "async", "redundancy": 1}), "set schedule.redundancy: 0, or remove"),
        (routed([0]), "placement.routes.rollout has 1 list, but rollout has 2 replicas: give one for each"),
        (routed([0], [1], [1]), "has 3 lists, but rollout has 2 replicas"),
        (routed([0, 1], []), "placement.routes.rollout.1 is empty, so that replica 1 of rollout has no trainer"),
        (routed([0], [0, 2]), "rollout.1 names rank 2, but the data-parallel ranks of actor are 0 to 1"),
        (routed([1], [1]), "names rank 0 of actor nowhere, so that nobody feeds it"),
        (routed([0, 0], [1]), r"rollout.0 is \[0, 0\], which names a rank twice"),
        (routed([0], [1], rows_per_step=6), "prompts: make it a multiple of 2, or remove placement.routes"),
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
