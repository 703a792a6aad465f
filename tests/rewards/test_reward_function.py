"""Reward functions are imported, and signatures that cannot be called with a row are rejected."""

from typing import Any

import pytest

from flowrl.rewards.reward_function import RewardError, load_reward_function
from tests.errors import rejects


def of_row(prompt: str, response: str, answer: str, **columns: object) -> float:
    return float(response == answer)


def of_response(response: str, **columns: object) -> float:
    return float(len(response))


def as_in_trl(completions: list[str], **kwargs: Any) -> list[float]:
    return [0.0 for _ in completions]


def as_in_trl_with_prompts(prompts: list[str], completions: list[str], answer: list[str], **kwargs: Any) -> list[float]:
    return [0.0 for _ in completions]


def without_answer(prompt: str, response: str) -> float:
    return 0.0


def of_completions_column(response: str, completions: list[str], **columns: object) -> float:
    """`completions` is a column of the dataset here."""
    return float(response in completions)


@pytest.mark.parametrize("function", [of_row, of_response, of_completions_column])
def test_a_function_of_a_row_is_loaded(function: Any) -> None:
    assert load_reward_function(f"{__name__}:{function.__name__}").__name__ == function.__name__


@pytest.mark.parametrize("function", [as_in_trl, as_in_trl_with_prompts])
def test_the_signature_of_trl_is_explained(function: Any) -> None:
    with rejects(function.__name__, "completions", "TRL", "prompt", "response", error=RewardError):
        load_reward_function(f"{__name__}:{function.__name__}")


def test_a_signature_without_a_column_is_rejected() -> None:
    with rejects("without_answer", "answer", error=RewardError):
        load_reward_function(f"{__name__}:without_answer")


def test_a_missing_function_is_rejected() -> None:
    with rejects("nowhere", "PYTHONPATH", error=RewardError):
        load_reward_function("nowhere:f")
