"""Reward functions are imported, and signatures that cannot be called with a row are rejected."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from flowrl.rewards.reward_function import (
    RewardError,
    accepted_columns,
    is_async,
    load_reward_function,
)
from flowrl.rewards.scorer import score_row
from tests.errors import rejects


def of_row(prompt: str, response: str, answer: str, **columns: object) -> float:
    return float(response == answer)


def of_response(response: str, **columns: object) -> float:
    return float(len(response))


def as_in_trl(completions: list[str], **kwargs: Any) -> list[float]:
    return [0.0 for _ in completions]


def as_in_trl_with_prompts(prompts: list[str], completions: list[str], answer: list[str], **kwargs: Any) -> list[float]:
    return [0.0 for _ in completions]


def of_columns(response: str, answer: str, difficulty: int) -> float:
    return float(response == answer) * difficulty


def of_keywords(*, response: str) -> float:
    return float(len(response))


def of_positions(prompt: str, response: str, /) -> float:
    return 0.0


def of_nothing(*values: str) -> float:
    return 0.0


def of_completion_default(completion: str = "", truth: str | None = None) -> float:
    return float(completion == truth)


def of_misspelled_default(respones: str = "", answer: str = "") -> float:
    return float(respones == answer)


def of_prompt(prompt: str, conversation: list[dict[str, str]], answer: str) -> float:
    return float(prompt == answer)


def of_response_default(response: str = "") -> float:
    return float(len(response))


def of_completions_column(response: str, completions: list[str], **columns: object) -> float:
    """`completions` is a column of the dataset here."""
    return float(response in completions)


@pytest.mark.parametrize(
    "function",
    [of_row, of_response, of_response_default, of_completions_column, of_columns, of_keywords],
)
def test_a_function_of_a_row_is_loaded(function: Any) -> None:
    assert load_reward_function(f"{__name__}:{function.__name__}").__name__ == function.__name__


@pytest.mark.parametrize("function", [as_in_trl, as_in_trl_with_prompts])
def test_the_signature_of_trl_is_explained(function: Any) -> None:
    with rejects(function.__name__, "completions", "TRL", "prompt", "response", error=RewardError):
        load_reward_function(f"{__name__}:{function.__name__}")


@pytest.mark.parametrize(
    "function", [of_positions, of_nothing, of_completion_default, of_misspelled_default, of_prompt]
)
def test_a_function_that_does_not_receive_the_response_by_name_is_rejected(function: Any) -> None:
    with rejects(function.__name__, "prompt", "response", "answer", error=RewardError):
        load_reward_function(f"{__name__}:{function.__name__}")


def test_a_missing_function_is_rejected() -> None:
    with rejects("nowhere", "PYTHONPATH", error=RewardError):
        load_reward_function("nowhere:f")


async def asynchronous(prompt: str, response: str, answer: str, **columns: object) -> float:
    return 1.0


def generator(prompt: str, response: str, answer: str, **columns: object) -> Iterator[float]:
    yield 1.0


def as_in_verl(data_source: str, solution_str: str, ground_truth: str, extra_info: object = None) -> float:
    return 1.0


async def asynchronous_generator(response: str) -> AsyncIterator[float]:
    yield 1.0


@pytest.mark.parametrize("function", [generator, asynchronous_generator])
def test_a_function_whose_call_returns_no_number_is_rejected(function: Any) -> None:
    with rejects(function.__name__, error=RewardError):
        load_reward_function(f"{__name__}:{function.__name__}")


def test_an_async_function_is_loaded_and_awaited() -> None:
    function = load_reward_function(f"{__name__}:asynchronous")
    assert is_async(function)
    assert score_row(function, "asynchronous", {"prompt": "", "response": "", "answer": ""}) == 1.0


def scaled(response: str, scale: float = 1.0) -> float:
    return len(response) * scale


def test_options_are_keyword_arguments() -> None:
    function = load_reward_function(f"{__name__}:scaled", {"scale": 0.5})
    assert score_row(function, "scaled", {"response": "abc"}) == 1.5
    assert accepted_columns(function, ["response", "scale"]) == ["response"]
    with rejects("scaled", "size", error=RewardError):
        load_reward_function(f"{__name__}:scaled", {"size": 0.5})


def test_a_function_of_a_file_is_loaded_once(tmp_path: Path) -> None:
    file = tmp_path / "own_reward.py"
    file.write_text("calls = []\ndef score(response):\n    calls.append(1)\n    return len(calls)\n")
    functions = [load_reward_function(f"{file}:score") for _ in range(2)]
    assert [score_row(function, "score", {"response": ""}) for function in functions] == [1, 2]
    with rejects(str(tmp_path / "other.py"), error=RewardError):
        load_reward_function(f"{tmp_path / 'other.py'}:score")


def named_ids(response: str, token_ids: list[int], finish_reason: str) -> float:
    return float(len(token_ids))


@pytest.mark.parametrize(("function", "expected"), [(named_ids, ["token_ids", "finish_reason"]), (of_response, [])])
def test_token_ids_and_the_finish_reason_are_received_only_by_name(function: Any, expected: list[str]) -> None:
    assert accepted_columns(function, ["token_ids", "finish_reason", "tagged_response"]) == expected


def test_the_signature_of_verl_is_explained() -> None:
    with rejects("as_in_verl", "verl", "solution_str", "response", error=RewardError):
        load_reward_function(f"{__name__}:as_in_verl")


@pytest.mark.parametrize("name", ["builtins:max", "builtins:dict"])
def test_a_function_without_a_signature_is_rejected(name: str) -> None:
    with rejects(*name.split(":"), error=RewardError):
        load_reward_function(name)


def only_row(prompt: str, response: str, answer: str) -> float:
    return 1.0


def with_source(response: str, data_source: str, **columns: object) -> float:
    return 1.0


@pytest.mark.parametrize(
    ("function", "accepted"),
    [
        (only_row, ["prompt", "response", "answer"]),
        (of_row, ["prompt", "response", "answer", "level"]),
        (of_columns, ["response", "answer"]),
        (of_nothing, []),
        (with_source, ["prompt", "response", "answer", "data_source", "level"]),
    ],
)
def test_a_function_receives_the_columns_that_it_accepts(function: Any, accepted: list[str]) -> None:
    columns = ("prompt", "response", "answer", "data_source", "conversation", "level")
    assert accepted_columns(function, columns) == accepted
