"""Runs whose model lacks weights (`model.strict: false`), and runs that export their model in several files."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from flowrl.cli import main
from flowrl.config import ConfigError
from flowrl.controller.errors import WorkerError
from flowrl.run.checks.config_checks import check_partial_models
from recipes.dpo.train import train as train_dpo
from recipes.grpo.train import train as train_grpo
from recipes.ppo.train import train as train_ppo
from recipes.sft.train import train as train_sft
from tests.errors import rejects
from tests.recipes.preference_configs import dpo_config, write_few_pairs
from tests.recipes.test_sft import sft_config

MISSING, UNKNOWN = "model.layers.0.mlp.up_proj.weight", "model.layers.9.mlp.up_proj.weight"
EXPORT = {"max_shard_gb": 2e-5, "dtype": "bfloat16"}


@pytest.fixture(scope="module")
def folder(task_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a copy of the task whose model lacks a weight and has an unknown one."""
    folder = shutil.copytree(task_folder, tmp_path_factory.mktemp("partial") / "task")
    weights = load_file(folder / "model" / "model.safetensors")
    del weights[MISSING]
    save_file(weights | {UNKNOWN: torch.ones(2)}, folder / "model" / "model.safetensors", metadata={"format": "pt"})
    write_few_pairs(folder)
    return folder


def model(folder: Path) -> dict[str, Any]:
    return {"path": folder / "model", "strict": False}


def records(output: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["step"]]


def check_differences(summary: dict[str, Any], *roles: str) -> None:
    expected = {"missing": [MISSING], "unexpected": [UNKNOWN]}
    # The backbone of a critic has names without a prefix.
    backbone = expected | {"missing": [MISSING.removeprefix("model.")]}
    assert summary["weight_differences"] == {role: backbone if role == "critic" else expected for role in roles}


@pytest.mark.slow
def test_sft_reports_the_weights_and_saves_a_complete_model_in_several_files(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    actor = {"model": model(folder), "optimizer": {"lr": 1e-2}}
    with pytest.raises(WorkerError, match="strict: false"):
        train_sft(sft_config(folder, output=tmp_path / "strict"))
    capsys.readouterr()
    summary = train_sft(sft_config(folder, output=tmp_path / "run", actor=actor, export=EXPORT))
    check_differences(summary, "actor")
    output = " ".join(capsys.readouterr().out.split())
    assert MISSING in output and UNKNOWN in output
    saved = tmp_path / "run" / "model"
    index = json.loads((saved / "model.safetensors.index.json").read_text())
    assert MISSING in index["weight_map"] and UNKNOWN not in index["weight_map"]
    assert AutoModelForCausalLM.from_pretrained(saved, dtype="auto").dtype == torch.bfloat16


def test_dpo_starts_with_the_same_initial_weights_in_actor_and_reference(folder: Path, tmp_path: Path) -> None:
    roles = {"actor": {"model": model(folder)}, "reference": {"model": model(folder)}}
    config = dpo_config(folder, tmp_path / "run", steps=1, export=EXPORT, **roles)
    check_differences(train_dpo(config), "actor", "reference")
    assert records(config.output)[0]["actor/loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert len(list((config.output / "model").glob("*.safetensors"))) > 1


@pytest.mark.slow
def test_grpo_generates_with_the_initial_weights_of_the_actor(folder: Path, grpo_config: Callable[..., Any]) -> None:
    actor = {"model": model(folder), "optimizer": {"lr": 1e-3}, "kl_loss_coef": 0.02}
    config = grpo_config(actor=actor, reference={"model": model(folder)}, steps=1, export=EXPORT)
    check_differences(train_grpo(config), "actor", "reference")
    step = records(config.output)[0]
    assert step["rollout_gap"] < 1e-4 and abs(step["kl"]) < 1e-4
    assert len(list((config.output / "model").glob("*.safetensors"))) > 1


@pytest.mark.slow
def test_ppo_continues_with_its_exported_critic(folder: Path, ppo_config: Callable[..., Any], tmp_path: Path) -> None:
    critic = {"model": model(folder), "optimizer": {"lr": 1e-3}}
    settings = {"actor": critic, "reference": {"model": model(folder)}, "steps": 1}
    config = ppo_config(critic=critic, checkpoint={"every": 1}, export=EXPORT, **settings)
    check_differences(train_ppo(config), "actor", "critic", "reference")
    exported = tmp_path / "critic"
    command = ["export", str(config.output), "--role", "critic", "--output", str(exported), "--max-shard-gb", "2e-5"]
    assert main(command) == 0
    assert len(list(exported.glob("*.safetensors"))) > 1 and not list(tmp_path.glob("*.partial"))
    critic = {"model": {"path": exported}, "optimizer": {"lr": 1e-3}}
    summary = train_ppo(ppo_config(critic=critic, output=tmp_path / "again", **settings))
    check_differences(summary, "actor", "reference")
    assert main(["export", str(config.output), "--dtype", "bfloat16", "--output", str(tmp_path / "half")]) == 0
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "half", dtype="auto").dtype == torch.bfloat16


def test_an_engine_that_reads_the_files_itself_rejects_partial_models(
    folder: Path, ppo_config: Callable[..., Any]
) -> None:
    actor = {"model": model(folder), "optimizer": {"lr": 1e-3}}
    check_partial_models(ppo_config(actor=actor))
    with rejects("actor.model.strict", "vllm", "hf", error=ConfigError):
        rollout = {"engine": "vllm", "max_response_tokens": 6}
        check_partial_models(ppo_config(actor=actor, rollout=rollout, backend="ray"))
    with rejects("reward.judge.model.strict", "vllm", error=ConfigError):
        check_partial_models(ppo_config(reward={"judge": {"model": model(folder), "engine": "vllm"}}))


def test_export_rejects_file_settings_for_an_adapter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(tmp_path), "--adapter", "--dtype", "bfloat16"]) == 2
    assert "--adapter" in capsys.readouterr().err
