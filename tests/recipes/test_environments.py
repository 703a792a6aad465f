"""Recipes with environments: one and several turns, rewards per turn, failures, and lost processes."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from flowrl.config import Placement, UserError
from flowrl.data.messages import DataError
from flowrl.data.template import ConversationTemplate, write_template
from flowrl.engines.rollout.base import Request, Response, Segment
from flowrl.report.rollout_log import read_rows
from flowrl.run.datasets import read_prompts
from flowrl.workers.dialogs import Dialog, turn_columns
from flowrl.workers.episodes import Episode
from recipes.grpo.config import GRPOConfig
from recipes.grpo.train import train as train_grpo
from recipes.ppo.config import PPOConfig
from recipes.ppo.train import train as train_ppo
from tests.errors import rejects
from tests.recipes.conftest import FinishedRun
from tests.recipes.test_numbers import metrics_of
from tests.recipes.test_resume import assert_bitwise_identical
from tests.recipes.test_rewards import ALL_ROWS, FAST_SCHEDULES, SCHEDULES, saved_rows
from tests.recipes.test_schedules import ALIKE, weights
from tests.recipes.turns import Deadly
from tests.slow_cases import one_of

HERE = "tests.recipes.turns"
GrpoConfigs = Callable[..., GRPOConfig]
TOGETHER = Placement(
    device="cpu",
    pools={"main": [1]},
    roles=dict.fromkeys(("actor", "reference", "critic", "rollout", "reward", "environment"), "main"),
)
APART = Placement.model_validate({**ALIKE, "roles": {**ALIKE["roles"], "environment": "train"}})


def environment(name: str, **settings: Any) -> dict[str, Any]:
    return {"reward": None, "environment": {"name": f"{HERE}:{name}", **settings}}


def results(config: GRPOConfig) -> list[dict[str, float]]:
    """Returns the metrics that do not name the source of the scores."""
    own = ("rewards/", "turns", "environment/", "evaluation/turns", "evaluation/environment/")
    return [{name: v for name, v in line.items() if not name.startswith(own)} for line in metrics_of(config)]


@pytest.mark.parametrize("placement", one_of(APART, TOGETHER), ids=["apart", "together"])
@pytest.mark.parametrize("schedule", ["sync", pytest.param("one_step_off", marks=pytest.mark.slow)])
def test_one_turn_is_bitwise_identical_to_a_reward_function(
    grpo_config: GrpoConfigs, tmp_path: Path, schedule: str, placement: Placement
) -> None:
    changes: dict[str, Any] = {"steps": 2, "evaluate_every": 2}
    settings = {"schedule": SCHEDULES[schedule], "placement": placement, **changes}
    function = grpo_config(
        output=tmp_path / "function", reward={"function": "recipes.quickstart.task:score"}, **settings
    )
    episodes = grpo_config(output=tmp_path / "episodes", **environment("OneTurn"), **settings)
    for config in (function, episodes):
        train_grpo(config)
    assert results(episodes) == results(function)
    assert all((weights(episodes)[name] == value).all() for name, value in weights(function).items())


ON_RAY = {
    "colocated": {"pools": {"main": [2]}, "roles": dict.fromkeys(TOGETHER.roles, "main")},
    "split": {"pools": {"a": [1], "b": [1]}, "roles": {role: "a" if role in ("actor", "rollout") else "b" for role in
              TOGETHER.roles}},
    "standalone": {"pools": {role: [1] for role in TOGETHER.roles}, "roles": {role: role for role in TOGETHER.roles}},
    "two replicas": {
        "pools": {"train": [1], "make": [2], "score": [2]},
        "roles": dict.fromkeys(TOGETHER.roles, "train") | {"rollout": "make", "reward": "score",
                                                          "environment": "score"},
    },
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_RAY)
@pytest.mark.parametrize("schedule", ["sync", "one_step_off", "async"])
def test_one_turn_on_ray_is_bitwise_identical_to_a_reward_function(
    ray_session: None, grpo_config: GrpoConfigs, tmp_path: Path, schedule: str, name: str
) -> None:
    """Each placement has processes of its own for the environments. Async without staleness trains like sync."""
    shared = {"sync": (), "one_step_off": ("colocated",), "async": ("colocated", "split")}[schedule]
    if name in shared:
        pytest.skip(f"{schedule} does not allow the shared devices of the rollout")
    kind = {"kind": "async", "max_staleness": 0} if schedule == "async" else SCHEDULES[schedule]
    placement = Placement.model_validate({"device": "cpu", **ON_RAY[name]})
    settings: dict[str, Any] = {"schedule": kind, "placement": placement, "backend": "ray", "threads": 1, "steps": 2}
    function = grpo_config(
        output=tmp_path / "function", reward={"function": "recipes.quickstart.task:score"}, **settings
    )
    episodes = grpo_config(output=tmp_path / "episodes", **environment("OneTurn"), **settings)
    for config in (function, episodes):
        train_grpo(config)
    assert results(episodes) == results(function)
    assert all((weights(episodes)[name] == value).all() for name, value in weights(function).items())


@pytest.mark.parametrize("schedule", FAST_SCHEDULES)
def test_episodes_of_two_turns_are_trained(grpo_config: GrpoConfigs, schedule: str) -> None:
    config = grpo_config(
        schedule=SCHEDULES[schedule],
        placement=APART,
        rollout={"max_response_tokens": 24},
        steps=2,
        batch_size=16,
        **environment("TwoTurns"),
        **ALL_ROWS,
    )
    train_grpo(config)
    check_turns(config)


def test_episodes_of_two_turns_are_trained_on_ray(one_step_off_run: FinishedRun[GRPOConfig]) -> None:
    check_turns(one_step_off_run.config)


def check_turns(config: GRPOConfig) -> None:
    """Checks that rows have the environment's turn, and that the metrics count it."""
    rows = [row for step in saved_rows(config) for row in step]
    assert any("1+1=" in row["response"] for row in rows) and any(row["environment_length"] for row in rows)
    for line in metrics_of(config):
        if line["step"]:
            assert 1 < line["turns"] <= 2 and line["environment/again"] > 0 and line["environment/restarts"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("schedule", FAST_SCHEDULES)
def test_saved_rows_have_the_prompt_of_the_environment(grpo_config: GrpoConfigs, schedule: str) -> None:
    settings: dict[str, Any] = {"placement": APART, **ALL_ROWS, "evaluate_every": 2, "schedule": SCHEDULES[schedule]}
    config = grpo_config(**environment("Reversed"), **settings)
    prompts, held_out = read_prompts(config)
    train_grpo(config)
    asked = [row["prompt"][::-1] for row in prompts.take(config.steps * config.prompts_per_step * 2)]
    for row in (row for step in saved_rows(config) for row in step):
        assert row["prompt"] == asked[row["prompt_id"]]
    evaluated = [row["prompt"] for row in read_rows(config.output / "rollouts", "evaluation", config.steps)]
    (test,) = held_out.values()
    assert evaluated and set(evaluated) <= {prompt[::-1] for prompt in test.get("prompt")}


def test_rewards_are_given_at_the_end_of_their_turn() -> None:
    """Two turns of two tokens, with one token of the environment between them."""
    policy = [Segment.policy(Response("0", [7, 8], [0.0, 0.0], [0, 0])), Segment.environment([9])]
    episode = Episode(0, Request("0", [1, 2, 3], key=0, segments=policy), {}, Response("0", [4, 5], [0.0] * 2, [0, 0]))
    episode.dialog = Dialog(episode.request, 0, rewards=[0.5, 2.0], infos=[{"counts": {"again": 1}}, {"reason": "end"}])
    rewards, records = turn_columns([episode])
    assert rewards == [0, 0, 0, 0, 0.5, 0, 0, 2.0]
    assert records == [{"turns": 2, "restarts": 0, "counts": {"again": 1}, "reason": "end"}]


@pytest.mark.slow
def test_ppo_trains_on_the_rewards_of_turns(ppo_config: Callable[..., PPOConfig]) -> None:
    settings: dict[str, Any] = {"placement": TOGETHER, "rollout": {"max_response_tokens": 24}, "steps": 1}
    config = ppo_config(**settings, **environment("TwoTurns"), **ALL_ROWS)
    train_ppo(config)
    assert metrics_of(config)[-1]["environment/again"] > 0


@pytest.mark.slow
def test_a_failed_episode_is_named_or_counted(grpo_config: GrpoConfigs, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="unlucky"):
        train_grpo(grpo_config(output=tmp_path / "stop", placement=TOGETHER, **environment("Unlucky")))
    settings = environment("Unlucky", on_failure="drop", max_failure_rate=1.0)
    config = grpo_config(output=tmp_path / "drop", placement=TOGETHER, **settings, **ALL_ROWS)
    train_grpo(config)
    records = [line for line in metrics_of(config) if line["step"]]
    assert all(0 < line["reward_failed_fraction"] < 1 for line in records)
    assert all(row["score"] == 1 for step in saved_rows(config) for row in step)


@pytest.mark.slow
def test_an_evaluation_has_no_score_of_a_failed_episode(grpo_config: GrpoConfigs) -> None:
    """All other episodes have the score 1."""
    settings = environment("Unlucky", on_failure="zero", max_failure_rate=1.0)
    train_grpo(config := grpo_config(placement=TOGETHER, steps=1, evaluate_every=1, **settings))
    records, rows = metrics_of(config), read_rows(config.output / "rollouts", "evaluation", 1)
    num_failed = [row["score"] for row in rows].count(None)
    assert 0 < num_failed < len(rows) and records[1]["evaluation/failed"] == num_failed
    assert all(record["accuracy"] == 1.0 for record in records)


@pytest.mark.slow
def test_episodes_of_a_killed_process_start_again(grpo_config: GrpoConfigs, tmp_path: Path) -> None:
    """The environment kills its process once."""
    settings = environment("KilledOnce", options={"folder": str(tmp_path)})
    config = grpo_config(output=tmp_path / "run", placement=TOGETHER, steps=2, **settings, **ALL_ROWS)
    train_grpo(config)
    assert (tmp_path / "killed").exists()
    assert sum(line["environment/restarts"] for line in metrics_of(config) if line["step"]) > 0
    assert all(len(rows) == config.batch_size for rows in saved_rows(config))


@pytest.mark.slow
@pytest.mark.parametrize(
    "schedule", ["sync", *(pytest.param(name, marks=pytest.mark.slow) for name in ("one_step_off", "async"))]
)
def test_episodes_that_kill_their_process_cost_only_their_rows(grpo_config: GrpoConfigs, schedule: str) -> None:
    """Episodes that lost their process twice run alone, one after another, and each ends."""
    settings = environment("Deadly", on_failure="zero", max_failure_rate=1.0)
    config = grpo_config(schedule=SCHEDULES[schedule], placement=APART, steps=2, **settings, **ALL_ROWS)
    train_grpo(config)
    rows = [row for step in saved_rows(config) for row in step]
    assert len(rows) == config.steps * config.batch_size
    killed = [Deadly.kills_for(row["prompt"]) for row in rows]
    assert 0 < sum(killed) < len(rows)
    assert [bool(row["reward_failures"]) for row in rows] == killed


@pytest.mark.slow
def test_dynamic_sampling_of_episodes_resumes_bitwise_identically(grpo_config: GrpoConfigs, tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "schedule": SCHEDULES["one_step_off"],
        "placement": APART,
        "dynamic_sampling": {"max_rounds": 20},
        "checkpoint": {"every": 1},
        "data": grpo_config().data.model_dump() | {"order": "curriculum"},
        **environment("Parity", on_failure="drop"),
        **ALL_ROWS,
    }
    straight = grpo_config(output=tmp_path / "straight", steps=3, **settings)
    train_grpo(straight)
    train_grpo(grpo_config(output=tmp_path / "resumed", steps=1, **settings))
    resumed = grpo_config(output=tmp_path / "resumed", steps=3, resume="auto", **settings)
    train_grpo(resumed)
    assert_bitwise_identical(resumed, straight)


@pytest.mark.slow
def test_a_run_leaves_no_process_behind(grpo_config: GrpoConfigs) -> None:
    before = {process.pid for process in psutil.Process(os.getpid()).children(recursive=True)}
    train_grpo(grpo_config(placement=TOGETHER, steps=1, **environment("OneTurn")))
    after = psutil.Process(os.getpid()).children(recursive=True)
    _, alive = psutil.wait_procs([process for process in after if process.pid not in before], timeout=60)
    assert alive == []


def test_reward_and_environment_exclude_each_other(grpo_config: GrpoConfigs) -> None:
    with pytest.raises(ValueError, match="environment"):
        grpo_config(environment={"name": f"{HERE}:OneTurn"}, reward={"function": "recipes.quickstart.task:score"})
    with pytest.raises(ValueError, match="reward and environment are unset"):
        grpo_config(reward=None)


@pytest.mark.parametrize(
    ("settings", "facts"),
    [
        (environment("NoSuchClass"), ("environment.name", "NoSuchClass")),
        (environment("OneTurn", options={"turns": 2}), ("environment.name", "OneTurn", "turns")),
    ],
)
def test_an_environment_that_cannot_be_created_is_rejected_before_the_start(
    grpo_config: GrpoConfigs, settings: dict[str, Any], facts: tuple[str, ...]
) -> None:
    config = grpo_config(placement=TOGETHER, **settings)
    with rejects(*facts):
        train_grpo(config)
    assert not config.output.exists()


def test_a_template_that_rewrites_turns_is_rejected_before_the_start(grpo_config: GrpoConfigs, tmp_path: Path) -> None:
    """The template renders only the last message."""
    template = tmp_path / "template.yaml"
    write_template(template, ConversationTemplate("{{ messages[-1]['content'] }}{{ eos_token }}"))
    config = grpo_config(placement=TOGETHER, **environment("TwoTurns"))
    data = config.data.model_copy(update={"template": template})
    with rejects("environment.name", "template", "message", 1, error=DataError):
        train_grpo(config.model_copy(update={"data": data}))
    assert not config.output.exists()
