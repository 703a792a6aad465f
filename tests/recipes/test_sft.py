"""Supervised fine-tuning with held-out examples."""

import json
from pathlib import Path
from shutil import copy
from typing import Any

import pytest
import torch
import yaml
from pydantic import ValidationError
from transformers import AutoModelForCausalLM

from flowrl.checkpoints.checkpoints import Checkpoints
from flowrl.checkpoints.resume import RunComplete
from flowrl.config import ConfigError, ModelConfig
from flowrl.data.chat import ChatTokenizer, DataError, Message
from flowrl.report.plots import PANELS, select_lines
from flowrl.run.checks.check_list import check_start
from flowrl.run.datasets import SftExamples
from flowrl.run.loop import Run
from recipes.sft.config import SFTConfig
from recipes.sft.train import train
from tests.configs import with_float64_models
from tests.engines.closeness import FLOAT64_RTOL
from tests.errors import missing_facts, rejects

CONSTANT = {"lr": 1e-2}


def sft_config(task_folder: Path, optimizer: dict[str, Any] = CONSTANT, **changes: Any) -> SFTConfig:
    data = {"train": task_folder / "sft.jsonl", "test": task_folder / "sft.jsonl", "max_prompt_tokens": 16}
    settings = {
        "backend": "inline",
        "threads": 1,
        "steps": 4,
        "actor": {"model": {"path": task_folder / "model"}, "optimizer": optimizer},
        "data": data | {"evaluation_rows": 50},
        "batch_size": 16,
        "report": {"tensorboard": False},
    }
    return SFTConfig.model_validate(settings | changes)


def expected_loss(model_path: Path, task_folder: Path) -> float:
    """Returns the mean cross-entropy of the response tokens, computed with transformers."""
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float64)
    total, count = 0.0, 0
    batch = SftExamples(
        task_folder / "sft.jsonl", ModelConfig(path=task_folder / "model"), max_tokens=16, max_examples=50
    ).batch()
    lengths = batch.lengths().tolist()
    ids, masks = batch.get("input_ids").split(lengths), batch.get("response_mask").split(lengths)
    with torch.no_grad():
        for ids_T, mask_T in zip(ids, masks, strict=True):
            logprobs_TV = model(ids_T[None]).logits[0, :-1].log_softmax(-1)
            chosen_T = logprobs_TV.gather(-1, ids_T[1:, None])[:, 0]
            total -= float(chosen_T[mask_T[1:]].sum())
            count += int(mask_T[1:].sum())
    return total / count


def test_epochs_alone_determine_the_steps_and_the_learning_rate_schedule(task_folder: Path, tmp_path: Path) -> None:
    """2,000 examples in batches of 600 are four steps per epoch."""
    linear = {"lr": 1e-2, "schedule": "linear"}
    changes: dict[str, Any] = {"batch_size": 600, "epochs": 2, "optimizer": linear}
    config = sft_config(task_folder, output=tmp_path / "run", steps=0, checkpoint={"every": 3}, **changes)
    assert config.actor.optimizer.total_steps is None and config.num_updates is None
    summary = train(config)
    assert (summary["steps"], summary["steps_requested"]) == (8, 8)
    history = [json.loads(line) for line in (config.output / "metrics.jsonl").read_text().splitlines()]
    rates = [record["actor/lr"] for record in history if record["step"]]
    assert rates == pytest.approx([1e-2 * (1 - step / 8) for step in range(8)])
    saved = yaml.safe_load((config.output / "config.yaml").read_text())
    assert (saved["steps"], saved["epochs"], saved["actor"]["optimizer"]["total_steps"]) == (8, None, 8)
    again = sft_config(task_folder, output=tmp_path / "run", steps=0, resume="auto", **changes)
    with pytest.raises(RunComplete):
        train(again)


@pytest.mark.slow
def test_the_fewer_of_steps_and_epochs_end_the_run(task_folder: Path, tmp_path: Path) -> None:
    config = sft_config(task_folder, output=tmp_path, steps=3, epochs=1, batch_size=500)
    assert [config.with_steps(rows).steps for rows in (2000, 1001, 1000, 1)] == [3, 3, 2, 1]
    assert sft_config(task_folder, output=tmp_path, steps=3).with_steps(1).steps == 3


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_a_run_without_a_length_is_rejected(task_folder: Path, tmp_path: Path, schedule: str) -> None:
    with pytest.raises(ValidationError) as error:
        sft_config(task_folder, CONSTANT | {"schedule": schedule}, output=tmp_path, steps=0)
    assert not missing_facts(str(error.value), "steps", "epochs")


def test_an_exceeded_schedule_is_reported_once_at_the_start(
    task_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    optimizer = {"lr": 1e-2, "schedule": "linear", "total_steps": 2}
    train(sft_config(task_folder, output=tmp_path / "run", optimizer=optimizer))
    printed = capsys.readouterr().out
    assert printed.count("warning:") == 1
    assert not missing_facts(printed.partition("starting")[2], "actor.optimizer.total_steps", 2, 4)


def test_the_validation_loss_is_in_metrics_curves_and_summary(task_folder: Path, tmp_path: Path) -> None:
    config = with_float64_models(
        sft_config(task_folder, output=tmp_path / "run", evaluate_every=2, checkpoint={"every": 2})
    )
    summary = train(config)
    history = [json.loads(line) for line in (config.output / "metrics.jsonl").read_text().splitlines()]
    losses = {record["step"]: record["validation_loss"] for record in history if "validation_loss" in record}
    assert list(losses) == [0, 2, 4] and losses[4] < losses[0]
    assert losses[0] == pytest.approx(expected_loss(task_folder / "model", task_folder), rel=FLOAT64_RTOL)
    assert losses[4] == pytest.approx(expected_loss(config.output / "model", task_folder), rel=FLOAT64_RTOL)
    assert (summary["validation_loss_before"], summary["validation_loss_after"]) == (losses[0], losses[4])
    assert summary["evaluation_rows"] == 50
    (panel,) = (panel for panel in PANELS if panel.lines[0].metric == "validation_loss")
    ((_, (steps, _)),) = select_lines(history, panel)
    assert steps == [0, 2, 4]
    score = Checkpoints(config.output).read(4).manifest.score
    assert score is not None and (score.name, score.value) == ("validation_loss", losses[4])


@pytest.mark.slow
def test_without_periodic_evaluations_the_training_loss_ranks_checkpoints_and_is_shown(
    task_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = {"train": task_folder / "sft.jsonl", "max_prompt_tokens": 16}
    checkpoint = {"every": 2, "keep_best": 1}
    config = sft_config(task_folder, output=tmp_path / "run", data=data, checkpoint=checkpoint)
    train(config)
    history = [json.loads(line) for line in (config.output / "metrics.jsonl").read_text().splitlines()]
    score = Checkpoints(config.output).read(4).manifest.score
    assert score is not None and score.value == history[-1]["actor/loss"]
    assert f"loss {score.value:.4f}" in capsys.readouterr().out


@pytest.mark.slow
def test_without_held_out_examples_nothing_is_evaluated(task_folder: Path, tmp_path: Path) -> None:
    data = {"train": task_folder / "sft.jsonl", "max_prompt_tokens": 16}
    config = sft_config(task_folder, output=tmp_path / "run", steps=1, data=data)
    train(config)
    assert "validation_loss" not in (config.output / "metrics.jsonl").read_text()


def test_evaluations_without_a_test_file_are_rejected(task_folder: Path, tmp_path: Path) -> None:
    data = {"train": task_folder / "sft.jsonl", "max_prompt_tokens": 16}
    with pytest.raises(ValidationError, match=r"data\.test"):
        sft_config(task_folder, output=tmp_path / "run", evaluate_every=2, data=data)


def test_a_model_may_have_its_tokenizer_in_another_folder(task_folder: Path, tmp_path: Path) -> None:
    model, tokenizer = tmp_path / "model", tmp_path / "tokenizer"
    for path in (task_folder / "model").iterdir():
        target = tokenizer if "token" in path.name or "template" in path.name else model
        target.mkdir(exist_ok=True)
        copy(path, target)
    actor = {"model": {"path": model, "tokenizer": tokenizer}, "optimizer": CONSTANT}
    data = {"train": task_folder / "sft.jsonl", "max_prompt_tokens": 16}
    config = sft_config(task_folder, output=tmp_path / "run", steps=1, actor=actor, data=data)
    check_start(config)
    train(config)
    AutoModelForCausalLM.from_pretrained(config.output / "model")
    saved, original = (ChatTokenizer(folder) for folder in (config.output / "model", tokenizer))
    messages = [Message("user", "1+2")]
    assert saved.encode_prompt(messages) == original.encode_prompt(messages)


def test_a_missing_tokenizer_is_rejected_before_the_run(task_folder: Path, tmp_path: Path) -> None:
    actor = {"model": {"path": task_folder / "model", "tokenizer": tmp_path / "none"}, "optimizer": CONSTANT}
    with pytest.raises(ConfigError) as error:
        check_start(sft_config(task_folder, output=tmp_path / "run", actor=actor))
    assert not missing_facts(str(error.value), "actor.model.tokenizer", tmp_path / "none")


def test_an_invalid_template_is_rejected_before_the_first_step(task_folder: Path, tmp_path: Path) -> None:
    template = tmp_path / "template.json"
    template.write_text('{"stop_ids": [[99999]]}')
    data = {"train": task_folder / "sft.jsonl", "max_prompt_tokens": 16, "template": template}
    config = sft_config(task_folder, output=tmp_path / "run", data=data)
    with rejects(template, 99999, error=DataError):
        train(config)
    assert not config.output.exists()
    with rejects(template, 99999, error=DataError):
        Run(config)  # also for a recipe that does not check the template
