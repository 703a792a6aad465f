"""PPO with a critic and a KL penalty to the reference policy.

Schulman et al. (2017), https://arxiv.org/abs/1707.06347, as applied to language models by Ouyang et al. (2022),
https://arxiv.org/abs/2203.02155. The last token of a response receives the score, and every token receives a KL
penalty. Usage: `python -m recipes.ppo.train CONFIG [key=value ...]`
"""

import sys

from flowrl.cli import run_recipe
from recipes.ppo.config import PPOConfig

if __name__ == "__main__":  # here, because a wrong config is reported before the imports below, which take seconds
    sys.exit(run_recipe(PPOConfig, "recipes.ppo.train:train"))

from flowrl.run.advantages import Advantages
from flowrl.run.datasets import PtxText, read_prompts
from flowrl.run.evaluation import evaluate
from flowrl.run.loop import Run, StartRun, Summary
from flowrl.workers import PTX, Actor, Critic, Reference, Rollout


def train(config: PPOConfig, start: StartRun = Run) -> Summary:
    """Trains the actor and the critic. Returns the summary of the run."""
    prompts, held_out = read_prompts(config)
    advantages, text = Advantages(config), PtxText(config)
    with start(config) as run:
        actor = run.group("actor", Actor, config.actor)
        critic = run.group("critic", Critic, config.critic)
        reference = run.group("reference", Reference, config.reference)
        reward = run.rewards()
        rollout = run.group("rollout", Rollout, config.rollout, config.actor.model, seed=config.seed)
        run.add_checkpointable(actor, critic, advantages, text)
        run.add_evaluation(held_out, lambda sets: evaluate(rollout, reward, sets, config.evaluation_by_set))

        for batch in run.rollouts(rollout, prompts, policy=actor, reward=reward):
            # The batch has responses and scores. The functions of `reward` score a response while others are generated,
            # and its models score all responses afterwards.

            # 1. Compute log-probabilities and values. Calls return at once, and each waits only for the columns that it
            #    reads. The first is omitted with one update per step, or with exact log-probabilities of the rollout.
            if config.actor.old_logprobs == "recompute":
                batch["old_logprobs"] = actor.logprobs(batch)
            if reference:
                batch["ref_logprobs"] = reference.logprobs(batch)
            batch["values"] = critic.values(batch)

            # 2. Compute rewards, advantages and metrics, on the task worker.
            batch, metrics = advantages.compute(batch)
            run.log(metrics)
            run.save_rollouts(batch)

            # 3. Update critic and actor. On separate pools they run at the same time.
            for minibatch in batch.minibatches(config.minibatch_size, epochs=config.ppo_epochs):
                run.log(text.add_gradient(actor, PTX))  # language modeling on the text of config.ptx, if any
                run.log(critic.update(minibatch), actor.update(minibatch, weight=text.policy_weight))

            # 4. Send the new weights to the rollout. Then the run evaluates and saves a checkpoint, if they are due.
            run.sync_weights(actor, rollout)
        run.save_model(actor)
        return run.finish()
