"""The program under test: the PPO recipe with the workers of workers.py. It records the prompts of every step.

Usage: `python -m tests.chaos.training CONFIG`. The records are in `trained.jsonl` in the folder `FLOWRL_CHAOS`.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from flowrl.cli import run_recipe
from recipes.ppo.config import PPOConfig

if __name__ == "__main__":  # here, because the imports below take seconds
    sys.exit(run_recipe(PPOConfig, "tests.chaos.training:train"))

from flowrl.run.advantages import Advantages
from flowrl.run.datasets import read_prompts
from flowrl.run.loop import Run
from tests.chaos.workers import FOLDER, TracedActor, TracedCritic, TracedReference, TracedReward, TracedRollout


def train(config: PPOConfig) -> dict[str, Any]:
    """Trains as recipes/ppo/train.py does, and records the prompts of every step."""
    prompts, held_out = read_prompts(config)
    temperature = config.rollout.temperature
    advantages = Advantages(config.algorithm, config.actor, seed=config.seed)
    with Run(config) as run, Path(os.environ[FOLDER], "trained.jsonl").open("a", buffering=1) as records:
        actor = run.group("actor", TracedActor, config.actor, temperature=temperature)
        critic = run.group("critic", TracedCritic, config.critic)
        reference = run.group("reference", TracedReference, config.reference, temperature=temperature)
        reward = run.group("reward", TracedReward, config.reward)
        rollout = run.group("rollout", TracedRollout, config.rollout, config.actor.model, seed=config.seed)
        run.evaluate_with(rollout, reward, held_out)
        run.add_checkpointable(actor, critic, advantages=advantages)

        for step, batch in run.rollouts(rollout, prompts):
            batch["scores"] = reward.score(batch)
            batch["old_logprobs"] = actor.logprobs(batch)
            batch["ref_logprobs"] = reference.logprobs(batch)
            batch["values"] = critic.values(batch)
            batch, metrics = advantages.compute(batch, step)
            run.log(metrics)
            run.save_rollouts(batch)
            for minibatch in batch.minibatches(
                config.minibatch_size, epochs=config.ppo_epochs, seed=(config.seed, step)
            ):
                run.log(critic.update(minibatch), actor.update(minibatch))
            run.sync_weights(actor, rollout)
            prompt_ids = batch["prompt_id"].get("prompt_id").tolist()
            records.write(json.dumps({"step": step, "prompts": prompt_ids}) + "\n")
        return run.finish(actor)
