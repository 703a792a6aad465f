"""Functions and packages that a config names are checked."""

import importlib.util

import pytest

from flowrl.config import ConfigError
from flowrl.run.checks.config_checks import check_engine_args, check_packages
from tests.errors import rejects
from tests.run.checks.test_placement_checks import on, quantized_run, run_with, run_with_vllm, scripted


def test_a_package_of_an_engine_that_is_not_installed_is_named_with_its_command() -> None:
    run = quantized_run("int8").model_copy(update={"rollout": scripted("UnknownMemoryEngine")})
    with rejects("rollout.engine", "UnknownMemoryEngine", "scripted_lib", "make", "install", error=ConfigError):
        check_packages(run)


@pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None or importlib.util.find_spec("torchao") is not None,
    reason="with torchao int8 is supported",
)
def test_int8_in_vllm_without_torchao_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.quantization .*int8.* torchao"):
        check_packages(quantized_run("int8"))


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="the names are those of the installed vLLM")
def test_an_argument_that_vllm_does_not_have_is_named_with_its_setting() -> None:
    check_engine_args(run_with_vllm(engine_args={"block_size": 32}))
    with rejects("rollout.vllm.engine_args", "block_sise", "block_size", error=ConfigError):
        check_engine_args(run_with_vllm(engine_args={"block_sise": 32}))


@pytest.mark.skipif(importlib.util.find_spec("torchao") is not None, reason="with torchao 8-bit moments are supported")
def test_moments_of_8_bits_without_torchao_are_rejected() -> None:
    run = run_with(on(1))
    optimizer = run.actor.optimizer.model_copy(update={"kind": "adamw_8bit"})
    run = run.model_copy(update={"actor": run.actor.model_copy(update={"optimizer": optimizer})})
    with rejects("actor.optimizer.kind", "adamw_8bit", "torchao", error=ConfigError):
        check_packages(run)
