"""Runs with each source of the old log-probabilities have the same metrics."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from recipes.grpo.config import GRPOConfig
from recipes.grpo.train import train as train_grpo
from recipes.ppo.config import PPOConfig
from recipes.ppo.train import train as train_ppo

GAP = {"rollout_gap", "rollout_gap_max", "actor/rollout_gap"}
CLOCK = {"seconds", "elapsed_s", "tokens_per_s", "memory_mb", "wait_data_s", "wait_weights_s", "rewards/reward/seconds"}
TOLERANCE = 1e-4
"""Bound of float32 metrics after two steps. Adam amplifies rounding errors of small gradients."""

Configure = Callable[..., Any]


def trained(config: PPOConfig | GRPOConfig) -> list[dict[str, Any]]:
    """Trains, and returns the metrics of each step."""
    (train_ppo if isinstance(config, PPOConfig) else train_grpo)(config)  # pyright: ignore[reportArgumentType]
    lines = (config.output / "metrics.jsonl").read_text().splitlines()[1:]
    return [
        {"kl" if name == "actor/kl" else name: value for name, value in json.loads(line).items() if not is_clock(name)}
        for line in lines
    ]


def is_clock(name: str) -> bool:
    return name in CLOCK or name.startswith(("idle_", "usage/"))


def with_old_logprobs(make: Configure, output: Path, old_logprobs: str, **changes: Any) -> PPOConfig | GRPOConfig:
    actor = make().actor.model_dump() | {"old_logprobs": old_logprobs} | changes.pop("actor", {})
    return make(output=output / old_logprobs, actor=actor, steps=2, **changes)


def assert_close(actual: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert len(actual) == len(expected) == 2
    for found, wanted in zip(actual, expected, strict=True):
        assert found.keys() - GAP == wanted.keys() - GAP
        assert {name: found[name] for name in found.keys() - GAP} == pytest.approx(
            {name: wanted[name] for name in wanted.keys() - GAP}, rel=TOLERANCE, abs=TOLERANCE
        )


def test_grpo_with_one_update_has_the_same_metrics_for_each_choice(grpo_config: Configure, tmp_path: Path) -> None:
    one_update = {"minibatch_size": 32}
    assert with_old_logprobs(grpo_config, tmp_path, "auto", **one_update).actor.old_logprobs == "current"
    recompute, current, rollout = (
        trained(with_old_logprobs(grpo_config, tmp_path, choice, **one_update))
        for choice in ("recompute", "current", "rollout")
    )
    assert_close(current, recompute)
    assert_close(rollout, recompute)
    assert recompute[0].keys() & GAP == {"rollout_gap", "rollout_gap_max"}
    assert current[0].keys() & GAP == {"actor/rollout_gap"} and rollout[0]["rollout_gap"] == 0
    assert current[0]["actor/rollout_gap"] == pytest.approx(recompute[0]["rollout_gap"], rel=0.1, abs=1e-7)
    for line in current:
        assert line["actor/ratio_min"] == line["actor/ratio_max"] == 1 and line["actor/approx_kl"] == 0
    for metrics in (rollout, recompute):
        assert metrics[0]["actor/ratio"] == pytest.approx(1, abs=1e-6)
        assert abs(metrics[0]["actor/approx_kl"]) < 1e-6


@pytest.mark.slow
def test_ppo_with_a_kl_penalty_has_the_same_metrics_for_each_choice(ppo_config: Configure, tmp_path: Path) -> None:
    """The penalty reads old log-probabilities, and a step has two updates."""
    assert with_old_logprobs(ppo_config, tmp_path, "auto").actor.old_logprobs == "rollout"
    rollout, recompute = (trained(with_old_logprobs(ppo_config, tmp_path, choice)) for choice in ("auto", "recompute"))
    assert_close(rollout, recompute)
    assert rollout[1]["kl"] > 0


@pytest.mark.slow
def test_ppo_without_a_penalty_has_the_same_metrics_for_each_choice(ppo_config: Configure, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"algorithm": {"estimator": "gae", "lam": 0.95}, "minibatch_size": 32}
    current, recompute = (
        trained(with_old_logprobs(ppo_config, tmp_path, choice, **changes)) for choice in ("auto", "recompute")
    )
    assert_close(current, recompute)
    assert "actor/rollout_gap" in current[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "algorithm"),
    [
        pytest.param("clip_cov", {"estimator": "grpo"}, marks=pytest.mark.slow),
        ("kl_cov", {"estimator": "grpo"}),
        pytest.param("decoupled_ppo", {"estimator": "grpo"}, marks=pytest.mark.slow),
        ("ppo", {"estimator": "grpo", "correction": {"kind": "truncated"}}),
        pytest.param("ppo", {"estimator": "rloo", "kl_coef": 0.05}, marks=pytest.mark.slow),
    ],
)
def test_other_readers_get_their_column_with_one_update(
    loss: str, algorithm: dict[str, Any], grpo_config: Configure, tmp_path: Path
) -> None:
    changes: dict[str, Any] = {"actor": {"loss": loss}, "algorithm": algorithm, "minibatch_size": 32}
    automatic, recompute = (
        trained(with_old_logprobs(grpo_config, tmp_path, choice, **changes)) for choice in ("auto", "recompute")
    )
    assert_close(automatic, recompute)
