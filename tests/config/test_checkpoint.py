import pytest

from flowrl.config import CheckpointConfig, RunConfig


def test_nothing_is_saved_unless_asked_for() -> None:
    assert CheckpointConfig().every == 0


def test_the_best_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="keep_best is 1, but every is 0"):
        CheckpointConfig(keep_best=1)


def test_the_best_are_kept_of_steps_that_are_evaluated() -> None:
    settings = {"output": "out", "steps": 3, "evaluate_every": 4, "checkpoint": {"every": 6, "keep_best": 1}}
    with pytest.raises(ValueError, match=r"checkpoint\.every is 6, .* evaluate_every, 4: set it to 8"):
        RunConfig.model_validate(settings)
