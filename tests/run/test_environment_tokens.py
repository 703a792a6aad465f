"""Advantages, metrics and staleness of responses with tokens of an environment equal those of the policy's tokens."""

from typing import Any

import pytest
import torch

from flowrl.data.batch.batch import Batch
from flowrl.run.advantages import Advantages
from flowrl.run.rollout_rows import collect_rows
from flowrl.schedules.rollout_source import staleness_metrics
from recipes.ppo.config import PPOConfig
from tests.configs import ppo_settings
from tests.engines.closeness import assert_norm_close

NUM_POLICY = (3, 1, 4, 2)
"""Number of the policy's tokens of each response. An environment returns tokens before the last of them."""

COLUMNS = ("old_logprobs", "ref_logprobs", "rollout_logprobs", "values")


def batch(num_environment: int) -> Batch:
    """Returns rows with a prompt of two tokens, with the same policy tokens for any number of environment tokens."""
    draws = torch.rand(len(COLUMNS), sum(NUM_POLICY), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    columns = dict(zip(COLUMNS, (-draws).split(1), strict=True))
    columns |= {"weight_version": torch.arange(sum(NUM_POLICY))[None] % 3}
    mask, lengths = [], []
    for count in NUM_POLICY:
        inner = num_environment if count > 1 else 0
        mask += [False, False, *[True] * (count - 1), *[False] * inner, True]
        lengths.append(2 + count + inner)
    mask_T = torch.tensor(mask)
    tokens = {"response_mask": mask_T}
    for name, values in columns.items():
        spoilt = torch.full(mask_T.shape, -1 if name == "weight_version" else -7.0, dtype=values.dtype)
        tokens[name] = spoilt.masked_scatter(mask_T, values[0])
    rows = {"scores": torch.tensor([1.0, 0.5, 0.0, 2.0]), "group": [0, 0, 1, 1], "truncated": [False] * 4}
    rows |= {"prompt": ["p"] * 4, "response": ["r"] * 4}
    return Batch.from_columns(rows=rows, tokens=tokens, lengths=lengths).with_seed((0, 1))


GAE = {"estimator": "gae", "gamma": 0.9, "lam": 0.8}
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "gae": (GAE | {"whiten": True}, "ppo"),
    "KL penalty": (GAE | {"kl_coef": 0.3, "kl_control": {"kind": "adaptive", "target": 0.1, "horizon": 100}}, "ppo"),
    "token correction": (GAE | {"correction": {"kind": "truncated", "level": "token", "max_weight": 1.1}}, "ppo"),
    "sequence correction": (GAE | {"correction": {"kind": "masked", "level": "sequence", "max_weight": 1.2}}, "ppo"),
    "covariances": (GAE, "kl_cov"),
    "decoupled": (GAE, "decoupled_ppo"),
}


@pytest.mark.parametrize("name", CASES)
def test_environment_tokens_change_no_column_and_no_metric(name: str) -> None:
    algorithm, loss = CASES[name]
    settings = ppo_settings(algorithm=algorithm)
    settings["actor"] |= {"loss": loss, "old_logprobs": "recompute"}
    results = []
    for num_tokens in (0, 5):
        given = batch(num_tokens)
        advantages = Advantages(PPOConfig.model_validate(settings))
        computed, metrics = advantages.compute(given)
        mask = given.get("response_mask")
        columns = [column for column in computed.columns if column not in given.columns]
        tokens = {column: computed.get(column) for column in columns if column != "behavior_logprobs"}
        assert all(not values[~mask].any() for key, values in tokens.items() if key != "loss_weights")
        values = {key: metric.result() for key, metric in metrics.get().items()}
        results.append(({key: column[mask] for key, column in tokens.items()}, values, advantages.state()))
    (columns, values, state), (own_columns, own_values, own_state) = results
    assert own_values.pop("environment_length") == 15 / 4
    assert own_values == pytest.approx(values) and "environment_length" not in values
    assert columns.keys() == own_columns.keys() >= {"token_rewards", "advantages", "returns"}
    for key, column in columns.items():
        assert_norm_close(own_columns[key].double(), column.double())
    assert str(own_state) == str(state)


def test_the_score_is_at_the_last_policy_token() -> None:
    given = batch(2)
    settings = ppo_settings(algorithm=GAE)
    rewards = Advantages(PPOConfig.model_validate(settings)).compute(given)[0].get("token_rewards")
    last = torch.from_numpy(given.lengths()).cumsum(0) - 1
    assert rewards[last].tolist() == [1.0, 0.5, 0.0, 2.0] and rewards.sum() == 3.5


def test_staleness_is_that_of_policy_tokens() -> None:
    results = [staleness_metrics(batch(num), 4, 4).get() for num in (0, 5)]
    assert results[0] == results[1] and results[0]["staleness_max"].result() == 4


def test_saved_rows_count_the_tokens_of_both_producers() -> None:
    rows = collect_rows(batch(5)).get()
    assert [row["response_length"] for row in rows] == list(NUM_POLICY)
    assert [row["environment_length"] for row in rows] == [5, 0, 5, 5]
    assert [row["version"] for row in rows] == [row["version"] for row in collect_rows(batch(0)).get()]
