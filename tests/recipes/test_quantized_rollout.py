"""Recipes whose rollout samples in int8."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flowrl import Placement
from recipes.grpo.config import GRPOConfig
from recipes.grpo.train import train as train_grpo
from recipes.ppo.config import PPOConfig
from recipes.ppo.train import train as train_ppo
from tests.recipes.test_numbers import CLOCK as MAY_DIFFER

CLOCK = MAY_DIFFER - {"rollout_gap", "rollout_gap_max"}
"""Metrics that may depend on the placement. The gap is the effect of quantization, so it must not."""

CORRECTION = {"correction": {"kind": "truncated"}}


def metrics_of(config: PPOConfig | GRPOConfig) -> list[dict[str, float]]:
    lines = (config.output / "metrics.jsonl").read_text().splitlines()
    return [
        {name: value for name, value in json.loads(line).items() if name not in CLOCK and not name.startswith("usage/")}
        for line in lines
    ]


def split(roles: tuple[str, ...]) -> Placement:
    """Returns a placement with a separate rollout and all other roles colocated."""
    pools = dict.fromkeys(roles, "policy") | {"rollout": "rollout"}
    return Placement(device="cpu", pools={"policy": [1], "rollout": [1]}, roles=pools)


def compare(make: Callable[..., Any], train: Callable[[Any], Any], algorithm: dict[str, Any], folder: Path) -> None:
    """Compares an inline run (colocated rollout) with a run on Ray (separate rollout with weight sync)."""
    rollout = {"max_response_tokens": 6, "quantization": "int8"}
    inline = make(output=folder / "inline", rollout=rollout, algorithm=algorithm)
    placement = split(inline.roles)
    separate = make(
        output=folder / "separate", rollout=rollout, algorithm=algorithm, backend="ray", placement=placement
    )
    for config in (inline, separate):
        train(config)
    lines = metrics_of(inline)
    assert lines == metrics_of(separate)
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    for line in lines[1:]:
        assert 0.9 < line["correction/weight"] < 1.1 and line["correction/weight"] != 1
        assert 1e-5 < line["rollout_gap"] < 0.1


@pytest.mark.slow
def test_ppo_is_identical_with_a_colocated_and_a_separate_rollout(
    ray_session: None, ppo_config: Callable[..., PPOConfig], tmp_path: Path
) -> None:
    compare(ppo_config, train_ppo, {"estimator": "gae", "lam": 0.95, "kl_coef": 0.05} | CORRECTION, tmp_path)


@pytest.mark.slow
def test_grpo_is_identical_with_a_colocated_and_a_separate_rollout(
    ray_session: None, grpo_config: Callable[..., GRPOConfig], tmp_path: Path
) -> None:
    compare(grpo_config, train_grpo, {"estimator": "grpo"} | CORRECTION, tmp_path)


@pytest.mark.slow
def test_a_resumed_run_samples_from_the_weights_of_its_checkpoint(
    grpo_config: Callable[..., GRPOConfig], tmp_path: Path
) -> None:
    settings = {
        "rollout": {"max_response_tokens": 6, "quantization": "int8"},
        "algorithm": {"estimator": "grpo"} | CORRECTION,
        "resume": "auto",
    }
    straight = grpo_config(output=tmp_path / "straight", **settings)
    train_grpo(straight)
    interrupted = {**settings, "output": tmp_path / "interrupted", "checkpoint": {"every": 1}}
    train_grpo(grpo_config(**interrupted, steps=1))
    train_grpo(grpo_config(**interrupted))
    # The first run ended after step 1 and was evaluated there, so that step is not compared.
    assert metrics_of(grpo_config(**interrupted))[2:] == metrics_of(straight)[2:]
