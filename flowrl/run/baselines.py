"""Columns with which some advantage estimators compare the responses of a step."""

from typing import TYPE_CHECKING

import numpy as np

from flowrl.algorithms.registry import advantage_estimators
from flowrl.config import AdvantageConfig
from flowrl.data.batch.batch import Batch

if TYPE_CHECKING:
    from flowrl.schedules.rewards import Scoring
    from flowrl.workers.groups import ActorGroup, RolloutGroup


def baseline_columns(
    batch: Batch, config: AdvantageConfig, actor: "ActorGroup", rollout: "RolloutGroup", reward: "Scoring"
) -> Batch:
    """Returns the batch with the columns `sum_squared_probs` and `greedy_scores`, if the estimator reads them.

    `sum_squared_probs` requires one more forward pass than the log-probabilities. `greedy_scores` is the score of a
    greedy response to the prompt of each row, which the rollout generates once per prompt with its current weights.
    """
    inputs = advantage_estimators.inputs(advantage_estimators.load(config.estimator))
    if "sum_squared_probs" in inputs:
        batch["sum_squared_probs"] = actor.sum_squared_probs(batch)
    if "greedy_scores" in inputs:
        batch["greedy_scores"] = _greedy_scores(batch, rollout, reward)
    return batch


def _greedy_scores(batch: Batch, rollout: "RolloutGroup", reward: "Scoring") -> Batch:
    _, first, prompt_of_row = np.unique(batch.group_ids("prompt_id"), return_index=True, return_inverse=True)
    prompts = batch.rows(first)
    responses = rollout.generate.submit(prompts, temperature=0.0, **reward.generate_arguments)
    prompts = prompts.drop(*(name for name in responses.columns if name in prompts))
    # Not `reward.score`, which would count the responses in the metrics of the rewards.
    return reward.add_model_scores(prompts.union(responses)).select("scores").rows(prompt_of_row)
