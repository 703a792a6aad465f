"""Supervised fine-tuning with cross-entropy on the assistant's messages.

Usage: `python -m recipes.sft.train CONFIG [key=value ...]`
"""

import sys

from flowrl.cli import run_recipe
from recipes.sft.config import SFTConfig

if __name__ == "__main__":  # here, because a wrong config is reported before the imports below, which take seconds
    sys.exit(run_recipe(SFTConfig, "recipes.sft.train:train"))

from flowrl.run.datasets import SftExamples
from flowrl.run.evaluation import evaluate_loss
from flowrl.run.loop import Run, StartRun, Summary
from flowrl.workers import Actor


def train(config: SFTConfig, start: StartRun = Run) -> Summary:
    """Trains the model. Returns the summary of the run."""
    examples, held_out = SftExamples.read(config.data, config.actor.model)
    config = config.with_steps(len(examples))
    stream = examples.batches(config.batch_size, seed=config.seed, shuffle=config.data.order == "shuffle")
    with start(config) as run:
        actor = run.group("actor", Actor, config.actor)
        run.add_checkpointable(actor)
        run.add_evaluation(held_out, lambda sets: evaluate_loss(actor, sets))

        for batch in run.batches(stream, policy=actor):
            run.log(actor.update(batch))  # then the run evaluates and saves a checkpoint, if they are due
        run.save_model(actor)
        return run.finish()
