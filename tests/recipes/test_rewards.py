"""Recipes with several rewards, failing rewards and dynamic sampling, under every schedule and after a resume."""

import json
import math
import shutil
import zlib
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from flowrl.checkpoints.checkpoints import Checkpoints
from flowrl.config import Placement, UserError
from flowrl.report.rollout_log import read_rows
from flowrl.run.datasets import read_prompts
from flowrl.run.loop import Run
from flowrl.workers import Actor, Rollout
from recipes.grpo.config import GRPOConfig
from recipes.grpo.train import train as train_grpo
from recipes.ppo.config import PPOConfig
from tests.configs import with_float64_models
from tests.errors import rejects
from tests.recipes.conftest import FinishedRun, source_of
from tests.recipes.scored import MIXED, fails_for_response
from tests.recipes.test_numbers import assert_same, metrics_of
from tests.recipes.test_resume import assert_bitwise_identical
from tests.recipes.test_schedules import ALIKE
from tests.rewards.test_service import Handler, no_proxy, serve
from tests.slow_cases import one_of

__all__ = ["no_proxy"]

HERE = "tests.recipes.scored"
GrpoConfigs = Callable[..., GRPOConfig]
AnyRun = FinishedRun[GRPOConfig] | FinishedRun[PPOConfig]
SCHEDULES = {
    "sync": {"kind": "sync"},
    "one_step_off": {"kind": "one_step_off"},
    "async": {"kind": "async", "max_staleness": 1},
}
FAST_SCHEDULES = one_of("async", "sync", "one_step_off")
"""Schedules of tests for which `async` alone covers the most code. All schedules together take minutes."""
APART: dict[str, Any] = {"placement": Placement.model_validate(ALIKE)}
ALL_ROWS: dict[str, Any] = {"report": {"rollouts": {"every": 1, "rows": 100}}, "evaluate_every": 0}


def saved_rows(config: GRPOConfig | PPOConfig) -> list[list[dict[str, Any]]]:
    """Returns the trained rows of each step."""
    paths = sorted((config.output / "rollouts").glob("training-*.jsonl"))
    return [[json.loads(line) for line in path.read_text().splitlines()] for path in paths]


def step_records(config: GRPOConfig | PPOConfig) -> list[dict[str, float]]:
    return [line for line in metrics_of(config) if line["step"]]


@pytest.fixture(params=["sync_run", "async_run"])
def rewarded_run(request: pytest.FixtureRequest) -> AnyRun:
    """A run with several rewards, of which one fails for some responses."""
    return request.getfixturevalue(request.param)


@pytest.fixture(params=["sync_run", "one_step_off_run", "async_run"])
def filtered_run(request: pytest.FixtureRequest) -> AnyRun:
    """A run with dynamic sampling and failures."""
    return request.getfixturevalue(request.param)


def test_no_trained_group_has_equal_scores(filtered_run: AnyRun) -> None:
    config, summary = filtered_run
    steps = saved_rows(config)
    assert len(steps) == config.steps
    for rows in steps:
        prompt_ids = {row["prompt_id"] for row in rows}
        assert len(prompt_ids) == config.prompts_per_step
        for prompt_id in prompt_ids:
            group = [row for row in rows if row["prompt_id"] == prompt_id]
            assert {row["score"] if config.reward is None else row["rewards"]["task"] for row in group} == {0.0, 1.0}
    trained = [prompt_id for rows in steps for prompt_id in {row["prompt_id"] for row in rows}]
    assert len(set(trained)) == len(trained)
    dropped = sum(line["dropped_equal_scores"] for line in step_records(config))
    assert summary["groups"]["dropped"]["equal_scores"] >= dropped > 0


def test_dynamic_sampling_trains_the_first_informative_prompts_in_order(sync_run: FinishedRun[PPOConfig]) -> None:
    """Half of the prompts can have different scores, so a step needs several rounds. Surplus prompts are dropped."""
    trained = [list(dict.fromkeys(row["prompt_id"] for row in rows)) for rows in saved_rows(sync_run.config)]
    assert all(ids == sorted(ids) for ids in trained)
    assert all(before[-1] < after[0] for before, after in pairwise(trained))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_step_trains_on_fewer_groups_after_max_rounds(grpo_config: GrpoConfigs, schedule: str) -> None:
    config = grpo_config(
        schedule=SCHEDULES[schedule],
        reward={"function": f"{HERE}:parity"},
        dynamic_sampling={"max_rounds": 1},
        **APART,
        **ALL_ROWS,
    )
    train_grpo(config)
    records = step_records(config)
    counts = [len({row["prompt_id"] for row in rows}) for rows in saved_rows(config)]
    # Under async, groups that are complete early may fill a later step.
    assert 0 < min(counts) < config.prompts_per_step
    assert max(counts) < config.prompts_per_step + (schedule == "async")
    for line, num_groups in zip(records, counts, strict=True):
        if schedule == "async":  # groups that were dropped while another step was complete count for the next one
            assert line["dropped_equal_scores"] >= config.prompts_per_step - num_groups
        else:
            assert line["sampling_rounds"] == 1 and line["dropped_surplus"] == 0
            assert line["dropped_equal_scores"] == config.prompts_per_step - num_groups


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_run_without_informative_groups_ends_with_an_error(grpo_config: GrpoConfigs, schedule: str) -> None:
    config = grpo_config(
        schedule=SCHEDULES[schedule],
        reward={"function": f"{HERE}:constant"},
        dynamic_sampling={"max_rounds": 2},
        **APART,
    )
    with pytest.raises(UserError, match="max_rounds"):
        train_grpo(config)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["sync", "one_step_off"])
def test_dynamic_sampling_resumes_bitwise_identically(grpo_config: GrpoConfigs, tmp_path: Path, schedule: str) -> None:
    settings: dict[str, Any] = {
        "schedule": SCHEDULES[schedule],
        "reward": {"function": f"{HERE}:parity_of_short_responses", "on_failure": "drop", "max_failure_rate": 1.0},
        "dynamic_sampling": {"max_rounds": 20, "oversample": 1.5},
        "data": grpo_config().data.model_dump() | {"order": "curriculum", "difficulty": {"min": 0.01, "max": 0.99}},
        "checkpoint": {"every": 1},
        **APART,
        **ALL_ROWS,
    }
    straight = grpo_config(output=tmp_path / "straight", steps=4, **settings)
    train_grpo(straight)
    train_grpo(grpo_config(output=tmp_path / "resumed", steps=2, **settings))
    resumed = grpo_config(output=tmp_path / "resumed", steps=4, resume="auto", **settings)
    train_grpo(resumed)
    assert_bitwise_identical(resumed, straight)
    dropped = [json.loads((c.output / "summary.json").read_text())["groups"]["dropped"] for c in (straight, resumed)]
    assert dropped[0] == dropped[1] and dropped[0]["equal_scores"] > 0
    assert all(0 < line["reward_failed_fraction"] < 1 for line in step_records(resumed))


# Several rewards.

TWO = [
    {"name": "task", "weight": 2.0, "function": "recipes.quickstart.task:score"},
    {"name": "size", "weight": -0.25, "function": f"{HERE}:length"},
]


def test_scores_are_the_weighted_sum_of_the_rewards(rewarded_run: AnyRun) -> None:
    for row in (row for rows in saved_rows(rewarded_run.config) for row in rows):
        assert row["rewards"]["size"] == len(row["response"])
        expected = 2 * row["rewards"]["task"] - 0.25 * row["rewards"]["size"] + 0.5 * row["rewards"].get("bonus", 0)
        assert row["score"] == pytest.approx(expected, abs=1e-5)


def test_a_reward_scores_only_rows_of_its_data_sources(sync_run: FinishedRun[PPOConfig]) -> None:
    config = sync_run.config
    rows = [row for step in saved_rows(config) for row in step]
    for row in rows:
        expected = len(row["response"]) if source_of(row["prompt"]) == "even" else None
        assert row["rewards"].get("bonus") == expected
    assert 0 < sum("bonus" in row["rewards"] for row in rows) < len(rows)


@pytest.fixture
def two_sources(grpo_config: GrpoConfigs, task_folder: Path, tmp_path: Path) -> dict[str, Any]:
    """Settings `data` of prompts that alternate between the data sources `odd` and `even`."""
    rows = [json.loads(line) for line in (task_folder / "train.jsonl").read_text().splitlines()]
    path = tmp_path / "train.jsonl"
    path.write_text(
        "".join(json.dumps(row | {"data_source": "even" if i % 2 else "odd"}) + "\n" for i, row in enumerate(rows))
    )
    return grpo_config().data.model_dump() | {"train": path, "test": None, "evaluation_rows": None}


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_dynamic_sampling_by_a_reward_keeps_groups_of_other_data_sources(
    grpo_config: GrpoConfigs, two_sources: dict[str, Any], schedule: str
) -> None:
    parity = {"name": "task", "function": f"{HERE}:parity", "data_sources": ["even"]}
    settings: dict[str, Any] = {
        "data": two_sources,
        "reward": [parity, TWO[1] | {"data_sources": ["odd"]}],
        "dynamic_sampling": {"max_rounds": 20, "column": "task"},
    }
    config = grpo_config(schedule=SCHEDULES[schedule], steps=1, **settings, **APART, **ALL_ROWS)
    train_grpo(config)
    trained = [row for rows in saved_rows(config) for row in rows]
    assert {name for row in trained for name in row["rewards"]} == {"task", "size"}


def test_a_data_source_without_a_reward_is_named(grpo_config: GrpoConfigs, two_sources: dict[str, Any]) -> None:
    rewards = [TWO[0] | {"data_sources": ["even"]}]
    with pytest.raises(UserError, match="odd"):
        train_grpo(grpo_config(data=two_sources, reward=rewards, **ALL_ROWS))


@pytest.mark.slow
def test_gdpo_normalizes_the_rewards_of_a_list(grpo_config: GrpoConfigs) -> None:
    algorithm = {"estimator": "gdpo", "reward_columns": ["task", "size"], "reward_weights": [1.0, 0.5]}
    config = grpo_config(reward=TWO, algorithm=algorithm, **ALL_ROWS)
    train_grpo(config)
    assert all(math.isfinite(line["actor/grad_norm"]) for line in step_records(config))


# Failures.


def test_rows_whose_reward_failed_are_dropped_and_counted(filtered_run: AnyRun) -> None:
    config, _ = filtered_run
    for line, rows in zip(step_records(config), saved_rows(config), strict=True):
        assert min(Counter(row["prompt_id"] for row in rows).values()) >= 2
        assert 0 < line["reward_failed_fraction"] < 1
        if config.reward is not None:
            assert not any(fails_for_response(row["response"]) for row in rows)
            assert line["rewards/size/failed_fraction"] == line["reward_failed_fraction"]
            assert line["rewards/task/failed_fraction"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_failed_reward_with_zero_scores_zero(grpo_config: GrpoConfigs, schedule: str) -> None:
    reward = {"function": f"{HERE}:fail_for_long_responses", "on_failure": "zero", "max_failure_rate": 1.0}
    config = grpo_config(schedule=SCHEDULES[schedule], reward=reward, **APART, **ALL_ROWS)
    train_grpo(config)
    for row in (row for rows in saved_rows(config) for row in rows):
        assert row["score"] == (0 if len(row["response"]) > 4 else len(row["response"]))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("on_failure", ["zero", "drop"])
def test_each_misbehaving_call_costs_only_its_row(
    grpo_config: GrpoConfigs, tmp_path: Path, schedule: str, on_failure: str
) -> None:
    """One call hangs, others return no number, end or kill their process, or print without end."""
    reward = {
        "function": f"{HERE}:misbehaves_in_many_ways",
        "options": {"folder": str(tmp_path)},
        "timeout_s": 3.0,
        "on_failure": on_failure,
        "max_failure_rate": 0.5,
    }
    config = grpo_config(schedule=SCHEDULES[schedule], reward=reward, **APART, **ALL_ROWS)
    train_grpo(config)
    records = step_records(config)
    failed = sorted(json.loads((tmp_path / kind).read_text()) for kind in MIXED)
    for name in ("reward_failed_fraction", "rewards/reward/failed_fraction"):
        assert sum(line[name] for line in records) * config.batch_size == pytest.approx(len(MIXED))
    rows = [row for step in saved_rows(config) for row in step]
    assert len(records) == config.steps
    if on_failure == "zero":
        assert sorted([row["prompt"], row["response"]] for row in rows if row["reward_failures"]) == failed
        assert all(row["score"] == 0 for row in rows if row["reward_failures"])
        assert len(rows) == config.steps * config.batch_size
    else:
        assert not any(row["reward_failures"] for row in rows)
        dropped = Counter(prompt for prompt, _ in failed)
        groups = Counter(row["prompt"] for row in rows)
        for prompt, count in dropped.items():
            left = config.samples_per_prompt - count
            assert groups[prompt] == (left if left >= 2 else 0)
        assert {groups[prompt] for prompt in groups.keys() - dropped.keys()} == {config.samples_per_prompt}


def with_failing_evaluation(grpo_config: GrpoConfigs, **changes: Any) -> GRPOConfig:
    """Returns a config whose evaluation reward is 1 for 34 of 64 prompts, and fails for the others."""
    reward = {"function": "recipes.quickstart.task:score", "evaluation": f"{HERE}:fails_for_some_answers"}
    data = grpo_config().data.model_dump() | {"evaluation_rows": 64}
    changes = {"steps": 2, "evaluate_every": 1} | changes
    return grpo_config(data=data, reward=reward | changes.pop("failures"), **changes)


def test_an_evaluation_has_no_score_of_a_failed_reward(rewarded_run: AnyRun) -> None:
    config, summary = rewarded_run
    expected = {
        "accuracy": 1.0,
        "evaluation/accuracy_low": 1.0,
        "evaluation/accuracy_high": 1.0,
        "evaluation/failed": 30.0,
        "evaluation/failed_fraction": 30 / 64,
        "evaluation/failed_as_worst": 34 / 64,
        "evaluation/failed_as_best": 1.0,
    }
    records = [record for record in metrics_of(config) if "accuracy" in record]
    assert [record["step"] for record in records] == sorted({0, 2, 4, config.steps})
    assert all(record.items() >= expected.items() for record in records)
    assert all(summary[f"{name}_after"] == value for name, value in expected.items())
    rows = read_rows(config.output / "rollouts", "evaluation", 2)
    assert [row["score"] for row in rows] == [None if zlib.crc32(row["answer"].encode()) % 2 else 1.0 for row in rows]
    assert [list(row["reward_failures"]) for row in rows] == [["reward"] * (row["score"] is None) for row in rows]


def test_too_many_failures_before_training_leave_no_run(grpo_config: GrpoConfigs) -> None:
    config = with_failing_evaluation(grpo_config, failures={"on_failure": "zero"}, checkpoint={"every": 1})
    with rejects(47, "reward.max_failure_rate", "0.1", "crashed"):
        train_grpo(config)
    assert not (config.output / "config.yaml").exists()


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_an_evaluation_with_too_many_failures_ends_the_run(
    grpo_config: GrpoConfigs, tmp_path: Path, schedule: str
) -> None:
    """The reward of evaluations fails after the evaluation before training, which has 8 rows."""
    (tmp_path / "fail").touch()
    options = {"folder": str(tmp_path), "after": 8}
    evaluation = {"name": "exact", "function": f"{HERE}:fails_once_marked", "options": options}
    reward = {"function": "recipes.quickstart.task:score", "evaluation": [evaluation], "on_failure": "drop"}
    settings: dict[str, Any] = {"steps": 8, "evaluate_every": 1, "checkpoint": {"every": 1}, **APART}
    config = grpo_config(schedule=SCHEDULES[schedule], reward=reward, **settings)
    with rejects("exact", 100, "reward.max_failure_rate", "down"):
        train_grpo(config)
    *_, last = records = metrics_of(config)
    assert next(record["step"] for record in records if record.get("evaluation/failed") == 8) == 1
    assert last["step"] < 8 and Checkpoints(config.output).steps()[-1] == last["step"]


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_run_with_too_many_failures_saves_and_stops(grpo_config: GrpoConfigs, schedule: str) -> None:
    reward = {"function": f"{HERE}:fail_for_long_responses", "on_failure": "zero", "max_failure_rate": 0.01}
    settings: dict[str, Any] = {"steps": 8, "checkpoint": {"every": 100}, "evaluate_every": 0, **APART}
    config = grpo_config(schedule=SCHEDULES[schedule], reward=reward, **settings)
    with pytest.raises(UserError, match="max_failure_rate"):
        train_grpo(config)
    records = step_records(config)
    failed = [line["step"] for line in records if line["reward_failed_fraction"] > 0.01]
    assert failed == [records[-1]["step"]] and failed[0] < 8  # no later step is trained
    assert Checkpoints(config.output).steps() == failed


@pytest.mark.slow
@pytest.mark.parametrize("on_failure", ["stop", "drop"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_reward_model_without_finite_scores_fails(
    grpo_config: GrpoConfigs, task_folder: Path, tmp_path: Path, schedule: str, on_failure: str
) -> None:
    folder = shutil.copytree(task_folder / "model", tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"].fill_(3e38)  # finite, but its products are infinite, and their sums NaN
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    reward = {"model": {"path": folder}, "head": "fresh", "on_failure": on_failure}
    config = grpo_config(schedule=SCHEDULES[schedule], reward=reward, **APART, **ALL_ROWS)
    with rejects(*((folder, "nan", "reward.on_failure") if on_failure == "stop" else ("failed", "step", 1))):
        train_grpo(config)


@pytest.mark.parametrize("schedule", FAST_SCHEDULES)
def test_a_failed_reward_ends_the_run_and_names_its_row(grpo_config: GrpoConfigs, schedule: str) -> None:
    config = grpo_config(schedule=SCHEDULES[schedule], reward={"function": f"{HERE}:fail_for_long_responses"}, **APART)
    with pytest.raises(UserError, match=r"too long.*prompt"):
        train_grpo(config)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("on_failure", ["stop", "drop"])
def test_the_newest_step_is_saved_before_a_failed_reward_ends_the_run(
    grpo_config: GrpoConfigs, tmp_path: Path, schedule: str, on_failure: str
) -> None:
    """From some call on, every reward fails. The checkpoint period is longer than the run."""
    num_rows = grpo_config().batch_size
    reward: dict[str, Any] = {
        "function": f"{HERE}:fails_once_marked",
        "options": {"folder": str(tmp_path), "after": 3 * num_rows},
        "on_failure": on_failure,
        "max_failure_rate": 1.0,
    }
    settings: dict[str, Any] = {
        "schedule": SCHEDULES[schedule],
        "reward": reward,
        "steps": 6,
        "checkpoint": {"every": 100},
        **APART,
        **ALL_ROWS,
    }
    (tmp_path / "fail").touch()
    with pytest.raises(UserError, match="service is down" if on_failure == "stop" else "failed"):
        train_grpo(grpo_config(**settings))
    config = grpo_config(**settings, resume="auto")
    (saved,) = Checkpoints(config.output).steps()
    assert saved == metrics_of(config)[-1]["step"] and 1 <= saved < 6
    (tmp_path / "fail").unlink()
    train_grpo(config)
    assert [line["step"] for line in step_records(config)] == list(range(1, 7))
    prompts = [{row["prompt_id"] for row in rows} for rows in saved_rows(config)]
    trained = sorted(index for step in prompts for index in step)
    assert len(trained) == len(set(trained))
    if on_failure == "stop":  # no prompt is lost
        assert schedule == "async" or trained == list(range(len(trained)))


# Services.


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_service_that_fails_intermittently_scores_all_rows(grpo_config: GrpoConfigs, schedule: str) -> None:
    """Every third request fails, and its rows are sent again."""

    def respond(handler: Handler, number: int, rows: list[dict[str, Any]]) -> None:
        if number % 3 == 0:
            handler.send(b"", 503, Retry_After="0")
        else:
            handler.send(json.dumps({"scores": [len(row["response"]) for row in rows]}).encode())

    with serve(respond) as server:
        service = {"url": server.url, "batch_size": 8}
        reward = [TWO[0], {"name": "remote", "weight": 0.5, "service": service}]
        config = grpo_config(schedule=SCHEDULES[schedule], reward=reward, steps=2, **APART, **ALL_ROWS)
        train_grpo(config)
        assert len(server.requests) >= 3
    rows = [row for step in saved_rows(config) for row in step]
    assert len(rows) == 2 * config.batch_size
    for row in rows:
        assert row["rewards"]["remote"] == len(row["response"])
        expected = 2 * row["rewards"]["task"] + 0.5 * row["rewards"]["remote"]
        assert row["score"] == pytest.approx(expected, abs=1e-5)


@pytest.mark.slow
def test_a_service_that_is_down_drops_its_rows_or_stops_the_run(grpo_config: GrpoConfigs, tmp_path: Path) -> None:
    def respond(handler: Handler, number: int, rows: list[dict[str, Any]]) -> None:
        if any(len(row["response"]) > 4 for row in rows):
            handler.send(b"", 500)
        else:
            handler.send(json.dumps({"scores": [len(row["response"]) for row in rows]}).encode())

    with serve(respond) as server:
        reward = {"service": {"url": server.url, "batch_size": 1, "retries": 0}}
        with pytest.raises(UserError, match="500"):
            train_grpo(grpo_config(output=tmp_path / "stop", reward=reward))
        drop = {"on_failure": "drop", "max_failure_rate": 1.0}
        config = grpo_config(output=tmp_path / "drop", reward=reward | drop, **ALL_ROWS)
        train_grpo(config)
    assert all(row["score"] == len(row["response"]) <= 4 for step in saved_rows(config) for row in step)
    assert all(0 < line["reward_failed_fraction"] < 1 for line in step_records(config))


# Placement and overlap.


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["sync", "one_step_off"])
def test_rewards_do_not_depend_on_the_placement(
    ray_session: None, grpo_config: GrpoConfigs, tmp_path: Path, schedule: str
) -> None:
    settings: dict[str, Any] = {
        "schedule": SCHEDULES[schedule],
        "reward": TWO,
        "dynamic_sampling": {"max_rounds": 5, "column": "task"},
        "threads": 1,
        **ALL_ROWS,
    }
    together = Placement(device="cpu", pools={"main": [1]}, roles=dict.fromkeys(grpo_config().roles, "main"))
    runs = [
        grpo_config(output=tmp_path / "inline", placement=together, **settings),
        grpo_config(output=tmp_path / "ray", backend="ray", **APART, **settings),
    ]
    for config in map(with_float64_models, runs):
        train_grpo(config)
    compared = ("prompt_id", "sample", "response", "score", "rewards")
    rows = [[{name: row[name] for name in compared} for step in saved_rows(config) for row in step] for config in runs]
    assert rows[0] == rows[1]
    for expected, actual in zip(*map(metrics_of, runs), strict=True):
        seconds = [{name for name in line if name.endswith("/seconds")} for line in (expected, actual)]
        assert seconds[0] == seconds[1]
        expected, actual = ({name: line[name] for name in line.keys() - seconds[0]} for line in (expected, actual))
        assert_same(expected, actual)


def test_functions_score_responses_while_others_are_generated(grpo_config: GrpoConfigs, tmp_path: Path) -> None:
    """The first call of the reward is earlier than the end of `generate`."""
    reward = [{"name": "task", "function": f"{HERE}:logged", "options": {"folder": str(tmp_path)}}]
    rollout = {"max_response_tokens": 48, "max_num_seqs": 8}
    config = grpo_config(reward=reward, steps=1, rollout=rollout, **ALL_ROWS)
    with Run(config) as run:
        prompts, _ = read_prompts(config)
        actor = run.group("actor", Actor, config.actor)
        workers = run.group("rollout", Rollout, config.rollout, config.actor.model, seed=0)
        for _ in run.rollouts(workers, prompts, policy=actor, reward=run.rewards()):
            run.sync_weights(actor, workers)
        generated = [event for event in run.cluster.calls.events if event.method == "generate"]
    calls_s = sorted(float(line) for line in (tmp_path / "calls").read_text().splitlines())
    assert len(calls_s) == 32 and calls_s[0] < generated[0].ended_ns / 1e9


# Models and judges in a list.


def shout(text: str) -> float | None:
    """Parses a verdict: the share of digits, or a failure without digits."""
    digits = sum(character.isdigit() for character in text)
    return digits / len(text) if digits else None


def shouting_judge(task_folder: Path) -> dict[str, Any]:
    return {
        "model": {"path": task_folder / "model"},
        "prompt": "{prompt}{response}",
        "max_response_tokens": 4,
        "verdict": {"kind": f"{__name__}:shout"},
    }


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_functions_models_and_judges_are_combined(grpo_config: GrpoConfigs, task_folder: Path, schedule: str) -> None:
    model = {"path": task_folder / "model"}
    reward = {
        "components": [
            TWO[1],
            {"name": "scorer", "weight": 0.5, "model": model, "head": "fresh"},
            {"name": "judged", "weight": 3.0, "judge": shouting_judge(task_folder)},
        ],
        "on_failure": "zero",
        "max_failure_rate": 1.0,
        "evaluation": "recipes.quickstart.task:exact",
    }
    roles = {"reward_scorer": "train", "reward_judged": "train"}
    placement = Placement.model_validate({**ALIKE, "roles": {**ALIKE["roles"], **roles}})
    config = grpo_config(schedule=SCHEDULES[schedule], reward=reward, placement=placement, **ALL_ROWS)
    assert {"reward", "reward_scorer", "reward_judged"} <= set(config.roles)
    train_grpo(config)
    num_judged = 0
    for row in (row for rows in saved_rows(config) for row in rows):
        scores = row["rewards"]
        judged = scores["judged"] or 0.0  # None for a failed verdict, which counts as 0
        num_judged += judged > 0
        expected = -0.25 * len(row["response"]) + 0.5 * scores["scorer"] + 3 * judged
        assert row["score"] == pytest.approx(expected, abs=1e-4)
    assert num_judged
    for line in step_records(config):
        assert {"rewards/size", "rewards/scorer", "rewards/judged"} <= line.keys()


@pytest.mark.slow
def test_a_judge_can_be_the_only_reward(grpo_config: GrpoConfigs, task_folder: Path) -> None:
    config = grpo_config(
        reward={"judge": shouting_judge(task_folder), "on_failure": "drop", "max_failure_rate": 1.0}, **ALL_ROWS
    )
    train_grpo(config)
    assert all(row["score"] > 0 for rows in saved_rows(config) for row in rows)


def test_an_evaluation_has_no_score_without_a_verdict(grpo_config: GrpoConfigs, task_folder: Path) -> None:
    data = grpo_config().data.model_dump() | {"evaluation_rows": 64}
    settings: dict[str, Any] = {"data": data, "steps": 1, "evaluate_every": 1}
    config = grpo_config(
        reward={"judge": shouting_judge(task_folder), "on_failure": "zero", "max_failure_rate": 1.0}, **settings
    )
    train_grpo(config)
    scores = [row["score"] for row in read_rows(config.output / "rollouts", "evaluation", 1)]
    known = [score for score in scores if score is not None]
    assert 0 < len(known) < 64 and min(known) > 0
    record = metrics_of(config)[-1]
    assert record["evaluation/failed"] == 64 - len(known)
    assert record["accuracy"] == pytest.approx(sum(known) / len(known))
