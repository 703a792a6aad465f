"""What one step hands to the next, against values computed by hand."""

import json
from dataclasses import asdict

import pytest
import torch

from flowrl.algorithms import RewardMoments
from flowrl.config import AdvantageConfig, UserError
from flowrl.data.batch import Batch
from flowrl.data.block import LocalRef
from flowrl.run.estimate import estimate_advantages
from flowrl.run.step_state import StepState, carries, first_state, next_state

NORMALIZED = AdvantageConfig.model_validate({"estimator": "rloo", "shaping": [{"kind": "normalize_rewards"}]})


def batch(scores: list[float]) -> Batch:
    rows = {"scores": torch.tensor(scores), "group": [0] * len(scores)}
    return Batch.from_columns(
        rows=rows, tokens={"response_mask": torch.ones(len(scores), dtype=torch.bool)}, lengths=[1] * len(scores)
    )


def test_most_algorithms_carry_nothing() -> None:
    config = AdvantageConfig(estimator="grpo")
    state = first_state(config)
    assert not carries(config) and next_state(batch([1.0]), config, state) is state


def test_moments_grow_from_step_to_step() -> None:
    state = first_state(NORMALIZED)
    assert state == StepState(moments=(RewardMoments(),))
    state = next_state(batch([0.0, 4.0]), NORMALIZED, state)
    found = estimate_advantages(batch([2.0, 2.0]), NORMALIZED, state)
    # 0, 4, 2, 2: variance 8 / 3.
    assert found.get("shaped_scores").tolist() == pytest.approx([2 / (8 / 3) ** 0.5] * 2)
    state = next_state(batch([2.0, 2.0]), NORMALIZED, state)
    assert isinstance(state, LocalRef) and state.get().moments == (RewardMoments(4, 2.0, 8.0),)


def test_a_state_is_plain_numbers() -> None:
    state = StepState(moments=(RewardMoments(4, 2.0, 8.0),))
    assert json.loads(json.dumps(asdict(state))) == {"moments": [{"count": 4, "mean": 2.0, "sum_of_squares": 8.0}]}


def test_a_recipe_without_a_state_is_told() -> None:
    with pytest.raises(UserError, match="this recipe keeps no state: pass that of first_state and next_state"):
        estimate_advantages(batch([1.0, 2.0]), NORMALIZED)
