"""`flowrl eval` of a run has the same numbers as the last evaluation of the run, bitwise."""

import importlib.util
import json
import shutil
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from rich.console import Console

from flowrl.config import ReplicaSizes
from flowrl.controller.errors import FlowError
from flowrl.inference.evaluation.evaluate_models import evaluate_models
from flowrl.inference.evaluation.model_comparison import TaskResult
from flowrl.inference.evaluation.planned_tasks import EvaluationArguments
from recipes.grpo.config import GRPOConfig
from recipes.grpo.train import train
from tests.configs import grpo_settings, quickstart_settings
from tests.errors import rejects
from tests.hub_cache import make_snapshot
from tests.slow_cases import one_of

TASK = "recipes.quickstart.task"


def evaluate(*models: Path, **options: Any) -> list[TaskResult]:
    names = ("step", "output", "rows", "num_devices")
    own = {name: options.pop(name) for name in names if name in options}
    console = Console(file=StringIO(), width=200)
    return evaluate_models([str(model) for model in models], EvaluationArguments(**options), console=console, **own)


@pytest.fixture(scope="module")
def run(task_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trains two steps with a checkpoint of each. A named set is evaluated with sampled responses."""
    output = tmp_path_factory.mktemp("trained") / "run"
    settings = grpo_settings(
        **quickstart_settings(task_folder, output, steps=2, batch_size=16, minibatch_size=16, evaluate_every=1)
    )
    settings["reward"] = {"function": f"{TASK}:score"}
    sampled = {
        "samples": 4,
        "temperature": 1.0,
        "pass_score": 0.2,
        "extract_answer": "flowrl.rewards.final_number:extract_answer",
    }
    hard = {"files": task_folder / "test.jsonl", "rows": 12, "evaluation": sampled}
    settings["data"] |= {"tests": {"hard": hard}}
    settings |= {"rollout": {"max_response_tokens": 6}, "checkpoint": {"every": 1, "keep_last": 2}}
    settings["recipe"] = "recipes.grpo.config:GRPOConfig"
    train(GRPOConfig.model_validate(settings))
    return output


def recorded(run: Path, step: int) -> dict[str, float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return next(line for line in lines if line["step"] == step)


@pytest.mark.parametrize("step", one_of(None, 1))
def test_the_numbers_are_those_of_the_run(run: Path, step: int | None) -> None:
    plain, hard = evaluate(run, step=step)
    expected = recorded(run, step or 2)
    assert (plain.task, plain.num_prompts, hard.task, hard.num_prompts, hard.num_samples) == ("test", 8, "hard", 12, 4)
    assert plain.score.value == expected["accuracy"] and hard.score.value == expected["accuracy/hard"]
    assert plain.score.low == expected["evaluation/accuracy_low"]
    assert hard.score.high == expected["evaluation/accuracy_high/hard"]
    assert hard.metrics["evaluation/response_length"] == expected["evaluation/response_length/hard"]
    for name in ("pass@4", "majority@4"):
        assert hard.estimates[name].value == expected[f"accuracy_{name}/hard"]
    assert hard.estimates["best@4"].value == pytest.approx(expected["accuracy_best@4/hard"], rel=1e-6)


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(900)
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs the extra vllm")
def test_a_replica_of_two_devices_has_the_greedy_responses_of_the_run(run: Path, ray_session: None) -> None:
    plain, _ = evaluate(run, settings=("rollout.engine=vllm",), replica=ReplicaSizes(tp=2), num_devices=2)
    expected = recorded(run, 2)
    assert plain.score.value == expected["accuracy"]
    assert plain.metrics["evaluation/response_length"] == expected["evaluation/response_length"]


def test_models_are_compared_on_the_settings_of_the_run(run: Path, task_folder: Path, tmp_path: Path) -> None:
    output, rows = tmp_path / "results.json", tmp_path / "rows.jsonl"
    results = evaluate(task_folder / "model", run, output=output, rows=rows, limit=4)
    assert [(own.task, own.model) for own in results] == [
        ("test", "model"), ("test", "run"), ("hard", "model"), ("hard", "run")
    ]  # fmt: skip
    difference = results[3].difference
    assert difference is not None
    assert difference.value == pytest.approx(results[3].score.value - results[2].score.value, abs=1e-6)
    saved = json.loads(output.read_text())
    assert [model["name"] for model in saved["models"]] == ["model", "run"]
    assert saved["models"][0]["weights"] != saved["models"][1]["weights"]
    assert saved["inputs"][0]["data.test"]["bytes"] == (task_folder / "test.jsonl").stat().st_size
    assert [len(row["scores"]) for row in saved["prompts"]["run"]["hard"]] == [4] * 4
    lines = [json.loads(line) for line in rows.read_text().splitlines()]
    assert len(lines) == 2 * (4 + 4 * 4) and {line["task"] for line in lines} == {"test", "hard"}


def test_a_model_without_a_run_is_evaluated_on_a_data_file(task_folder: Path) -> None:
    task = [str(task_folder / "test.jsonl")]
    (result,) = evaluate(task_folder / "model", tasks=task, reward=f"{TASK}:score", limit=5)
    assert (result.task, result.num_prompts) == ("test", 5) and 0 <= result.score.value < 1


def test_a_model_that_fails_does_not_lose_the_results_of_others(task_folder: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(task_folder / "model", tmp_path / "broken")
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    options = {"output": tmp_path / "results.json", "rows": tmp_path / "rows.jsonl", "limit": 3}
    task = {"tasks": [str(task_folder / "test.jsonl")], "reward": f"{TASK}:score"}
    with rejects(str(broken), error=FlowError):
        evaluate(task_folder / "model", broken, **task, **options)
    saved = json.loads((tmp_path / "results.json").read_text())
    assert [own["model"] for own in saved["results"]] == ["model"] == [own["name"] for own in saved["models"]]
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == 3


def test_failed_rewards_are_no_scores(task_folder: Path, tmp_path: Path) -> None:
    """The reward is 1 for 34 of 64 rows, and fails for the others."""
    files = {"output": tmp_path / "results.json", "rows": tmp_path / "rows.jsonl"}
    task = {"tasks": [str(task_folder / "test.jsonl")], "reward": "tests.recipes.scored:fails_for_some_answers"}
    failures = ["reward.on_failure=zero", "reward.max_failure_rate=0.5"]
    (result,) = evaluate(task_folder / "model", **task, settings=failures, limit=64, **files)
    assert (result.score.value, result.num_prompts) == (1.0, 64)
    expected = {"failed": 30, "failed_fraction": 30 / 64, "failed_as_worst": 34 / 64, "failed_as_best": 1.0}
    assert result.metrics.items() >= {f"evaluation/{name}": value for name, value in expected.items()}.items()
    saved = json.loads((tmp_path / "results.json").read_text())
    assert [row["scores"] for row in saved["prompts"]["model"]["test"]].count([None]) == 30
    lines = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert all(bool(line["reward_failures"]) == (line["score"] is None) for line in lines)


def test_too_many_failed_rewards_end_the_command_after_its_files(task_folder: Path, tmp_path: Path) -> None:
    task = {"tasks": [str(task_folder / "test.jsonl")], "reward": "tests.recipes.scored:fails_for_some_answers"}
    with rejects(47, "model", "reward.max_failure_rate", "0.1", "crashed"):
        evaluate(
            task_folder / "model",
            **task,
            settings=["reward.on_failure=drop"],
            limit=64,
            output=tmp_path / "results.json",
        )
    (result,) = json.loads((tmp_path / "results.json").read_text())["results"]
    assert result["metrics"]["evaluation/failed"] == 30


def test_the_file_has_the_checksum_of_the_weights_of_a_hub_model(
    task_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = make_snapshot(tmp_path / "cache", "owner/model")
    shutil.copytree(task_folder / "model", snapshot, dirs_exist_ok=True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    output, task = tmp_path / "results.json", [str(task_folder / "test.jsonl")]
    evaluate(Path("owner/model"), task_folder / "model", tasks=task, reward=f"{TASK}:score", limit=2, output=output)
    hub, local = json.loads(output.read_text())["models"]
    assert hub["path"] == "owner/model" and hub["weights"] == local["weights"] and hub["weights"]["bytes"] > 0


def test_invalid_arguments_write_no_file(run: Path, task_folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "results.json"
    with rejects("twice"):
        evaluate(run, run, output=output)
    with rejects("--output"):
        evaluate(run, output=tmp_path)
    with rejects("--rows"):
        evaluate(run, rows=tmp_path / "none/rows.jsonl")
    with rejects("step", "9"):
        evaluate(run, output=output, step=9)
    with rejects("data.tests.empty.0.path"):
        (tmp_path / "empty.jsonl").touch()
        evaluate(run, output=output, tasks=[str(tmp_path / "empty.jsonl")])
    assert list(tmp_path.iterdir()) == [tmp_path / "empty.jsonl"]
