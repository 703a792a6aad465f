import pytest

from flowrl.config import CheckpointConfig, RunConfig


def test_no_checkpoint_is_saved_by_default() -> None:
    assert CheckpointConfig().every == 0


def test_keep_best_without_checkpoints_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"keep_best .*\b1\b.* every .*\b0\b"):
        CheckpointConfig(keep_best=1)


def test_keep_best_requires_checkpoints_at_evaluated_steps() -> None:
    settings = {"output": "out", "steps": 3, "evaluate_every": 4, "checkpoint": {"every": 6, "keep_best": 1}}
    with pytest.raises(ValueError, match=r"checkpoint\.every .*\b6\b.* evaluate_every.*\b4\b.* 8\b"):
        RunConfig.model_validate(settings)
