"""Scores shaped by the functions of the config, against values computed by hand."""

from typing import Any

import pytest
import torch

from flowrl.algorithms import RewardMoments
from flowrl.config import AdvantageConfig, UserError
from flowrl.data.batch.batch import Batch
from flowrl.run.advantages import batch_metrics, estimate_advantages
from flowrl.run.reward_shaping import shaped_rewards, shaping_columns

OWN = "tests.algorithms.own_functions"

# Responses of 1, 2, 3 and 1 tokens after prompts of one; rows 0 to 2 are a group.
LENGTHS = [2, 3, 4, 2]
MASK = [False, True, False, True, True, False, True, True, True, False, True]
SCORES = [1.0, 3.0, 0.0, 1.0]

CLIP = {"kind": "clip_rewards", "high": 1.0}
OVERLONG = {"kind": "overlong_penalty", "max_length": 3, "buffer": 2, "coef": 0.5}
SHORTER = {"kind": "length_penalty", "correct_from": 1.0, "coef": 2.0}
NORMALIZE = {"kind": "normalize_rewards", "shift_mean": True}


def batch() -> Batch:
    rows = {"scores": torch.tensor(SCORES), "group": [7, 7, 7, 9], "truncated": torch.tensor([False] * 4)}
    tokens = {"response_mask": torch.tensor(MASK), "rollout_logprobs": torch.zeros(len(MASK))}
    return Batch.from_columns(rows=rows, tokens=tokens, lengths=LENGTHS)


def rloo(*shaping: dict[str, Any]) -> AdvantageConfig:
    return AdvantageConfig.model_validate({"estimator": "rloo", "shaping": shaping})


def shaped(*shaping: dict[str, Any]) -> list[float]:
    return estimate_advantages(batch(), rloo(*shaping)).get("shaped_scores").tolist()


@pytest.mark.parametrize(
    ("shaping", "expected"),
    [
        ([CLIP], [1, 1, 0, 1]),
        # At 1, 2 and 3 tokens P is 0, -1/2 and -1.
        ([OVERLONG], [1, 2.75, -0.5, 1]),
        # Rows 0 and 1 are correct: 1/2 and 0; row 2 is wrong and longest: -1/2; row 3 has nothing to compare with.
        ([SHORTER], [2, 3, -1, 1]),
        ([CLIP, OVERLONG], [1, 0.75, -0.5, 1]),
        ([OVERLONG, CLIP], [1, 1, -0.5, 1]),
        # What is correct is told from the task's score, not from what the clip made of it.
        ([{"kind": "clip_rewards", "high": 0.5}, SHORTER], [1.5, 0.5, -1, 0.5]),
        ([{"kind": f"{OWN}:scaled", "options": {"by": 4.0}}], [4, 12, 0, 4]),
    ],
)
def test_shapings_are_applied_in_order(shaping: list[dict[str, Any]], expected: list[float]) -> None:
    assert shaped(*shaping) == expected


def test_advantages_are_made_of_the_shaped_scores_and_the_scores_stay() -> None:
    found = estimate_advantages(batch(), rloo(CLIP))
    # 1, 1 and 0 against the mean of the others.
    assert found.get("advantages")[torch.tensor(MASK)].tolist() == [0.5, 0.5, 0.5, -1, -1, -1, 0]
    assert found.get("token_rewards")[torch.tensor(MASK)].tolist() == [1, 0, 1, 0, 0, 0, 1]
    assert found.get("scores").tolist() == SCORES


def test_gdpo_of_the_scores_takes_the_shaped_ones() -> None:
    config = AdvantageConfig.model_validate({"estimator": "gdpo", "shaping": [{"kind": "clip_rewards", "high": -1.0}]})
    assert not estimate_advantages(batch(), config).get("advantages").any()


def test_the_metric_is_the_mean_change_and_the_reward_stays_the_tasks() -> None:
    found = batch_metrics(estimate_advantages(batch(), rloo(CLIP, OVERLONG))).get()
    assert found["reward"].result() == 1.25
    # 0, -2.25, -0.5 and 0.
    assert found["reward_shaping"].result() == pytest.approx(-0.6875)
    assert "reward_shaping" not in batch_metrics(estimate_advantages(batch(), rloo())).get()


def test_moments_are_of_the_rewards_that_come_to_the_function() -> None:
    config = rloo(CLIP, NORMALIZE)
    before = (RewardMoments(), RewardMoments(count=1, mean=3.0))
    rewards, after = shaped_rewards(batch().table("scores"), config.shaping, before)
    # 3, 1, 1, 0, 1: mean 1.2, squared deviations 3.24 + 3 * 0.04 + 1.44 = 4.8, variance 1.2.
    assert after[0] == RewardMoments() and after[1].count == 5
    assert after[1].mean == pytest.approx(1.2) and after[1].std == pytest.approx(1.2**0.5)
    expected = [-0.2 / 1.2**0.5, -0.2 / 1.2**0.5, -1.2 / 1.2**0.5, -0.2 / 1.2**0.5]
    assert rewards.tolist() == pytest.approx(expected, abs=1e-6)


def test_only_the_columns_of_the_functions_travel() -> None:
    assert shaping_columns(rloo(CLIP, NORMALIZE).shaping) == ["scores"]
    assert shaping_columns(rloo(OVERLONG, SHORTER).shaping) == ["scores", "response_mask", "group"]


def test_the_order_of_the_rows_does_not_matter() -> None:
    config, order = rloo(CLIP, OVERLONG, SHORTER), [2, 0, 3, 1]
    mixed = estimate_advantages(batch().reorder(order), config).get("shaped_scores")
    assert mixed.tolist() == estimate_advantages(batch(), config).get("shaped_scores")[order].tolist()


def test_a_missing_column_is_told() -> None:
    with pytest.raises(UserError, match=r"algorithm\.shaping reads the column group; the batch has none"):
        estimate_advantages(batch().drop("group"), rloo(SHORTER))


def test_a_result_of_another_shape_is_told() -> None:
    with pytest.raises(UserError, match=r"summed returned shape \[\], it must return rewards of shape \[4\]"):
        shaped({"kind": f"{OWN}:summed"})
