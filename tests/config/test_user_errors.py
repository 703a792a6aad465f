"""Exceptions of users' code become errors with a location, except those that end the program."""

import asyncio

import pytest

from flowrl.config import UserError
from flowrl.config.user_errors import convert_errors, describe_exception, error_text

EXITS = [SystemExit, KeyboardInterrupt, asyncio.CancelledError, GeneratorExit]


class Unprintable(Exception):
    def __str__(self) -> str:
        raise OSError


def convert(error: BaseException) -> UserError:
    return UserError(describe_exception(error, "own:f"))


def divide(number: int) -> float:
    return number / 0


@pytest.mark.parametrize("error", [ZeroDivisionError(), StopIteration(), UserError("own"), Unprintable()])
def test_an_exception_of_any_class_is_converted(error: Exception) -> None:
    with pytest.raises(UserError) as converted, convert_errors(convert):
        raise error
    assert converted.value.__cause__ is error and type(error).__name__ in str(converted.value)


@pytest.mark.parametrize("kind", EXITS)
def test_the_end_of_a_program_or_task_is_converted_only_if_it_is_named(kind: type[BaseException]) -> None:
    with pytest.raises(kind), convert_errors(convert):
        raise kind
    with pytest.raises(UserError), convert_errors(convert, kinds=BaseException):
        raise kind


def test_a_kept_exception_passes() -> None:
    error = UserError("own")
    with pytest.raises(UserError) as kept, convert_errors(convert, kinds=BaseException, keep=UserError):
        raise error
    assert kept.value is error


def test_the_location_is_the_innermost_line_of_the_called_function() -> None:
    line = divide.__code__.co_firstlineno + 1
    with pytest.raises(UserError) as error, convert_errors(convert):
        divide(1)
    assert str(error.value).endswith(f"({__file__}, line {line})")


def test_a_call_with_wrong_arguments_has_no_location() -> None:
    with pytest.raises(UserError) as error, convert_errors(convert):
        divide(1, 2)  # pyright: ignore[reportCallIssue]  (the error of a user)
    assert __file__ not in str(error.value)


def test_an_exception_without_a_text_is_described_by_its_class() -> None:
    assert "Unprintable" in error_text(Unprintable()) and "OSError" in error_text(Unprintable())
