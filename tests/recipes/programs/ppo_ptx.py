"""PPO with ptx (Ouyang et al. 2022, https://arxiv.org/abs/2203.02155, equation 2): the policy loss of each step is
combined with the language-modeling loss on other text.
"""

from collections.abc import Iterable
from dataclasses import replace

from flowrl import Batch
from flowrl.run.advantages import Advantages
from flowrl.run.loop import Run, Summary
from flowrl.workers import LANGUAGE_MODELING, Actor, Critic, Reference, Reward, Rollout
from tests.recipes.programs.configs import PtxConfig

PTX = replace(LANGUAGE_MODELING, label="ptx")


def train(config: PtxConfig, prompts: Iterable[Batch], texts: Iterable[Batch]) -> Summary:
    advantages = Advantages(config)
    with Run(config) as run:
        actor = run.group("actor", Actor, config.actor)
        critic = run.group("critic", Critic, config.critic)
        reference = run.group("reference", Reference, config.reference)
        reward = run.group("reward", Reward, config.reward)
        rollout = run.group("rollout", Rollout, config.rollout, config.actor.model, seed=config.seed)
        for batch, text in zip(run.batches(prompts, policy=actor), texts, strict=False):
            batch = batch.union(rollout.generate(batch))
            batch = batch.union(reward.score(batch))
            batch["old_logprobs"] = actor.logprobs(batch)
            batch["ref_logprobs"] = reference.logprobs(batch)
            batch["values"] = critic.values(batch)
            batch, metrics = advantages.compute(batch)
            run.log(metrics)
            for minibatch in batch.minibatches(8):
                run.log(critic.update(minibatch), actor.forward_backward(minibatch))
                run.log(actor.forward_backward(text, PTX, weight=config.ptx_coef), actor.optim_step())
            run.sync_weights(actor, rollout)
        return run.finish()
