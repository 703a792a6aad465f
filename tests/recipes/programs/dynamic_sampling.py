"""GRPO without a reference, with the dynamic sampling of DAPO (Yu et al. 2025, https://arxiv.org/abs/2503.14476):
a step trains only on prompts whose responses have different scores.
"""

from collections.abc import Iterable, Iterator

from flowrl import Batch
from flowrl.run.advantages import Advantages
from flowrl.run.loop import Run, Summary
from flowrl.workers import Actor, Reward, Rollout
from tests.recipes.programs.configs import GroupConfig


def train(config: GroupConfig, prompts: Iterable[Batch]) -> Summary:
    advantages, samples = Advantages(config), config.samples_per_prompt
    with Run(config) as run:
        actor = run.group("actor", Actor, config.actor)
        reward = run.group("reward", Reward, config.reward)
        rollout = run.group("rollout", Rollout, config.rollout, config.actor.model, seed=config.seed)

        def informative() -> Iterator[Batch]:
            kept: list[Batch] = []
            for batch in (rows.with_samples(samples) for rows in prompts):
                batch = batch.union(rollout.generate(batch))
                batch = batch.union(reward.score(batch))
                differ = batch.get("scores").view(-1, samples).std(1) > 0
                kept.append(batch.rows(differ.repeat_interleave(samples).numpy()))
                if sum(map(len, kept)) >= config.batch_size:
                    yield Batch.concat(kept).rows(slice(config.batch_size))
                    kept = []

        for batch in run.batches(informative(), policy=actor):
            batch["old_logprobs"] = actor.logprobs(batch)
            batch, metrics = advantages.compute(batch)
            run.log(metrics, actor.update(batch))
            run.save_rollouts(batch)
            run.sync_weights(actor, rollout)
        return run.finish()
