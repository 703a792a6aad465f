"""GRPO with episodes of two turns: training, evaluation, resume, and one or two ranks."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from flowrl.checkpoints.checkpoints import Checkpoints
from flowrl.checkpoints.saved_rows import FILE
from flowrl.config import Placement
from recipes.grpo.config import GRPOConfig
from recipes.grpo.train import train
from tests.configs import with_float64_models
from tests.recipes.test_environments import APART, TOGETHER, environment
from tests.recipes.test_numbers import assert_same, metrics_of
from tests.recipes.test_resume import assert_bitwise_identical, from_step, without_evaluations
from tests.recipes.test_schedules import ASYNC, EVERY_STEP, detached

GrpoConfigs = Callable[..., GRPOConfig]
TURNS: dict[str, Any] = {"rollout": {"max_response_tokens": 24}, **environment("TwoTurns")}


def saved_rows(config: GRPOConfig, kind: str) -> list[dict[str, Any]]:
    files = sorted((config.output / "rollouts").glob(f"{kind}-*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def check(config: GRPOConfig, *, evaluated: bool = True) -> None:
    """Checks that the environment took part in the training and in the evaluation, and that no check failed."""
    lines = [line for line in metrics_of(config) if "response_length" in line]
    assert len(lines) == config.steps and sum("environment_length" in line for line in lines) > 0
    assert all(line["response_length"] <= 24 for line in lines)
    rows = [row for kind in ("training", "evaluation")[: 1 + evaluated] for row in saved_rows(config, kind)]
    assert any(row["environment_length"] for row in rows)
    assert all("1+1=" in row["response"] for row in rows if row["environment_length"])


@pytest.mark.slow
def test_a_run_trains_and_evaluates(grpo_config: GrpoConfigs) -> None:
    """With strict checks of the rollout's log-probabilities, also after the environment's tokens."""
    actor = grpo_config().actor.model_dump() | {"old_logprobs": "recompute"}
    rollout = {"max_response_tokens": 24, "check": "strict"}
    config = grpo_config(**TURNS | {"rollout": rollout}, placement=TOGETHER, actor=actor)
    train(config)
    check(config)
    lines = [json.loads(line) for line in (config.output / "metrics.jsonl").read_text().splitlines()]
    gaps = [line["rollout_gap"] for line in lines if "rollout_gap" in line]
    assert len(gaps) == config.steps and max(gaps) < 1e-5


@pytest.mark.slow
def test_one_step_off_resumes_with_the_segments_of_pending_responses(grpo_config: GrpoConfigs, tmp_path: Path) -> None:
    checkpoint = EVERY_STEP | {"asynchronous": False}
    straight = grpo_config(**TURNS, checkpoint=checkpoint, placement=APART, schedule={"kind": "one_step_off"})
    train(straight)
    check(straight)
    rows = load_file(Checkpoints(straight.output).read(2).path / FILE)
    mask = rows["tokens/response_mask"]
    lengths = rows["rows/length"].tolist()
    parts = [row[int(row.int().argmax()) :] for row in mask.split(lengths)]
    assert any(not part.all() for part in parts) and all(part[-1] for part in parts)
    assert torch.equal(rows["tokens/weight_version"] >= 0, mask) and not rows["tokens/rollout_logprobs"][~mask].any()
    again = from_step(straight, 2, tmp_path / "again")
    train(again)
    assert_bitwise_identical(again, straight)


@pytest.mark.slow
def test_async_without_staleness_is_bitwise_identical_to_sync(grpo_config: GrpoConfigs, tmp_path: Path) -> None:
    results = []
    for schedule in ({"kind": "sync"}, {"kind": "async", "max_staleness": 0}):
        config = grpo_config(**TURNS, placement=APART, schedule=schedule, output=tmp_path / schedule["kind"])
        train(config)
        results.append(metrics_of(config))
    names = results[0][-1].keys() & results[1][-1].keys()
    assert "environment_length" in names
    for line, expected in zip(results[1], results[0], strict=True):
        assert all(line[name] == expected[name] for name in names & line.keys() & expected.keys())


@pytest.mark.slow
def test_async_trains_and_resumes(grpo_config: GrpoConfigs, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"placement": APART, "schedule": ASYNC, "evaluate_every": 2}
    config = grpo_config(**TURNS, steps=6, checkpoint=EVERY_STEP, **changes)
    train(config)
    check(config)
    again = from_step(config, 3, tmp_path / "again")
    train(again)
    check(again)
    assert all(line["staleness_max"] <= 2 for line in metrics_of(again)[1:])


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [{"kind": "sync"}, {"kind": "one_step_off"}, ASYNC], ids=lambda s: s["kind"])
def test_a_run_trains_on_ray(grpo_config: GrpoConfigs, ray_session: None, schedule: dict[str, Any]) -> None:
    placement = detached(2)
    placement = placement.model_copy(update={"roles": {**placement.roles, "environment": "train"}})
    config = grpo_config(**TURNS, backend="ray", placement=placement, schedule=schedule)
    train(config)
    check(config, evaluated=False)


@pytest.mark.slow
def test_sharded_ranks_give_the_metrics_of_one_rank(
    grpo_config: GrpoConfigs, ray_session: None, tmp_path: Path
) -> None:
    """The ranks of the sharded actor need different numbers of segments in most steps."""
    straight = with_float64_models(grpo_config(**TURNS, placement=TOGETHER, output=tmp_path / "one"))
    train(straight)
    roles = ("actor", "reference", "environment", "rollout")
    placement = Placement(device="cpu", pools={"main": [2]}, roles=dict.fromkeys(roles, "main"))
    actor = straight.actor.model_dump() | {"engine": {"strategy": "fsdp"}}
    changes = {"actor": actor, "placement": placement, "backend": "ray", "output": tmp_path / "two"}
    sharded = GRPOConfig.model_validate(straight.model_dump() | changes)
    train(sharded)
    for line, expected in zip(metrics_of(sharded), metrics_of(straight), strict=True):
        assert_same(without_evaluations(expected), without_evaluations(line))
