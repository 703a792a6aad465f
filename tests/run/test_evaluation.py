"""Evaluations of held-out prompts by hand-computed scores, and the history of a run's evaluations."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from flowrl import Batch, Dispatch, Worker, make_tensordict, register
from flowrl.algorithms.evaluation_estimates import bootstrap_interval, mean_at_k
from flowrl.config import EvaluationConfig, RoleConfig, RunConfig
from flowrl.data.batch.block import LocalRef
from flowrl.data.batch.tensordicts import lengths, num_rows
from flowrl.run.evaluation import (
    Evaluation,
    EvaluationHistory,
    PromptScores,
    evaluate,
    evaluate_loss,
    measure_episodes,
    measure_scores,
)
from flowrl.run.loop import Run
from tests.conftest import ClusterMaker
from tests.errors import rejects

SCORES = {0: [1.0, 0.0, 0.5], 1: [0.0, 0.0, 0.25], 2: [1.0, 1.0, 1.0], 4: [math.nan], 5: [math.inf]}
"""Prompt -> score of each sample."""


class Table(Worker):
    """Generates responses of `prompt_id + 1` tokens, and scores them by the table `SCORES`."""

    @register(
        Dispatch.DP_COMPUTE_PROTO,
        blocking=False,
        reads=("prompt_id", "sample"),
        writes=("response_mask", "response", "warmth"),
    )
    def generate(self, batch: TensorDict, temperature: float | None = None) -> TensorDict:
        lengths_B = batch["rows", "prompt_id"] + 1
        warmth = torch.full((num_rows(batch),), -1.0 if temperature is None else temperature)
        rows = {"response": [f"{n} tokens" for n in lengths_B.tolist()], "warmth": warmth}
        mask_T = torch.ones(int(lengths_B.sum()), dtype=torch.bool)
        return make_tensordict(rows, {"response_mask": mask_T}, lengths_B)

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False, reads=("prompt_id", "sample"), writes=("scores",))
    def score(self, batch: TensorDict, evaluation: bool = False) -> TensorDict:
        assert evaluation
        pairs = zip(batch["rows", "prompt_id"].tolist(), batch["rows", "sample"].tolist(), strict=True)
        return make_tensordict({"scores": torch.tensor([SCORES[prompt][sample] for prompt, sample in pairs])})

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False, reads=("input_ids", "response_mask"), writes=("logprobs",))
    def logprobs(self, batch: TensorDict) -> TensorDict:
        return make_tensordict(tokens={"logprobs": -batch["tokens", "input_ids"].float()}, lengths=lengths(batch))


@pytest.fixture
def table(open_cluster: ClusterMaker) -> Any:
    return open_cluster("inline", {"main": [1]}, {"actor": "main"}).group("actor", Table)


def prompts(*ids: int) -> Batch:
    return Batch.from_rows([{"prompt_id": number, "prompt": f"prompt {number}"} for number in ids])


def without_interval(result: Evaluation) -> dict[str, float]:
    return {name: value for name, value in result.items() if not name.startswith("evaluation/accuracy_")}


def test_a_greedy_evaluation_scores_one_response_per_prompt(table: Any) -> None:
    result = evaluate(table, table, prompts(0, 1, 2))
    assert without_interval(result) == {"accuracy": pytest.approx(2 / 3), "evaluation/response_length": 2.0}
    assert result.num_rows == 3
    assert [(row["row"], row["prompt"], row["score"]) for row in result.rows] == [
        (0, "prompt 0", 1.0),
        (1, "prompt 1", 0.0),
        (2, "prompt 2", 1.0),
    ]
    assert [row["other_scores"]["warmth"] for row in result.rows] == [0.0] * 3


def test_several_samples_give_their_mean_and_the_mean_of_the_best(table: Any) -> None:
    result = evaluate(table, table, prompts(0, 1), EvaluationConfig(samples=3, temperature=0.7))
    # Mean of 1, 0, 0.5, 0, 0, 0.25; best 1 and 0.25; prompt 0 has a correct response; lengths 1 and 2.
    assert without_interval(result) == {
        "accuracy": pytest.approx(1.75 / 6),
        "accuracy_best@3": pytest.approx(0.625),
        "accuracy_pass@3": 0.5,
        "evaluation/response_length": 1.5,
    }
    assert result.num_rows == 2
    drawn = [(row["prompt_id"], row["sample"], row["score"]) for row in result.rows]
    assert drawn == [(prompt, sample, SCORES[prompt][sample]) for prompt in (0, 1) for sample in range(3)]
    assert [row["other_scores"]["warmth"] for row in result.rows] == [pytest.approx(0.7)] * 6


def test_the_interval_is_that_of_the_mean_scores_of_prompts(table: Any) -> None:
    config = EvaluationConfig(samples=3, temperature=0.7)
    result = evaluate(table, table, {"": prompts(0, 1, 2), "hard": prompts(1)}, config)
    expected = bootstrap_interval(mean_at_k(torch.tensor([SCORES[prompt] for prompt in (0, 1, 2)])))
    assert result["evaluation/accuracy_low"] == expected.low < result["accuracy"]
    assert result["evaluation/accuracy_high"] == expected.high > result["accuracy"]
    assert result["evaluation/accuracy_low/hard"] == pytest.approx(0.25 / 3)


def test_the_majority_is_the_score_of_the_most_frequent_answer(table: Any) -> None:
    """All responses to a prompt are equal, so their answer has the mean score. Prompt 1 has no answer."""
    function = f"{Path(__file__).with_name('answer_functions.py')}:first_character"
    config = EvaluationConfig(samples=3, temperature=0.7, pass_score=0.25, extract_answer=function)
    result = evaluate(table, table, prompts(0, 1, 2), config)
    assert result["accuracy_majority@3"] == pytest.approx((0.5 + 0.25 / 3 + 1) / 3)
    assert result["accuracy_pass@3"] == 1.0
    assert result.scores[""].answers == [["1"] * 3, [None] * 3, ["3"] * 3]


@pytest.mark.parametrize("function", ["returns_number", "nowhere", "end_process"])
def test_a_function_that_extracts_no_text_is_rejected_by_name(table: Any, function: str) -> None:
    """A function that ends its process does not end the run."""
    name = f"tests.run.answer_functions:{function}"
    config = EvaluationConfig(samples=3, temperature=0.7, extract_answer=name)
    with rejects(function):
        evaluate(table, table, prompts(0), config)


def test_data_sources_have_values_of_their_own(table: Any) -> None:
    rows = [{"prompt_id": i, "prompt": "p", "data_source": source} for i, source in enumerate(("a", "b", "a"))]
    result = evaluate(table, table, {"": Batch.from_rows(rows), "one": Batch.from_rows(rows[:1])})
    assert result["accuracy_source/a"] == 1.0 and result["accuracy_source/b"] == 0.0
    assert not any(name.startswith("accuracy_source") and name.endswith("/one") for name in result)
    # Each resample has two prompts of a and one of b, whose scores do not vary.
    assert result["evaluation/accuracy_low"] == result["evaluation/accuracy_high"] == pytest.approx(2 / 3)
    assert result.scores[""].sources == ["a", "b", "a"] and result.scores[""].prompt_ids == [0, 1, 2]


# Responses whose reward failed.


NAN = float("nan")
PARTIAL = PromptScores(
    torch.tensor([[1.0, NAN, 0.0, 0.5], [NAN, NAN, 3.0, NAN], [NAN] * 4, [1.0, 0.0, 0.0, 0.0]]),
    [0, 1, 2, 3],
    ["a", "b", "b", "a"],
    [["4", "4", "5", "6"], ["7", "7", "8", None], ["9"] * 4, ["1", "2", "2", None]],
)
"""Prompts with 3, 1, 0 and 4 scores."""


def test_estimates_use_the_prompts_with_enough_scores() -> None:
    metrics = measure_scores(PARTIAL, EvaluationConfig(samples=4, temperature=1.0))
    interval = bootstrap_interval(torch.tensor([0.5, 3.0, 0.25]), strata=["a", "b", "a"])
    assert metrics == {
        "accuracy": 1.25,  # (0.5 + 3 + 0.25) / 3
        "evaluation/accuracy_low": interval.low,
        "evaluation/accuracy_high": interval.high,
        "accuracy_best@4": 1.0,  # only prompt 3 has 4 scores
        "accuracy_pass@4": 1.0,
        "accuracy_majority@4": 0.5,  # prompt 0: 1 (of answer 4); prompt 3: 0; prompts 1 and 2: unknown
        "accuracy_source/a": 0.375,
        "accuracy_source/b": 3.0,
        "evaluation/failed": 8.0,
        "evaluation/failed_fraction": 0.5,
        "evaluation/failed_as_worst": 0.34375,  # prompt means 1.5 / 4, 3 / 4, 0 and 1 / 4
        "evaluation/failed_as_best": 1.84375,  # 4.5 / 4, 3, 3 and 1 / 4, with the best score 3
    }


def test_the_worst_score_is_0_or_lower_and_the_best_one_at_least_that_of_a_correct_response() -> None:
    negative = PromptScores(torch.tensor([[-2.0], [-1.0], [NAN], [NAN]]), [0, 1, 2, 3], [None] * 4)
    metrics = measure_scores(negative, EvaluationConfig(pass_score=0.5))
    assert metrics["accuracy"] == -1.5
    assert (metrics["evaluation/failed_as_worst"], metrics["evaluation/failed_as_best"]) == (-1.75, -0.5)


def test_without_any_score_there_are_only_bounds() -> None:
    metrics = measure_scores(PromptScores(torch.full((2, 1), NAN), [0, 1], [None] * 2), EvaluationConfig())
    assert math.isnan(metrics["accuracy"]) and math.isnan(metrics["evaluation/accuracy_low"])
    assert (metrics["evaluation/failed_fraction"], metrics["evaluation/failed_as_best"]) == (1.0, 1.0)


def test_a_score_that_is_no_finite_number_is_a_failure(table: Any) -> None:
    """A reward model that is called directly may return such scores. Prompts 4 and 5 have NaN and infinity."""
    result = evaluate(table, table, prompts(0, 4, 5, 2))
    assert (result["accuracy"], result["evaluation/failed"]) == (1.0, 2.0)
    assert [row["score"] for row in result.rows] == [1.0, None, None, 1.0]


def test_events_of_episodes_are_shares() -> None:
    """An event counts once per episode."""
    records = [
        {"turns": 2, "counts": {"tool_call": 2, "answer": 1}},
        {"turns": 1, "counts": {"tool_call": 0, "answer": 1}},
        {"turns": 1, "counts": {}},
        {"turns": 4, "counts": {"tool_call": 3, "max_turns": 1}},
    ]
    assert measure_episodes(make_tensordict({"episode": records})) == {
        "evaluation/turns": 2.0,
        "evaluation/environment/answer": 0.5,
        "evaluation/environment/max_turns": 0.25,
        "evaluation/environment/tool_call": 0.5,
    }


def test_every_named_set_has_its_metrics_and_its_rows(table: Any) -> None:
    sets = {"": prompts(0, 1), "hard": prompts(1), "none": Batch.from_rows([])}
    result = evaluate(table, table, sets)
    assert without_interval(result) == {
        "accuracy": 0.5,
        "evaluation/response_length": 1.5,
        "accuracy/hard": 0.0,
        "evaluation/response_length/hard": 2.0,
    }
    assert result.num_rows == 3
    assert [(row["row"], row.get("set"), row["prompt_id"]) for row in result.rows] == [
        (0, None, 0),
        (1, None, 1),
        (2, "hard", 1),
    ]


def test_a_set_has_samples_and_a_temperature_of_its_own(table: Any) -> None:
    own = {"": EvaluationConfig(), "hard": EvaluationConfig(samples=3, temperature=0.7)}
    result = evaluate(table, table, {"hard": prompts(0, 1), "": prompts(0, 1)}, own)
    assert result.keys() >= {"accuracy", "accuracy/hard", "accuracy_best@3/hard"} and "accuracy_best@3" not in result
    assert (result["accuracy"], result["accuracy/hard"]) == (0.5, pytest.approx(1.75 / 6))
    assert [row["set"] for row in result.rows if row.get("set")] == ["hard"] * 6


def examples(*rows: list[int]) -> Batch:
    """Examples whose first token is not part of the response."""
    mask = torch.tensor([position > 0 for row in rows for position in range(len(row))])
    ids = torch.tensor([token for row in rows for token in row])
    return Batch.from_columns(tokens={"input_ids": ids, "response_mask": mask}, lengths=[len(row) for row in rows])


def test_the_validation_loss_is_the_mean_over_response_tokens_of_each_set(table: Any) -> None:
    both = {"": examples([9, 1, 2], [9, 6]), "short": examples([9, 4])}
    result = evaluate_loss(table, both)
    assert result == {"validation_loss": 3.0, "validation_loss/short": 4.0} and result.num_rows == 3


def rising(step: int, num_rows: int = 4) -> Evaluation:
    return Evaluation({"accuracy": step / 10}, num_rows, [{"row": 0}])


def test_the_first_and_the_last_result_are_kept_and_restored() -> None:
    history = EvaluationHistory()
    for step in range(6):
        history.add(step, rising(step))
        assert history.has_result_of(step) and not history.has_result_of(step + 1)
    assert [step for step, _ in history.results] == [0, 5]
    restored = EvaluationHistory()
    restored.restore(json.loads(json.dumps(history.state())))
    assert restored.results == history.results
    assert restored.summary(5) == {"accuracy_before": 0.0, "accuracy_after": 0.5, "evaluation_rows": 4}
    assert restored.summary(6) == {"accuracy_before": 0.0, "accuracy_after": None, "evaluation_rows": 4}
    restored.add(6, rising(6))
    assert [step for step, _ in restored.results] == [0, 6]


def test_the_failures_of_a_pending_evaluation_are_restored() -> None:
    """The first evaluation, whose metrics select the values of the log record, has no failures."""
    history = EvaluationHistory()
    history.add(0, rising(0))
    failures = {"evaluation/failed": 3.0, "evaluation/failed_as_best/hard": 0.75}
    restored = EvaluationHistory()
    restored.restore(history.state(), [(2, 4)], [{"step": 2, "reward": 0.5, "accuracy": 0.25, **failures}])
    assert dict(restored.results[-1][1]) == {"accuracy": 0.25, **failures}


def test_results_of_one_step_are_merged() -> None:
    history = EvaluationHistory()
    history.add(0, rising(0))
    history.add(0, Evaluation({"validation_loss": 2.0}, 3))
    history.add(2, Evaluation({"validation_loss": 1.0}, 3))
    history.add(2, rising(2))
    assert [(step, dict(result), result.num_rows) for step, result in history.results] == [
        (0, {"accuracy": 0.0, "validation_loss": 2.0}, 7),
        (2, {"accuracy": 0.2, "validation_loss": 1.0}, 7),
    ]


def test_an_evaluation_without_rows_is_no_result() -> None:
    history = EvaluationHistory()
    history.add(0, Evaluation({}))
    assert not history.has_result_of(0) and history.summary(0) == {"evaluation_rows": 0}


class LoggingConfig(RunConfig):
    actor: RoleConfig = RoleConfig()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    placement = {"device": "cpu", "pools": {"main": [1]}, "roles": {"actor": "main"}}
    settings = {"output": tmp_path / "out", "steps": 1, "backend": "inline", "placement": placement}
    report = {"tensorboard": False, "rollouts": None}
    with Run(LoggingConfig.model_validate(settings | {"report": report})) as run:
        yield run


@pytest.mark.parametrize("result", [None, "0.5", 0.5, [0.5], torch.tensor(0.5), prompts(0)])
def test_an_evaluation_without_a_dictionary_is_rejected(run: Run, result: Any) -> None:
    with rejects("run.log", "accuracy"):
        run.log(result)


@pytest.mark.parametrize("value", [None, "0.5", {"easy": 0.5}, torch.tensor(0.5), np.float32(0.5), True])
def test_an_evaluation_with_a_value_that_is_no_number_is_rejected_by_name(run: Run, value: Any) -> None:
    result: Any = {"win_rate": value}
    for logged in (result, Evaluation(result)):
        with rejects("run.log", "win_rate", "Mean", "float"):
            run.log(logged)


def test_a_future_without_numbers_is_rejected_by_name(run: Run) -> None:
    run.log(LocalRef({"win_rate": "high"}))
    with rejects("run.log", "win_rate", "high"):
        next(run.batches([prompts(0)], policy=run.group("actor", Table)))


def test_a_result_that_is_not_finite_is_recorded_as_null(run: Run) -> None:
    run.log({"win_rate": float("nan")})
    assert next(run.batches([prompts(0)], policy=run.group("actor", Table))).num_rows == 1
    (record,) = [json.loads(line) for line in (run.config.output / "metrics.jsonl").read_text().splitlines()]
    assert record == {"step": 0, "win_rate": None}


def test_a_role_that_the_config_lacks_is_rejected_by_name(run: Run) -> None:
    with rejects("judge", "LoggingConfig", "actor", "RoleConfig", "placement.roles.judge"):
        run.group("judge", Table)
