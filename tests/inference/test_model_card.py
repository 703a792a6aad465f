"""`flowrl export` writes a folder for the Hub: the model, a card with metadata, and the files of its training."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM

from flowrl.cli import main
from flowrl.inference.model_card import TRAINING, render_card


def card_of(folder: Path) -> ModelCard:
    return ModelCard.load(folder / "README.md")


def metadata_of(card: ModelCard) -> dict[str, Any]:
    return card.data.to_dict()


def test_an_exported_checkpoint_has_a_card_and_the_files_of_its_training(run_folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "hub"
    assert main(["export", str(run_folder), "--step", "1", "--output", str(output)]) == 0
    AutoModelForCausalLM.from_pretrained(output)
    card = card_of(output)
    metadata = metadata_of(card)
    assert metadata["library_name"] == "transformers" and "flowrl" in metadata["tags"]
    assert "base_model" not in metadata, "a path of this machine is no model of the Hub"
    steps = [json.loads(line)["step"] for line in (output / TRAINING / "metrics.jsonl").read_text().splitlines()]
    assert max(steps) == 1
    assert (output / TRAINING / "curves.png").stat().st_size > 1000
    config = yaml.safe_load((output / TRAINING / "config.yaml").read_text())
    assert config["batch_size"] == 16 and "| `batch_size` | `16` |" in card.text
    (inputs,) = [json.loads((run_folder / "inputs.json").read_text())]
    assert inputs and all(f"{value['crc32']:08x}" in card.text for value in inputs.values())
    assert "step 1" in card.text and "torch 2." in card.text
    assert "command" not in json.loads((output / TRAINING / "system.json").read_text())


def test_a_card_that_cannot_be_written_leaves_no_folder(run_folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(run_folder, run)
    (run / "metrics.jsonl").write_text("corrupt\n{}\n")
    assert main(["export", str(run), "--output", str(tmp_path / "hub")]) == 2
    assert not (tmp_path / "hub").exists()


def test_a_run_without_checkpoints_exports_its_saved_model(run_folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    for path in run_folder.iterdir():
        if path.name != "checkpoints":
            (run / path.name).symlink_to(path)
    assert main(["export", str(run)]) == 0
    AutoModelForCausalLM.from_pretrained(run / "export-step-000002")
    assert "step 2" in card_of(run / "export-step-000002").text
    assert main(["export", str(run)]) == 2  # the folder exists
    assert main(["export", str(run), "--step", "1", "--output", str(tmp_path / "x")]) == 2


def test_the_card_of_an_adapter_is_for_peft(lora_folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "adapter"
    assert main(["export", str(lora_folder), "--adapter", "--output", str(output)]) == 0
    assert metadata_of(card_of(output))["library_name"] == "peft"
    assert (output / "adapter_config.json").is_file() and not (output / "config.json").exists()


def test_evaluations_have_their_intervals() -> None:
    records = [
        {"step": 0, "accuracy": 0.25, "evaluation/accuracy_low": 0.2, "evaluation/accuracy_high": 0.3},
        {"step": 4, "reward": math.nan},
        {"step": 5, "accuracy": 0.5, "evaluation/accuracy_low": 0.4, "evaluation/accuracy_high": 0.6},
    ]
    text = render_card(
        {"recipe": "recipes.grpo.config:GRPOConfig", "actor": {"model": {"path": "org/model"}}},
        records,
        Path("runs/x"),
        step=5,
        role="actor",
        is_adapter=False,
        has_curves=True,
    )
    assert "| `accuracy` | 0.25 (0.2 to 0.3) (step 0) | 0.5 (0.4 to 0.6) (step 5) |" in text
    metadata = metadata_of(ModelCard(text))
    assert metadata["base_model"] == "org/model" and metadata["pipeline_tag"] == "text-generation"
    assert "python -m recipes.grpo.train training/config.yaml" in text


@pytest.mark.parametrize("arguments", [["missing"], ["{run}", "--step", "9"], ["{run}", "--output", "/proc/x"]])
def test_wrong_arguments_exit_with_2(arguments: list[str], run_folder: Path, tmp_path: Path) -> None:
    assert main(["export", *(argument.replace("{run}", str(run_folder)) for argument in arguments)]) == 2
