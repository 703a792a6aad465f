"""On-policy distillation: a student is trained to agree with a teacher at the tokens of its own responses.

Agarwal et al. (2024), https://arxiv.org/abs/2306.13649.
Usage: `python -m recipes.distillation.train CONFIG [key=value ...]`
"""

import sys

from flowrl.cli import run_recipe
from recipes.distillation.config import DistillationConfig

if __name__ == "__main__":  # here, because a wrong config is reported before the imports below, which take seconds
    sys.exit(run_recipe(DistillationConfig, "recipes.distillation.train:train"))

from flowrl.run.advantages import measure_batch
from flowrl.run.datasets import read_prompts
from flowrl.run.loop import Run, StartRun, Summary
from flowrl.run.targets import evaluate_agreement, teacher_columns
from flowrl.workers import Actor, Reference, Rollout


def train(config: DistillationConfig, start: StartRun = Run) -> Summary:
    """Trains the student. Returns the summary of the run."""
    prompts, held_out = read_prompts(config)
    with start(config) as run:
        actor = run.group("actor", Actor, config.actor)
        teacher = run.group("teacher", Reference, config.teacher)
        reward = run.rewards() if config.reward else None
        rollout = run.group("rollout", Rollout, config.rollout, config.actor.model, seed=config.seed)
        run.add_checkpointable(actor)
        run.add_evaluation(
            held_out, lambda sets: evaluate_agreement(actor, teacher, rollout, reward, sets, config.evaluation_by_set)
        )

        for batch in run.rollouts(rollout, prompts, policy=actor):
            # 1. Score the responses, which only measures the student. The recipes that train on scores pass `reward` to
            #    run.rollouts instead, so that functions score a response while others are generated.
            if reward:
                batch = batch.union(reward.score(batch))
            run.log(measure_batch(batch))
            run.save_rollouts(batch)

            # 2. Compute the teacher's log-probabilities of the student's tokens, or the teacher's most likely tokens.
            batch = teacher_columns(batch, teacher, config.actor.loss)

            # 3. Reduce the KL between student and teacher.
            for minibatch in batch.minibatches(config.minibatch_size):
                run.log(actor.update(minibatch))

            # 4. Send the new weights to the rollout. Then the run evaluates and saves a checkpoint, if they are due.
            run.sync_weights(actor, rollout)
        run.save_model(actor)
        return run.finish()
