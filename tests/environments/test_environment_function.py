"""Loads and calls environment functions. Errors name the function, the prompt, and what is allowed."""

from typing import Any

import pytest

from flowrl.environments.environment_function import (
    EnvironmentFunctionError,
    call_environment,
    load_environment_function,
)
from tests.environments import environment_functions
from tests.errors import rejects

MODULE = "tests.environments.environment_functions"
SEGMENTS = (object(),)


def call(name: str, **columns: Any) -> str | list[int] | None:
    function = load_environment_function(f"{MODULE}:{name}")
    return call_environment(function, f"{MODULE}:{name}", {"segments": SEGMENTS, "texts": ["7"], **columns}, 16)


def test_text_tokens_and_none_are_returned() -> None:
    assert call("ask_again", answer="7", prompt="1+6=") == "="
    assert call("as_array") == [5, 6]
    assert call("end_at_once") is None


@pytest.mark.parametrize("name", ["without_parameters", "asynchronous", "positional", "missing"])
def test_a_function_with_a_wrong_signature_is_rejected(name: str) -> None:
    with rejects(MODULE, name, error=EnvironmentFunctionError):
        load_environment_function(f"{MODULE}:{name}")


@pytest.mark.parametrize(
    ("name", "fact"), [("number", "1.5"), ("mixed", "4"), ("raw_bytes", "5"), ("unknown_token", "10000")]
)
def test_a_wrong_value_names_function_prompt_and_what_is_allowed(name: str, fact: str) -> None:
    allowed = ("0", "15") if name == "unknown_token" else ("text", "token", "None")
    with rejects(MODULE, name, "prompt", "12", fact, *allowed, error=EnvironmentFunctionError):
        call(name, prompt="12")


def test_an_exception_names_its_line_and_prompt() -> None:
    with rejects(
        MODULE, "failing", "KeyError", "12", environment_functions.__file__, error=EnvironmentFunctionError
    ) as error:
        call("failing", prompt="12")
    assert isinstance(error.value.__cause__, KeyError)


def test_an_exception_without_a_text_is_reported() -> None:
    with rejects("unprintable", "Unprintable", error=EnvironmentFunctionError):
        call("unprintable")


def test_an_interrupt_is_no_error_of_the_function() -> None:
    with pytest.raises(KeyboardInterrupt):
        call("interrupted")


def test_a_function_with_keywords_receives_all_columns_except_those_that_it_must_name() -> None:
    with rejects("answer", "prompt", "segments", "level", error=EnvironmentFunctionError) as error:
        call("all_columns", answer="7", prompt="1+6", level=3, conversation=[], data_source="sums")
    assert "conversation" not in str(error.value) and "data_source" not in str(error.value)
