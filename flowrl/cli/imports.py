"""Imports a recipe's config class and training function, and prepares imports (working folder, garbage collector)."""

import gc
import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from flowrl.config import ConfigError, RunConfig, import_recipe, training_module
from flowrl.config.base import unknown_name
from flowrl.config.user_errors import convert_errors, error_text


def add_working_folder() -> None:
    """Makes modules of the working folder importable, as `python -m` does."""
    if "" not in sys.path:
        sys.path.insert(0, "")


@contextmanager
def collection_paused() -> Iterator[None]:
    """Pauses the cyclic garbage collector. Imports of torch and transformers then take a fifth less CPU time.

    The collector would traverse the new modules many times, although it can free almost none of their objects.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


_PACKAGE = "recipes"
"""Package of the included recipes. A recipe is a sub-package with the modules `config` and `train`."""


def included_recipes() -> dict[str, type[RunConfig]]:
    """Returns the config classes of the recipes that are installed with flowrl, by name."""
    package = importlib.import_module(_PACKAGE)
    names = [name for _, name, is_package in pkgutil.iter_modules(package.__path__) if is_package]
    classes = {name: _config_class_in(f"{_PACKAGE}.{name}.config") for name in sorted(names)}
    return {name: cls for name, cls in classes.items() if cls is not None}


def find_recipe(name: str) -> type[RunConfig]:
    """Returns the config class of an included recipe, such as `grpo`, or of `module:Class`. Raises ConfigError."""
    if ":" not in name:
        recipes = included_recipes()
        if name not in recipes:
            available = unknown_name("recipe", name, recipes, custom=None)
            raise ConfigError(f"{available}, or the config class of your own recipe as module:Class")
        return recipes[name]
    add_working_folder()
    return import_recipe(name, RunConfig)


def training_function(schema: type[RunConfig]) -> Callable[..., Any] | None:
    """Returns the function `train` of a recipe, or None if the recipe has none.

    The function is in `train.py` next to `config.py`, or in the module of the config class. Raises ConfigError if the
    module cannot be imported.
    """
    name = training_module(schema.__module__)
    if importlib.util.find_spec(name) is None:
        return None

    def describe(error: BaseException) -> ConfigError:
        return ConfigError(f"recipe: cannot import {name} ({error_text(error)}): correct the module or what it imports")

    with convert_errors(describe):
        module = importlib.import_module(name)
    return vars(module).get("train")


def _config_class_in(module: str) -> type[RunConfig] | None:
    """Returns the config class that a module defines, or None if there is no such module or class."""
    if importlib.util.find_spec(module) is None:
        return None
    values = vars(importlib.import_module(module)).values()
    own = (value for value in values if isinstance(value, type) and value.__module__ == module)
    return next((cls for cls in own if issubclass(cls, RunConfig)), None)
