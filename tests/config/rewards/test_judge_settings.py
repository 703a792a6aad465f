"""Settings of judges."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from flowrl.config import JudgeConfig, RunConfig
from flowrl.config.rewards.judge_settings import ChoiceVerdict, CustomVerdict, RatingVerdict


def judge(**settings: Any) -> JudgeConfig:
    return JudgeConfig.model_validate({"model": {"path": "judge"}} | settings)


def test_the_default_verdict_depends_on_the_kind() -> None:
    assert judge().applied_verdict == RatingVerdict()
    assert judge(kind="pairwise").applied_verdict == ChoiceVerdict()
    assert judge(verdict="choice").applied_verdict == ChoiceVerdict()
    assert judge(verdict="my:parser").applied_verdict == CustomVerdict(kind="my:parser")


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"prompt": "{response}", "prompt_file": "p.txt"}, "prompt_file"),
        ({"prompt": "Rate this."}, "response"),
        ({"prompt": "{response_a} {response_b}"}, "response"),
        ({"kind": "pairwise", "prompt": "{response}"}, "response_a"),
        ({"kind": "pairwise", "prompt": "{response_a} {response_b} {response}"}, "response"),
        ({"compare_with": "answer"}, "compare_with"),
        ({"max_comparisons": 1}, "max_comparisons"),
        ({"verdict": {"kind": "rating", "pattern": "Rating"}}, "groups"),
        ({"verdict": {"kind": "rating", "pattern": "(Rating"}}, "pattern"),
        ({"verdict": {"kind": "rating", "low": 1, "high": 1}}, "high"),
        ({"verdict": {"kind": "choice", "choices": {"A": 1.0}}}, "choices"),
        ({"kind": "pairwise", "verdict": {"kind": "choice", "choices": {"A": 2.0, "B": 0.0}}}, "choices"),
        ({"vllm": {}}, "vllm"),
        ({"engine": "tensorrt"}, "tensorrt"),
    ],
)
def test_invalid_settings_are_rejected(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ValidationError, match=named):
        judge(**settings)


def test_a_prompt_file_is_read_and_checked(tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("Is {response} polite?")
    assert judge(prompt_file=file).read_prompt() == "Is {response} polite?"
    file.write_text("Is it polite?")
    with pytest.raises(ValueError, match="response"):
        judge(prompt_file=file).read_prompt()
    with pytest.raises(ValueError, match=r"missing\.txt"):
        judge(prompt_file=tmp_path / "missing.txt").read_prompt()


class JudgedRun(RunConfig):
    judge: JudgeConfig


def test_a_judge_with_vllm_needs_its_own_process() -> None:
    settings = {"output": "o", "steps": 1}
    configs = [
        JudgedRun.model_validate(settings | {"judge": {"model": {"path": "judge"}, "engine": engine}})
        for engine in ("hf", "vllm")
    ]
    assert [config.dedicated_roles() for config in configs] == [(), ("judge",)]


@pytest.mark.parametrize(
    ("settings", "count"),
    [({}, 1), ({"kind": "pairwise", "max_comparisons": 3}, 3), ({"kind": "pairwise", "compare_with": "answer"}, 2)],
)
def test_the_number_of_verdicts_per_response(settings: dict[str, Any], count: int) -> None:
    assert judge(**settings).max_judgments == count


def test_the_engine_gets_the_settings_of_the_judge() -> None:
    settings = judge(engine="vllm", vllm={"kv_cache_gb": 2.0}, max_response_tokens=9, max_num_seqs=3, temperature=0.5)
    generation = settings.generation
    assert (generation.engine, generation.max_response_tokens, generation.max_num_seqs) == ("vllm", 9, 3)
    assert generation.vllm is not None and generation.vllm.kv_cache_gb == 2.0
    assert (generation.temperature, judge().generation.temperature) == (0.5, 1.0)
