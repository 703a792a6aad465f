"""Tasks of lm-eval with local data: log-probabilities and greedy text are those of transformers."""

import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from flowrl.inference.evaluation.evaluate_models import evaluate_models
from flowrl.inference.evaluation.harness import check_harness, evaluate_harness
from flowrl.inference.evaluation.planned_tasks import EvaluationArguments
from flowrl.inference.model_source import ModelSource, resolve_model
from recipes.quickstart.prepare import save_model, save_tokenizer
from tests.errors import rejects
from tests.inference.byte_tokenizer import BEGIN, save_byte_tokenizer

pytest.importorskip("lm_eval")
pytestmark = pytest.mark.filterwarnings("ignore")  # the library and its dependencies warn of deprecated functions

SUMS = [("11+11=", "22"), ("30-19=", "11"), ("45+5=", "50"), ("7+5=", "12")]
_DATASET = """
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
"""
CHOICE = """task: sums_choice
output_type: multiple_choice
doc_to_text: "{{prompt}}"
doc_to_choice: ["22", "11", "50", "12"]
doc_to_target: label
target_delimiter: ""
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
GENERATION = """task: sums_generation
output_type: generate_until
doc_to_text: "{{prompt}}"
doc_to_target: "{{answer}}"
target_delimiter: ""
generation_kwargs: {until: ["9"], max_gen_toks: 4, do_sample: false}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""
PERPLEXITY = """task: sums_perplexity
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{prompt}}{{answer}}"
metric_list: [{metric: word_perplexity}]
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    folder = tmp_path_factory.mktemp("harness") / "model"
    save_tokenizer(folder)
    save_model(folder, seed=3)
    return resolve_model(str(folder))


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Writes a YAML file per task; returns their paths."""
    folder = tmp_path_factory.mktemp("tasks")
    data = folder / "sums.jsonl"
    rows = [{"prompt": prompt, "answer": answer, "label": i} for i, (prompt, answer) in enumerate(SUMS)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    paths = {}
    for name, text in (("choice", CHOICE), ("generation", GENERATION), ("perplexity", PERPLEXITY)):
        paths[name] = str(folder / f"{name}.yaml")
        Path(paths[name]).write_text(text + _DATASET.format(data=data))
    return paths


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(cache))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def next_logprobs(source: ModelSource, ids: list[int]) -> torch.Tensor:
    """Returns the log-probabilities of transformers of each next token."""
    model = AutoModelForCausalLM.from_pretrained(source.path)
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].log_softmax(-1)


def continuation_logprob(source: ModelSource, prompt: str, text: str) -> float:
    tokenizer = AutoTokenizer.from_pretrained(source.path)
    start, ids = len(tokenizer.encode(prompt)), tokenizer.encode(prompt + text)
    logprobs = next_logprobs(source, ids)
    return sum(float(logprobs[i - 1, ids[i]]) for i in range(start, len(ids)))


@pytest.mark.parametrize(
    ("arguments", "max_tokens", "temperature"),
    [
        ({}, 256, 0.0),
        ({"max_gen_toks": 2000}, 1000, 0.0),
        ({"max_new_tokens": 5}, 5, 0.0),
        ({"max_tokens": 6, "temperature": 0.7}, 6, 0.7),
        ({"max_gen_toks": 7, "do_sample": False, "temperature": 0.7}, 7, 0.0),
        ({"max_gen_toks": 8, "do_sample": True}, 8, 1.0),
    ],
)
def test_generation_arguments_have_the_meaning_of_the_library(
    arguments: dict[str, Any], max_tokens: int, temperature: float
) -> None:
    from flowrl.inference.evaluation.harness_model import read_sampling  # noqa: PLC0415 (requires lm_eval)

    sampling = read_sampling(arguments, 1000)
    assert (sampling.max_tokens, sampling.temperature) == (max_tokens, temperature)


def test_scores_and_text_are_those_of_transformers(source: ModelSource, tasks: dict[str, str]) -> None:
    results = evaluate_harness(list(tasks.values()), source, EvaluationArguments())
    assert results.keys() >= {"sums_choice/acc", "sums_generation/exact_match", "sums_perplexity/word_perplexity"}
    choices = ["22", "11", "50", "12"]
    expected = []
    for prompt, answer in SUMS:
        values = [continuation_logprob(source, prompt, choice) for choice in choices]
        expected.append(float(choices[values.index(max(values))] == answer))
    own = results["sums_choice/acc"]
    assert own.scores.scores_PN.flatten().tolist() == expected
    assert own.metrics["accuracy"] == sum(expected) / 4

    tokenizer = AutoTokenizer.from_pretrained(source.path)
    for (prompt, _), row in zip(SUMS, results["sums_generation/exact_match"].rows, strict=True):
        ids = tokenizer.encode(prompt)
        for _ in range(4):
            ids.append(int(next_logprobs(source, ids)[-1].argmax()))
            if ids[-1] == tokenizer.eos_token_id:
                break
        text = tokenizer.decode(ids[len(tokenizer.encode(prompt)) :], skip_special_tokens=True)
        assert row["response"] == [text.partition("9")[0]]

    rolling = results["sums_perplexity/word_perplexity"]
    assert not rolling.scores.is_scored and rolling.metrics["accuracy"] > 1


def test_a_text_follows_the_begin_token_which_is_not_scored(tmp_path: Path) -> None:
    from lm_eval.api.instance import Instance  # noqa: PLC0415 (requires lm_eval)

    from flowrl.inference.evaluation.harness_model import HarnessModel  # noqa: PLC0415 (requires lm_eval)

    save_byte_tokenizer(tmp_path, text_template="<begin> $A <end>")
    save_model(tmp_path, seed=3, num_characters=256)
    source = resolve_model(str(tmp_path))
    model = HarnessModel(source)
    first, second = model.tok_encode("ab", add_special_tokens=False)
    assert model.tok_encode("ab") == model.tok_encode("<begin>ab") == [BEGIN, first, second]
    logprobs = next_logprobs(source, [BEGIN, first, second])
    expected = float(logprobs[0, first] + logprobs[1, second])
    instance = Instance("loglikelihood_rolling", {}, ("ab",), 0)
    assert model.loglikelihood_rolling([instance]) == [pytest.approx(expected, rel=1e-5)]
    ((value, _),) = model.loglikelihood([Instance("loglikelihood", {}, ("", "ab"), 0)])
    assert value == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_two_models_are_compared_on_a_task(source: ModelSource, tasks: dict[str, str], tmp_path: Path) -> None:
    other = tmp_path / "other"
    save_tokenizer(other)
    save_model(other, seed=4)
    arguments = EvaluationArguments(tasks=[f"lm-eval:{tasks['choice']}"], limit=3)
    results = evaluate_models([str(source.path), str(other)], arguments, console=Console(file=StringIO()))
    accuracy = [result for result in results if result.task == "sums_choice/acc"]
    assert [result.num_prompts for result in accuracy] == [3, 3]
    assert accuracy[1].difference is not None
    assert accuracy[1].difference.value == pytest.approx(accuracy[1].score.value - accuracy[0].score.value)


def test_a_task_whose_data_cannot_be_loaded_is_named(source: ModelSource, tmp_path: Path) -> None:
    task = tmp_path / "sums_without_data.yaml"
    task.write_text(CHOICE + _DATASET.format(data=tmp_path / "missing.jsonl"))
    with rejects(task, tmp_path / "missing.jsonl"):
        evaluate_harness([str(task)], source, EvaluationArguments())


def test_unknown_tasks_and_sampling_options_are_rejected(tasks: dict[str, str], tmp_path: Path) -> None:
    with rejects("nowhere.yaml"):
        check_harness(["nowhere.yaml"], EvaluationArguments())
    with rejects("--samples", "4"):
        check_harness([tasks["choice"]], EvaluationArguments(samples=4))
