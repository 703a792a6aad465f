"""Arguments of vLLM's engine are checked without importing vLLM, and reach its engine."""

import dataclasses
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from flowrl.config import VllmConfig
from flowrl.engines.rollout.vllm.engine_args import _read_annotations, find_argument_problem
from tests.engines import vllm_checks
from tests.engines.closeness import FLOAT32_RTOL
from tests.engines.rollout.vllm.test_engine import PROMPTS, open_pair

pytestmark = [pytest.mark.vllm, pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM")]


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"max_num_batched_tokens": 4096, "enable_chunked_prefill": None, "cpu_offload_gb": 2},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
        {"kv_cache_dtype": "a value that only vLLM knows"},
    ],
)
def test_arguments_of_the_right_types_are_accepted(arguments: dict[str, Any]) -> None:
    assert find_argument_problem(arguments) is None


@pytest.mark.parametrize(
    ("arguments", "facts"),
    [
        ({"max_num_batched_token": 4096}, ["max_num_batched_token", "max_num_batched_tokens"]),
        ({"max_num_batched_tokens": "many"}, ["max_num_batched_tokens", "'many'", "int"]),
        ({"block_size": True}, ["block_size", "True", "int"]),
        ({"enable_expert_parallel": 1}, ["enable_expert_parallel", "1", "bool"]),
    ],
)
def test_a_wrong_name_or_type_is_named(arguments: dict[str, Any], facts: list[str]) -> None:
    problem = find_argument_problem(arguments)
    assert problem is not None and all(fact in problem for fact in facts)


def test_reading_the_arguments_does_not_import_vllm() -> None:
    _read_annotations.cache_clear()
    before = set(sys.modules)
    assert _read_annotations()
    assert not {name for name in set(sys.modules) - before if name.partition(".")[0] == "vllm"}


@pytest.mark.slow
def test_the_names_are_those_of_vllm() -> None:
    from flowrl.engines.rollout.vllm import engine  # noqa: PLC0415 (imports vLLM)

    known = {field.name for field in dataclasses.fields(engine.EngineArgs) if not field.name.startswith("_")}
    assert _read_annotations() is not None and set(_read_annotations() or ()) == known


def test_without_vllm_nothing_is_checked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr("flowrl.engines.rollout.vllm.engine_args.find_spec", lambda name: None)
    _read_annotations.cache_clear()
    assert find_argument_problem({"unknown": 1}) is None
    _read_annotations.cache_clear()


NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}


@pytest.mark.slow
def test_greedy_responses_with_ngrams_are_the_same_in_fewer_steps(ray_session: None, tmp_path: Path) -> None:
    """Drafts are tokens of the context. After a weight update, they are verified with the new weights.

    vLLM 0.32 samples wrong tokens with drafts on CPUs, so runs on CPUs are rejected.
    """
    settings = VllmConfig(engine_args={"speculative_config": NGRAM, "max_num_batched_tokens": 640})
    num_steps = num_tokens = 0
    with open_pair(tmp_path / "ngram", "Qwen2, tied", (), settings) as pair:
        assert pair.group.run(vllm_checks.engine_arguments) == [(640, "ngram")]
        for seed in range(3):
            pair.sync(seed)
            responses = pair.generate(PROMPTS, greedy=True)
            assert pair.relative_error(PROMPTS, responses) < FLOAT32_RTOL
            assert {version for row in responses["versions"] for version in row} == {pair.version}
            for prompt, tokens in zip(PROMPTS, responses["tokens"], strict=True):
                assert pair.most_likely(prompt, tokens) == tokens
                ((again, steps),) = pair.group.run(vllm_checks.count_steps, prompt)
                assert again == tokens
                num_steps, num_tokens = num_steps + steps, num_tokens + len(tokens)
    assert num_steps < num_tokens
