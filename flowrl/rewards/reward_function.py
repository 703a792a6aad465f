"""Imports reward functions and checks their signature."""

import inspect
from collections.abc import Callable
from typing import SupportsFloat

from flowrl.config import ImportNameError, UserError, import_function

RewardFunction = Callable[..., SupportsFloat]


class RewardError(UserError):
    """Raised if a reward function cannot be loaded, raises an exception, or does not return a finite number."""


def load_reward_function(name: str) -> RewardFunction:
    """Imports the function `module:function`. Raises RewardError if the import fails or the signature is invalid."""
    try:
        function: RewardFunction = import_function(name)  # its result is checked at every call
    except ImportNameError as error:
        raise RewardError(str(error)) from error
    signature = inspect.signature(function)
    if "completions" in signature.parameters and "response" not in signature.parameters:
        raise RewardError(
            f"reward function {name}{signature} receives lists of completions, as in TRL, but flowrl calls it once per "
            f"response: write it as (prompt, response, answer, **columns), and return one number"
        )
    try:
        signature.bind_partial(prompt="", response="", answer="")
    except TypeError as error:
        raise RewardError(
            f"reward function {name}{signature} cannot be called by name ({error}); write it as (prompt, response, "
            f"answer, **columns)"
        ) from None
    return function


def required_parameters(function: RewardFunction) -> tuple[str, ...]:
    """Returns the names of a reward function's parameters without a default."""
    named = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    parameters = inspect.signature(function).parameters.values()
    return tuple(p.name for p in parameters if p.kind in named and p.default is inspect.Parameter.empty)
