"""Settings of vLLM whose meaning depends on the devices."""

from typing import Literal

import pytest

from flowrl.config import VllmConfig


@pytest.mark.parametrize(
    ("value", "on_cpus", "on_gpus"), [(False, False, False), (True, True, True), ("auto", False, True)]
)
def test_auto_schedules_ahead_on_gpus(value: bool | Literal["auto"], on_cpus: bool, on_gpus: bool) -> None:
    settings = VllmConfig(async_scheduling=value)
    assert (settings.uses_async_scheduling(on_gpus=False), settings.uses_async_scheduling(on_gpus=True)) == (
        on_cpus,
        on_gpus,
    )


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("max_model_len", "vllm.max_model_len"),
        ("tensor_parallel_size", "tp"),
        ("data_parallel_size_local", "devices"),
        ("trust_remote_code", "code"),
        ("logits_processors", "distribution"),
        ("watermark_config", "distribution"),
        ("load_format", "weights"),
        ("hf_overrides", "config.json"),
        ("runner", "value"),
    ],
)
def test_an_argument_that_flowrl_sets_is_rejected(name: str, instead: str) -> None:
    with pytest.raises(ValueError, match=rf"{name} .*{instead}"):
        VllmConfig.model_validate({"engine_args": {name: 1}})


def test_speculative_decoding_excludes_asynchronous_scheduling() -> None:
    """vLLM 0.32 rejects both together."""
    arguments = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}
    settings = VllmConfig.model_validate({"async_scheduling": "auto", "engine_args": arguments})
    assert not settings.uses_async_scheduling(on_gpus=True)
    with pytest.raises(ValueError, match=r"async_scheduling is true.*speculative_config"):
        VllmConfig.model_validate({"async_scheduling": True, "engine_args": arguments})


@pytest.mark.parametrize("config", [{"method": "eagle"}, {"num_speculative_tokens": 2}, {"model": "m"}])
def test_drafts_of_a_model_are_rejected(config: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"speculative_config\.method"):
        VllmConfig.model_validate({"engine_args": {"speculative_config": config}})


def test_a_draft_that_is_no_mapping_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"speculative_config is ngram, .*mapping.*num_speculative_tokens"):
        VllmConfig.model_validate({"engine_args": {"speculative_config": "ngram"}})


def test_other_arguments_are_passed_on() -> None:
    arguments = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}, "block_size": 32}
    assert VllmConfig.model_validate({"engine_args": arguments}).engine_args == arguments
