"""A PPO config file, and the error messages for it after a change."""

from pathlib import Path

import pytest

from flowrl.config import ConfigError, load
from recipes.ppo.config import PPOConfig

PPO = """\
recipe: recipes.ppo.config:PPOConfig
output: runs/test
steps: 2
batch_size: 8
minibatch_size: 4
actor:
  model: {path: model}
  optimizer: {lr: 1e-4}
critic:
  model: {path: model}
  optimizer: {lr: 1e-4}
reference:
  model: {path: model}
reward: {function: "rewards:score"}
rollout: {max_response_tokens: 8}
algorithm: {estimator: gae}
data: {train: train.jsonl, max_prompt_tokens: 8}
"""
"""All required settings."""


def error_of(path: Path, *overrides: str) -> str:
    """Returns the error message for a PPO config, without its folder."""
    with pytest.raises(ConfigError) as caught:
        load(path, overrides, PPOConfig)
    return str(caught.value).replace(f"{path.parent}/", "")


def rewrite(path: Path, old: str, new: str) -> Path:
    """Replaces a text in a file and returns the path of the file."""
    path.write_text(path.read_text().replace(old, new))
    return path
