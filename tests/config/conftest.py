"""Fixtures for the tests of config files."""

from pathlib import Path

import pytest

from tests.config.ppo_file import PPO


@pytest.fixture
def ppo(tmp_path: Path) -> Path:
    """The path of a PPO config with all required settings."""
    path = tmp_path / "ppo.yaml"
    path.write_text(PPO)
    return path
