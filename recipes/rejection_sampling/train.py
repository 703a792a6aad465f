"""Rejection sampling: the policy is fine-tuned on the best of N own responses to each prompt.

Touvron et al. (2023), https://arxiv.org/abs/2307.09288, section 3.2.3.
Usage: `python -m recipes.rejection_sampling.train CONFIG [key=value ...]`
"""

import sys

from flowrl.cli import run_recipe
from recipes.rejection_sampling.config import RejectionSamplingConfig

if __name__ == "__main__":  # here, because a wrong config is reported before the imports below, which take seconds
    sys.exit(run_recipe(RejectionSamplingConfig, "recipes.rejection_sampling.train:train"))

from flowrl.run.advantages import measure_batch
from flowrl.run.datasets import read_prompts
from flowrl.run.evaluation import evaluate
from flowrl.run.loop import Run, StartRun, Summary
from flowrl.run.targets import select_best
from flowrl.workers import Actor, Rollout


def train(config: RejectionSamplingConfig, start: StartRun = Run) -> Summary:
    """Trains the policy. Returns the summary of the run."""
    prompts, held_out = read_prompts(config)
    with start(config) as run:
        actor = run.group("actor", Actor, config.actor)
        reward = run.rewards()
        rollout = run.group("rollout", Rollout, config.rollout, config.actor.model, seed=config.seed)
        run.add_checkpointable(actor)
        run.add_evaluation(held_out, lambda sets: evaluate(rollout, reward, sets, config.evaluation_by_set))

        for batch in run.rollouts(rollout, prompts, policy=actor, reward=reward):
            # The batch has responses and scores. The functions of `reward` score a response while others are generated,
            # and its models score all responses afterwards.

            # 1. Log the scores.
            run.log(measure_batch(batch))
            run.save_rollouts(batch)

            # 2. Select the best responses to each prompt. The driver waits for the scores.
            best, metrics = select_best(batch, keep=config.keep, min_score=config.min_score)
            run.log(*metrics)

            # 3. Train on the selected responses with cross-entropy.
            for minibatch in best.minibatches(config.minibatch_size):
                run.log(actor.update(minibatch))

            # 4. Send the new weights to the rollout. Then the run evaluates and saves a checkpoint, if they are due.
            run.sync_weights(actor, rollout)
        run.save_model(actor)
        return run.finish()
