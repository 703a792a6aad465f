"""Supervised fine-tuning with cross-entropy on the assistant's messages.

Usage: `python -m recipes.sft.train CONFIG [key=value ...]`
"""

import logging
import sys
from typing import Any

from flowrl.cli import run_recipe
from recipes.sft.config import SFTConfig

if __name__ == "__main__":  # here, because a wrong config is reported before the imports below, which take seconds
    sys.exit(run_recipe(SFTConfig, "recipes.sft.train:train"))

from flowrl.config import ActorConfig
from flowrl.run.datasets import Examples
from flowrl.run.loop import Run
from flowrl.workers import Actor

_logger = logging.getLogger(__name__)


def train(config: SFTConfig) -> dict[str, Any]:
    """Trains the model. Returns the summary of the run."""
    data = config.data
    examples = Examples(data.train, config.model.path, max_tokens=data.max_prompt_tokens)
    held_out = data.test and Examples(
        data.test, config.model.path, max_tokens=data.max_prompt_tokens, max_examples=data.evaluation_rows
    )
    _check_epochs(config, len(examples))
    policy = ActorConfig(model=config.model, optimizer=config.optimizer, lora=config.lora, engine=config.engine)
    with Run(config) as run:
        actor = run.group("actor", Actor, policy)
        run.evaluate_loss_with(actor, held_out)
        run.add_checkpointable(actor)
        stream = examples.batches(config.batch_size, seed=config.seed, shuffle=data.shuffle, epochs=config.epochs)
        for _, batch in run.batches(stream):
            run.log(actor.update_sft(batch))
        return run.finish(actor)


def _check_epochs(config: SFTConfig, num_examples: int) -> None:
    """Logs a warning if the run stops after `epochs` passes before its learning rate has decayed to 0."""
    num_steps = config.steps if config.epochs is None else config.epochs * -(-num_examples // config.batch_size)
    end = None if config.optimizer.schedule == "constant" else config.optimizer.total_steps
    if num_steps < config.steps and end is not None and num_steps < end:
        _logger.warning(
            "epochs %d ends the run after %d steps, before optimizer.total_steps %d, so the learning rate does not "
            "reach 0: set steps to %d, and total_steps to the same value or null",
            config.epochs,
            num_steps,
            end,
            num_steps,
        )
