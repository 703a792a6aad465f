"""Settings of evaluations from the arguments of the command."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from flowrl.config import EvaluationConfig, EvaluationRunConfig
from flowrl.inference.evaluation.planned_tasks import (
    EvaluationArguments,
    find_run,
    plan_evaluations,
    read_run_settings,
)
from flowrl.inference.model_source import ModelSource
from recipes.quickstart.prepare import save_model, save_tokenizer
from tests.configs import grpo_settings
from tests.errors import rejects

EXACT = "recipes.quickstart.task:exact"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    folder = tmp_path_factory.mktemp("model")
    save_tokenizer(folder)
    save_model(folder, seed=0)
    return ModelSource(folder, None, None, "tiny", "model")


@pytest.fixture
def task(tmp_path: Path) -> Path:
    path = tmp_path / "sums.jsonl"
    path.write_text('{"prompt": "1+1", "answer": "2"}\n')
    return path


def settings(test: Path, **tests: Any) -> dict[str, Any]:
    """Settings of a run."""
    return {
        "data": {"test": str(test), "tests": tests, "max_prompt_tokens": 6, "evaluation_rows": 3},
        "rollout": {"max_response_tokens": 5, "temperature": 0.7},
        "evaluation": {"samples": 1, "temperature": 0.0},
        "environment": None,
        "reward": {"function": "recipes.quickstart.task:score", "evaluation": EXACT},
        "seed": 5,
        "actor": {"model": {"path": "initial", "dtype": "float32"}},
    }


def plan(source: ModelSource, base: dict[str, Any] | None, **arguments: Any) -> list[EvaluationRunConfig]:
    return plan_evaluations(EvaluationArguments(**arguments), source, base)


def test_without_a_task_the_data_and_the_reward_are_those_of_the_run(source: ModelSource, task: Path) -> None:
    (config,) = plan(source, settings(task, hard={"files": str(task), "every": 5, "rows": 2}))
    assert list(config.data.evaluation_sets) == ["", "hard"] and config.data.num_evaluation_rows("hard") == 2
    assert config.reward is not None and config.reward.evaluation == EXACT
    assert (config.rollout.temperature, config.seed, config.actor.model.path) == (0.7, 5, source.path)


def test_a_data_file_replaces_the_data_of_the_run(source: ModelSource, task: Path) -> None:
    (config,) = plan(source, settings(task, hard=str(task)), tasks=[str(task)])
    assert list(config.data.evaluation_files) == ["sums"] and config.data.evaluation_rows is None
    assert config.reward is not None and config.reward.evaluation == EXACT
    (other,) = plan(source, settings(task), tasks=[str(task)], reward="flowrl.rewards.gsm8k:score")
    assert other.reward is not None and other.reward.function == "flowrl.rewards.gsm8k:score"
    assert other.reward.evaluation is None


def test_options_replace_the_settings_of_single_sets(source: ModelSource, task: Path) -> None:
    own = {"samples": 8, "temperature": 0.5}
    base = settings(task, hard={"files": str(task), "rows": 2, "evaluation": own})
    (kept,) = plan(source, base)
    assert kept.evaluation_by_set == {"": EvaluationConfig(), "hard": EvaluationConfig(**own)}
    (config,) = plan(source, base, samples=4, temperature=1.0, limit=1, seed=9)
    assert list(config.evaluation_by_set.values()) == [EvaluationConfig(samples=4, temperature=1.0)] * 2
    assert [config.data.num_evaluation_rows(name) for name in ("", "hard")] == [1, 1] and config.seed == 9


def test_settings_follow_the_options(source: ModelSource, task: Path) -> None:
    (config,) = plan(source, settings(task), engine="hf", settings=["rollout.top_p=0.5", "seed=2"])
    assert config.rollout.top_p == 0.5 and config.seed == 2


def test_a_model_without_a_run_has_lengths_that_fit_it(source: ModelSource, task: Path) -> None:
    (config,) = plan(source, None, tasks=[str(task)], reward=EXACT)
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    assert longest <= 64 and config.rollout.max_response_tokens >= 16
    assert config.evaluation == EvaluationConfig()


def test_generated_tasks_have_the_reward_of_their_library(source: ModelSource, task: Path) -> None:
    file, gym = plan(
        source, settings(task), tasks=[str(task), "leg_counting", "reasoning-gym:chain_sum"], reward=EXACT, limit=7
    )
    assert list(file.data.evaluation_files) == ["sums"]
    assert list(gym.data.evaluation_files) == ["leg_counting", "chain_sum"]
    assert gym.reward is not None and gym.reward.function == "flowrl.rewards.reasoning_gym:score"
    (source_of_rows,) = gym.data.tests["leg_counting"].files  # pyright: ignore[reportGeneralTypeIssues] (a tuple)
    assert (source_of_rows.rows, source_of_rows.split) == (7, "test")


def test_tasks_of_the_harness_need_no_config(source: ModelSource) -> None:
    assert plan(source, None, tasks=["lm-eval:arc_easy"]) == []


def test_invalid_arguments_are_rejected(source: ModelSource, task: Path) -> None:
    with rejects("--task", "--reward"):
        plan(source, None, tasks=[str(task)])
    with rejects("--task"):
        plan(source, None)
    with rejects("--task", "leg_count", "leg_counting"):
        plan(source, None, tasks=["leg_count"])
    with rejects("--task", "sums"):
        plan(source, settings(task), tasks=[str(task), str(task)])
    with rejects("evaluation.samples", "4", "temperature"):
        plan(source, settings(task), samples=4)
    with rejects("rollout.max_tokens", "rollout.max_response_tokens"):
        plan(source, settings(task), settings=["rollout.max_tokens=3"])


def test_a_run_is_found_from_its_checkpoints(tmp_path: Path) -> None:
    checkpoint = tmp_path / "run/checkpoints/step-000002"
    checkpoint.mkdir(parents=True)
    (tmp_path / "run/config.yaml").write_text("recipe: recipes.sft.config:SFTConfig\n")
    assert find_run(str(checkpoint)) == find_run(str(tmp_path / "run")) == tmp_path / "run"
    assert find_run(str(tmp_path)) is None and find_run("some/model") is None
    assert read_run_settings(tmp_path / "run") is None


def test_a_recorded_setting_without_effect_does_not_prevent_an_evaluation(tmp_path: Path) -> None:
    settings = grpo_settings(recipe="recipes.grpo.config:GRPOConfig", data={"train": "t.jsonl", "max_prompt_tokens": 8})
    settings["reward"]["head_seed"] = 3
    settings["data"]["difficulty"] = {"candidates": 7}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings))
    kept = read_run_settings(tmp_path)
    assert kept is not None and kept["reward"]["head_seed"] == 0
