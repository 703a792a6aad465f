"""Imports objects that settings name as `module:attribute`."""

import importlib
import re
from typing import Any

from flowrl.config.user_errors import UserError


class ImportNameError(UserError):
    """A `module:attribute` name is malformed, or its module or attribute cannot be imported."""


def check_import_name(name: str) -> str:
    """Returns `name` if it has the form `module:attribute`. Does not import the module."""
    if not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", name):
        raise ImportNameError(f"{name!r} must have the form module:name, like flowrl.rewards.final_number:score")
    return name


def import_attribute(name: str) -> Any:  # Any: the named object has any type
    """Imports a module and returns the attribute that `name` (`module:attribute`) refers to.

    Raises: ImportNameError if the import fails for any reason; its `__cause__` is the original exception.
    """
    module, _, attribute = check_import_name(name).partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except Exception as error:
        cause = f"{type(error).__name__}: {error}"
        raise ImportNameError(f"cannot import {name} ({cause}): correct the name or PYTHONPATH") from error


def import_function(name: str) -> Any:  # Any: the signature is the caller's
    """Imports the function that `name` (`module:function`) refers to. Raises ImportNameError."""
    function = import_attribute(name)
    if not callable(function):
        raise ImportNameError(f"{name} is a {type(function).__name__}, but must be a function")
    return function
