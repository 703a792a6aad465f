"""Shaping of scores in YAML: read with its defaults, and what cannot mean anything refused in one sentence."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from flowrl.config import AdvantageConfig, ConfigError, KlControlConfig, ShapingConfig, load, to_yaml
from recipes.grpo.config import GRPOConfig
from tests.configs import grpo_settings

YAML = """
estimator: rloo
shaping:
  - {kind: clip_rewards, low: -1, high: 1}
  - {kind: overlong_penalty, max_length: 512, buffer: 64}
  - {kind: length_penalty, correct_from: 1.0, coef: 0.5}
  - {kind: normalize_rewards}
  - {kind: "my.rewards:f", options: {by: 2}}
"""


@pytest.fixture
def read(tmp_path: Path) -> Callable[[str], AdvantageConfig]:
    def from_text(text: str) -> AdvantageConfig:
        (tmp_path / "c.yaml").write_text(text)
        return load(tmp_path / "c.yaml", [], AdvantageConfig)

    return from_text


def test_a_list_of_shapings_is_read_in_order_with_defaults(read: Callable[[str], AdvantageConfig]) -> None:
    shaping = read(YAML).shaping
    assert [(one.kind, one.arguments()) for one in shaping] == [
        ("clip_rewards", {"low": -1, "high": 1}),
        ("overlong_penalty", {"max_length": 512, "buffer": 64, "coef": 1.0}),
        ("length_penalty", {"correct_from": 1.0, "coef": 0.5}),
        ("normalize_rewards", {"shift_mean": False}),
        ("my.rewards:f", {"by": 2}),
    ]


def test_a_resolved_list_is_read_back(read: Callable[[str], AdvantageConfig]) -> None:
    assert read(to_yaml(read(YAML))) == read(YAML)


def test_a_bound_that_is_not_given_is_left_to_the_function() -> None:
    assert ShapingConfig(kind="clip_rewards", high=1.0).arguments() == {"high": 1.0}


def test_a_misspelt_setting_of_an_entry_is_named_with_its_place(read: Callable[[str], AdvantageConfig]) -> None:
    with pytest.raises(ConfigError, match=r"shaping\.0\.lo is not a setting; did you mean shaping\.0\.low"):
        read("estimator: rloo\nshaping:\n  - {kind: clip_rewards, lo: -1}\n")


@pytest.mark.parametrize(
    ("settings", "way_out"),
    [
        (
            {"kind": "clip_reward"},
            r"'clip_reward' is no reward shaping; did you mean clip_rewards\? There are",
        ),
        (
            {"kind": "clip_rewards", "high": 1.0, "buffer": 4},
            "buffer belongs to kind overlong_penalty and",
        ),
        ({"kind": "clip_rewards"}, "neither low nor high"),
        ({"kind": "clip_rewards", "low": 1.0, "high": 1.0}, "low is 1, not below high, 1"),
        ({"kind": "overlong_penalty", "max_length": 8, "buffer": 9}, "buffer is 9, above max_length, 8"),
        ({"kind": "overlong_penalty", "max_length": 8}, "buffer is missing: kind overlong_penalty needs it"),
        ({"kind": "length_penalty", "coef": 0.5}, "correct_from is missing"),
        ({"kind": "normalize_rewards", "options": {"a": 1}}, "options belongs to kind module:function"),
    ],
)
def test_a_shaping_that_means_nothing_is_refused(settings: dict[str, Any], way_out: str) -> None:
    with pytest.raises(ValidationError, match=way_out):
        ShapingConfig.model_validate(settings)


CLIP = {"kind": "clip_rewards", "high": 1.0}


@pytest.mark.parametrize(
    ("settings", "way_out"),
    [
        ({"estimator": "remax"}, "not the greedy_scores that remax takes off them"),
        ({"estimator": "gdpo", "reward_columns": ["scores", "style"]}, "reward_columns is scores, style: remove"),
        ({"estimator": "gdpo", "reward_columns": ["style"]}, "the column scores alone"),
    ],
)
def test_an_estimator_that_shaping_does_not_reach_is_refused(settings: dict[str, Any], way_out: str) -> None:
    with pytest.raises(ValidationError, match=way_out):
        AdvantageConfig.model_validate(settings | {"shaping": [CLIP]})


STEERED = {"estimator": "rloo", "kl_coef": 0.1, "kl_control": {"kind": "adaptive", "target": 0.02}}


def test_a_kl_control_is_read_with_its_defaults_and_back(read: Callable[[str], AdvantageConfig]) -> None:
    config = read("{estimator: rloo, kl_coef: 0.1, kl_control: {kind: adaptive, target: 0.02}}")
    assert config.kl_control is not None
    assert config.kl_control.arguments() == {"target": 0.02, "horizon": 10_000.0}
    assert read(to_yaml(config)) == config


def test_the_coefficient_is_fixed_where_there_is_one_and_nothing_is_said() -> None:
    assert AdvantageConfig(estimator="rloo").kl_control == KlControlConfig(kind="fixed")
    assert AdvantageConfig(estimator="grpo").kl_control is None


@pytest.mark.parametrize(
    ("settings", "way_out"),
    [
        ({"kl_control": {"kind": "adaptve"}}, "'adaptve' is no KL control; did you mean adaptive"),
        ({"kl_control": {"kind": "adaptive"}}, "target is missing: kind adaptive needs it"),
        ({"kl_control": {"kind": "fixed", "target": 0.1}}, "target belongs to kind adaptive"),
        ({"kl_coef": 0.0}, "kl_coef is 0, so there is no KL penalty for kl_control adaptive"),
        ({"estimator": "grpo", "kl_coef": None}, "kl_control belongs to estimator gae, rloo"),
    ],
)
def test_a_control_of_nothing_is_refused(settings: dict[str, Any], way_out: str) -> None:
    with pytest.raises(ValidationError, match=way_out):
        AdvantageConfig.model_validate(STEERED | settings)


def run_with(shaping: dict[str, Any], **settings: Any) -> GRPOConfig:
    algorithm = {"estimator": "rloo", "shaping": [shaping]}
    return GRPOConfig.model_validate(grpo_settings(algorithm=algorithm) | settings)


def test_a_length_penalty_without_groups_is_refused() -> None:
    penalty = {"kind": "length_penalty", "correct_from": 1.0, "coef": 0.5}
    algorithm = {"estimator": "reinforce_plus_plus", "shaping": [penalty]}
    with pytest.raises(ValidationError, match=r"samples_per_prompt is 1, and .* length_penalty compares"):
        run_with(penalty, samples_per_prompt=1, algorithm=algorithm)
    assert run_with(penalty).algorithm.shaping[0].coef == 0.5


def test_a_punishment_that_no_response_is_long_enough_for_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"begins above max_length - buffer = 8 tokens, but .* is 8: no"):
        run_with({"kind": "overlong_penalty", "max_length": 10, "buffer": 2})
    assert run_with({"kind": "overlong_penalty", "max_length": 10, "buffer": 3}).algorithm.shaping[0].coef == 1.0


def test_a_horizon_within_which_one_step_could_end_the_penalty_is_refused() -> None:
    control = {"kind": "adaptive", "target": 0.02, "horizon": 1.6}
    with pytest.raises(ValidationError, match=r"horizon is 1\.6, at most a fifth of batch_size, 8.* set it to 8"):
        run_with(CLIP, algorithm=STEERED | {"kl_control": control})
    run_with(CLIP, algorithm=STEERED | {"kl_control": control | {"horizon": 1.7}})


def test_a_best_of_more_samples_than_there_are_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"algorithm\.k is 3, more than samples_per_prompt, 2"):
        run_with(CLIP, algorithm={"estimator": "pass_at_k", "k": 3})
    run_with(CLIP, algorithm={"estimator": "pass_at_k", "k": 2})
