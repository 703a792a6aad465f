"""Fixture of a small model for the tests of workers."""

import pytest

from flowrl.config import ModelConfig
from recipes.quickstart.prepare import prepare


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    """The untrained model of the quickstart. Tests must not change its folder."""
    folder = tmp_path_factory.mktemp("quickstart") / "data"
    prepare(folder, seed=0)
    return ModelConfig(path=folder / "model")
