"""Settings of schedules, and the correction that follows from them."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from flowrl.config import (
    AdvantageConfig,
    AnySchedule,
    AsyncSchedule,
    ConfigError,
    CorrectionConfig,
    load,
    parse,
    to_yaml,
)
from flowrl.config.schedule import SyncSchedule
from recipes.grpo.config import GRPOConfig
from tests.configs import grpo_settings

GRPO = grpo_settings()
TRUNCATED = CorrectionConfig.select("truncated")
ASYNC = {"schedule": {"kind": "async"}}


def test_the_default_schedule_is_sync():
    assert GRPOConfig.model_validate(GRPO).schedule == SyncSchedule()


def test_async_has_its_defaults():
    schedule = parse(AnySchedule, {"kind": "async"})
    assert schedule == AsyncSchedule(
        max_staleness=1, max_concurrent=None, overprovision=0, interrupt=True, concurrent_evaluation="auto"
    )


@pytest.mark.parametrize("value", [True, False, "auto"])
def test_evaluations_run_alongside_training_always_never_or_by_idle_time(value: bool | str):
    schedule = parse(AnySchedule, ASYNC["schedule"] | {"concurrent_evaluation": value})
    assert isinstance(schedule, AsyncSchedule) and schedule.concurrent_evaluation == value


@pytest.mark.parametrize(
    ("settings", "staleness", "is_streaming"),
    [
        ({}, 0, False),
        ({"kind": "one_step_off"}, 1, False),
        ({"kind": "async"}, 1, True),
        ({"kind": "async", "max_staleness": 4}, 4, True),
        ({"kind": "async", "max_staleness": 0}, 0, False),
    ],
)
def test_a_schedule_bounds_staleness(settings: dict[str, Any], staleness: int, is_streaming: bool):
    schedule = parse(AnySchedule, settings)
    assert (schedule.staleness, schedule.is_streaming) == (staleness, is_streaming)


@pytest.mark.parametrize(
    ("settings", "setting"),
    [
        ({"kind": "sync", "max_staleness": 1}, "max_staleness"),
        ({"kind": "one_step_off", "interrupt": True}, "interrupt"),
        ({"kind": "async", "max_staleness": 0, "overprovision": 2}, r"overprovision .*\b2\b"),
        ({"kind": "async", "max_staleness": -1}, "max_staleness"),
        ({"kind": "async", "max_concurrent": 0}, "max_concurrent"),
        ({"kind": "detached"}, "'detached'"),
    ],
)
def test_an_invalid_setting_is_rejected(settings: dict[str, Any], setting: str):
    with pytest.raises(ValidationError, match=setting):
        parse(AnySchedule, settings)


def test_overprovisioning_by_more_than_a_step_is_rejected():
    maximum = GRPO | {"schedule": {"kind": "async", "overprovision": 4}}
    assert GRPOConfig.model_validate(maximum).schedule == AsyncSchedule(overprovision=4)
    with pytest.raises(ValidationError, match=r"schedule\.overprovision .*\b5\b.* 4\b"):
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
def test_rollouts_of_a_different_policy_are_corrected(settings: dict[str, Any]):
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
def test_other_rollouts_are_not_corrected(settings: dict[str, Any]):
    assert GRPOConfig.model_validate(GRPO | settings).algorithm.correction is None


def test_an_explicit_correction_is_kept():
    masked = {"algorithm": {"estimator": "grpo", "correction": {"kind": "masked"}}}
    assert GRPOConfig.model_validate(GRPO | ASYNC | masked).algorithm.correction == CorrectionConfig.select("masked")


def test_unresolved_auto_applies_no_correction():
    config = AdvantageConfig.select("grpo")
    assert (config.correction, config.applied_correction) == ("auto", None)


@pytest.mark.parametrize("settings", [{}, ASYNC, {"schedule": {"kind": "one_step_off"}}])
def test_a_resolved_config_is_read_back(settings: dict[str, Any], tmp_path: Path):
    config = GRPOConfig.model_validate(GRPO | settings | {"recipe": "recipes.grpo.config:GRPOConfig"})
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    read = load(tmp_path / "config.yaml", [], GRPOConfig)
    assert (read, to_yaml(read)) == (config, to_yaml(config))


@pytest.mark.parametrize(
    ("override", "pattern"),
    [
        ("algorithm.correction={kind: masked, level: word}", r"algorithm\.correction\.level .*'word'"),
        ("algorithm.correction={kind: truncate}", r"algorithm\.correction\.kind .*'truncate'.*truncated"),
        ("algorithm.correction=automatic", r"algorithm\.correction: .*'automatic'"),
        ("schedule={kind: async, max_stale: 2}", r"schedule\.max_stale\b.*schedule\.max_staleness"),
    ],
)
def test_an_invalid_value_is_named_with_its_key(override: str, pattern: str, tmp_path: Path):
    config = GRPOConfig.model_validate(GRPO | {"recipe": "recipes.grpo.config:GRPOConfig"})
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    with pytest.raises(ConfigError, match=pattern):
        load(tmp_path / "config.yaml", [override], GRPOConfig)
