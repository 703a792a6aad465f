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

from flowrl.checkpoints.run_files import read_metrics
from flowrl.cli import main
from flowrl.config import RolloutLogConfig
from flowrl.inference.model_card import TRAINING, render_card
from flowrl.report.rollout_log import RolloutLog, read_rows
from tests.report.page.generated_run import write_run


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


def card_text(base: Path | str, run: Path = Path("runs/x"), step: int = 5) -> str:
    """Returns the card of a model whose training began with `base`."""
    settings = {"recipe": "recipes.grpo.config:GRPOConfig", "actor": {"model": {"path": str(base)}}}
    records = read_metrics(run / "metrics.jsonl")
    return render_card(settings, records, run, step=step, role="actor", is_adapter=False, has_curves=False)


@pytest.mark.parametrize(
    ("base", "is_on_hub"),
    [("org/model", True), ("gpt2", True), ("/models/removed", False), ("runs/quickstart/sft/model", False)],
)
def test_only_a_hub_name_is_the_base_model_of_the_metadata(base: str, is_on_hub: bool) -> None:
    text = card_text(base)
    assert metadata_of(ModelCard(text)).get("base_model") == (base if is_on_hub else None)
    assert f"`{base}`" in text


README = "---\nlicense: {}\ntags: [a]\n---\n# Model\n"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"README.md": README.format("apache-2.0")}, {"license": "apache-2.0"}),
        ({"README.md": README.format("[mit, cc-by-4.0]")}, {"license": ["mit", "cc-by-4.0"]}),
        (
            {"README.md": README.format("other\nlicense_name: own\nlicense_link: https://a.org/l")},
            {"license": "other", "license_name": "own", "license_link": "https://a.org/l"},
        ),
        ({"README.md": README.format("other\nlicense_link: LICENSE")}, {"license": "other"}),
        ({"README.md": "# Model\n", "config.json": '{"license": "mit"}'}, {"license": "mit"}),
        ({"README.md": "---\n[}\n---\n", "config.json": '{"model_type": "llama"}'}, {}),
        ({"README.md": README.format("7"), "config.json": "[]"}, {}),
        ({}, {}),
    ],
)
def test_the_license_is_that_of_the_base_model(
    files: dict[str, str], expected: dict[str, str | list[str]], tmp_path: Path
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    text = card_text(tmp_path)
    metadata = metadata_of(ModelCard(text))
    assert {key: value for key, value in metadata.items() if key.startswith("license")} == expected
    assert ("Its license" in text) == bool(expected)


def test_the_card_has_the_sizes_of_the_evaluation_sets(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", num_steps=10)
    assert "| `data.test` | 40 | 40 |" in card_text("org/model", run, step=10)
    rows = read_rows(run / "rollouts", "evaluation", 0)
    log = RolloutLog(run / "rollouts", RolloutLogConfig(), last_step=10)
    log.write("evaluation", 4, [{**row, "set": "hard", "sample": i} for row in rows[:3] for i in (0, 1)])
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "accuracy/hard": 0.5}\n')
    text = card_text("org/model", run, step=10)
    assert "| `data.test` | 40 | 40 |" in text and "| `data.tests.hard` | 3 | 6 |" in text


def test_without_saved_rows_the_size_is_that_of_the_summary(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", num_steps=10)
    shutil.rmtree(run / "rollouts")
    assert "used 40 rows" in card_text("org/model", run, step=10)
    (run / "summary.json").unlink()
    text = card_text("org/model", run, step=10)
    assert "Evaluation on held-out data" in text and "evaluation of the run used" not in text
