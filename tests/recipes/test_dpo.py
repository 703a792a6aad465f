"""Preference optimization: every loss trains with the same recipe, resumes exactly, and reads its reference."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file

from recipes.dpo.config import DPOConfig
from recipes.dpo.train import train
from tests.configs import with_float64_models
from tests.engines.closeness import FLOAT32_RTOL
from tests.errors import missing_facts
from tests.recipes.preference_configs import dpo_config, write_few_pairs

KINDS = (
    "dpo",
    "kto",
    *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("dpo_hinge", "ipo", "simpo", "orpo", "cpo")),
)


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory, task_folder: Path) -> Path:
    write_few_pairs(task_folder)
    return task_folder


def records(config: DPOConfig) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (config.output / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("kind", KINDS)
def test_every_loss_separates_chosen_and_rejected_responses(task: Path, tmp_path: Path, kind: str) -> None:
    file = task / "pairs_test.jsonl"
    data = {"train": file, "test": file, "max_prompt_tokens": 16}
    config = dpo_config(task, tmp_path / "run", actor={"loss": kind}, steps=10, evaluate_every=10, data=data)
    summary = train(config)
    first, last = records(config)[0], records(config)[-1]
    gaps = [r["evaluation/chosen_reward"] - r["evaluation/rejected_reward"] for r in (first, last)]
    assert gaps[1] > gaps[0]
    assert last["validation_loss"] < first["validation_loss"]
    assert summary["evaluation_rows"] == (40 if kind == "kto" else 20)
    assert {"actor/accuracy", "actor/chosen_logprobs", "actor/rejected_logprobs"} <= last.keys()
    assert (config.reference is None) == (kind in ("simpo", "orpo", "cpo"))


@pytest.mark.slow
def test_losses_with_a_reference_start_at_their_value_for_equal_models(task: Path, tmp_path: Path) -> None:
    values = {"dpo": math.log(2), "dpo_hinge": 1.0, "ipo": 25.0, "kto": 0.5}
    for kind, expected in values.items():
        config = dpo_config(task, tmp_path / kind, actor={"loss": kind}, steps=1)
        train(config)
        step = records(config)[-1]
        assert step["actor/loss"] == pytest.approx(expected, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dpo", pytest.param("kto", marks=pytest.mark.slow)])
def test_an_interrupted_run_resumes_exactly(task: Path, tmp_path: Path, kind: str) -> None:
    changes: dict[str, Any] = {"actor": {"loss": kind}, "checkpoint": {"every": 2}, "epochs": 2, "batch_size": 64}
    full = dpo_config(task, tmp_path / "full", **changes | {"steps": 0})
    train(full)
    train(dpo_config(task, tmp_path / "part", **changes | {"steps": 2}))
    part = dpo_config(task, tmp_path / "part", **changes | {"steps": 0, "resume": "auto"})
    train(part)
    states = [load_file(config.output / "model" / "model.safetensors") for config in (full, part)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    steps = [[r["actor/loss"] for r in records(config) if r["step"]] for config in (full, part)]
    assert steps[0] == steps[1] and len(steps[0]) == (4 if kind == "dpo" else 8)


def test_stored_and_live_reference_values_train_the_same_weights(task: Path, tmp_path: Path) -> None:
    losses = {}
    for mode in ("stored", "live"):
        config = dpo_config(task, tmp_path / mode, reference_logprobs=mode)
        train(config)
        assert (config.output / "reference_logprobs.npy").exists() == (mode == "stored")
        losses[mode] = [r["actor/loss"] for r in records(config) if r["step"]]
    assert losses["stored"] == pytest.approx(losses["live"], rel=FLOAT32_RTOL)


def test_reference_values_are_stored_if_a_pair_is_used_more_than_once(task: Path, tmp_path: Path) -> None:
    for steps, is_stored in ((7, False), (8, True)):
        assert dpo_config(task, tmp_path, steps=steps).stores_reference(120 - 8) == is_stored
    assert not dpo_config(task, tmp_path, steps=99, reference_logprobs="live").stores_reference(120)
    assert not dpo_config(task, tmp_path, steps=99, actor={"loss": "kto"}).stores_reference(120)
    assert not dpo_config(task, tmp_path, steps=99, actor={"loss": "simpo"}).stores_reference(120)


def test_kto_cannot_store_reference_values(task: Path, tmp_path: Path) -> None:
    with pytest.raises(ValidationError) as error:
        dpo_config(task, tmp_path, reference_logprobs="stored", actor={"loss": "kto"})
    assert not missing_facts(str(error.value), "reference_logprobs", "kto", "live")


@pytest.mark.slow
def test_a_lora_actor_without_its_adapter_is_the_reference(task: Path, tmp_path: Path) -> None:
    losses = []
    for name, lora in (("lora", {"rank": 4}), ("full", None)):
        config = with_float64_models(
            dpo_config(task, tmp_path / name, actor={"lora": lora}, reference_logprobs="live", steps=4)
        )
        train(config)
        losses.append([r["actor/loss"] for r in records(config) if r["step"]])
    assert losses[0][0] == pytest.approx(math.log(2), abs=1e-6)
    assert losses[0][-1] < losses[0][0] and losses[0] != losses[1]


def gap(chosen_logprobs: torch.Tensor, ref_chosen_logprobs: torch.Tensor, rejected_logprobs: torch.Tensor) -> Any:
    """A user's loss: the rejected response, and a penalty on changes of the chosen one."""
    return (chosen_logprobs - ref_chosen_logprobs).square() + rejected_logprobs, {}


def test_a_function_is_a_loss(task: Path, tmp_path: Path) -> None:
    actor = {"loss": f"{__name__}:gap"}
    config = dpo_config(task, tmp_path / "run", actor=actor, reference={"model": {"path": task / "model"}})
    train(config)
    steps = [r for r in records(config) if r["step"]]
    assert steps[-1]["actor/rejected_logprobs"] < steps[0]["actor/rejected_logprobs"]
