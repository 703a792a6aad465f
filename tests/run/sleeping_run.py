"""A run whose roles sleep: the loop of a recipe around `sleeping_replicas`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from flowrl.config import OnPolicyConfig, Placement
from flowrl.data.chat import ChatTokenizer
from flowrl.data.prompts import PromptStream, read_conversations
from flowrl.run.loop import Run
from tests.configs import quickstart_settings
from tests.schedules.sleeping_replicas import Durations, SleepingActor, SleepingRollout


class SleepingConfig(OnPolicyConfig):
    """Settings of all on-policy recipes. The run starts no reward."""


def sleeping_config(
    task: Path, output: Path, *, num_replicas: int = 2, num_trainers: int = 1, **changes: Any
) -> SleepingConfig:
    """Args: `task` is a folder written by `recipes.quickstart.prepare`."""
    settings = quickstart_settings(
        task,
        output,
        backend="ray",
        placement=Placement(
            device="cpu",
            pools={"train": [num_trainers], "make": [num_replicas]},
            roles={"actor": "train", "rollout": "make", "reward": "train"},
        ),
        steps=6,
        minibatch_size=8,
        samples_per_prompt=1,
        rollout={"max_response_tokens": 1, "max_num_seqs": 4},
        algorithm={"estimator": "grpo"},
    )
    del settings["data"]["test"], settings["data"]["evaluation_rows"]
    return SleepingConfig.model_validate(settings | changes)


def train(
    config: SleepingConfig,
    costs: Durations,
    row_s: float,
    compute: Callable[[Run, int], None] = lambda run, step: None,
) -> tuple[dict[str, Any], list[list[int]]]:
    """Trains; returns the summary of the run and the prompts of each step. `compute` runs in the driver at the end of
    each step.
    """
    tokenizer = ChatTokenizer(config.actor.model.path)
    prompts = PromptStream(read_conversations(config.data.train)[:64], tokenizer, seed=0, max_prompt_tokens=16)
    slots = max(1, config.rollout.num_seqs // config.samples_per_prompt)
    trained = []
    with Run(config) as run:
        actor = run.group("actor", SleepingActor, row_s)
        rollout = run.group("rollout", SleepingRollout, costs, slots)
        run.add_checkpointable(actor)
        for batch in run.rollouts(rollout, prompts, policy=actor):
            trained.append(batch["prompt_id"].get("prompt_id").tolist())
            for minibatch in batch.minibatches(config.minibatch_size):
                run.log(actor.update(minibatch))
            run.sync_weights(actor, rollout)
            compute(run, run.step)
        run.save_model(actor)
        return run.finish(), trained
