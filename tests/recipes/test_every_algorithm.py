"""Every estimator, loss and correction that a step has the columns for, in a short run of the recipes."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flowrl import Placement
from flowrl.config import AnyAdvantage, AnyPolicyLoss
from flowrl.config.union import CUSTOM, members_of
from recipes.grpo.config import GRPOConfig
from recipes.grpo.train import train
from recipes.ppo.config import PPOConfig
from recipes.ppo.train import train as train_ppo

CLOCK = {"seconds", "elapsed_s", "tokens_per_s", "memory_mb"}
CLOCK |= {f"idle_{role}" for role in ("actor", "critic", "reference", "reward", "rollout")}
CLOCK |= {"wait_data_s", "wait_weights_s"}
OWN_MODULE = "tests.algorithms.own_functions"

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    **{
        name: ({"estimator": name}, {})
        for name, member in members_of(AnyAdvantage).items()
        if name not in ("gae", CUSTOM) and member.EXTRA_COLUMN is None  # pyright: ignore[reportAttributeAccessIssue]
    },
    **{f"loss {name}": ({"estimator": "grpo"}, {"loss": name}) for name in members_of(AnyPolicyLoss) if name != CUSTOM},
    "loss clip_cov that selects": (
        {"estimator": "grpo"},
        {"loss": {"kind": "clip_cov", "cov_fraction": 0.1, "cov_low": -9.0, "cov_high": 9.0}},
    ),
    "loss kl_cov that selects": ({"estimator": "grpo"}, {"loss": {"kind": "kl_cov", "cov_fraction": 0.1}}),
    "truncated": ({"estimator": "rloo", "correction": {"kind": "truncated", "normalize": True}}, {}),
    "masked": ({"estimator": "rloo", "correction": {"kind": "masked", "level": "geometric"}}, {}),
    "rejection": ({"estimator": "rloo", "correction": {"kind": "rejection", "high": 0.1}}, {}),
    "own": (
        {"estimator": f"{OWN_MODULE}:sign", "options": {"bar": 0.5}, "correction": {"kind": f"{OWN_MODULE}:kept_half"}},
        {
            "loss": {"kind": f"{OWN_MODULE}:half_reinforce", "options": {"weight": 0.25}},
            "kl_loss_coef": 0.1,
            "kl_loss_kind": f"{OWN_MODULE}:squared",
            "aggregation": f"{OWN_MODULE}:tenth",
        },
    ),
    "shaping": (
        {
            "estimator": "rloo",
            "shaping": [
                {"kind": "length_penalty", "correct_from": 0.5, "coef": 0.5},
                {"kind": "overlong_penalty", "max_length": 6, "buffer": 4},
                {"kind": "normalize_rewards", "shift_mean": True},
                {"kind": "clip_rewards", "low": -2.0, "high": 2.0},
                {"kind": f"{OWN_MODULE}:scaled", "options": {"by": 0.5}},
            ],
        },
        {},
    ),
    "adaptive KL": (
        {"estimator": "rloo", "kl_coef": 0.1, "kl_control": {"kind": "adaptive", "target": 1.0, "horizon": 64.0}},
        {},
    ),
    "straight-through": ({"estimator": "grpo"}, {"kl_loss_coef": 0.1, "kl_loss_gradient": "k2"}),
}


def configured(
    make: Callable[..., GRPOConfig], name: str, engine: dict[str, int] | None = None, **changes: Any
) -> GRPOConfig:
    algorithm, actor = CASES[name]
    base = make().actor
    settings = {"model": base.model, "optimizer": base.optimizer, "engine": engine or {}} | actor
    return make(algorithm=algorithm, actor=settings, steps=1, **changes)


def metrics_of(config: GRPOConfig) -> dict[str, float]:
    line = (config.output / "metrics.jsonl").read_text().splitlines()[1]
    return {name: value for name, value in json.loads(line).items() if name not in CLOCK}


@pytest.mark.parametrize("name", CASES)
def test_a_step_ends_with_finite_numbers(name: str, grpo_config: Callable[..., GRPOConfig]) -> None:
    config = configured(grpo_config, name)
    train(config)
    found = metrics_of(config)
    assert math.isfinite(found["actor/loss"]) and found["actor/grad_norm"] >= 0
    assert found["actor/skipped_update"] == 0
    if "selects" in name:
        assert found["actor/selected_fraction"] > 0
    if "correction" in CASES[name][0]:
        assert found["correction/weight"] > 0
    assert ("reward_shaping" in found) == ("shaping" in CASES[name][0])


@pytest.mark.parametrize("backend", ["inline", "ray"])
def test_a_kl_below_its_target_lowers_the_coefficient(
    backend: str, request: pytest.FixtureRequest, ppo_config: Callable[..., PPOConfig]
) -> None:
    """Far below, each step of 32 rows does so by 0.2 * 32 / 64."""
    if backend == "ray":
        request.getfixturevalue("ray_session")
    control = {"kind": "adaptive", "target": 1.0, "horizon": 64.0}
    algorithm = {"estimator": "gae", "kl_coef": 0.1, "kl_control": control}
    placement = Placement(device="cpu", pools={"main": [1]}, roles=dict.fromkeys(PPOConfig.roles, "main"))
    config = ppo_config(algorithm=algorithm, backend=backend, placement=placement)
    train_ppo(config)
    lines = [json.loads(line) for line in (config.output / "metrics.jsonl").read_text().splitlines()[1:]]
    assert [line["kl_coef"] for line in lines] == pytest.approx([0.1, 0.09, 0.081])


def assert_same(expected: GRPOConfig, found: GRPOConfig) -> None:
    others = metrics_of(found)
    for metric, value in metrics_of(expected).items():
        # The gaps between rollout and trainer are rounding errors themselves.
        if not metric.startswith(("rollout_gap", "mismatch/")):
            assert others[metric] == pytest.approx(value, rel=1e-4, abs=1e-5), metric


@pytest.mark.parametrize(
    "name", ["gpg", "loss gspo", "loss clip_cov that selects", "loss decoupled_ppo", "truncated", "shaping"]
)
def test_micro_batches_change_no_number(name: str, grpo_config: Callable[..., GRPOConfig], tmp_path: Path) -> None:
    whole = configured(grpo_config, name, output=tmp_path / "whole")
    cut = configured(grpo_config, name, output=tmp_path / "cut", engine={"max_tokens_per_microbatch": 40})
    train(whole)
    train(cut)
    assert_same(whole, cut)


@pytest.mark.parametrize("name", ["loss clip_cov that selects", "own", "shaping"])
def test_ranks_change_no_number(
    name: str, ray_session: None, grpo_config: Callable[..., GRPOConfig], tmp_path: Path
) -> None:
    two = Placement(
        device="cpu", pools={"main": [2]}, roles=dict.fromkeys(("actor", "reference", "reward", "rollout"), "main")
    )
    inline = configured(grpo_config, name, output=tmp_path / "inline")
    placed = configured(grpo_config, name, output=tmp_path / "placed", backend="ray", placement=two)
    train(inline)
    train(placed)
    assert_same(inline, placed)
