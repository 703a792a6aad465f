"""Checks of a run's data and tokenizers before anything starts."""

import json
from pathlib import Path
from shutil import copytree

import pytest

from flowrl.data.chat import DataError
from flowrl.run.datasets import read_prompts
from recipes.grpo.config import GRPOConfig
from recipes.quickstart.prepare import prepare
from tests.configs import grpo_settings


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("datasets") / "data"
    prepare(folder, seed=0)
    return folder


def config_with_reward_model(data: Path, reward_model: Path) -> GRPOConfig:
    settings = grpo_settings(model=data / "model", reward={"model": {"path": reward_model}, "head": "fresh"})
    return GRPOConfig.model_validate(
        settings | {"data": {"train": next(data.glob("*train*")), "max_prompt_tokens": 32}}
    )


def test_a_reward_model_with_the_actors_vocabulary_is_accepted(data: Path, tmp_path: Path) -> None:
    folder = copytree(data / "model", tmp_path / "reward")
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, indent=4))  # other bytes, same vocabulary
    read_prompts(config_with_reward_model(data, folder))


def test_a_reward_model_with_another_vocabulary_is_rejected(data: Path, tmp_path: Path) -> None:
    folder = copytree(data / "model", tmp_path / "reward")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = [token for token in vocabulary if token.isdigit()][:2]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(DataError, match=r"reward\.model\.path"):
        read_prompts(config_with_reward_model(data, folder))


def test_a_reward_model_without_a_tokenizer_is_rejected(data: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"reward\.model\.path"):
        read_prompts(config_with_reward_model(data, tmp_path))
