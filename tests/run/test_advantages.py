"""From columns to advantages and metrics, against values computed by hand."""

import math

import pytest
import torch

from flowrl.config import ActorConfig, AdvantageConfig, CorrectionConfig
from flowrl.data.batch.batch import Batch
from flowrl.run.advantages import batch_metrics, estimate_advantages
from flowrl.run.loss_columns import loss_columns

# Two rows: a prompt of 1 token and a response of 2; a prompt of 2 and a response of 1.
LENGTHS = [3, 3]
MASK = [False, True, True, False, False, True]


def batch(**tokens: list[float]) -> Batch:
    rows = {"scores": torch.tensor([1.0, 3.0]), "group": [4, 4], "truncated": torch.tensor([True, False])}
    columns = {name: torch.tensor(values) for name, values in tokens.items()}
    return Batch.from_columns(rows=rows, tokens=columns | {"response_mask": torch.tensor(MASK)}, lengths=LENGTHS)


def test_gae_puts_the_score_last_and_the_kl_on_every_token() -> None:
    config = AdvantageConfig(estimator="gae", gamma=1.0, lam=1.0, kl_coef=0.5, kl_kind="k1")
    rows = batch(
        values=[0.0, 0.5, 0.25, 0.0, 0.0, 1.0],
        old_logprobs=[0.0, -1.0, -2.0, 0.0, 0.0, -1.0],
        ref_logprobs=[0.0, -1.5, -1.0, 0.0, 0.0, -1.0],
    )
    found = estimate_advantages(rows, config)
    # KL per token: 0.5 and -1 in row 0, 0 in row 1; so the rewards are -0.25, 0.5 + 1 and 3.
    assert found.get("token_rewards").tolist() == [0, -0.25, 1.5, 0, 0, 3.0]
    assert found.get("returns").tolist() == [0, 1.25, 1.5, 0, 0, 3.0]
    assert found.get("advantages").tolist() == [0, 0.75, 1.25, 0, 0, 2.0]


def test_whitened_advantages_have_mean_zero_over_the_whole_batch() -> None:
    config = AdvantageConfig(estimator="gae", whiten=True)
    found = estimate_advantages(batch(values=[0.0] * 6), config).get("advantages")
    # Advantages 1, 1, 3: mean 5/3, unbiased variance 4/3.
    expected = [(1 - 5 / 3) / (4 / 3) ** 0.5] * 2 + [(3 - 5 / 3) / (4 / 3) ** 0.5]
    assert found[torch.tensor(MASK)].tolist() == pytest.approx(expected, abs=1e-5)


def test_grpo_compares_the_rows_of_a_group() -> None:
    found = estimate_advantages(batch(), AdvantageConfig(estimator="grpo", normalize_std=False))
    assert found.get("advantages").tolist() == [0, -1, -1, 0, 0, 1]
    assert found.get("token_rewards").tolist() == [0, 0, 1, 0, 0, 3]


def test_metrics_are_means_over_rows_and_response_tokens() -> None:
    rows = batch(
        rollout_logprobs=[9.0, -1.0, -2.0, 9.0, 9.0, -1.0],
        old_logprobs=[0.0, -1.0, -2.3, 0.0, 0.0, -1.0],
        ref_logprobs=[0.0, -1.0, -2.3, 0.0, 0.0, -1.0],
    )
    found = {name: metric.result() for name, metric in batch_metrics(rows).get().items()}
    assert found["reward"] == 2 and found["reward_max"] == 3
    assert found["response_length"] == 1.5 and found["response_tokens"] == 3
    assert found["truncated_fraction"] == 0.5
    assert found["kl"] == 0
    assert found["rollout_gap"] == pytest.approx(0.1, abs=1e-6)


DECOUPLED = ActorConfig.model_validate({"model": {"path": "m"}, "optimizer": {"lr": 1.0}, "loss": "decoupled_ppo"})


@pytest.mark.parametrize("correction", [None, CorrectionConfig(kind="rejection", high=9.0)])
def test_a_loss_with_the_weight_in_its_formula_leaves_so_many_samples(correction: CorrectionConfig | None) -> None:
    log2 = math.log(2)
    rows = batch(
        rollout_logprobs=[9.0, -1 - log2, -1.0, 9.0, 9.0, -1 + log2],
        old_logprobs=[0.0, -1.0, -1.0, 0.0, 0.0, -1.0],
    )
    config = AdvantageConfig(estimator="grpo", correction=correction)
    rows = loss_columns(estimate_advantages(rows, config), DECOUPLED, seed=(0, 1))
    found = {name: metric.result() for name, metric in batch_metrics(rows).get().items()}
    # Weights of 2, 1 and 1/2.
    assert found["correction/weight"] == pytest.approx(3.5 / 3)
    assert found["correction/effective_samples"] == pytest.approx(3.5**2 / (4 + 1 + 0.25) / 3)
    assert found["correction/rejected_fraction"] == 0
    assert found["mismatch/logprob_gap_max"] == pytest.approx(log2)


def test_other_losses_without_a_correction_weigh_nothing() -> None:
    rows = batch(rollout_logprobs=[0.0] * 6, old_logprobs=[-1.0] * 6)
    assert not [name for name in batch_metrics(rows).get() if name.startswith(("correction/", "mismatch/"))]
