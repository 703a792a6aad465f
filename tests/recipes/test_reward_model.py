"""Training of a reward model: metrics, acceptance, resume, and use of the saved model."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from flowrl.cli import main
from flowrl.config import CheckFailed
from flowrl.data.chat import ChatTokenizer
from flowrl.data.reading.reader import read_conversations
from recipes.dpo.train import train as train_dpo
from recipes.ppo.train import train as train_ppo
from recipes.reward_model.config import AcceptanceConfig, RewardModelRunConfig
from recipes.reward_model.train import train
from tests.engines.closeness import FLOAT32_RTOL
from tests.errors import missing_facts
from tests.recipes.preference_configs import dpo_config, reward_model_config, write_few_pairs


@pytest.fixture(scope="module")
def task(task_folder: Path) -> Path:
    write_few_pairs(task_folder)
    return task_folder


def records(config: RewardModelRunConfig) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (config.output / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("lora", [None, pytest.param({"rank": 4}, marks=pytest.mark.slow)])
def test_the_saved_model_is_a_sequence_classifier_and_a_reward_of_ppo(
    task: Path, tmp_path: Path, lora: Any, ppo_config: Any
) -> None:
    changes: dict[str, Any] = {"checkpoint": {"every": 8}, "reward": {"lora": lora}}
    config = reward_model_config(task, tmp_path / "rm", epochs=1, steps=0, **changes)
    summary = train(config)
    folder = config.output / "model"
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.config.num_labels == 1
    chat = ChatTokenizer(folder)
    scores = []
    for pair in read_conversations(task / "pairs_test.jsonl", kind="preference"):
        ids = [chat.encode_example([*pair.messages, *answer])[0] for answer in (pair.chosen, pair.rejected)]
        padded = tokenizer.pad({"input_ids": ids}, return_tensors="pt", padding_side="right")
        with torch.no_grad():
            scores.append(model(**padded).logits[:, 0])
    chosen, rejected = torch.stack(scores).mean(0).tolist()
    expected = [summary[f"evaluation/{name}_reward_after"] for name in ("chosen", "rejected")]
    assert [chosen, rejected] == pytest.approx(expected, rel=10 * FLOAT32_RTOL)
    assert summary["steps"] == 8

    exported = tmp_path / "exported"
    assert main(["export", str(config.output), "--output", str(exported)]) == 0
    names = {path.name for path in folder.iterdir()}
    assert {path.name for path in exported.iterdir()} == names | {"README.md", "training"}
    assert [name for name in names if (exported / name).read_bytes() != (folder / name).read_bytes()] == []
    assert main(["export", str(config.output), "--adapter"]) == 2

    ppo = train_ppo(ppo_config(reward={"model": {"path": folder}}, steps=1))
    assert ppo["steps"] == 1


@pytest.mark.slow
def test_the_loss_falls_and_the_curves_are_logged(task: Path, tmp_path: Path) -> None:
    config = reward_model_config(task, tmp_path / "run", steps=10, evaluate_every=5, reward={"loss": "log_exp"})
    train(config)
    history = records(config)
    names = {"reward/accuracy", "reward/chosen_reward", "reward/rejected_reward", "reward/margin", "reward/loss"}
    assert all(names <= record.keys() for record in history if record["step"])
    held_out = {r["step"]: r for r in history if "accuracy" in r}
    assert list(held_out) == [0, 5, 10]
    assert {"validation_loss", "evaluation/chosen_reward", "evaluation/rejected_reward"} <= held_out[5].keys()


@pytest.mark.slow
def test_margins_of_the_data_replace_the_setting(task: Path, tmp_path: Path) -> None:
    rows = [json.loads(line) for line in (task / "pairs.jsonl").read_text().splitlines()]
    losses = {}
    for name, margin in (("column", 2.0), ("setting", None)):
        path = tmp_path / f"{name}.jsonl"
        path.write_text(
            "".join(json.dumps(row | ({} if margin is None else {"margin": margin})) + "\n" for row in rows)
        )
        loss = {"kind": "log_sig", "margin": 0.5 if margin else 2.0}
        data = {"train": path, "max_prompt_tokens": 16}
        config = reward_model_config(task, tmp_path / name, data=data, reward={"loss": loss})
        train(config)
        losses[name] = [record["reward/loss"] for record in records(config)]
    assert losses["column"] == losses["setting"]


@pytest.mark.slow
def test_an_interrupted_run_resumes_exactly(task: Path, tmp_path: Path) -> None:
    schedule = {"optimizer": {"lr": 1e-3, "schedule": "cosine"}}
    changes: dict[str, Any] = {"checkpoint": {"every": 3}, "epochs": 1, "reward": schedule}
    full = reward_model_config(task, tmp_path / "full", **changes | {"steps": 0})
    train(full)
    assert records(full)[-1]["reward/lr"] < 0.1 * 1e-3
    config = reward_model_config(task, tmp_path / "part", **changes | {"steps": 0})
    stopped = config.with_steps(120).model_copy(update={"steps": 3})
    train(stopped)
    part = reward_model_config(task, tmp_path / "part", **changes | {"steps": 0, "resume": "auto"})
    train(part)
    states = [load_file(c.output / "model" / "model.safetensors") for c in (full, part)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


METRICS = {
    "accuracy_after": 0.7,
    "evaluation/chosen_reward_after": 1.0,
    "evaluation/rejected_reward_after": 0.0,
}


def test_the_criteria_are_accuracy_and_mean_scores() -> None:
    criteria = AcceptanceConfig()
    assert criteria.find_problem(METRICS) is None
    problem = criteria.find_problem(METRICS | {"accuracy_after": 0.6})
    assert problem is not None and not missing_facts(problem, "0.600", "acceptance.min_accuracy", "0.6")
    problem = criteria.find_problem(METRICS | {"evaluation/rejected_reward_after": 1.5})
    assert problem is not None and not missing_facts(problem, "1.000", "1.500")
    for name in METRICS:
        assert criteria.find_problem(METRICS | {name: math.nan}) is not None


@pytest.mark.parametrize("min_accuracy", [1, 1.5, -0.1])
def test_a_minimum_accuracy_that_decides_nothing_is_rejected(min_accuracy: float) -> None:
    with pytest.raises(ValidationError):
        AcceptanceConfig(min_accuracy=min_accuracy)


@pytest.mark.slow
def test_a_model_that_is_not_accepted_is_saved_and_can_end_the_program(task: Path, tmp_path: Path) -> None:
    acceptance = {"min_accuracy": 0.999, "on_failure": "fail"}
    config = reward_model_config(task, tmp_path / "run", steps=1, acceptance=acceptance)
    with pytest.raises(CheckFailed) as error:
        train(config)
    assert not missing_facts(str(error.value), "accuracy", "acceptance.min_accuracy", "0.999")
    assert (config.output / "model" / "config.json").exists()
    warned = reward_model_config(task, tmp_path / "warned", steps=1, acceptance={"min_accuracy": 0.999})
    assert train(warned)["accepted"] is False
    assert train(reward_model_config(task, tmp_path / "blind", steps=1, evaluate_every=0))["accepted"] is None


def test_acceptance_needs_an_evaluation(task: Path, tmp_path: Path) -> None:
    data = {"train": task / "pairs.jsonl", "max_prompt_tokens": 16}
    with pytest.raises(ValidationError) as error:
        reward_model_config(task, tmp_path, data=data, acceptance={"on_failure": "fail"})
    assert not missing_facts(str(error.value), "acceptance.on_failure", "data.test")


@pytest.mark.parametrize("role", ["reward", "actor"])
def test_model_and_export_have_the_conversation_template(task: Path, tmp_path: Path, role: str) -> None:
    template = tmp_path / "template.json"
    text = (task / "model" / "chat_template.jinja").read_text()
    template.write_text(json.dumps({"chat_template": text, "end_of_assistant": "<eos>", "stop_ids": [[1]]}))
    changes: dict[str, Any] = {"steps": 1, "checkpoint": {"every": 1}, "evaluate_every": 0}
    data = {"train": task / "pairs.jsonl", "max_prompt_tokens": 16, "template": template}
    if role == "reward":
        train(config := reward_model_config(task, tmp_path / "run", data=data, **changes))
    else:
        train_dpo(config := dpo_config(task, tmp_path / "run", data=data, **changes))
    exported = tmp_path / "exported"
    assert main(["export", str(config.output), "--output", str(exported)]) == 0
    for folder in (config.output / "model", exported):
        values = json.loads((folder / "conversation_template.json").read_text())
        assert (values["chat_template"], values["stop_ids"]) == (text, [[1]])
