"""Columns, metrics and state of `Advantages`, against values computed by hand."""

import json
import math
from typing import Any

import pytest
import torch

from flowrl.algorithms import AdaptiveKlControl, RewardMoments, gae, grpo, remax
from flowrl.algorithms.registry import advantage_estimators
from flowrl.config import AdvantageConfig, AnyAdvantage, AnyCorrection, CorrectionConfig, UserError, parse
from flowrl.config.stages.on_policy import OnPolicyConfig
from flowrl.data.batch.batch import Batch
from flowrl.run.advantages import Advantages, ShapedScores, measure_batch, shape_scores
from tests.configs import on_policy_settings

OWN = "tests.algorithms.own_functions"
LOG2 = math.log(2)

# Two rows: a prompt of 1 token and a response of 2; a prompt of 2 and a response of 1.
LENGTHS = [3, 3]
MASK = [False, True, True, False, False, True]


def batch(**tokens: list[float]) -> Batch:
    rows = {"scores": torch.tensor([1.0, 3.0]), "group": [4, 4], "truncated": torch.tensor([True, False])}
    columns = {name: torch.tensor(values) for name, values in tokens.items()}
    return Batch.from_columns(rows=rows, tokens=columns | {"response_mask": torch.tensor(MASK)}, lengths=LENGTHS)


def batch_with_ratios() -> Batch:
    """Ratios of trainer to rollout of 2 and 8 in row 0, and 1/2 in row 1."""
    return batch(
        old_logprobs=[0.0, -1.0, -1.0, 0.0, 0.0, -1.0],
        rollout_logprobs=[5.0, -1 - LOG2, -1 - 3 * LOG2, 5.0, 5.0, -1 + LOG2],
    )


def advantages_of(config: AdvantageConfig, loss: str = "ppo", **settings: float) -> Advantages:
    run = on_policy_settings(algorithm=config, rollout={"max_response_tokens": 1024})
    run["actor"]["loss"] = {"kind": loss} | settings
    return Advantages(OnPolicyConfig.model_validate(run))


def compute(rows: Batch, config: AdvantageConfig, loss: str = "ppo", **settings: float) -> Batch:
    return advantages_of(config, loss, **settings).compute(rows)[0]


def metrics_of(rows: Batch, config: AdvantageConfig, loss: str = "ppo", **settings: float) -> dict[str, float]:
    metrics = advantages_of(config, loss, **settings).compute(rows)[1].get()
    return {name: metric.result() for name, metric in metrics.items()}


def response(rows: Batch, name: str) -> list[float]:
    return rows.get(name)[torch.tensor(MASK)].tolist()


GRPO = advantage_estimators.settings(grpo)


# Rewards and advantages.


def test_gae_puts_the_score_last_and_the_kl_on_every_token() -> None:
    config = AdvantageConfig.select("gae", gamma=1.0, lam=1.0, kl_coef=0.5, kl_kind="k1")
    rows = batch(
        values=[0.0, 0.5, 0.25, 0.0, 0.0, 1.0],
        old_logprobs=[0.0, -1.0, -2.0, 0.0, 0.0, -1.0],
        ref_logprobs=[0.0, -1.5, -1.0, 0.0, 0.0, -1.0],
    )
    result = compute(rows, config)
    # KL per token: 0.5 and -1 in row 0, 0 in row 1; so the rewards are -0.25, 0.5 + 1 and 3.
    assert result.get("token_rewards").tolist() == [0, -0.25, 1.5, 0, 0, 3.0]
    assert result.get("returns").tolist() == [0, 1.25, 1.5, 0, 0, 3.0]
    assert result.get("advantages").tolist() == [0, 0.75, 1.25, 0, 0, 2.0]


def test_rloo_compares_scores_after_the_kl_penalty() -> None:
    rows = batch(old_logprobs=[0.0, -1.0, -2.0, 0.0, 0.0, -1.0], ref_logprobs=[0.0, -1.5, -1.0, 0.0, 0.0, -1.0])
    # As above, the penalties of row 0 are 0.25 and -0.5: its score of 1 becomes 1.25. That of row 1 stays 3.
    result = compute(rows, AdvantageConfig.select("rloo", kl_coef=0.5, kl_kind="k1"))
    assert result.get("advantages").tolist() == [0, -1.75, -1.75, 0, 0, 1.75]


@pytest.mark.parametrize(("stored", "kl"), [({}, math.e - 2), ({"old_logprobs": [-1.0] * 6}, 0.0)])
def test_old_logprobs_of_the_rollout_are_used_unless_others_are_stored(stored: Any, kl: float) -> None:
    settings = on_policy_settings(algorithm={"estimator": "rloo", "kl_coef": 0.5})
    settings["actor"]["old_logprobs"] = "rollout"
    rows = batch(rollout_logprobs=[-2.0] * 6, ref_logprobs=[-1.0] * 6, **stored)
    # k3 = exp(x) - x - 1 of x = ref - old.
    metrics = Advantages(OnPolicyConfig.model_validate(settings)).compute(rows)[1].get()
    assert metrics["kl"].result() == pytest.approx(kl)


def test_whitened_advantages_have_mean_zero_over_the_batch() -> None:
    result = compute(batch(values=[0.0] * 6), advantage_estimators.settings(gae, whiten=True))
    # Advantages 1, 1, 3: mean 5/3, unbiased variance 4/3.
    expected = [(1 - 5 / 3) / (4 / 3) ** 0.5] * 2 + [(3 - 5 / 3) / (4 / 3) ** 0.5]
    assert response(result, "advantages") == pytest.approx(expected, rel=1e-6)


def test_grpo_compares_the_rows_of_a_group() -> None:
    result = compute(batch(), advantage_estimators.settings(grpo, normalize_std=False))
    assert result.get("advantages").tolist() == [0, -1, -1, 0, 0, 1]
    assert result.get("token_rewards").tolist() == [0, 0, 1, 0, 0, 3]


@pytest.mark.parametrize(
    ("estimator", "column"), [("remax", "greedy_scores"), ("optimal_token_baseline", "sum_squared_probs")]
)
def test_a_missing_column_is_an_error_that_names_setting_and_column(estimator: str, column: str) -> None:
    with pytest.raises(UserError, match=rf"algorithm\.estimator {estimator}\b.*\b{column}\b"):
        compute(batch(old_logprobs=[0.0] * 6), parse(AnyAdvantage, {"estimator": estimator}))


def test_remax_reads_the_column_that_a_recipe_stores() -> None:
    rows = batch()
    rows["greedy_scores"] = Batch.from_rows([{"g": 0.5}, {"g": 4.0}])
    assert response(compute(rows, advantage_estimators.settings(remax)), "advantages") == [0.5, 0.5, -1]


def test_gdpo_normalizes_each_reward_column() -> None:
    rows = batch()
    rows["style"] = Batch.from_rows([{"s": 0.0}, {"s": 0.0}])
    config = AdvantageConfig.select("gdpo", reward_columns=("scores", "style"), reward_weights=(1.0, 2.0))
    result = compute(rows, config)
    # Only the scores differ: -1 and 1. They are divided twice by their standard deviation plus eps = 1e-4.
    normalized = 1 / (2**0.5 + 1e-4)
    expected = normalized / (2**0.5 * normalized + 1e-4)
    assert response(result, "advantages") == pytest.approx([-expected, -expected, expected], rel=1e-6)
    assert response(result, "token_rewards") == [0, 1, 3]


def test_a_reward_that_does_not_apply_to_a_group_contributes_nothing_to_gdpo() -> None:
    """Two groups of two rows. Each reward applies to one group only."""
    rows = Batch.from_columns(
        rows={
            "group": [0, 0, 1, 1],
            "code": torch.tensor([0.0, 1.0, torch.nan, torch.nan]),
            "math": torch.tensor([torch.nan, torch.nan, 0.0, 1.0]),
        },
        tokens={"input_ids": [1] * 4, "response_mask": [True] * 4},
        lengths=[1] * 4,
    )
    result = compute(rows, AdvantageConfig.select("gdpo", reward_columns=("code", "math")))
    normalized = 1 / (2 * (0.5**0.5 + 1e-4))
    expected = normalized / ((4 * normalized**2 / 3) ** 0.5 + 1e-4)
    expected_advantages = [-expected, expected, -expected, expected]
    assert result.get("advantages").tolist() == pytest.approx(expected_advantages, rel=1e-6)
    assert result.get("token_rewards").tolist() == [0, 1, 0, 1]


# Metrics.


def test_metrics_are_means_over_rows_and_response_tokens() -> None:
    rows = batch(
        rollout_logprobs=[9.0, -1.0, -2.0, 9.0, 9.0, -1.0],
        old_logprobs=[0.0, -1.0, -2.3, 0.0, 0.0, -1.0],
        ref_logprobs=[0.0, -1.0, -2.3, 0.0, 0.0, -1.0],
    )
    rows = rows.union(Batch.from_columns({"reward_truncated": [False, True]}))
    values = metrics_of(rows, GRPO)
    assert values["reward"] == 2 and values["reward_max"] == 3
    assert values["response_length"] == 1.5 and values["response_tokens"] == 3
    assert values["truncated_fraction"] == values["reward_truncated_fraction"] == 0.5
    assert values["kl"] == 0
    assert values["rollout_gap"] == pytest.approx(0.1, abs=1e-6)
    assert not [name for name in values if name.startswith(("correction/", "mismatch/", "reward_shaping", "kl_coef"))]


def test_groups_with_equal_scores_are_counted() -> None:
    """Three groups of two rows, whose order in the batch is arbitrary, and a group of one row."""
    rows = Batch.from_columns(
        rows={
            "group": [7, 3, 7, 5, 3, 5, 9],
            "scores": torch.tensor([1.0, 0.0, 1.0, 0.5, 1.0, 0.25, 0.0]),
            "shaped_scores": torch.tensor([1.0, 0.0, 1.0, 0.5, 1.0, 0.5, 0.0]),
        },
        tokens={"response_mask": [True] * 7},
        lengths=[1] * 7,
    )
    measured = {name: metric.result() for name, metric in measure_batch(rows).get().items()}
    assert measured["equal_scores_fraction"] == pytest.approx(2 / 3)  # with the shaped scores
    unshaped = measure_batch(rows.select("group", "scores", "response_mask")).get()
    assert unshaped["equal_scores_fraction"].result() == pytest.approx(1 / 3)
    single = measure_batch(rows.rows([0, 1, 3])).get()
    assert "equal_scores_fraction" not in single


def test_repeated_ngrams_of_responses_are_counted() -> None:
    rows = Batch.from_columns(
        tokens={"input_ids": [1, 1, 1, 1, 1, 1, 5, 6, 7, 8], "response_mask": [False, *[True] * 9]}, lengths=[6, 4]
    )
    # The first response has two equal n-grams of 4 tokens, the second response has one.
    assert measure_batch(rows).get()["repetition"].result() == pytest.approx(1 / 3)
    assert "repetition" not in measure_batch(rows.rows([1]).select("response_mask")).get()


# Columns of losses and corrections.


@pytest.mark.parametrize("loss", ["ppo", "gspo", "reinforce"])
def test_most_losses_add_no_column(loss: str) -> None:
    rows = batch_with_ratios()
    assert set(compute(rows, GRPO, loss).columns) == {*rows.columns, "token_rewards", "advantages"}


def test_the_behavior_policy_of_decoupled_ppo_is_the_rollout() -> None:
    rows = batch_with_ratios()
    result = compute(rows, GRPO, "decoupled_ppo")
    assert torch.equal(result.get("behavior_logprobs"), rows.get("rollout_logprobs"))


def test_kl_cov_selects_the_largest_covariances_of_the_batch() -> None:
    rows = batch(old_logprobs=[0.0, -1.0, -3.0, 0.0, 0.0, -2.0])
    # Advantages -1, -1 and 1 with mean -1/3, log-probabilities with mean -2: covariances -2/3, 2/3 and 0.
    result = compute(rows, advantage_estimators.settings(grpo, normalize_std=False), "kl_cov", cov_fraction=0.4)
    assert response(result, "selected") == [False, True, False]


def test_clip_cov_depends_on_the_step_and_is_reproducible() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = Batch.from_columns(
        rows={"scores": torch.tensor([1.0, -1.0]), "group": [0, 0]},
        tokens={
            "old_logprobs": torch.randn(400, generator=generator),
            "response_mask": torch.ones(400, dtype=torch.bool),
        },
        lengths=[200, 200],
    )
    advantages = advantages_of(GRPO, "clip_cov", cov_fraction=0.05, cov_low=0.0, cov_high=9.0)
    first, again, next_step = (advantages.compute(rows.with_seed((0, step)))[0].get("selected") for step in (1, 1, 2))
    assert first.sum() == 20
    assert torch.equal(first, again) and not torch.equal(first, next_step)


@pytest.mark.parametrize(
    ("settings", "weights"),
    [
        ({"kind": "truncated", "max_weight": 4.0}, [2, 4, 0.5]),
        # 2, 3.5 and 0.5 have the mean 2.
        ({"kind": "truncated", "max_weight": 3.5, "normalize": True}, [1, 1.75, 0.25]),
        ({"kind": f"{OWN}:kept_half"}, [0.5, 0.5, 0.5]),
    ],
)
def test_a_correction_weights_the_tokens(settings: dict[str, Any], weights: list[float]) -> None:
    config = AdvantageConfig.select("grpo", correction=parse(AnyCorrection, settings))
    result = compute(batch_with_ratios(), config)
    assert response(result, "loss_weights") == pytest.approx(weights)
    assert response(result, "loss_mask") == [True, True, True]


@pytest.mark.parametrize(
    ("settings", "mask"),
    [
        # The mean of k1 = -log ratio is -2 log 2 in row 0, and log 2 in row 1.
        (
            {"rejection_level": "sequence_mean", "kl_kind": "k1", "high": 0.5, "low": -1.5 * LOG2},
            [False, False, False],
        ),
        ({"high": 1.0}, [True, True, True]),
    ],
)
def test_rejected_rows_leave_the_loss(settings: dict[str, Any], mask: list[bool]) -> None:
    correction = parse(AnyCorrection, {"kind": "rejection"} | settings)
    result = compute(batch_with_ratios(), AdvantageConfig.select("grpo", correction=correction))
    assert response(result, "loss_mask") == mask


def test_truncated_responses_leave_the_loss_but_count_in_the_baseline() -> None:
    config = AdvantageConfig.select("grpo", mask_truncated=True, normalize_std=False)
    rows = batch()
    result = compute(rows, config)
    # Row 0 is truncated. The scores are 1 and 3, with mean 2.
    assert result.get("loss_mask").tolist() == [False, False, False, False, False, True]
    assert response(result, "advantages") == [-1, -1, 1]
    assert result.get("response_mask").tolist() == MASK
    assert "loss_mask" not in compute(rows, advantage_estimators.settings(grpo))


def test_masked_truncated_responses_and_rejected_tokens_both_leave_the_loss() -> None:
    # The ratios of trainer to rollout are 2, 8 and 1/2, so k1 is -log 2, -3 log 2 and log 2.
    correction = CorrectionConfig.select("rejection", rejection_level="token", high=0.5)
    for mask_truncated, expected in ((False, [1, 1, 0]), (True, [0, 0, 0])):
        config = AdvantageConfig.select("grpo", correction=correction, mask_truncated=mask_truncated)
        assert response(compute(batch_with_ratios(), config), "loss_mask") == expected


HALF = 0.5**0.5


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        # The trained advantages are 1, 1 and 4: mean 2, unbiased variance 3. Those of GAE are scores, because the
        # values are 0.
        ({"estimator": "gae", "whiten": True}, [-1 / 3**0.5, -1 / 3**0.5, 2 / 3**0.5]),
        ({"estimator": "reinforce_plus_plus"}, [-1 / 3**0.5, -1 / 3**0.5, 2 / 3**0.5]),
        # The mean of the group includes the truncated row: 1 - 5, 1 - 5 and 4 - 5 have the mean -3 and variance 3.
        ({"estimator": "reinforce_plus_plus_baseline"}, [-1 / 3**0.5, -1 / 3**0.5, 2 / 3**0.5]),
    ],
)
def test_truncated_responses_do_not_enter_the_normalization_of_trained_tokens(
    algorithm: dict[str, Any], expected: list[float]
) -> None:
    rows = {"scores": torch.tensor([1.0, 4.0, 10.0]), "group": [7, 7, 7], "truncated": [False, False, True]}
    mask = [False, True, True, False, True, False, True, True]
    tokens = {"response_mask": torch.tensor(mask), "values": torch.zeros(8)}
    batch = Batch.from_columns(rows=rows, tokens=tokens, lengths=[3, 2, 3])
    result = compute(batch, parse(AnyAdvantage, algorithm | {"mask_truncated": True}))
    trained = result.get("loss_mask")
    assert trained.tolist() == [False, True, True, False, True, False, False, False]
    assert result.get("advantages")[trained].tolist() == pytest.approx(expected, rel=1e-6)


def test_a_rejected_token_gives_its_reward_to_earlier_tokens_but_does_not_enter_their_normalization() -> None:
    # Only the second token of row 0 is rejected: k1 is -3 log 2. Its score is also the return of the first token.
    correction = CorrectionConfig.select("rejection", rejection_level="token", low=-2 * LOG2, high=9.0)
    result = compute(
        batch_with_ratios(), parse(AnyAdvantage, {"estimator": "reinforce_plus_plus", "correction": correction})
    )
    assert response(result, "loss_mask") == [True, False, True]
    # The trained returns are 1 and 3.
    assert response(result, "advantages") == pytest.approx([-HALF, 0, HALF], rel=1e-6)


def test_normalized_weights_have_the_mean_one_over_trained_tokens() -> None:
    correction = CorrectionConfig.select("truncated", max_weight=9.0, normalize=True)
    rows = batch_with_ratios()
    rows["truncated"] = Batch.from_rows([{"t": False}, {"t": True}])
    config = AdvantageConfig.select("grpo", correction=correction, mask_truncated=True)
    # The weights are 2 and 8 in row 0, and 1/2 in the truncated row 1.
    assert response(compute(rows, config), "loss_weights") == pytest.approx([0.4, 1.6, 0.1])
    values = metrics_of(rows, config)
    assert values["correction/weight"] == pytest.approx(1)
    # 100 / (4 + 64) of 2 trained tokens.
    assert values["correction/effective_samples"] == pytest.approx(100 / 68 / 2)
    assert values["correction/rejected_fraction"] == pytest.approx(1 / 3)


def test_a_step_without_trained_tokens_has_no_mean_weight() -> None:
    correction = CorrectionConfig.select("rejection", rejection_level="token", high=0.5)
    values = metrics_of(batch_with_ratios(), AdvantageConfig.select("grpo", correction=correction, mask_truncated=True))
    assert values["correction/rejected_fraction"] == 1 and "correction/weight" not in values


def test_losses_select_no_tokens_of_masked_truncated_responses() -> None:
    rows = batch(old_logprobs=[0.0, -1.0, -3.0, 0.0, 0.0, -2.0])
    config = AdvantageConfig.select("grpo", normalize_std=False, mask_truncated=True)
    # One token is left, whose covariance is 0.
    assert response(compute(rows, config, "kl_cov", cov_fraction=1.0), "selected") == [False, False, True]


def test_a_correction_has_metrics() -> None:
    config = AdvantageConfig.select("grpo", correction=CorrectionConfig.select("truncated", max_weight=4.0))
    values = metrics_of(batch_with_ratios(), config)
    assert values["correction/weight"] == pytest.approx(6.5 / 3)
    # (2 + 4 + 0.5)^2 / (4 + 16 + 0.25) of 3 tokens.
    assert values["correction/effective_samples"] == pytest.approx(42.25 / 20.25 / 3)
    assert values["correction/rejected_fraction"] == 0
    assert values["mismatch/logprob_gap_max"] == pytest.approx(3 * LOG2)


def test_the_effective_samples_of_row_weights_are_rows() -> None:
    correction = CorrectionConfig.select("truncated", level="sequence", max_weight=4.0)
    values = metrics_of(batch_with_ratios(), AdvantageConfig.select("grpo", correction=correction))
    # Rows of weight 4 (16, truncated) and 1/2; the first has two tokens.
    assert values["correction/weight"] == pytest.approx(8.5 / 3)
    assert values["correction/effective_samples"] == pytest.approx(4.5**2 / 16.25 / 2)


@pytest.mark.parametrize("correction", [None, CorrectionConfig.select("rejection", high=9.0)])
def test_a_loss_that_contains_the_weight_has_correction_metrics(correction: AnyCorrection | None) -> None:
    rows = batch(
        rollout_logprobs=[9.0, -1 - LOG2, -1.0, 9.0, 9.0, -1 + LOG2],
        old_logprobs=[0.0, -1.0, -1.0, 0.0, 0.0, -1.0],
    )
    values = metrics_of(rows, AdvantageConfig.select("grpo", correction=correction), "decoupled_ppo")
    # Weights of 2, 1 and 1/2.
    assert values["correction/weight"] == pytest.approx(3.5 / 3)
    assert values["correction/effective_samples"] == pytest.approx(3.5**2 / (4 + 1 + 0.25) / 3)
    assert values["correction/rejected_fraction"] == 0
    assert values["mismatch/logprob_gap_max"] == pytest.approx(LOG2)


# Reward shaping, on responses of 1, 2, 3 and 1 tokens after prompts of one; rows 0 to 2 are a group.

SHAPING_MASK = [False, True, False, True, True, False, True, True, True, False, True]
SCORES = [1.0, 3.0, 0.0, 1.0]

CLIP = {"kind": "clip_rewards", "high": 1.0}
OVERLONG = {"kind": "overlong_penalty", "max_length": 3, "buffer": 2, "coef": 0.5}
SHORTER = {"kind": "length_penalty", "correct_from": 1.0, "coef": 2.0}
NORMALIZE = {"kind": "normalize_rewards", "shift_mean": True}


def shaping_batch() -> Batch:
    rows = {"scores": torch.tensor(SCORES), "group": [7, 7, 7, 9]}
    return Batch.from_columns(rows=rows, tokens={"response_mask": torch.tensor(SHAPING_MASK)}, lengths=[2, 3, 4, 2])


def shaped_rloo(*shaping: dict[str, Any]) -> AdvantageConfig:
    return parse(AnyAdvantage, {"estimator": "rloo", "shaping": shaping})


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
        # The length penalty compares the task's score, not the clipped one, with `correct_from`.
        ([{"kind": "clip_rewards", "high": 0.5}, SHORTER], [1.5, 0.5, -1, 0.5]),
        ([{"kind": f"{OWN}:scaled", "options": {"by": 4.0}}], [4, 12, 0, 4]),
    ],
)
def test_shapings_are_applied_in_order(shaping: list[dict[str, Any]], expected: list[float]) -> None:
    assert compute(shaping_batch(), shaped_rloo(*shaping)).get("shaped_scores").tolist() == expected


@pytest.mark.parametrize(
    ("shaping", "expected"),
    [
        # The first response ends at the limit: P is -1. The second has 90 tokens: P is (100 - 20 - 90) / 20 = -1/2.
        ({"kind": "overlong_penalty", "max_length": 100, "buffer": 20}, [0.0, 0.5]),
        # The first response is the longer of two correct responses: -1/2 and 1/2.
        ({"kind": "length_penalty", "correct_from": 1.0, "coef": 1.0}, [0.5, 1.5]),
    ],
)
def test_the_length_of_a_response_includes_the_tokens_of_its_environment(
    shaping: dict[str, Any], expected: list[float]
) -> None:
    prompt, first = [False] * 3, [*[True] * 30, *[False] * 60, *[True] * 10]
    tokens = {"response_mask": torch.tensor([*prompt, *first, *prompt, *[True] * 90])}
    rows = {"scores": torch.ones(2), "group": [0, 0]}
    batch = Batch.from_columns(rows=rows, tokens=tokens, lengths=[103, 93])
    assert compute(batch, shaped_rloo(shaping)).get("shaped_scores").tolist() == expected


def test_advantages_are_computed_from_shaped_scores_and_scores_stay() -> None:
    result = compute(shaping_batch(), shaped_rloo(CLIP))
    # 1, 1 and 0 against the mean of the others.
    mask = torch.tensor(SHAPING_MASK)
    assert result.get("advantages")[mask].tolist() == [0.5, 0.5, 0.5, -1, -1, -1, 0]
    assert result.get("token_rewards")[mask].tolist() == [1, 0, 1, 0, 0, 0, 1]
    assert result.get("scores").tolist() == SCORES


def test_gdpo_on_scores_uses_the_shaped_scores() -> None:
    config = parse(AnyAdvantage, {"estimator": "gdpo", "shaping": [{"kind": "clip_rewards", "high": -1.0}]})
    assert not compute(shaping_batch(), config).get("advantages").any()


def test_the_shaping_metric_is_the_mean_change_of_the_score() -> None:
    values = metrics_of(shaping_batch(), shaped_rloo(CLIP, OVERLONG))
    assert values["reward"] == 1.25
    # 0, -2.25, -0.5 and 0.
    assert values["reward_shaping"] == pytest.approx(-0.6875)


def test_shaping_does_not_depend_on_the_order_of_the_rows() -> None:
    config, order = shaped_rloo(CLIP, OVERLONG, SHORTER), [2, 0, 3, 1]
    mixed = compute(shaping_batch().reorder(order), config).get("shaped_scores")
    assert mixed.tolist() == compute(shaping_batch(), config).get("shaped_scores")[order].tolist()


def test_a_column_that_shaping_lacks_is_an_error() -> None:
    with pytest.raises(UserError, match=r"algorithm\.shaping\b.*\bgroup\b"):
        compute(shaping_batch().drop("group"), shaped_rloo(SHORTER))


def test_a_shaping_of_another_shape_is_an_error() -> None:
    with pytest.raises(UserError, match=rf"{OWN}:summed"):
        compute(shaping_batch(), shaped_rloo({"kind": f"{OWN}:summed"}))


# State.


def test_moments_include_the_rewards_that_the_function_receives() -> None:
    before = ShapedScores(torch.empty(0), (RewardMoments(), RewardMoments(count=1, mean=3.0)))
    shaped = shape_scores(shaping_batch().tensordict("scores"), shaped_rloo(CLIP, NORMALIZE).shaping, before)
    # 3, 1, 1, 0, 1: mean 1.2, squared deviations 3.24 + 3 * 0.04 + 1.44 = 4.8, variance 1.2.
    assert shaped.moments[0] == RewardMoments() and shaped.moments[1].count == 5
    assert shaped.moments[1].mean == pytest.approx(1.2) and shaped.moments[1].std == pytest.approx(1.2**0.5)
    expected = [-0.2 / 1.2**0.5, -0.2 / 1.2**0.5, -1.2 / 1.2**0.5, -0.2 / 1.2**0.5]
    assert shaped.scores_B.tolist() == pytest.approx(expected, abs=1e-6)


NORMALIZED = parse(AnyAdvantage, {"estimator": "rloo", "shaping": [{"kind": "normalize_rewards"}]})


def scored(scores: list[float]) -> Batch:
    rows = {"scores": torch.tensor(scores), "group": [0] * len(scores)}
    mask = torch.ones(len(scores), dtype=torch.bool)
    return Batch.from_columns(rows=rows, tokens={"response_mask": mask}, lengths=[1] * len(scores))


def test_moments_accumulate_over_steps() -> None:
    advantages = advantages_of(NORMALIZED)
    advantages.compute(scored([0.0, 4.0]))
    result, _ = advantages.compute(scored([2.0, 2.0]))
    # 0, 4, 2, 2: variance 8 / 3.
    assert result.get("shaped_scores").tolist() == pytest.approx([2 / (8 / 3) ** 0.5] * 2)
    assert advantages.state()["moments"] == [{"count": 4, "mean": 2.0, "sum_of_squares": 8.0}]


def adaptive(**control: object) -> AdvantageConfig:
    return parse(AnyAdvantage, {"estimator": "rloo", "kl_coef": 0.5, "kl_control": control})


ADAPTIVE = adaptive(kind="adaptive", target=0.2, horizon=20.0)


def batch_with_kl(kl: list[float]) -> Batch:
    """Rows of one prompt token and one response token each; the prompt tokens are masked."""
    tokens = {
        "response_mask": torch.tensor([False, True] * len(kl)),
        "old_logprobs": torch.tensor([x for value in kl for x in (9.0, value - 2.0)]),
        "ref_logprobs": torch.tensor([x for _ in kl for x in (0.0, -2.0)]),
    }
    rows = {"scores": torch.tensor([1.0] * len(kl)), "group": [0] * len(kl)}
    return Batch.from_columns(rows=rows, tokens=tokens, lengths=[2] * len(kl))


def coef_after(rows: Batch, config: AdvantageConfig) -> float:
    advantages = advantages_of(config)
    advantages.compute(rows)
    return advantages.state()["kl_control"]["coef"]


def test_an_adaptive_coefficient_follows_the_kl_of_earlier_steps() -> None:
    advantages = advantages_of(ADAPTIVE)
    # KL 1 and 0: mean 0.5 is far above 0.2, so a step of 2 rows raises the coefficient by 0.2 * 2 / 20.
    rows = batch_with_kl([1.0, 0.0])
    first, _ = advantages.compute(rows)
    assert first.get("token_rewards").tolist() == [0, 0.5, 0, 1]
    second, metrics = advantages.compute(rows)
    assert second.get("token_rewards").tolist() == pytest.approx([0, 1 - 0.51, 0, 1])
    assert metrics.get()["kl_coef"].result() == pytest.approx(0.51)


def test_a_kl_of_half_the_target_lowers_the_coefficient() -> None:
    # An error of -0.5 counts as -0.2.
    assert coef_after(batch_with_kl([0.1, 0.1]), ADAPTIVE) == pytest.approx(0.5 * 0.98)


def test_rows_without_a_response_do_not_change_the_coefficient() -> None:
    rows = batch_with_kl([1.0, 0.0])
    rows["response_mask"] = Batch.from_columns(tokens={"x": torch.tensor([False] * 4)}, lengths=[2, 2])
    assert coef_after(rows, ADAPTIVE) == 0.5


def test_the_measured_kl_has_the_kind_of_the_penalty() -> None:
    config = parse(
        AnyAdvantage, {"estimator": "rloo", "kl_coef": 0.5, "kl_kind": "k2", "kl_control": {"kind": f"{OWN}:LastKl"}}
    )
    # k2 is 2 and 0.
    assert coef_after(batch_with_kl([2.0, 0.0]), config) == 1.0


def test_a_fixed_coefficient_does_not_change() -> None:
    assert coef_after(batch_with_kl([1.0, 0.0]), adaptive(kind="fixed")) == 0.5


def test_a_kl_control_without_the_interface_is_an_error() -> None:
    with pytest.raises(UserError, match=r"algorithm\.kl_control\.kind .*NoControl"):
        advantages_of(adaptive(kind=f"{OWN}:NoControl"))


def test_a_nan_kl_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"\bkl\b.*NaN"):
        advantages_of(ADAPTIVE).compute(batch_with_kl([math.nan]))


@pytest.mark.parametrize(("config", "rows"), [(NORMALIZED, scored([0.0, 4.0])), (ADAPTIVE, batch_with_kl([1.0, 0.0]))])
def test_a_restored_state_continues_exactly(config: AdvantageConfig, rows: Batch) -> None:
    original, restored = advantages_of(config), advantages_of(config)
    original.compute(rows)
    restored.restore(json.loads(json.dumps(original.state())))
    results = [advantages.compute(rows)[0].get("advantages") for advantages in (original, restored)]
    assert torch.equal(*results) and restored.state() == original.state()


def test_settings_of_the_kl_control_may_change_on_resume() -> None:
    advantages = advantages_of(ADAPTIVE)
    advantages.restore({"kl_control": {"coef": 0.25}, "moments": []})
    assert advantages._kl_control == AdaptiveKlControl(0.25, target=0.2, horizon=20.0)
