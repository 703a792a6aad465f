"""Final answers are extracted in separate processes. A function that misbehaves is an error with its name."""

import os

import pytest

from flowrl.rewards.pool import PoolLimits, extract_answers
from flowrl.rewards.reward_function import RewardError
from tests.errors import rejects

HERE = "tests.user_code.answer_functions"
LIMITS = PoolLimits(workers=2, timeout_s=60.0)


def test_answers_have_the_order_of_the_responses_and_no_surrounding_spaces() -> None:
    responses = [f"{i} tokens" for i in range(20)]
    assert extract_answers(f"{HERE}:first_word", responses, LIMITS) == [str(i) for i in range(20)]
    assert extract_answers(f"{HERE}:first_word", ["a b", "", "  "], LIMITS) == ["a", None, None]
    assert extract_answers(f"{HERE}:padded", ["a", " ", ""], LIMITS) == ["a", None, None]
    assert extract_answers(f"{HERE}:padded", [], LIMITS) == []


def test_the_function_runs_in_other_processes_without_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_TOKEN", "secret")
    processes = set(extract_answers(f"{HERE}:process_id", ["x"] * 8, LIMITS))
    assert 1 <= len(processes) <= 2 and str(os.getpid()) not in processes
    assert extract_answers(f"{HERE}:variable", ["SOME_TOKEN"], LIMITS) == [None]


@pytest.mark.parametrize(
    ("function", "facts"),
    [
        ("number", ("4",)),
        ("fail", ("ValueError", "no")),
        ("end_process", ("3",)),
        ("end_program", ("SystemExit",)),
    ],
)
def test_a_function_that_gives_no_text_is_an_error_with_its_name_and_the_response(
    function: str, facts: tuple[str, ...]
) -> None:
    with rejects(function, *facts, error=RewardError) as caught:
        extract_answers(f"{HERE}:{function}", ["some-response"], LIMITS)
    assert "some-response" in str(caught.value) and "reward function" not in str(caught.value)


@pytest.mark.parametrize(("function", "fact"), [("wait", "async"), ("nowhere", "answer_functions")])
def test_a_function_that_cannot_be_loaded_is_an_error_with_its_name(function: str, fact: str) -> None:
    with rejects(function, error=RewardError) as caught:
        extract_answers(f"{HERE}:{function}", ["some-response"], LIMITS)
    assert fact in str(caught.value) and "some-response" not in str(caught.value)


def test_the_function_has_the_limits_of_the_pool() -> None:
    with rejects("hang", "timeout_s", "0.5", error=RewardError):
        extract_answers(f"{HERE}:hang", ["a", "b"], PoolLimits(workers=1, timeout_s=0.5))
    with rejects("allocate", "MemoryError", error=RewardError):
        extract_answers(f"{HERE}:allocate", ["a"], PoolLimits(workers=1, timeout_s=60.0, memory_mb=4000.0))
