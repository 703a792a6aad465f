"""Preference optimization: DPO (Rafailov et al. 2023, https://arxiv.org/abs/2305.18290) and other losses.

Usage: `python -m recipes.dpo.train CONFIG [key=value ...]`
"""

import sys

from flowrl.cli import run_recipe
from recipes.dpo.config import DPOConfig

if __name__ == "__main__":  # here, because a wrong config is reported before the imports below, which take seconds
    sys.exit(run_recipe(DPOConfig, "recipes.dpo.train:train"))

from flowrl.run.loop import Run, StartRun, Summary
from flowrl.run.preferences.preference_examples import PreferenceExamples
from flowrl.run.preferences.preference_inputs import evaluate_preferences, preference_inputs, store_reference
from flowrl.workers import Actor, Reference


def train(config: DPOConfig, start: StartRun = Run) -> Summary:
    """Trains the policy. Returns the summary of the run."""
    examples, held_out = PreferenceExamples.read(config.data, config.actor)
    config = config.with_steps(len(examples))
    with start(config) as run:
        actor = run.group("actor", Actor, config.actor)
        reference = run.group("reference", Reference, config.reference)
        run.add_checkpointable(actor)
        if reference and config.stores_reference(len(examples)):
            store_reference(run, examples, reference)
        run.add_evaluation(held_out, lambda sets: evaluate_preferences(actor, sets, reference))

        stream = examples.batches(config.batch_size, seed=config.seed, shuffle=config.data.order == "shuffle")
        for batch in run.batches(stream, policy=actor):
            # 1. Log-probabilities of the responses under the reference, and KTO's estimate of the KL.
            batch = preference_inputs(batch, actor, reference)

            # 2. Increase the probability of the chosen response relative to the rejected response. Then the run
            #    evaluates and saves a checkpoint, if they are due.
            run.log(actor.update(batch))
        run.save_model(actor)
        return run.finish()
