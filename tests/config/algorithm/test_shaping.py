"""Reward shaping and KL control: their settings in YAML, and combinations that are rejected."""

from collections.abc import Callable
from pathlib import Path
from textwrap import indent
from typing import Any

import pytest
from pydantic import ValidationError

from flowrl.config import (
    AdvantageConfig,
    AnyAdvantage,
    AnyShaping,
    Config,
    ConfigError,
    KlControlConfig,
    ShapingConfig,
    load,
    parse,
    to_yaml,
)
from flowrl.config.algorithm.advantage import PenalizedAdvantageConfig
from recipes.grpo.config import GRPOConfig
from tests.configs import grpo_settings

YAML = """\
estimator: rloo
shaping:
  - {kind: clip_rewards, low: -1, high: 1}
  - {kind: overlong_penalty, max_length: 512, buffer: 64}
  - {kind: length_penalty, correct_from: 1.0, coef: 0.5}
  - {kind: normalize_rewards}
  - {kind: "my.rewards:f", options: {by: 2}}
"""


class Run(Config):
    algorithm: AnyAdvantage


@pytest.fixture
def read(tmp_path: Path) -> Callable[[str], AdvantageConfig]:
    def from_text(text: str) -> AdvantageConfig:
        (tmp_path / "c.yaml").write_text(
            f"algorithm: {text}" if text[0] == "{" else f"algorithm:\n{indent(text, '  ')}"
        )
        return load(tmp_path / "c.yaml", [], Run).algorithm

    return from_text


def test_a_list_of_shapings_is_read_in_order_with_defaults(read: Callable[[str], AdvantageConfig]) -> None:
    shaping = read(YAML).shaping
    assert [(entry.kind, entry.arguments()) for entry in shaping] == [
        ("clip_rewards", {"low": -1, "high": 1}),
        ("overlong_penalty", {"max_length": 512, "buffer": 64, "coef": 1.0}),
        ("length_penalty", {"correct_from": 1.0, "coef": 0.5}),
        ("normalize_rewards", {"shift_mean": False}),
        ("my.rewards:f", {"by": 2}),
    ]


def test_a_resolved_list_is_read_back(read: Callable[[str], AdvantageConfig]) -> None:
    assert read(to_yaml(read(YAML))) == read(YAML)


def test_a_null_bound_keeps_the_default_of_the_function() -> None:
    assert ShapingConfig.select("clip_rewards", high=1.0).arguments() == {"high": 1.0}


def test_a_misspelled_setting_of_an_entry_is_named_with_its_location(read: Callable[[str], AdvantageConfig]) -> None:
    with pytest.raises(ConfigError, match=r"c.yaml:4: .*algorithm\.shaping\.0\.lo\b.*algorithm\.shaping\.0\.low\b"):
        read("estimator: rloo\nshaping:\n  - {kind: clip_rewards, lo: -1}\n")


@pytest.mark.parametrize(
    "settings",
    [
        {"kind": "clip_reward"},
        {"kind": "clip_rewards", "high": 1.0, "buffer": 4},
        {"kind": "clip_rewards"},
        {"kind": "clip_rewards", "low": 1.0, "high": 1.0},
        {"kind": "overlong_penalty", "max_length": 8, "buffer": 9},
        {"kind": "overlong_penalty", "max_length": 8},
        {"kind": "length_penalty", "coef": 0.5},
        {"kind": "normalize_rewards", "options": {"a": 1}},
    ],
)
def test_an_invalid_shaping_is_rejected(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        parse(AnyShaping, settings)


CLIP = {"kind": "clip_rewards", "high": 1.0}


@pytest.mark.parametrize(
    ("settings", "setting"),
    [
        ({"estimator": "remax"}, "greedy_scores"),
        ({"estimator": "gdpo", "reward_columns": ["scores", "style"]}, r"reward_columns .*scores, style"),
        ({"estimator": "gdpo", "reward_columns": ["style"]}, r"reward_columns .*style"),
    ],
)
def test_shaping_is_rejected_for_an_estimator_that_reads_other_rewards(settings: dict[str, Any], setting: str) -> None:
    with pytest.raises(ValidationError, match=setting):
        parse(AnyAdvantage, settings | {"shaping": [CLIP]})


ADAPTIVE = {"estimator": "rloo", "kl_coef": 0.1, "kl_control": {"kind": "adaptive", "target": 0.02}}


def test_a_kl_control_is_read_with_its_defaults_and_back(read: Callable[[str], AdvantageConfig]) -> None:
    config = read("{estimator: rloo, kl_coef: 0.1, kl_control: {kind: adaptive, target: 0.02}}")
    assert isinstance(config, PenalizedAdvantageConfig)
    assert config.kl_control == KlControlConfig.select("adaptive", target=0.02, horizon=10_000.0)
    assert read(to_yaml(config)) == config


def test_the_coefficient_is_fixed_by_default() -> None:
    penalized = AdvantageConfig.select("rloo", kl_coef=0.1).kl_penalty
    assert penalized is not None and penalized.kl_control == KlControlConfig.select("fixed")
    assert [AdvantageConfig.select(name).kl_penalty for name in ("rloo", "grpo")] == [None, None]


@pytest.mark.parametrize(
    "settings",
    [
        {"kl_control": {"kind": "adaptve"}},
        {"kl_control": {"kind": "adaptive"}},
        {"kl_control": {"kind": "fixed", "target": 0.1}},
        {"kl_coef": 0.0},
        {"estimator": "grpo"},
    ],
)
def test_an_invalid_kl_control_is_rejected(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="kl_control"):
        parse(AnyAdvantage, ADAPTIVE | settings)


def run_with(shaping: dict[str, Any], **settings: Any) -> GRPOConfig:
    algorithm = {"estimator": "rloo", "shaping": [shaping]}
    return GRPOConfig.model_validate(grpo_settings(algorithm=algorithm) | settings)


def test_a_length_penalty_without_groups_is_rejected() -> None:
    penalty = {"kind": "length_penalty", "correct_from": 1.0, "coef": 0.5}
    algorithm = {"estimator": "reinforce_plus_plus", "shaping": [penalty]}
    with pytest.raises(ValidationError, match=r"samples_per_prompt .*\b1\b.*length_penalty"):
        run_with(penalty, samples_per_prompt=1, algorithm=algorithm)
    assert run_with(penalty).algorithm.shaping == (ShapingConfig.select("length_penalty", correct_from=1.0, coef=0.5),)


def test_an_overlong_penalty_above_the_maximum_length_is_rejected() -> None:
    with pytest.raises(ValidationError, match=r"max_length .*buffer .*\b8 .*rollout\.max_response_tokens .*\b8\b"):
        run_with({"kind": "overlong_penalty", "max_length": 10, "buffer": 2})
    shaping = run_with({"kind": "overlong_penalty", "max_length": 10, "buffer": 3}).algorithm.shaping
    assert shaping == (ShapingConfig.select("overlong_penalty", max_length=10, buffer=3, coef=1.0),)


def test_a_short_kl_horizon_is_rejected() -> None:
    control = {"kind": "adaptive", "target": 0.02, "horizon": 1.6}
    with pytest.raises(ValidationError, match=r"kl_control\.horizon .*1\.6.* batch_size.*\b8\b"):
        run_with(CLIP, algorithm=ADAPTIVE | {"kl_control": control})
    run_with(CLIP, algorithm=ADAPTIVE | {"kl_control": control | {"horizon": 1.7}})


def test_a_k_above_samples_per_prompt_is_rejected() -> None:
    with pytest.raises(ValidationError, match=r"algorithm\.k .*\b3\b.* samples_per_prompt"):
        run_with(CLIP, algorithm={"estimator": "pass_at_k", "k": 3})
    run_with(CLIP, algorithm={"estimator": "pass_at_k", "k": 2})
