"""Rejection sampling: the responses that are trained, metrics, schedules, resume, and invalid settings."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from flowrl.data.batch.batch import Batch
from flowrl.data.metric import merge_metrics
from flowrl.run.targets import select_best
from flowrl.run.updates import describe_batches, describe_updates
from recipes.quickstart.task import score
from recipes.rejection_sampling.config import RejectionSamplingConfig
from recipes.rejection_sampling.train import train
from tests.engines.closeness import FLOAT32_RTOL
from tests.errors import rejects
from tests.recipes.rollout_configs import (
    SCHEDULES,
    detached,
    first_responses,
    rejection_config,
)


def records(config: RejectionSamplingConfig) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (config.output / "metrics.jsonl").read_text().splitlines()]


def weights(config: RejectionSamplingConfig) -> dict[str, torch.Tensor]:
    return load_file(config.output / "model" / "model.safetensors")


def test_a_step_trains_on_the_best_response_to_each_prompt(task_folder: Path, tmp_path: Path) -> None:
    config = rejection_config(task_folder, tmp_path / "run", steps=1)
    train(config)
    batch = first_responses(config)
    columns = (batch.get(name) for name in ("prompt", "response", "answer"))
    scores = [score(prompt, response, answer) for prompt, response, answer in zip(*columns, strict=True)]
    groups = [range(start, start + 4) for start in range(0, 32, 4)]
    best = [max(rows, key=lambda row: (scores[row], -row)) for rows in groups]
    selected = batch.rows(best)
    loss = -selected.get("rollout_logprobs")[selected.get("response_mask")].mean()

    (step,) = records(config)[1:]
    assert step["reward"] == pytest.approx(sum(scores) / 32, rel=FLOAT32_RTOL)
    assert step["reward_selected"] == pytest.approx(sum(scores[row] for row in best) / 8, rel=FLOAT32_RTOL)
    assert step["reward_selected"] > step["reward"]
    assert step["selected_fraction"] == 0.25
    assert step["kl_bound"] == pytest.approx(math.log(4) - 0.75)
    assert step["actor/loss"] == pytest.approx(float(loss), rel=1e-4)


def selected(rows: dict[str, torch.Tensor], keep: int = 1) -> tuple[list[float], dict[str, float]]:
    """Returns the scores of the selected rows, and the metrics."""
    logged: Any  # metrics, and a future of metrics
    best, logged = select_best(Batch.from_columns(rows=rows), keep=keep)
    merged = merge_metrics([logged[0], logged[1].get()])
    return best.get("scores").tolist(), {name: metric.result() for name, metric in merged.items()}


def test_a_response_whose_reward_failed_is_never_selected() -> None:
    """The score of 0 of a failed response would be the best score. All rewards of the last prompt failed."""
    rows = {
        "scores": torch.tensor([-1.0, 0.0, -2.0, 0.0, -3.0, -4.0, 0.0]),
        "reward_failed": torch.tensor([False, True, False, True, False, False, True]),
        "group": torch.tensor([0, 0, 0, 1, 1, 1, 2]),
    }
    scores, metrics = selected(rows)
    assert scores == [-1.0, -3.0]
    # The selected responses are the best of 2 candidates each.
    kl_bound = pytest.approx(math.log(2) - 0.5)
    assert metrics == {"selected_fraction": 2 / 7, "kl_bound": kl_bound, "reward_selected": -2.0}
    assert selected(rows, keep=3)[0] == [-1.0, -2.0, -3.0, -4.0]


def test_without_a_valid_reward_no_response_is_selected() -> None:
    rows = {"scores": torch.zeros(2), "reward_failed": torch.ones(2, dtype=torch.bool), "group": torch.zeros(2).long()}
    scores, metrics = selected(rows)
    assert scores == [] and metrics["selected_fraction"] == 0


def test_a_minimum_score_may_leave_no_response(task_folder: Path, tmp_path: Path) -> None:
    config = rejection_config(task_folder, tmp_path / "run", min_score=2.0, steps=2)
    train(config)
    for step in records(config)[1:]:
        assert step["selected_fraction"] == 0 and step["reward_selected"] is None
        assert "actor/loss" not in step and "kl_bound" not in step
    initial = load_file(task_folder / "model" / "model.safetensors")
    assert all(torch.equal(weights(config)[name], weight) for name, weight in initial.items())


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if name != "sync"])
def test_every_schedule_trains_on_complete_groups(task_folder: Path, tmp_path: Path, schedule: str) -> None:
    placement = detached("reward")
    changes: dict[str, Any] = {"schedule": SCHEDULES[schedule], "placement": placement, "keep": 2, "minibatch_size": 16}
    config = rejection_config(task_folder, tmp_path / "run", **changes)
    train(config)
    steps = records(config)[1:]
    assert [step["selected_fraction"] for step in steps] == [0.5] * 3
    assert all(step["reward_selected"] >= step["reward"] and math.isfinite(step["actor/loss"]) for step in steps)


@pytest.mark.slow
def test_an_interrupted_run_resumes_exactly(task_folder: Path, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"checkpoint": {"every": 1}, "minibatch_size": 3}
    full = rejection_config(task_folder, tmp_path / "full", **changes)
    part = rejection_config(task_folder, tmp_path / "part", **changes | {"steps": 1})
    train(full)
    train(part)
    train(part.model_copy(update={"steps": 3, "resume": "auto"}))
    assert all(torch.equal(weights(part)[name], weight) for name, weight in weights(full).items())
    names = ("reward", "reward_selected", "actor/loss")
    assert [[step[name] for name in names] for step in records(full)[1:]] == [
        [step[name] for name in names] for step in records(part)[1:]
    ]


def test_updates_are_those_of_the_selected_responses(task_folder: Path, tmp_path: Path) -> None:
    config = rejection_config(task_folder, tmp_path, keep=2, minibatch_size=6)
    assert config.num_updates == 3 * 3
    assert "(2 minibatches of 6 and 1 of 4)" in describe_updates(config)[0]
    assert "32 sequences (batch_size), of which up to 16 are trained = 3 of up to 6" in describe_batches(config, 1)[0]
    assert "at most" in describe_updates(rejection_config(task_folder, tmp_path, min_score=0.5))[0]


@pytest.mark.parametrize(
    ("changes", "facts"),
    [
        ({"samples_per_prompt": 1}, ("samples_per_prompt", 1, 2)),
        ({"keep": 4}, ("keep", "samples_per_prompt", 4, 3)),
        ({"keep": 0}, ("keep", 0)),
        ({"minibatch_size": 9}, ("minibatch_size", 9, "keep", 8)),
    ],
)
def test_invalid_settings_are_rejected(
    task_folder: Path, tmp_path: Path, changes: dict[str, Any], facts: tuple[str | int, ...]
) -> None:
    with rejects(*facts, error=ValueError):
        rejection_config(task_folder, tmp_path, **changes)
