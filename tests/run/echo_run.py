"""A run whose workers only count versions."""

import json
import time
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from flowrl import Batch, Dispatch, Placement, Worker, make_tensordict, register
from flowrl.config import ExportConfig, OnPolicyConfig, RolePlacement
from flowrl.data.batch.tensordicts import num_rows
from flowrl.data.metric import Mean, Metric
from flowrl.data.prompts import PromptStream, read_conversations
from flowrl.report.rollout_log import Kind, read_rows, saved_steps
from flowrl.run.evaluation import evaluate
from flowrl.run.loop import Run


class Echo(Worker):
    """A worker for all roles. Its update only increments the version."""

    def __init__(self, fails_at: int = -1) -> None:
        self.version, self.fails_at = 0, fails_at

    @register(
        Dispatch.DP_COMPUTE_PROTO,
        blocking=False,
        reads=("prompt_id", "sample"),
        writes=("response_mask", "response", "version"),
    )
    def generate(self, batch: TensorDict, temperature: float | None = None) -> TensorDict:
        count = num_rows(batch)
        rows = {
            "response": ["greedy" if temperature == 0 else "sampled"] * count,
            "version": torch.full((count,), self.version),
        }
        return make_tensordict(
            rows, {"response_mask": torch.ones(count, dtype=torch.bool)}, torch.ones(count, dtype=torch.int64)
        )

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False, reads=("version",), writes=("scores",))
    def score(self, batch: TensorDict, evaluation: bool = False) -> TensorDict:
        if evaluation:
            time.sleep(0.5)
        return make_tensordict({"scores": batch["rows", "version"].float() / 10})

    @register(Dispatch.DP_COMPUTE_METRIC, blocking=False, reads=("version", "sample"))
    def update(self, batch: TensorDict) -> dict[str, Metric]:
        if self.version == self.fails_at:
            raise RuntimeError("the update broke")
        count = num_rows(batch)
        return {
            "version": Mean(float(batch["rows", "version"].sum()), count),
            "sample": Mean(float(batch["rows", "sample"].sum()), count),
        }

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def set_version(self, version: int) -> None:
        self.version = version

    @register(Dispatch.RANK_ZERO)
    def save(self, folder: Path, config: ExportConfig) -> None:
        folder.mkdir()
        (folder / "weights").write_text(str(self.version))


class Counting(Echo):
    """Counts its updates, and saves the count."""

    num_updates = 0

    @register(Dispatch.DP_COMPUTE_METRIC, blocking=False, reads=("scores",))
    def update(self, batch: TensorDict) -> dict[str, Metric]:
        self.num_updates += 1
        return {"reward": Mean(float(batch["rows", "scores"].sum()), num_rows(batch))}

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def save_checkpoint(self, folder: Path, asynchronous: bool = False) -> None:
        (folder / "count").write_text(str(self.num_updates))

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def load_checkpoint(self, folder: Path) -> None: ...

    @register(Dispatch.RANK_ZERO)
    def save(self, folder: Path, config: ExportConfig) -> None:
        folder.mkdir()
        (folder / "weights").write_text(str(self.num_updates))


class EchoConfig(OnPolicyConfig):
    """Settings of all on-policy recipes. One group of Echo has the tasks of all roles."""


QUIET = {"tensorboard": False, "rollouts": None}


def placed(num_devices: int) -> Placement:
    roles: dict[str, str | RolePlacement] = {"actor": "main", "rollout": "main", "reward": "main"}
    return Placement(device="cpu", pools={"main": [num_devices]}, roles=roles)


def stream(config: EchoConfig) -> PromptStream:
    from flowrl.data.chat import ChatTokenizer  # noqa: PLC0415 (loads transformers, which only these tests need)

    tokenizer = ChatTokenizer(config.actor.model.path)
    return PromptStream(read_conversations(config.data.train)[:20], tokenizer, seed=0, max_prompt_tokens=16)


def held_out_prompts(config: EchoConfig) -> Batch:
    return Batch.from_rows(stream(config).evaluation_rows(config.data.evaluation_rows))


def train(config: EchoConfig, fails_at: int = -1) -> dict[str, Any]:
    prompts, held_out = stream(config), held_out_prompts(config)
    with Run(config) as run:
        actor: Any = run.group("actor", Echo, fails_at)
        if run.due(config.evaluate_every):
            run.log(evaluate(actor, actor, held_out))
        for batch in run.rollouts(actor, prompts, policy=actor):
            batch["scores"] = actor.score(batch)
            run.save_rollouts(batch)
            for minibatch in batch.minibatches(config.minibatch_size):
                run.log(actor.update(minibatch))
            run.sync_weights(actor, actor)
            if run.due(config.evaluate_every):
                run.log(evaluate(actor, actor, held_out))
        run.save_model(actor)
        return run.finish()


def lines(config: EchoConfig) -> list[dict[str, float]]:
    return [json.loads(line) for line in (config.output / "metrics.jsonl").read_text().splitlines()]


def saved_scores(config: EchoConfig, kind: Kind) -> dict[int, list[float]]:
    """Returns the scores of the saved rows, by step."""
    folder = config.output / "rollouts"
    return {
        step: [round(row["score"], 3) for row in read_rows(folder, kind, step)] for step in saved_steps(folder, kind)
    }
