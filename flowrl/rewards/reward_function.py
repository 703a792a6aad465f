"""Imports reward functions, checks their signature and their scores, and describes their failures."""

import functools
import inspect
import reprlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from flowrl.config import ImportNameError, UserError, import_function
from flowrl.config.user_errors import describe_exception, describe_safely

RewardFunction = Callable[..., Any]  # Any: a number, an awaitable of a number, or a list of numbers
"""A function of columns that returns a number. An async function is awaited. A batched function receives a list per
column and returns a list of numbers.
"""

MAX_SCORE = 1e18
"""Maximum magnitude of a score. Sums of squares of larger scores may overflow in float32."""

Failure = Literal["raised", "invalid", "memory", "timeout", "exited", "killed", "corrupt", "not_loaded", "closed"]
"""Kind of a failed call.

- `raised`: an exception. `memory`: MemoryError. `invalid`: no finite number, or an input that cannot be sent.
- `timeout`: no score in time. `exited`, `killed`: the process ended by itself, or by a signal.
- `corrupt`: wrote invalid data to the result channel. `not_loaded`: the import failed. `closed`: the pool was closed.
"""


FunctionKind = Literal["reward function", "answer function"]
"""What a user function returns: the score of a response, or its final answer (`evaluation.extract_answer`). Messages
show the kind.
"""


@dataclass(frozen=True)
class FunctionSpec:
    """A function of a pool."""

    name: str
    """Name with which rows are submitted. Messages show `function` instead."""

    function: str
    """`module:function` or `path/to/file.py:function`."""

    options: Mapping[str, Any] = field(default_factory=dict)  # Any: values of JSON
    """Further keyword arguments of each call."""

    batch_size: int | None = None
    """Maximum number of rows of a call. The function then receives lists and returns a list. None: one row per call."""

    kind: FunctionKind = "reward function"
    """An answer function receives the column `response` only, and returns a text or None."""

    @property
    def title(self) -> str:
        """Kind and import name, for messages."""
        return f"{self.kind} {self.function}"


@dataclass(frozen=True)
class Outcome:
    """The result of a row, or the reason why it has none."""

    score: float | None
    failure: Failure | None = None
    message: str = ""
    seconds: float = 0.0
    """Time of the last call. A batched call counts fully for each of its rows."""

    num_attempts: int = 1
    """Number of calls for this row. Calls that failed because of another row are not counted."""

    answer: str | None = None
    """Result of an answer function, which gives no score."""


class RewardError(UserError):
    """Raised if a reward function cannot be loaded, raises an exception, or does not return a finite number."""

    kind: Failure = "raised"


def make_error(kind: Failure, message: str) -> RewardError:
    """Returns an error with its kind."""
    error = RewardError(message)
    error.kind = kind
    return error


def load_reward_function(name: str, options: Mapping[str, Any] | None = None) -> RewardFunction:
    """Imports the function `module:function` or `file.py:function`, and binds the keyword arguments `options`.

    Raises RewardError if the import fails or the signature is invalid.
    """
    try:
        function: RewardFunction = import_function(name)  # its result is checked at every call
    except ImportNameError as error:
        raise RewardError(str(error)) from error
    try:
        signature = inspect.signature(function)
    except ValueError as error:
        raise RewardError(
            f"reward function {name} has no signature that Python can read: name a function that calls it"
        ) from error
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise RewardError(
            f"reward function {name} is a generator, so a call returns no number: return one number instead of yield"
        )
    parameters = signature.parameters
    foreign = next((library for parameter, library in _FOREIGN.items() if parameter in parameters), None)
    if foreign is not None and "response" not in parameters:
        raise RewardError(
            f"reward function {name}{signature} is written for {foreign}, but flowrl calls it once per response: write "
            f"it as (prompt, response, answer, **columns), and return one number"
        )
    positional = [p.name for p in parameters.values() if p.kind is p.POSITIONAL_ONLY and p.default is p.empty]
    if positional or not accepted_columns(function, ["response"]):
        problem = f"positional-only parameters ({', '.join(positional)})" if positional else "no parameter response"
        raise RewardError(
            f"reward function {name}{signature} has {problem}, but flowrl passes columns by name: write it as "
            "(prompt, response, answer, **columns), or with only the columns that it needs"
        )
    unknown = [option for option in options or () if not accepted_columns(function, [option])]
    if unknown:
        raise RewardError(
            f"reward function {name}{signature} has no parameter {', '.join(unknown)}: correct the name of the option"
        )
    return functools.partial(function, **options) if options else function


def is_async(function: RewardFunction) -> bool:
    """Returns whether a call of the function returns an awaitable."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


_FOREIGN = {
    "completions": "TRL, which passes lists of completions",
    "solution_str": "verl, which passes data_source, solution_str and ground_truth",
}
"""Parameter of reward functions of another library -> the library."""

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
"""Kinds of parameters that can receive one column by its name."""


ONLY_IF_NAMED = ("conversation", "data_source", "token_ids", "tagged_response", "finish_reason")
"""Columns that a function with `**columns` receives only if it names them."""


def accepted_names(function: RewardFunction) -> tuple[list[str], bool]:
    """Returns the columns that a reward function names, and whether it also accepts others (`**columns`)."""
    parameters = inspect.signature(function).parameters.values()
    bound = function.keywords if isinstance(function, functools.partial) else {}
    accepts_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
    return [p.name for p in parameters if p.kind in _NAMED and p.name not in bound], accepts_all


def accepted_columns(function: RewardFunction, columns: Iterable[str]) -> list[str]:
    """Returns those `columns` that a reward function accepts. Functions with `**columns` receive all, except
    `ONLY_IF_NAMED`, which a function receives only if it names them.
    """
    return select_columns(*accepted_names(function), columns)


def select_columns(names: Iterable[str], accepts_all: bool, columns: Iterable[str]) -> list[str]:
    """Returns those `columns` that a function with these `accepted_names` receives."""
    return [name for name in columns if name in names or (accepts_all and name not in ONLY_IF_NAMED)]


def describe_failure(
    error: BaseException, name: str, row: Mapping[str, Any], kind: FunctionKind = "reward function"
) -> RewardError:
    """Returns a RewardError that names the function, the exception, its location and the row."""
    failure: Failure = "memory" if isinstance(error, MemoryError) else "raised"
    return make_error(failure, describe_exception(error, f"{kind} {name}") + shown_inputs(row))


def shown_inputs(row: Mapping[str, Any]) -> str:
    """Returns the prompt, the response and the answer of a row as text that follows a message."""
    shown = [column for column in ("prompt", "response", "answer") if column in row] or list(row)
    return " for " * bool(shown) + ", ".join(f"{column} {SHORT_REPR.repr(row[column])}" for column in shown)


def show_value(value: object) -> str:
    """Returns a short text of a value of the user."""
    return describe_safely(lambda: SHORT_REPR.repr(value))


SHORT_REPR = reprlib.Repr()
SHORT_REPR.maxstring = SHORT_REPR.maxother = 400
"""Shortens long prompts and responses in error messages."""


def required_parameters(function: RewardFunction) -> tuple[str, ...]:
    """Returns the names of a reward function's parameters without a default."""
    parameters = inspect.signature(function).parameters.values()
    return tuple(p.name for p in parameters if p.kind in _NAMED and p.default is inspect.Parameter.empty)


def optional_parameters(function: RewardFunction) -> tuple[str, ...]:
    """Returns the names of a reward function's parameters with a default. Excludes keyword-only parameters, which are
    options by convention.
    """
    parameters = inspect.signature(function).parameters.values()
    is_column = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return tuple(p.name for p in parameters if p.kind is is_column and p.default is not inspect.Parameter.empty)


def load_answer_function(name: str) -> Callable[[str], object]:
    """Imports the function `module:function` or `file.py:function` that extracts the final answer of a response.

    Raises RewardError if the import fails or the function cannot be called with a response only.
    """
    try:
        function = import_function(name)
    except ImportNameError as error:
        raise RewardError(str(error)) from error
    if is_async(function):
        raise RewardError(f"{name} is async, but evaluation.extract_answer needs a sync function: remove async")
    try:
        inspect.signature(function).bind("")
    except (TypeError, ValueError) as error:
        raise RewardError(
            f"{name} cannot be called with the text of a response ({error}): give it one parameter, the response, and "
            f"return the final answer as text, or None"
        ) from error
    return function
