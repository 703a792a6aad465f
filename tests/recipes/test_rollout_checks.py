"""Recipes whose rollout is not the actor: who says so, and what becomes of the run."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from flowrl import Placement
from flowrl.cli import exit_code
from recipes.grpo import train as recipe
from recipes.grpo.config import GRPOConfig
from tests.recipes.drifting import Drifting, Hotter

ROLES = {"actor": "a", "reference": "a", "reward": "a", "rollout": "b"}
APART = Placement(device="cpu", pools={"a": [1], "b": [1]}, roles=ROLES)
STEPS = 4


@pytest.fixture
def config(grpo_config: Callable[..., GRPOConfig]) -> Callable[..., GRPOConfig]:
    """A run whose rollout has weights of its own; keyword arguments are the rollout's."""

    def make(placement: Placement = APART, **rollout: Any) -> GRPOConfig:
        return grpo_config(steps=STEPS, placement=placement, rollout={"max_response_tokens": 6} | rollout)

    return make


def lines(config: GRPOConfig) -> list[dict[str, float]]:
    return [json.loads(line) for line in (config.output / "metrics.jsonl").read_text().splitlines()][1:]


@pytest.mark.parametrize("check", ["sampled", "complete"])
def test_a_sound_run_compares_weights_after_every_update(config: Callable[..., GRPOConfig], check: str) -> None:
    made = config(check_weights=check)
    assert recipe.train(made)["rollout_gap_steps"] == 0
    assert {line["weights_compared"] for line in lines(made)} == {27 if check == "complete" else 15}
    assert all(line["weights_unreached"] == 0 for line in lines(made))
    assert all(line["rollout_gap"] <= line["rollout_gap_max"] < 1e-4 for line in lines(made))


def test_a_rollout_with_the_actors_own_weights_compares_nothing(config: Callable[..., GRPOConfig]) -> None:
    made = config(Placement(pools={"main": [1]}, roles=dict.fromkeys(ROLES, "main")))
    recipe.train(made)
    assert not any("weights_compared" in line for line in lines(made))


def test_a_weight_that_is_wrong_after_an_update_ends_the_run(
    config: Callable[..., GRPOConfig], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(recipe, "Rollout", Drifting)
    made = config()
    assert exit_code(lambda: recipe.train(made)) == 1
    told = capsys.readouterr().err
    assert told.startswith("error: rollout: ") and " 1 of 15 " in told and told.count("\n") == 1
    assert "model.norm.weight by up to 0.1" in told


def test_a_gap_is_told_once_and_counted(
    config: Callable[..., GRPOConfig], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(recipe, "Rollout", Drifting)
    summary = recipe.train(config(check_weights="off"))
    assert summary["rollout_gap_steps"] == STEPS - 1  # the first step samples from what it was started with
    said = " ".join(capsys.readouterr().out.split())
    assert said.count("warning:") == 1 and "warning: step 2: " in said
    assert "rollout.check_weights is off" in said


def test_a_gap_ends_a_strict_run_and_its_lines_stay(
    config: Callable[..., GRPOConfig], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(recipe, "Rollout", Hotter)
    made = config(check="strict")
    assert exit_code(lambda: recipe.train(made)) == 1
    told = capsys.readouterr().err
    assert told.startswith("error: step 1: the rollout's log-probabilities are ") and told.count("\n") == 1
    assert "above rollout.gap_warning 0.001; likely causes, the first first: weights" in told
    assert [line["step"] for line in lines(made)] == [1]
    assert (made.output / "trace.json").exists() and not (made.output / "summary.json").exists()


@pytest.mark.parametrize("settings", [{"check": "off"}, {"check": "strict", "gap_warning": 10.0}])
def test_a_gap_that_the_config_allows_is_not_told(
    config: Callable[..., GRPOConfig],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    settings: dict[str, Any],
) -> None:
    monkeypatch.setattr(recipe, "Rollout", Hotter)
    assert recipe.train(config(**settings))["rollout_gap_steps"] == 0
    assert "warning" not in capsys.readouterr().out
