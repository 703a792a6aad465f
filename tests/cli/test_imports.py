"""The training function of a recipe is found, and a module that cannot be imported is reported."""

from pathlib import Path

import pytest

from flowrl.cli.imports import find_recipe, training_function
from flowrl.config import ConfigError
from tests.errors import rejects

CONFIG = "from flowrl.config import RunConfig\n\n\nclass Config(RunConfig):\n    pass\n"


def write_recipe(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, train: str) -> str:
    """Writes the package of a recipe, and returns the name of its config class."""
    (folder / name).mkdir()
    (folder / name / "config.py").write_text(CONFIG)
    (folder / name / "train.py").write_text(train)
    monkeypatch.syspath_prepend(folder)
    return f"{name}.config:Config"


def test_a_training_module_that_cannot_be_imported_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    schema = find_recipe(write_recipe(tmp_path, monkeypatch, "dividing_recipe", "1 / 0"))
    with rejects("dividing_recipe.train", "ZeroDivisionError", error=ConfigError):
        training_function(schema)


def test_an_interrupt_of_an_import_is_no_error_of_the_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    schema = find_recipe(write_recipe(tmp_path, monkeypatch, "interrupted_recipe", "raise KeyboardInterrupt"))
    with pytest.raises(KeyboardInterrupt):
        training_function(schema)
