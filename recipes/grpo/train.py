"""GRPO, which is PPO without a critic. A response's advantage is relative to the other responses to the same prompt.

Shao et al. (2024), https://arxiv.org/abs/2402.03300. Usage: `python -m recipes.grpo.train CONFIG [key=value ...]`
"""

import sys

from flowrl.cli import run_recipe
from recipes.grpo.config import GRPOConfig

if __name__ == "__main__":  # here, because a wrong config is reported before the imports below, which take seconds
    sys.exit(run_recipe(GRPOConfig, "recipes.grpo.train:train"))

from flowrl.run.advantages import Advantages
from flowrl.run.baselines import baseline_columns
from flowrl.run.datasets import PtxText, read_prompts
from flowrl.run.evaluation import evaluate
from flowrl.run.loop import Run, StartRun, Summary
from flowrl.workers import PTX, Actor, Reference, Rollout


def train(config: GRPOConfig, start: StartRun = Run) -> Summary:
    """Trains the actor. Returns the summary of the run."""
    prompts, held_out = read_prompts(config)
    advantages, text = Advantages(config), PtxText(config)
    with start(config) as run:
        actor = run.group("actor", Actor, config.actor)
        reference = run.group("reference", Reference, config.reference)
        reward = run.rewards()
        rollout = run.group("rollout", Rollout, config.rollout, config.actor.model, seed=config.seed)
        run.add_checkpointable(actor, advantages, text)
        run.add_evaluation(held_out, lambda sets: evaluate(rollout, reward, sets, config.evaluation_by_set))

        for batch in run.rollouts(rollout, prompts, policy=actor, reward=reward):
            # The batch has responses and scores. The functions of `reward` score a response while others are generated,
            # and its models score all responses afterwards.

            # 1. Compute log-probabilities. `actor.logprobs` is omitted if a step has one update, or if the rollout's
            #    log-probabilities are exact.
            if config.actor.old_logprobs == "recompute":
                batch["old_logprobs"] = actor.logprobs(batch)
            if reference:
                batch["ref_logprobs"] = reference.logprobs(batch)
            batch = baseline_columns(batch, config.algorithm, actor, rollout, reward)  # of few estimators

            # 2. Compute advantages and metrics, on the task worker.
            batch, metrics = advantages.compute(batch)
            run.log(metrics)
            run.save_rollouts(batch)

            # 3. Update the actor. The KL to the reference, if any, is part of its loss.
            for minibatch in batch.minibatches(config.minibatch_size, epochs=config.ppo_epochs):
                run.log(text.add_gradient(actor, PTX))  # language modeling on the text of config.ptx, if any
                run.log(actor.update(minibatch, weight=text.policy_weight))

            # 4. Send the new weights to the rollout. Then the run evaluates and saves a checkpoint, if they are due.
            run.sync_weights(actor, rollout)
        run.save_model(actor)
        return run.finish()
