"""Reward functions are called with rows, and their exceptions and invalid scores are errors of these rows."""

import asyncio
import math
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from flowrl.rewards.reward_function import RewardError
from flowrl.rewards.scorer import check_score, extract_answer, score_batch, score_row, score_row_async
from tests.errors import rejects


def of_row(prompt: str, response: str, answer: str, **columns: object) -> float:
    return float(response == answer)


def of_columns(response: str, answer: str, difficulty: int) -> float:
    return float(response == answer) * difficulty


def of_lists(response: list[str], factor: list[float | None]) -> list[float]:
    return [len(text) * (1.0 if number is None else number) for text, number in zip(response, factor, strict=True)]


def test_a_batched_function_receives_lists() -> None:
    rows = [{"response": "ab", "factor": 0.5}, {"response": "abc"}]
    assert score_batch(of_lists, "of_lists", rows) == [1.0, 3.0]


def test_an_invalid_score_of_a_batch_concerns_only_its_row() -> None:
    rows = [{"response": "ab", "factor": math.inf}, {"response": "abc", "factor": 2.0}]
    invalid, valid = score_batch(of_lists, "of_lists", rows)
    assert isinstance(invalid, RewardError) and invalid.kind == "invalid" and valid == 6.0


def test_a_row_is_scored() -> None:
    row = {"prompt": "p", "response": "r", "answer": "r"}
    assert score_row(of_row, "own:of_row", row) == 1.0
    assert score_row(of_columns, "own:of_columns", {"response": "r", "answer": "r", "difficulty": 3}) == 3.0
    with rejects("own", "ZeroDivisionError", error=RewardError):
        score_row(lambda **columns: 1 / 0, "own:f", row)


class Raising:
    """A reward function, and a score, that raises an exception."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __call__(self, response: object) -> float:
        raise self.error

    def __float__(self) -> float:
        raise self.error

    async def call(self, response: object) -> float:
        raise self.error


CALLS: dict[str, Callable[[Raising], object]] = {
    "row": lambda function: score_row(function, "own:f", {"response": "1"}),
    "async": lambda function: asyncio.run(score_row_async(function.call, "own:f", {"response": "1"})),
    "batch": lambda function: score_batch(function, "own:f", [{"response": "1"}]),
    "answer": lambda function: extract_answer(function, "own:f", "1"),
    "score": lambda score: check_score(score, "own:f", {"response": "1"}),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("error", [ZeroDivisionError(), MemoryError()])
def test_an_exception_of_any_class_is_reported(call: Callable[[Raising], object], error: Exception) -> None:
    with rejects("own", type(error).__name__, error=RewardError) as reported:
        call(Raising(error))
    assert reported.value.__cause__ is error


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_an_interrupt_is_no_failure_of_a_function(call: Callable[[Raising], object]) -> None:
    with pytest.raises(KeyboardInterrupt):
        call(Raising(KeyboardInterrupt()))


@pytest.mark.parametrize(
    "value", [np.float32(0.5), np.float64(0.5), np.array(0.5), torch.tensor(0.5), Fraction(1, 2), Decimal("0.5")]
)
def test_a_reward_with_a_finite_float_is_accepted(value: Any) -> None:
    assert score_row(lambda response: value, "own:score", {"response": "1"}) == 0.5


@pytest.mark.parametrize(
    "value", [np.float32("nan"), torch.tensor(float("inf")), np.zeros(2), torch.zeros(2), None, "1.0", 10**400]
)
def test_a_reward_without_a_finite_float_is_rejected(value: Any) -> None:
    with rejects("own", "score", error=RewardError):
        score_row(lambda response: value, "own:score", {"response": "1"})


@pytest.mark.parametrize("value", [1e308, -1e30])
def test_a_reward_that_would_overflow_is_rejected(value: float) -> None:
    with rejects("own", "score", "18", error=RewardError):  # 1e18, the limit
        score_row(lambda response: value, "own:score", {"response": "1"})
