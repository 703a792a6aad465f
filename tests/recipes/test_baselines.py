"""Columns of estimators that compare responses with a baseline: greedy scores, and sums of squared probabilities."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from transformers import AutoModelForCausalLM

from flowrl import Batch, Cluster
from flowrl.config.placement import SINGLE
from flowrl.run.baselines import baseline_columns
from flowrl.run.datasets import read_prompts
from flowrl.schedules.rewards import Rewards
from flowrl.workers import Actor, Reward, Rollout
from recipes.grpo.config import GRPOConfig
from recipes.grpo.train import train

Configure = Callable[..., GRPOConfig]


def test_each_row_has_the_score_of_a_greedy_response_to_its_prompt(grpo_config: Configure) -> None:
    config = grpo_config(algorithm={"estimator": "remax"}, samples_per_prompt=2)
    assert config.reward is not None
    prompts = Batch.from_rows(read_prompts(config)[0].take(config.prompts_per_step))
    with Cluster(SINGLE, backend="inline", roles=config.roles, num_threads=1) as cluster:
        actor: Any = cluster.group("actor", Actor, config.actor)
        reward: Any = cluster.group("reward", Reward, config.reward)
        rollout: Any = cluster.group("rollout", Rollout, config.rollout, config.actor.model, seed=config.seed)
        scoring = Rewards(config.reward, {"reward": reward}, "reward")
        scoring.connect(rollout)
        batch = prompts.with_samples(2)
        batch = batch.union(rollout.generate(batch, **scoring.generate_arguments))
        order = [*range(1, len(batch)), 0]  # the samples of a prompt need not be adjacent
        result = baseline_columns(batch.reorder(order), config.algorithm, actor, rollout, scoring)
        greedy = prompts.union(rollout.generate(prompts, temperature=0.0))
        expected = reward.score(greedy).get("scores").repeat_interleave(2)[order]
        assert torch.equal(result.get("greedy_scores"), expected)
        assert torch.equal(result.get("scores"), batch.get("scores")[order])
        assert not torch.equal(result.get("greedy_scores"), result.get("scores"))


def test_the_sum_of_squared_probabilities_is_that_of_the_sampling_distribution(grpo_config: Configure) -> None:
    rollout = {"max_response_tokens": 6, "temperature": 0.7}
    config = grpo_config(algorithm={"estimator": "optimal_token_baseline"}, rollout=rollout)
    ids, mask = torch.tensor([3, 12, 5, 9]), torch.tensor([False, False, True, True])
    batch = Batch.from_columns(tokens={"input_ids": ids, "response_mask": mask}, lengths=[4])
    with Cluster(SINGLE, backend="inline", roles=("actor",), num_threads=1) as cluster:
        actor: Any = cluster.group("actor", Actor, config.actor)
        sums = actor.sum_squared_probs(batch).get("sum_squared_probs")
    model = AutoModelForCausalLM.from_pretrained(config.actor.model.path, dtype=torch.float32)
    with torch.no_grad():
        probs = (model(ids[None]).logits[0].double() / 0.7).softmax(-1)
    expected = [0, 0, *probs.square().sum(-1)[1:3].tolist()]
    assert sums.tolist() == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("estimator", ["remax", "optimal_token_baseline"])
def test_the_recipe_trains_with_the_estimator(estimator: str, grpo_config: Configure) -> None:
    config = grpo_config(algorithm={"estimator": estimator}, steps=2)
    train(config)
    records = [json.loads(line) for line in (config.output / "metrics.jsonl").read_text().splitlines()[1:]]
    assert len(records) == 2 and all(record["actor/grad_norm"] > 0 for record in records)


def test_a_greedy_response_of_other_weights_is_refused(grpo_config: Configure) -> None:
    with pytest.raises(ValidationError, match=r"algorithm\.estimator is remax.*schedule\.kind is one_step_off"):
        grpo_config(algorithm={"estimator": "remax"}, schedule={"kind": "one_step_off"})
