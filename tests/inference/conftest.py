"""Provides short runs with checkpoints, and their task."""

from pathlib import Path

import pytest

from recipes.sft.config import SFTConfig
from recipes.sft.train import train
from tests.small_task import prepare_small


@pytest.fixture(scope="session")
def task_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes the quickstart's data, tokenizer and untrained model; returns their folder."""
    folder = tmp_path_factory.mktemp("task") / "data"
    prepare_small(folder)
    return folder


def train_run(task: Path, output: Path, **actor: object) -> Path:
    """Fine-tunes the untrained model for two steps, with a checkpoint of each step; returns the run folder."""
    config = SFTConfig.model_validate(
        {
            "output": output,
            "backend": "inline",
            "threads": 1,
            "steps": 2,
            "actor": {"model": {"path": task / "model"}, "optimizer": {"lr": 1e-2}, **actor},
            "data": {"train": task / "sft.jsonl", "max_prompt_tokens": 16},
            "batch_size": 16,
            "checkpoint": {"every": 1, "keep_last": 2},
            "report": {"tensorboard": False},
        }
    )
    train(config)
    return output


@pytest.fixture(scope="session")
def run_folder(task_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_run(task_folder, tmp_path_factory.mktemp("run") / "full")


@pytest.fixture(scope="session")
def lora_folder(task_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that trained an adapter."""
    return train_run(task_folder, tmp_path_factory.mktemp("run") / "adapted", lora={"rank": 2})
