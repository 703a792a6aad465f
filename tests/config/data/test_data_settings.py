"""Order and difficulty of training prompts, in the settings."""

from typing import Any

import pytest
from pydantic import ValidationError

from flowrl.config import DataConfig
from recipes.distillation.config import DistillationConfig
from recipes.grpo.config import GRPOConfig
from recipes.sft.config import SFTConfig
from tests.configs import grpo_settings

DATA = {"train": "train.jsonl", "max_prompt_tokens": 8}


@pytest.mark.parametrize(
    ("settings", "needs_success"),
    [
        ({}, False),
        ({"order": "file"}, False),
        ({"order": "curriculum"}, True),
        ({"difficulty": {"max": 0.9}}, True),
        ({"order": "file", "difficulty": {"min": 0.0}}, True),
    ],
)
def test_a_curriculum_and_a_filter_need_the_success(settings: dict[str, Any], needs_success: bool) -> None:
    assert DataConfig.model_validate(DATA | settings).needs_success == needs_success


@pytest.mark.parametrize(
    ("difficulty", "name"),
    [
        ({"min": 0.9, "max": 0.1}, "min"),
        ({"revisit": 1.5, "min": 0.0}, "revisit"),
        ({"candidates": 1}, "candidates"),
        ({"column": "rate"}, "column"),
    ],
)
def test_invalid_difficulty_is_rejected(difficulty: dict[str, Any], name: str) -> None:
    with pytest.raises(ValidationError, match=name):
        DataConfig.model_validate(DATA | {"difficulty": difficulty})


def test_a_run_without_scores_cannot_select_prompts_by_success() -> None:
    data = {"data": DATA | {"order": "curriculum"}}
    assert GRPOConfig.model_validate(grpo_settings(**data)).data.needs_success
    sft = {"output": "o", "epochs": 1, "batch_size": 1, "actor": grpo_settings()["actor"]}
    with pytest.raises(ValidationError, match=r"data\.order"):
        SFTConfig.model_validate(sft | data)
    settings = grpo_settings(**data)
    distillation = {
        name: settings[name] for name in ("output", "steps", "batch_size", "minibatch_size", "actor", "rollout", "data")
    }
    with pytest.raises(ValidationError, match=r"data\.order"):
        DistillationConfig.model_validate(distillation | {"teacher": {"model": {"path": "model"}}})
