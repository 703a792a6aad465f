"""Settings of the recipes that generate responses without advantages, with the quickstart's task."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from flowrl import Batch, Cluster
from flowrl.config.placement import SINGLE
from flowrl.run.datasets import read_prompts
from flowrl.workers import Actor, Rollout
from recipes.distillation.config import DistillationConfig
from recipes.quickstart.prepare import save_model, save_tokenizer
from recipes.rejection_sampling.config import RejectionSamplingConfig
from tests.configs import quickstart_settings

TASK = "recipes.quickstart.task"
SCHEDULES = {
    "sync": {"kind": "sync"},
    "one_step_off": {"kind": "one_step_off"},
    "async": {"kind": "async", "max_staleness": 1},
}
"""All schedules by name."""


def detached(*roles: str) -> dict[str, Any]:
    """Returns an inline placement in which the rollout has a pool of its own, as every schedule allows."""
    placed = dict.fromkeys(("actor", *roles), "train") | {"rollout": "make"}
    return {"device": "cpu", "pools": {"train": [1], "make": [1]}, "roles": placed}


def rejection_config(task: Path, output: Path, **changes: Any) -> RejectionSamplingConfig:
    """Returns settings of three inline steps with 8 prompts of 4 responses, and one update per step."""
    settings = quickstart_settings(task, output, steps=3, batch_size=32, minibatch_size=8, samples_per_prompt=4)
    del settings["reference"]
    settings["reward"] = {"function": f"{TASK}:score", "evaluation": f"{TASK}:exact"}
    settings["rollout"] = {"max_response_tokens": 6}
    settings["actor"] |= changes.pop("actor", {})
    return RejectionSamplingConfig.model_validate(settings | changes)


def distillation_config(task: Path, output: Path, teacher: Path, **changes: Any) -> DistillationConfig:
    """Returns settings of three inline steps with 16 responses, and one update per step."""
    settings = quickstart_settings(task, output, steps=3, batch_size=16, minibatch_size=16, samples_per_prompt=1)
    del settings["reference"], settings["reward"]
    settings["rollout"] = {"max_response_tokens": 6}
    settings["teacher"] = {"model": {"path": teacher}}
    settings["actor"] |= changes.pop("actor", {})
    return DistillationConfig.model_validate(settings | changes)


def save_teacher(folder: Path) -> Path:
    """Saves a random model with another seed than that of the task, and the task's tokenizer."""
    save_tokenizer(folder)
    save_model(folder, seed=7)
    return folder


def first_responses(config: RejectionSamplingConfig | DistillationConfig, *, held_out: bool = False) -> Batch:
    """Returns the rollouts of the first step of a run, or the greedy responses to its held-out prompts."""
    prompts, tests = read_prompts(config)
    with Cluster(SINGLE, backend="inline", roles=config.roles, num_threads=1) as cluster:
        cluster.group("actor", Actor, config.actor)
        rollout = cluster.group("rollout", Rollout, config.rollout, config.actor.model, seed=config.seed)
        if held_out:
            rows = tests[""].with_samples(1)
            batch = rows.union(rollout.generate.submit(rows, temperature=0.0))
        else:
            rows = Batch.from_rows(prompts.take(config.prompts_per_step)).with_samples(config.samples_per_prompt)
            batch = rows.union(rollout.generate.submit(rows))
        return Batch.of_payload(batch.payload())


def response_logits(model: Path, batch: Batch) -> torch.Tensor:
    """Returns the logits [T, V] with which transformers predicts the response tokens of all rows."""
    policy = AutoModelForCausalLM.from_pretrained(model)
    lengths = batch.lengths().tolist()
    ids, masks = (batch.get(name).split(lengths) for name in ("input_ids", "response_mask"))
    with torch.no_grad():
        return torch.cat([policy(own[None]).logits[0, :-1][mask[1:]] for own, mask in zip(ids, masks, strict=True)])
