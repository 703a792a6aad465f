"""Rollouts with wrong weights or sampling are detected, and end a strict run."""

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest
import torch

from flowrl import Placement
from flowrl.cli import exit_code
from flowrl.health import read_findings
from recipes.grpo import train as recipe
from recipes.grpo.config import GRPOConfig
from recipes.ppo.config import PPOConfig
from tests.configs import with_float64_models
from tests.engines.closeness import reduction_rtol
from tests.errors import missing_facts
from tests.recipes.conftest import FinishedRun
from tests.recipes.drifting import Drifting, Hotter
from tests.slow_cases import one_of

ROLES = {"actor": "a", "reference": "a", "reward": "a", "rollout": "b"}
APART = Placement(device="cpu", pools={"a": [1], "b": [1]}, roles=ROLES)
STEPS = 2


@pytest.fixture
def config(grpo_config: Callable[..., GRPOConfig]) -> Callable[..., GRPOConfig]:
    """Returns a function that builds configs with a rollout in its own process; keyword arguments go to the rollout."""

    def make(placement: Placement = APART, **rollout: Any) -> GRPOConfig:
        return grpo_config(steps=STEPS, placement=placement, rollout={"max_response_tokens": 6} | rollout)

    return make


def lines(config: GRPOConfig | PPOConfig) -> list[dict[str, float]]:
    return [json.loads(line) for line in (config.output / "metrics.jsonl").read_text().splitlines()][1:]


@pytest.mark.parametrize("check", [pytest.param("sampled", marks=pytest.mark.slow), "complete"])
def test_correct_run_compares_weights_after_every_update(config: Callable[..., GRPOConfig], check: str) -> None:
    run_config = with_float64_models(config(check_weights=check))
    assert recipe.train(run_config)["rollout_gap_steps"] == 0
    assert {line["weights_compared"] for line in lines(run_config)} == {27 if check == "complete" else 15}
    assert all(line["weights_unreached"] == 0 for line in lines(run_config))
    # Both compute in float64; the rollout stores log-probabilities in float32.
    rtol = reduction_rtol(torch.float32, length=1, depth=1)
    assert all(line["rollout_gap"] < rtol * line["actor/entropy"] for line in lines(run_config))


def test_one_step_off_compares_weights_after_every_update(one_step_off_run: FinishedRun[GRPOConfig]) -> None:
    records = lines(one_step_off_run.config)
    assert [(line["weights_compared"], line["weights_unreached"]) for line in records] == [(27, 0)] * 4


def test_rollout_that_shares_the_actors_weights_compares_nothing(sync_run: FinishedRun[PPOConfig]) -> None:
    assert not any("weights_compared" in line for line in lines(sync_run.config))


def test_wrong_weight_after_an_update_ends_the_run(
    config: Callable[..., GRPOConfig], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(recipe, "Rollout", Drifting)
    run_config = config()
    assert exit_code(lambda: recipe.train(run_config)) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and not missing_facts(error, "rollout", 1, 15, "model.norm.weight", 0.1)


@pytest.mark.slow
def test_gap_is_a_finding_and_is_counted(
    config: Callable[..., GRPOConfig], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(recipe, "Rollout", Drifting)
    run_config = config(check_weights="off")
    summary = recipe.train(run_config)
    assert summary["rollout_gap_steps"] == STEPS - 1  # the first step samples from the initial weights
    (finding,) = read_findings(run_config.output)
    assert (finding.check, finding.step, finding.last_step) == ("logprob_gap", 2, STEPS)
    assert not missing_facts(finding.message, "rollout.gap_warning", 0.001, "rollout.check_weights")
    assert summary["health"] == [asdict(finding)]
    assert not missing_facts(" ".join(capsys.readouterr().out.split()), "health", 2, "rollout.check_weights")


def test_gap_ends_a_strict_run_and_its_records_stay(
    config: Callable[..., GRPOConfig], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(recipe, "Rollout", Hotter)
    run_config = config(check="strict")
    assert exit_code(lambda: recipe.train(run_config)) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and not missing_facts(error, 1, "rollout.gap_warning", 0.001)
    assert [line["step"] for line in lines(run_config)] == [1]
    assert (run_config.output / "trace.json").exists() and not (run_config.output / "summary.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("settings", one_of({"check": "strict", "gap_warning": 10.0}, {"check": "off"}))
def test_gap_that_the_config_allows_does_not_warn(
    config: Callable[..., GRPOConfig],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    settings: dict[str, Any],
) -> None:
    monkeypatch.setattr(recipe, "Rollout", Hotter)
    summary = recipe.train(config(**settings))
    assert summary["rollout_gap_steps"] == 0 and summary["health"] == []
    assert "health:" not in capsys.readouterr().out
