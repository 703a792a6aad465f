"""What may be set of a schedule, and which correction follows from it."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from flowrl.config import AdvantageConfig, ConfigError, CorrectionConfig, ScheduleConfig, load, to_yaml
from recipes.grpo.config import GRPOConfig
from tests.configs import grpo_settings

GRPO = grpo_settings()
TRUNCATED = CorrectionConfig(kind="truncated")
ASYNC = {"schedule": {"kind": "async"}}


def test_a_schedule_is_synchronous_unless_it_is_stated():
    assert GRPOConfig.model_validate(GRPO).schedule == ScheduleConfig(kind="sync")


def test_async_shows_what_is_in_force():
    found = ScheduleConfig.model_validate({"kind": "async"})
    assert found.settings() == {"max_staleness": 1, "max_concurrent": None, "overprovision": 0, "interrupt": True}


@pytest.mark.parametrize(
    ("settings", "staleness", "streams"),
    [
        ({}, 0, False),
        ({"kind": "one_step_off"}, 1, False),
        ({"kind": "async"}, 1, True),
        ({"kind": "async", "max_staleness": 4}, 4, True),
        ({"kind": "async", "max_staleness": 0}, 0, False),
    ],
)
def test_a_schedule_bounds_staleness(settings: dict[str, Any], staleness: int, streams: bool):
    found = ScheduleConfig.model_validate(settings)
    assert (found.staleness, found.streams) == (staleness, streams)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"kind": "sync", "max_staleness": 1},
            "max_staleness belongs to kind async and does nothing for sync: remove it, or set kind: async",
        ),
        ({"kind": "one_step_off", "interrupt": True}, "interrupt belongs to kind async and does nothing for one_step"),
        (
            {"kind": "async", "max_staleness": 0, "overprovision": 2},
            "set overprovision: 0, or max_staleness: 1 or more",
        ),
        ({"kind": "async", "max_staleness": -1}, "greater than or equal to 0"),
        ({"kind": "async", "max_concurrent": 0}, "greater than 0"),
        ({"kind": "detached"}, "'sync', 'one_step_off' or 'async'"),
    ],
)
def test_a_setting_that_means_nothing_is_refused(settings: dict[str, Any], sentence: str):
    with pytest.raises(ValidationError, match=sentence):
        ScheduleConfig.model_validate(settings)


def test_redundancy_of_more_than_a_step_is_refused():
    most = GRPO | {"schedule": {"kind": "async", "overprovision": 4}}
    assert GRPOConfig.model_validate(most).schedule.overprovision == 4
    sentence = r"schedule\.overprovision is 5, more than the 4 prompts of a step .*: set at most 4"
    with pytest.raises(ValidationError, match=sentence):
        GRPOConfig.model_validate(GRPO | {"schedule": {"kind": "async", "overprovision": 5}})


@pytest.mark.parametrize(
    "settings",
    [
        {"schedule": {"kind": "one_step_off"}},
        ASYNC,
        {"rollout": {"max_response_tokens": 8, "quantization": "int8"}},
        {"rollout": {"max_response_tokens": 8, "engine": "vllm"}},
    ],
)
def test_rollouts_of_another_policy_are_corrected(settings: dict[str, Any]):
    assert GRPOConfig.model_validate(GRPO | settings).algorithm.correction == TRUNCATED


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"schedule": {"kind": "async", "max_staleness": 0}},
        ASYNC | {"actor": GRPO["actor"] | {"loss": "decoupled_ppo"}},
        ASYNC | {"algorithm": {"estimator": "grpo", "correction": None}},
    ],
)
def test_others_are_not(settings: dict[str, Any]):
    assert GRPOConfig.model_validate(GRPO | settings).algorithm.correction is None


def test_what_is_stated_stays():
    masked = {"algorithm": {"estimator": "grpo", "correction": {"kind": "masked"}}}
    assert GRPOConfig.model_validate(GRPO | ASYNC | masked).algorithm.correction == CorrectionConfig(kind="masked")


def test_without_a_run_auto_corrects_nothing():
    config = AdvantageConfig(estimator="grpo")
    assert (config.correction, config.applied_correction) == ("auto", None)


@pytest.mark.parametrize("settings", [{}, ASYNC, {"schedule": {"kind": "one_step_off"}}])
def test_a_resolved_config_is_read_back(settings: dict[str, Any], tmp_path: Path):
    config = GRPOConfig.model_validate(GRPO | settings | {"recipe": "recipes.grpo.config:GRPOConfig"})
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    found = load(tmp_path / "config.yaml", [], GRPOConfig)
    assert (found, to_yaml(found)) == (config, to_yaml(config))


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("algorithm.correction={kind: masked, level: word}", "algorithm.correction.level is 'word'"),
        ("algorithm.correction={kind: truncate}", "'truncate' is no correction; did you mean truncated"),
        ("algorithm.correction=automatic", "algorithm.correction is 'automatic', but"),
        ("schedule={kind: async, max_stale: 2}", "did you mean schedule.max_staleness"),
    ],
)
def test_a_wrong_word_is_named_with_its_key(override: str, sentence: str, tmp_path: Path):
    config = GRPOConfig.model_validate(GRPO | {"recipe": "recipes.grpo.config:GRPOConfig"})
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    with pytest.raises(ConfigError, match=sentence):
        load(tmp_path / "config.yaml", [override], GRPOConfig)
