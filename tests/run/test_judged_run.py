"""Checks and the memory estimate of a run with a judge, before it starts."""

import json
from pathlib import Path
from typing import Any

import pytest

from flowrl.checkpoints.inputs import input_checksums
from flowrl.config import ConfigError, JudgeConfig, UserError
from flowrl.memory.memory_estimate import estimate_memory, explain_unknown_sizes, read_sizes
from flowrl.run.checks.config_checks import check_functions, check_processes
from flowrl.run.checks.file_checks import find_path_problems
from recipes.grpo.config import GRPOConfig
from tests.configs import grpo_settings, plan_run
from tests.workers.judges import save_judge


class JudgedConfig(GRPOConfig):
    judge: JudgeConfig


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, which is the policy and the judge."""
    return save_judge(tmp_path_factory.mktemp("judged") / "model").path


def config_of(folder: Path, **judge: Any) -> JudgedConfig:
    placement = {"device": "cpu", "pools": {"main": [1], "judges": [1]}, "roles": {}}
    placement["roles"] = dict.fromkeys(("actor", "rollout", "reference", "reward"), "main") | {"judge": "judges"}
    settings = grpo_settings(model=folder, placement=placement, judge={"model": {"path": folder}} | judge)
    return JudgedConfig.model_validate(settings)


@pytest.mark.parametrize("engine", ["hf", "vllm"])
def test_the_memory_plan_counts_a_judge(folder: Path, engine: str) -> None:
    config = config_of(folder, engine=engine)
    devices = estimate_memory(config, plan_run(config, [2]), read_sizes(config))
    (memory,) = [device.roles["judge"] for device in devices if "judge" in device.roles]
    assert memory is not None
    num_parameters = json.loads((folder / "model.safetensors").read_bytes()[8:].split(b"}}")[0].decode() + "}}")
    sizes = [entry["data_offsets"] for name, entry in num_parameters.items() if name != "__metadata__"]
    assert memory.weights == sum(end - start for start, end in sizes)
    assert [call.name for call in memory.calls] == ["generate"]
    if engine == "vllm":
        assert memory.kv_cache == 1_000_000_000
    else:
        # Responses of 8 tokens and prompts of 8: about 500 characters of the judge's prompt, and 512 of its verdict.
        assert memory.calls[0].kv_cache > 8 * 512 * 2 * 128 * 4


def test_the_memory_plan_counts_a_judge_in_the_dtype_of_its_engine(folder: Path) -> None:
    weights = {}
    for dtype in (None, "bfloat16"):
        config = config_of(folder, engine="vllm", vllm={"dtype": dtype})
        (memory,) = [
            memory
            for device in estimate_memory(config, plan_run(config, [2]), read_sizes(config))
            if (memory := device.roles.get("judge")) is not None
        ]
        weights[dtype] = memory.weights
    assert weights[None] == 2 * weights["bfloat16"] > 0


def test_a_judge_of_unknown_size_is_explained(folder: Path) -> None:
    reasons = explain_unknown_sizes(config_of(folder, model={"path": "nowhere"}))
    assert any("judge.model.path" in reason for reason in reasons)


@pytest.mark.parametrize(
    ("judge", "named"),
    [
        ({"prompt_file": "missing.txt"}, "judge.prompt_file"),
        ({"verdict": "missing:parser"}, "judge.verdict"),
        ({"engine": "tests.engines.rollout.scripted_engine:IncompleteEngine"}, "IncompleteEngine"),
    ],
)
def test_what_a_judge_cannot_load_ends_the_run_before_it_starts(
    folder: Path, judge: dict[str, Any], named: str
) -> None:
    config = config_of(folder, **judge).model_copy(update={"reward": config_of(folder).reward})
    assert config.reward is not None
    object.__setattr__(
        config, "reward", config.reward.model_copy(update={"function": "flowrl.rewards.final_number:score"})
    )
    with pytest.raises(UserError, match=named):
        check_functions(config)


def test_a_vllm_judge_cannot_run_inline(folder: Path) -> None:
    config = config_of(folder, engine="vllm").model_copy(update={"backend": "inline"})
    with pytest.raises(ConfigError, match=r"judge\.engine"):
        check_processes(config)


def test_a_judge_with_hf_cannot_be_sharded(folder: Path) -> None:
    config = config_of(folder)
    placement = config.placement.model_copy(
        update={
            "pools": {"main": (1,), "judges": (2,)},
            "roles": {**config.placement.roles, "judge": {"pool": "judges", "tp": 2}},
        }
    )
    with pytest.raises(ConfigError, match=r"judge\.engine"):
        plan_run(config.model_copy(update={"placement": placement}), [3])


def test_a_missing_model_of_a_judge_is_reported(folder: Path) -> None:
    problems = list(find_path_problems(config_of(folder, model={"path": "nowhere"})))
    assert any(problem.startswith("judge.model.path") for problem in problems)


def test_the_files_of_a_judge_are_inputs_of_the_run(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("{response}")
    config = config_of(folder, prompt_file=file, verdict="tests.workers.judges:score_text")
    before = input_checksums(config)
    assert {"judge.prompt_file", "judge.verdict.kind", "judge.model.path"} <= before.keys()
    file.write_text("Rate {response}")
    changed = {key for key, checksum in input_checksums(config).items() if checksum != before[key]}
    assert changed == {"judge.prompt_file"}
