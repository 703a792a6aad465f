"""Columns for losses and corrections, decided over the whole batch, against values computed by hand."""

import math

import pytest
import torch

from flowrl.config import ActorConfig, AdvantageConfig, CorrectionConfig, UserError
from flowrl.data.batch.batch import Batch
from flowrl.run.advantages import batch_metrics, estimate_advantages
from flowrl.run.loss_columns import correct_rollouts, loss_columns

MASK = [False, True, True, False, False, True]
TRAINED = {"model": {"path": "model"}, "optimizer": {"lr": 1e-4}}
LOG2 = math.log(2)


def batch() -> Batch:
    """Ratios of trainer to rollout of 2 and 8 in row 0, and 1/2 in row 1."""
    tokens = {
        "response_mask": MASK,
        "old_logprobs": [0.0, -1.0, -1.0, 0.0, 0.0, -1.0],
        "rollout_logprobs": [5.0, -1 - LOG2, -1 - 3 * LOG2, 5.0, 5.0, -1 + LOG2],
        "advantages": [0.0, 1.0, 1.0, 0.0, 0.0, -2.0],
    }
    rows = {"scores": torch.tensor([1.0, 3.0]), "group": [4, 4], "truncated": torch.tensor([False, False])}
    return Batch.from_columns(rows=rows, tokens={n: torch.tensor(c) for n, c in tokens.items()}, lengths=[3, 3])


def actor(loss: str, **settings: float) -> ActorConfig:
    return ActorConfig.model_validate(TRAINED | {"loss": loss} | settings)


def response(found: Batch, name: str) -> list[float]:
    return found.get(name)[torch.tensor(MASK)].tolist()


@pytest.mark.parametrize("loss", ["ppo", "gspo", "reinforce"])
def test_most_losses_need_nothing(loss: str) -> None:
    given = batch()
    assert loss_columns(given, actor(loss), seed=(0, 1)) is given


def test_the_behaviour_policy_of_decoupled_ppo_is_the_rollout() -> None:
    found = loss_columns(batch(), actor("decoupled_ppo"), seed=(0, 1))
    assert torch.equal(found.get("behavior_logprobs"), batch().get("rollout_logprobs"))


def test_kl_cov_takes_the_largest_covariances_of_the_batch() -> None:
    rows = batch()
    rows["old_logprobs"] = Batch.from_columns(
        tokens={"x": torch.tensor([0.0, -1.0, -3.0, 0.0, 0.0, -2.0])}, lengths=[3, 3]
    )
    # Means -2 and 0: covariances 1 * 1, -1 * 1 and 0 * -2.
    found = loss_columns(rows, actor("kl_cov", cov_fraction=0.4), seed=(0, 1))
    assert response(found, "selected") == [True, False, False]


def test_clip_cov_draws_anew_in_every_step_and_the_same_in_the_same() -> None:
    tokens = {name: torch.randn(400, generator=torch.Generator().manual_seed(i)) for i, name in enumerate("ab")}
    names = {"a": "old_logprobs", "b": "advantages"}
    rows = Batch.from_columns(
        tokens={names[n]: c for n, c in tokens.items()} | {"response_mask": torch.ones(400, dtype=torch.bool)},
        lengths=[200, 200],
    )
    config = actor("clip_cov", cov_fraction=0.05, cov_low=0.0, cov_high=9.0)
    first, again, next_step = (loss_columns(rows, config, seed=s).get("selected") for s in ((0, 1), (0, 1), (0, 2)))
    assert first.sum() == 20
    assert torch.equal(first, again) and not torch.equal(first, next_step)


def test_truncated_weights_stop_at_the_bound() -> None:
    found = correct_rollouts(batch(), CorrectionConfig(kind="truncated", max_weight=4.0))
    assert response(found, "loss_weights") == pytest.approx([2, 4, 0.5])
    assert response(found, "loss_mask") == [True, True, True]


def test_normalised_weights_have_a_mean_of_one() -> None:
    found = correct_rollouts(batch(), CorrectionConfig(kind="truncated", max_weight=3.5, normalize=True))
    # 2, 3.5 and 0.5 have the mean 2.
    assert response(found, "loss_weights") == pytest.approx([1, 1.75, 0.25])


def test_rejected_rows_leave_the_loss() -> None:
    config = CorrectionConfig(
        kind="rejection", rejection_level="sequence_mean", kl_kind="k1", high=0.5, low=-1.5 * LOG2
    )
    # The mean of k1 = -log ratio is -2 log 2 in row 0, and log 2 in row 1.
    found = correct_rollouts(batch(), config)
    assert response(found, "loss_mask") == [False, False, False]
    wider = CorrectionConfig(kind="rejection", high=1.0)
    assert response(correct_rollouts(batch(), wider), "loss_mask") == [True, True, True]


def test_a_correction_of_ones_own_weighs_the_tokens() -> None:
    found = correct_rollouts(batch(), CorrectionConfig(kind="tests.algorithms.own_functions:kept_half"))
    assert response(found, "loss_weights") == [0.5, 0.5, 0.5]


def test_a_corrected_batch_reports_what_was_done_and_why() -> None:
    config = AdvantageConfig(estimator="grpo", correction=CorrectionConfig(kind="truncated", max_weight=4.0))
    metrics = batch_metrics(estimate_advantages(batch(), config)).get()
    found = {name: metric.result() for name, metric in metrics.items()}
    assert found["correction/weight"] == pytest.approx(6.5 / 3)
    # (2 + 4 + 0.5)^2 / (4 + 16 + 0.25) of 3 tokens.
    assert found["correction/effective_samples"] == pytest.approx(42.25 / 20.25 / 3)
    assert found["correction/rejected_fraction"] == 0
    assert found["mismatch/logprob_gap_max"] == pytest.approx(3 * LOG2)


def test_weights_of_rows_are_samples_of_rows() -> None:
    config = AdvantageConfig(
        estimator="grpo", correction=CorrectionConfig(kind="truncated", level="sequence", max_weight=4.0)
    )
    metrics = batch_metrics(estimate_advantages(batch(), config)).get()
    # Rows of weight 4 (16, cut off) and 1/2; the first stands on two tokens.
    assert metrics["correction/weight"].result() == pytest.approx(8.5 / 3)
    assert metrics["correction/effective_samples"].result() == pytest.approx(4.5**2 / 16.25 / 2)


@pytest.mark.parametrize(
    ("estimator", "column"), [("remax", "greedy_scores"), ("optimal_token_baseline", "sum_squared_probs")]
)
def test_a_column_that_is_not_there_is_named_with_what_it_is(estimator: str, column: str) -> None:
    with pytest.raises(
        UserError, match=f"algorithm.estimator {estimator} reads the column {column}, .*the batch has none"
    ):
        estimate_advantages(batch(), AdvantageConfig(estimator=estimator))


def test_remax_takes_the_column_that_a_recipe_stores() -> None:
    rows = batch()
    rows["greedy_scores"] = Batch.from_rows([{"g": 0.5}, {"g": 4.0}])
    found = estimate_advantages(rows, AdvantageConfig(estimator="remax"))
    assert response(found, "advantages") == [0.5, 0.5, -1]


def test_gdpo_normalises_each_reward_column() -> None:
    rows = batch()
    rows["style"] = Batch.from_rows([{"s": 0.0}, {"s": 0.0}])
    config = AdvantageConfig(estimator="gdpo", reward_columns=("scores", "style"), reward_weights=(1.0, 2.0))
    found = estimate_advantages(rows, config)
    # One reward differs: -1 and 1 over a standard deviation of sqrt(2), twice; the other adds nothing.
    assert response(found, "advantages") == pytest.approx([-(0.5**0.5), -(0.5**0.5), 0.5**0.5], abs=1e-3)
    assert response(found, "token_rewards") == [0, 1, 3]
