"""GRPO with dynamic sampling on tasks of reasoning-gym: settings, model, and the script from end to end."""

import json
import subprocess
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from flowrl.config import DataFile, load
from flowrl.data.chat import ChatTokenizer, Message
from flowrl.data.reading.generated_rows import generate_lines
from recipes.grpo.config import GRPOConfig
from recipes.reasoning.prepare import main
from recipes.reasoning.task import solved
from recipes.sft.config import SFTConfig
from tests.recipes.scripts import ROOT, read_steps, read_summary, run_script

FOLDER = ROOT / "recipes/reasoning"
SCRIPT = FOLDER / "run_reasoning.sh"


def first_rows(source: DataFile, num_rows: int) -> list[dict]:
    return [json.loads(line) for line in generate_lines(source, num_rows)]


def options_of(source: DataFile) -> dict:
    return {name: task.options for name, task in (source.reasoning_gym or {}).items()}


def test_the_warm_start_and_grpo_have_the_same_tasks_and_other_problems() -> None:
    warm_start = load(FOLDER / "sft.yaml", [], SFTConfig).data.training_files[0]
    data = load(FOLDER / "reasoning.yaml", [], GRPOConfig).data
    (train,), test = data.training_files, data.evaluation_files[""]
    assert isinstance(test, tuple)
    options, *others = (options_of(source) for source in (warm_start, train, test[0]))
    assert others == [options, options]
    assert len({source.first_seed for source in (warm_start, train, test[0])}) == 3


def test_every_task_has_its_own_evaluation_with_the_options_of_training() -> None:
    data = load(FOLDER / "reasoning.yaml", [], GRPOConfig).data
    tasks = data.training_files[0].reasoning_gym or {}
    assert set(data.tests) == set(tasks)
    for name in tasks:
        files = data.tests[name].files
        assert isinstance(files, tuple)
        (source,) = files
        assert source.split == "test" and source.reasoning_gym is not None
        assert source.reasoning_gym[name].options == tasks[name].options


def test_the_model_reads_any_text_with_one_token_per_byte(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    assert main(["--output", str(folder)]) == 0
    weights = (folder / "model.safetensors").read_bytes()
    assert main(["--output", str(folder)]) == 0 and (folder / "model.safetensors").read_bytes() == weights
    tokenizer = ChatTokenizer(folder)
    text = "Solve for e: 56 - 98*e = -1218 \u00d7 \u2705\n"
    ids = tokenizer.encode_prompt([Message("user", text)])
    assert len(ids) == len(text.encode()) + 1
    assert tokenizer.decode(ids) == text + "\n"
    num_parameters = sum(weight.numel() for weight in AutoModelForCausalLM.from_pretrained(folder).parameters())
    assert 300_000 < num_parameters < 1_000_000


def test_problems_fit_into_the_limits_of_tokens() -> None:
    config = load(FOLDER / "reasoning.yaml", [], GRPOConfig)
    sft = load(FOLDER / "sft.yaml", [], SFTConfig)
    for row in first_rows(config.data.training_files[0], 2000):
        question, answer = len(row["prompt"][0]["content"]) + 1, len(row["answer"]) + 1
        assert question <= config.data.max_prompt_tokens and answer <= config.rollout.max_response_tokens
        assert question + answer <= sft.data.max_prompt_tokens


def test_only_the_full_score_of_the_task_solves_a_problem() -> None:
    row = {"metadata": {"source_dataset": "spell_backward"}, "answer": "nus", "task": "spell_backward"}
    assert [solved(response, **row, data_source="x") for response in ("nus", "nux", "nuss", "")] == [1.0, 0.0, 0.0, 0.0]


def test_the_script_is_valid() -> None:
    subprocess.run(["bash", "-n", SCRIPT], check=True)


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("reasoning")


MIN_GAIN = 0.07
"""Smallest gain of the share of solved held-out problems. Seed 1 gains 0.140, seed 0 0.127 and seed 2 0.115."""


@pytest.mark.slow
@pytest.mark.timeout(3100)
def test_grpo_solves_more_held_out_problems(output: Path) -> None:
    run_script(SCRIPT, output)
    summary = read_summary(output / "seed1/grpo")
    assert 0.2 < summary["accuracy_before"] < 0.7
    assert summary["accuracy_after"] > summary["accuracy_before"] + MIN_GAIN
    assert summary["groups"]["dropped"]["equal_scores"] > 0
    assert (output / "seed1/grpo/model/model.safetensors").is_file()


@pytest.mark.slow
@pytest.mark.timeout(3100)
def test_a_second_run_reuses_the_warm_start(output: Path) -> None:
    """Runs also without the first test, which then has created no warm start."""
    first = output / "seed1/sft/summary.json"
    before = first.stat().st_mtime_ns if first.exists() else None
    settings = ["steps=2", "batch_size=64", "minibatch_size=32", "evaluate_every=0"]
    run_script(SCRIPT, output, *settings)
    assert before is None or first.stat().st_mtime_ns == before
    folder = max((output / "seed1").glob("grpo*"), key=lambda path: path.stat().st_mtime_ns)
    steps = read_steps(folder)
    assert [line["step"] for line in steps] == [1, 2]
    assert all(line["actor/grad_norm"] > 0 for line in steps)
