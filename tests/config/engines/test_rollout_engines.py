"""Capabilities of the included engines and of a user's engine, and the settings that they reject."""

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from flowrl.config import EngineCapabilities, RolloutConfig
from flowrl.config.engines.rollout_engines import ENGINES, get_capabilities
from flowrl.engines.rollout.base import ENGINE_CLASSES
from recipes.grpo.config import GRPOConfig
from tests.configs import grpo_settings
from tests.engines.rollout.scripted_engine import ScriptedEngine
from tests.errors import rejects

SCRIPTED = "tests.engines.rollout.scripted_engine:ScriptedEngine"
BATCH = "tests.engines.rollout.scripted_engine:BatchEngine"
OWN = "tests.config.engines.test_rollout_engines"


class ColdEngine(ScriptedEngine):
    """Returns log-probabilities that ignore the temperature."""

    capabilities = replace(ScriptedEngine.capabilities, logprobs_at_temperature=False)


class Plain:
    """Has no capabilities."""


def parts(*facts: object) -> list[str]:
    """Returns facts as single tokens: module and class of an engine are two."""
    return [part for fact in facts for part in str(fact).split(":")]


def test_every_included_engine_has_a_class() -> None:
    assert ENGINES.keys() == ENGINE_CLASSES.keys()


def test_the_capabilities_of_a_users_engine_are_those_of_its_class() -> None:
    assert get_capabilities(SCRIPTED) is ScriptedEngine.capabilities
    assert RolloutConfig(max_response_tokens=1, engine=SCRIPTED).capabilities is ScriptedEngine.capabilities


def test_capabilities_that_contradict_each_other_are_rejected() -> None:
    with rejects("own_process", "shares_weights", error=ValueError):
        EngineCapabilities(own_process=True, shares_weights=True)


def test_reading_capabilities_of_included_engines_imports_no_engine() -> None:
    code = (
        "import sys; from flowrl.config import RolloutConfig\n"
        "for name in ('hf', 'vllm'): RolloutConfig(max_response_tokens=1, engine=name).capabilities\n"
        "print([name for name in ('torch', 'vllm', 'ray', 'flowrl.engines') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("rollout", "facts"),
    [
        ({"engine": "vlm"}, ("rollout.engine", "vlm", "hf", "vllm", "module:Class")),
        ({"engine": "tests.nowhere:Engine"}, ("rollout.engine", "tests.nowhere:Engine")),
        ({"engine": "tests.nowhere.Engine:"}, ("rollout.engine", "module:name")),
        ({"engine": f"{OWN}:Plain"}, ("rollout.engine", f"{OWN}:Plain", "capabilities")),
        ({"engine": "json:dumps"}, ("rollout.engine", "json:dumps", "capabilities")),
        ({"engine": SCRIPTED, "options": {"depth": 1}}, ("options", "depth", SCRIPTED, "folder")),
        ({"engine": "hf", "options": {"folder": "x"}}, ("options", "folder", "hf")),
        ({"engine": SCRIPTED, "vllm": {}}, ("vllm", SCRIPTED)),
        ({"engine": SCRIPTED, "quantization": "int8"}, ("quantization", "int8", SCRIPTED, "hf", "vllm")),
        ({"engine": SCRIPTED, "transfer": {"via": "nccl"}}, ("transfer.via", "nccl", SCRIPTED, "vllm")),
        ({"engine": f"{OWN}:ColdEngine", "temperature": 0.5}, ("temperature", 0.5, f"{OWN}:ColdEngine", "hf")),
    ],
)
def test_settings_that_an_engine_does_not_support_are_rejected(
    rollout: dict[str, Any], facts: tuple[object, ...]
) -> None:
    with rejects(*parts(*facts), error=ValueError):
        GRPOConfig.model_validate(grpo_settings(rollout={"max_response_tokens": 8} | rollout))


def test_a_schedule_that_streams_requires_an_engine_that_streams() -> None:
    rollout = {"max_response_tokens": 8, "engine": BATCH}
    for schedule in ({"kind": "one_step_off"}, {"kind": "async", "max_staleness": 0}):
        assert GRPOConfig.model_validate(grpo_settings(rollout=rollout, schedule=schedule)).rollout.engine == BATCH
    with rejects("schedule.kind", "async", "rollout.engine", *parts(BATCH), "one_step_off", error=ValueError):
        GRPOConfig.model_validate(grpo_settings(rollout=rollout, schedule={"kind": "async", "max_staleness": 1}))


def test_weights_of_a_dtype_that_an_engine_lacks_are_rejected() -> None:
    actor = {"model": {"path": "m", "dtype": "float64"}, "optimizer": {"lr": 1e-4}}
    settings = grpo_settings(rollout={"max_response_tokens": 8, "engine": SCRIPTED}, actor=actor)
    with rejects("rollout.engine", *parts(SCRIPTED), "actor.model.dtype", "float64", "float32", error=ValueError):
        GRPOConfig.model_validate(settings)


def test_a_rollout_that_differs_from_the_trainer_is_corrected_by_default() -> None:
    corrections = [
        GRPOConfig.model_validate(
            grpo_settings(rollout={"max_response_tokens": 8, "engine": engine})
        ).algorithm.applied_correction
        for engine in ("hf", "vllm", SCRIPTED)
    ]
    assert [correction is not None for correction in corrections] == [False, True, True]


def test_a_run_in_one_process_keeps_an_engine_that_needs_no_process_of_its_own() -> None:
    engines = ("hf", "vllm", SCRIPTED, SCRIPTED.replace("Scripted", "Dedicated"))
    configs = [RolloutConfig(max_response_tokens=1, engine=engine).in_one_process() for engine in engines]
    assert [config.engine for config in configs] == ["hf", "hf", SCRIPTED, "hf"]


def test_an_unknown_name_is_rejected_with_the_known_names() -> None:
    with rejects(*parts("vlm", "hf", "vllm", "module:Class"), error=ValueError):
        get_capabilities("vlm")
