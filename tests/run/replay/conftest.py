"""Provides the quickstart's task, and a PPO run that recorded both of its steps."""

from pathlib import Path

import pytest

from flowrl.config import RunConfig
from tests.recipes.preference_configs import write_few_pairs
from tests.run.replay.replay_cases import PPO, RECORDED
from tests.small_task import prepare_small


@pytest.fixture(scope="package")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("replay") / "data"
    prepare_small(folder)
    write_few_pairs(folder)
    return folder


@pytest.fixture(scope="package")
def recorded(task: Path, tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """Trains two steps and records them; returns the config."""
    config = PPO.build(task, tmp_path_factory.mktemp("recorded") / "run", record=RECORDED)
    PPO.train(config)
    return config
