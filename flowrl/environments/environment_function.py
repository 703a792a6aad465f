"""Imports environment functions (`rollout.environment`), checks their signature, and calls them."""

import inspect
import operator
from collections.abc import Callable, Mapping
from typing import Any

from flowrl.config import ImportNameError, UserError, import_function
from flowrl.config.user_errors import convert_errors, describe_exception
from flowrl.rewards.reward_function import SHORT_REPR, accepted_columns

EnvironmentFunction = Callable[..., Any]  # Any: the result is checked at every call

RESPONSE_PARAMETERS = ("segments", "texts")
"""Parameters for the segments of the response so far, and for the text of each segment."""

ENVIRONMENT_COLUMNS = ("prompt", "conversation", "answer", "data_source")
"""Columns of flowrl that an environment function can receive, in addition to all columns of the dataset."""

_ALLOWED = "return the text or the token ids of the next segment, or None to end the response"


class EnvironmentFunctionError(UserError):
    """Error of a user's environment function: its import failed, it raised an exception, or its result is invalid."""


def load_environment_function(name: str) -> EnvironmentFunction:
    """Imports the function `module:function`. Raises EnvironmentFunctionError if its import or signature is invalid."""
    try:
        function: EnvironmentFunction = import_function(name)
        signature = inspect.signature(function)
    except (ImportNameError, ValueError) as error:
        raise EnvironmentFunctionError(str(error)) from error
    problem = None
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        problem = "is asynchronous or a generator, so a call returns no segment"
    elif any(p.kind is p.POSITIONAL_ONLY and p.default is p.empty for p in signature.parameters.values()):
        problem = "has positional-only parameters, but flowrl passes arguments by name"
    elif not accepted_columns(function, RESPONSE_PARAMETERS):
        problem = f"has neither of the parameters {' and '.join(RESPONSE_PARAMETERS)}"
    if problem is not None:
        raise EnvironmentFunctionError(
            f"environment function {name}{signature} {problem}: write it as (segments, texts, **columns), or with "
            f"only the parameters that it needs"
        )
    return function


def call_environment(
    function: EnvironmentFunction, name: str, columns: Mapping[str, Any], num_vocabulary: int
) -> str | list[int] | None:
    """Returns the next segment of a response, as text or token ids, or None if the response is complete.

    Args:
        function: the function `name`.
        name: name of the function, for errors.
        columns: the segments and texts of the response, and the columns of the row. The function receives those that
            it accepts.
        num_vocabulary: number of tokens of the vocabulary.
    Raises EnvironmentFunctionError if the function raises an exception or returns another value.
    """
    shown = [column for column in ("prompt", "answer", "texts") if column in columns]
    location = " for " + ", ".join(f"{column} {SHORT_REPR.repr(columns[column])}" for column in shown)

    def describe(error: BaseException) -> EnvironmentFunctionError:
        raised = describe_exception(error, f"environment function {name}")
        return EnvironmentFunctionError(f"{raised}{location}; {_ALLOWED}")

    with convert_errors(describe):
        value = function(**{column: columns[column] for column in accepted_columns(function, columns)})
    if value is None or isinstance(value, str):
        return value
    token_ids = _token_ids(value)
    if token_ids is None:
        raise EnvironmentFunctionError(
            f"environment function {name} returned {SHORT_REPR.repr(value)}{location}; {_ALLOWED}"
        )
    if outside := [token for token in token_ids if not 0 <= token < num_vocabulary]:
        raise EnvironmentFunctionError(
            f"environment function {name} returned the token {outside[0]}{location}, which is not in the vocabulary: "
            f"use ids from 0 to {num_vocabulary - 1}"
        )
    return token_ids


def _token_ids(value: Any) -> list[int] | None:  # Any: the result of a user's function
    """Returns a list, tuple, array or tensor of integers as a list, otherwise None."""
    values = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(values, list | tuple):
        return None
    try:
        return [operator.index(token) for token in values]
    except TypeError:
        return None
