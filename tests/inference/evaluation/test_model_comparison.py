"""Compares hand-made scores of two models."""

import json
import math
from collections.abc import Sequence
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console

from flowrl.algorithms.evaluation_estimates import bootstrap_interval, paired_difference
from flowrl.config import EvaluationConfig
from flowrl.inference.evaluation.evaluation_table import render_results, write_results
from flowrl.inference.evaluation.model_comparison import compare, prompt_records
from flowrl.inference.evaluation.model_scores import TaskScores
from flowrl.run.evaluation import PromptScores, measure_scores


def scored(
    rows: Sequence[Sequence[float]],
    prompts: Sequence[str] | None = None,
    sources: Sequence[str | None] | None = None,
    answers: Sequence[Sequence[str | None]] | None = None,
) -> TaskScores:
    scores = PromptScores(torch.tensor(rows), list(range(len(rows))), sources or [None] * len(rows), answers)
    metrics = {**measure_scores(scores, EvaluationConfig()), "evaluation/response_length": 3.0}
    return TaskScores(metrics, prompts or [f"prompt {i}" for i in range(len(rows))], scores, 1.0, [])


WEAK = scored(
    [[0.0, 0.0], [1.0, 0.0], [0.0, 0.0], [1.0, 1.0]], answers=[["4", "5"], ["4", "4"], [None, "1"], ["1", "1"]]
)
STRONG = scored([[1.0, 0.0], [1.0, 1.0], [0.0, 1.0], [1.0, 1.0]])


def test_values_intervals_and_differences_are_those_of_the_estimates() -> None:
    first, second = compare({"weak": {"sums": WEAK}, "strong": {"sums": STRONG}})
    assert (first.model, first.task, first.num_prompts, first.num_samples) == ("weak", "sums", 4, 2)
    interval = bootstrap_interval(torch.tensor([0.0, 0.5, 0.0, 1.0]))
    assert (first.score.value, first.score.low, first.score.high) == (0.375, interval.low, interval.high)
    assert {name: own.value for name, own in first.estimates.items()} == {
        "pass@1": 0.375,
        "pass@2": 0.5,
        "best@2": 0.5,
        "majority@2": 0.375,  # the scores of prompt 1 are those of one answer
    }
    assert first.difference is None
    assert second.difference == paired_difference(torch.tensor([0.5, 1, 0.5, 1]), torch.tensor([0.0, 0.5, 0.0, 1.0]))
    assert "majority@2" not in second.estimates and second.metrics == {"evaluation/response_length": 3.0}


def test_data_sources_have_their_own_intervals() -> None:
    sources = ["a", "b", "a", "b"]
    rows = [[0.0, 0.0], [1.0, 0.0], [1.0, 1.0], [1.0, 0.0]]
    answers = [["1", "2"], ["3", "4"], ["5", "5"], ["6", "7"]]
    (result,) = compare({"model": {"sums": scored(rows, sources=sources, answers=answers)}})
    values = {name: {key: own.value for key, own in intervals.items()} for name, intervals in result.sources.items()}
    assert values == {
        "a": {"accuracy": 0.5, "pass@1": 0.5, "pass@2": 0.5, "best@2": 0.5, "majority@2": 0.5},
        "b": {"accuracy": 0.5, "pass@1": 0.5, "pass@2": 1.0, "best@2": 1.0, "majority@2": 0.5},
    }
    assert result.sources["b"]["pass@2"].low == 1.0
    assert result.sources["a"]["pass@2"] == bootstrap_interval(torch.tensor([0.0, 1.0]))


def test_models_with_other_prompts_have_no_difference() -> None:
    results = compare({"weak": {"sums": WEAK}, "other": {"sums": scored([[1.0]], prompts=["another"])}})
    assert [result.difference for result in results] == [None, None]


NAN = math.nan


def test_models_are_compared_on_the_prompts_with_a_score_of_both() -> None:
    """Only the first model has scores of prompt 0, and only the second of prompt 3. Prompt 2 has one score of each."""
    first = scored([[1.0, 0.0], [1.0, 0.0], [NAN, 0.0], [NAN, NAN]])
    second = scored([[NAN, NAN], [1.0, 1.0], [1.0, NAN], [1.0, 0.0]])
    one, other = compare({"first": {"sums": first}, "second": {"sums": second}})
    assert (one.score.value, other.score.value) == (pytest.approx(1 / 3), pytest.approx(2.5 / 3))
    assert other.difference == paired_difference(torch.tensor([1.0, 1.0]), torch.tensor([0.5, 0.0]))
    assert (one.num_compared, other.num_compared) == (None, 2)
    # Of the first model, prompts 0 and 1 have two scores, and prompt 2 has one.
    assert {name: own.value for name, own in one.estimates.items()} == {
        "pass@1": pytest.approx(1 / 3),
        "pass@2": 1.0,
        "best@2": 1.0,
    }
    assert one.metrics["evaluation/failed"] == 3.0 and one.metrics["evaluation/failed_fraction"] == 3 / 8
    rows = [line.replace("│", " ").split() for line in printed([one, other]).splitlines() if "sums" in line]
    assert {"3", "(38%)", "0.250,", "0.625"} <= set(rows[0]) and rows[1][-1] == "2"


def test_a_table_without_failures_does_not_mention_them() -> None:
    assert "failed" not in printed(compare({"weak": {"sums": WEAK}, "strong": {"sums": STRONG}}))


def test_models_without_a_common_score_have_no_difference() -> None:
    first, second = scored([[NAN], [1.0]]), scored([[1.0], [NAN]])
    results = compare({"first": {"sums": first}, "second": {"sums": second}})
    assert [(result.difference, result.num_compared) for result in results] == [(None, None)] * 2


def test_a_metric_without_scores_has_a_value_only() -> None:
    """A metric of lm-eval that is not a mean over documents."""
    own = TaskScores({"accuracy": 7.5}, ["a", "b"], PromptScores(torch.full((2, 1), NAN), [0, 1], [None] * 2), 1.0, [])
    results = compare({"first": {"words": own}, "second": {"words": own}})
    assert all(result.score.value == 7.5 and math.isnan(result.score.low) for result in results)
    assert all(result.difference is None for result in results) and "7.500" in printed(results)


def printed(results: Sequence) -> str:
    console = Console(width=160, file=StringIO())
    console.print(render_results(results))
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def test_the_table_has_a_row_per_model_and_data_source() -> None:
    weak, strong = scored([[0.0], [1.0]], sources=["a", "b"]), scored([[1.0], [1.0]], sources=["a", "b"])
    lines = printed(compare({"weak": {"sums": weak}, "strong": {"sums": strong}})).splitlines()
    rows = [line.replace("│", " ").split() for line in lines if "weak" in line or "strong" in line]
    assert len(rows) == 6
    assert {"sums", "weak", "2", "0.500"} <= set(rows[0]) and {"a", "0.000"} <= set(rows[1])
    assert {"sums", "strong", "1.000", "+0.500"} <= set(rows[3])


def test_the_file_has_all_numbers(tmp_path: Path) -> None:
    results = compare({"weak": {"sums": WEAK}, "strong": {"sums": STRONG}})
    path = tmp_path / "results.json"
    write_results(path, results, {"prompts": {"weak": {"sums": prompt_records(WEAK)}}})
    saved = json.loads(path.read_text())
    assert saved["results"][1]["difference"]["value"] == pytest.approx(0.375)
    assert saved["versions"].keys() >= {"python", "torch", "transformers"}
    assert saved["prompts"]["weak"]["sums"][2] == {
        "prompt_id": 2,
        "prompt": "prompt 2",
        "data_source": None,
        "scores": [0.0, 0.0],
        "answers": [None, "1"],
    }
