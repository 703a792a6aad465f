"""The drawing of who feeds whom in `flowrl plan`."""

from typing import Any

import pytest

from flowrl.run.preflight import plan_run
from flowrl.schedules.schedule_graph import render_graph
from recipes.ppo.config import PPOConfig
from tests.configs import ppo_settings

PPO = ppo_settings()


def drawn(makers: int, trainers: int, schedule: dict[str, Any] | None = None, **placement: Any) -> str:
    """The graph of so many makers and trainers; 0 makers have the trainers' devices."""
    pools = {"trainers": [trainers]} | ({"makers": [makers]} if makers else {})
    roles = dict.fromkeys(PPOConfig.roles, "trainers") | ({"rollout": "makers"} if makers else {})
    where = {"device": "cpu", "pools": dict(reversed(pools.items())), "roles": roles} | placement
    config = PPOConfig.model_validate(PPO | {"placement": where, "schedule": schedule or {"kind": "async"}})
    return render_graph(config, plan_run(config))


def test_two_makers_feed_one_trainer_which_gives_them_weights():
    assert drawn(2, 1) == (
        "schedule: async; staleness at most 1, new weights between two tokens\n"
        "rollout 0  0:0 --+--  (1) experience: 4 prompts of 2 samples a step, at most 8 untrained  ----> actor 0  0:2\n"
        "rollout 1  0:1 --+\n"
        "  ^                                                                                             |\n"
        "  +--------------------------  (2) weights, through the object store  --------------------------+"
    )


def test_two_makers_feed_two_trainers():
    assert drawn(2, 2, {"kind": "async", "max_staleness": 3, "interrupt": False}).splitlines()[:3] == [
        "schedule: async; staleness at most 3, new weights when a maker has finished",
        "rollout 0  0:0 --+--  (1) experience: 4 prompts of 2 samples a step, at most 16 untrained  --+-> actor 0  0:2",
        "rollout 1  0:1 --+                                                                           +-> actor 1  0:3",
    ]


def test_routes_say_whom_each_maker_feeds():
    assert drawn(2, 2, routes={"rollout": [[0], [0, 1]]}).splitlines()[1:] == [
        "rollout 0  0:0 --  (1) experience  --> actor 0  0:2",
        "rollout 1  0:1 --  (1) experience  --> actor 0  0:2, actor 1  0:3",
        "(2) weights of every actor to all, through the object store",
    ]


@pytest.mark.parametrize(
    ("makers", "schedule", "sentence"),
    [
        (0, {"kind": "sync"}, "schedule: sync; a step's responses are generated, and then trained on"),
        (2, {"kind": "async", "max_staleness": 0}, "schedule: async with max_staleness 0, which is sync; a step's"),
        (2, {"kind": "one_step_off"}, "schedule: one_step_off; a step's responses are generated while the one before"),
        (0, {"kind": "one_step_off"}, "trains; they share devices, which have one of them at a time"),
        (
            2,
            {"kind": "async", "max_concurrent": 3, "overprovision": 2},
            "at most 3 prompts worked on at once, 2 more in",
        ),
        (2, {"kind": "async", "max_concurrent": 1}, "at most 1 prompt worked on at once, new"),
    ],
)
def test_a_schedule_says_what_it_is(makers: int, schedule: dict[str, Any], sentence: str):
    assert sentence in drawn(makers, 1, schedule).splitlines()[0]


def test_weights_within_processes_do_not_travel():
    assert "(2) weights, in the same processes, where nothing travels" in drawn(0, 2, {"kind": "sync"})


@pytest.mark.parametrize(
    ("schedule", "way"),
    [
        ({"kind": "async"}, "from GPU to GPU by NCCL"),
        ({"kind": "async", "interrupt": False}, "through the object store"),
        ({"kind": "sync"}, "from GPU to GPU by NCCL"),
    ],
)
def test_weights_are_drawn_on_the_way_that_the_run_takes(schedule: dict[str, Any], way: str):
    roles = dict.fromkeys(PPOConfig.roles, "trainers") | {"rollout": "makers"}
    where = {"device": "cuda", "pools": {"makers": [2], "trainers": [2]}, "roles": roles}
    vllm = {"rollout": {"max_response_tokens": 8, "engine": "vllm"}, "devices": [4]}
    config = PPOConfig.model_validate(PPO | vllm | {"placement": where, "schedule": schedule})
    assert f"(2) weights, {way}" in render_graph(config, plan_run(config))


def test_many_ranks_are_not_all_drawn_and_lines_end_together():
    lines = drawn(64, 64, {"kind": "sync"}).splitlines()
    assert len(lines) == 1 + 6 + 2 and lines[5].startswith("...") and lines[6].startswith("rollout 63")
    assert len(lines[-1]) == len(lines[-2])
