"""Program of two stages of a pipeline engine, which repeat what the included engine computes in one process."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup

from flowrl.config import ActorConfig
from flowrl.engines.checkpoint.engine_checkpoint import EngineCheckpoints, load
from flowrl.engines.train.base import Outputs, TrainContext, TrainEngine, load_train_engine_class
from flowrl.engines.train.module_engine import ModuleEngine
from flowrl.workers import Actor
from flowrl.workers.losses.loss import BoundLoss
from tests.engines.combined_losses import STEPS, TEMPERATURE, rows

PIPELINE = "tests.engines.train.user_engine:PipelineEngine"
LOSSES = ["token", "pair", "group", "token and ptx", "configured dpo", "configured kto"]
"""Optimizer steps whose losses read log-probabilities and entropies."""


def start(kind: str, folder: Path, group: ProcessGroup | None = None) -> TrainEngine:
    config = ActorConfig.model_validate(
        {
            "model": {"path": folder / "model", "dtype": "float64"},
            "optimizer": {"lr": 1e-2, "eps": 1e-3, "max_grad_norm": 0.5},
            "engine": {"kind": kind, "max_tokens_per_microbatch": 24},
        }
    )
    pp = 1 if group is None else group.size()
    context = TrainContext("policy", config, torch.device("cpu"), group, pp=pp)
    return load_train_engine_class(kind, pp=pp).start(context)


def train(engine: TrainEngine) -> Iterator[dict[str, Any]]:
    """Takes a step per entry of `LOSSES`. Yields the gradients of this process and the metrics of each step."""
    assert isinstance(engine, ModuleEngine)
    for name in LOSSES:
        metrics = {}
        for i, (loss, num_rows, weight) in enumerate(STEPS[name]):
            batch = rows(num_rows, seed=i)
            columns = {name: column.dtype for name, column in batch["tokens"].items()}
            bound = BoundLoss.of(loss, columns, Actor.COMPUTED, TEMPERATURE)
            metrics |= engine.forward_backward(batch, bound, bound.outputs, groups=loss.row_groups, weight=weight)
        gradients = {name: p.grad.clone() for name, p in engine.model.named_parameters() if p.grad is not None}
        steps = engine.optim_step()
        yield {
            "gradients": gradients,
            "losses": {name: metric.result() for name, metric in metrics.items()},
            "step": {name: metric.result() for name, metric in steps.items()},
        }


def results(engine: TrainEngine) -> dict[str, Any]:
    """Returns outputs, metrics and weights after training."""
    batch, steps = rows(12, seed=7), list(train(engine))
    token = STEPS["token"][0][0]
    bound = BoundLoss.of(token, {"response_mask": torch.bool}, Actor.COMPUTED, TEMPERATURE)
    return {
        "steps": steps,
        "outputs": engine.forward(batch, Outputs(("logprobs", "entropy"), "response_mask", TEMPERATURE)),
        "measured": {name: m.result() for name, m in engine.measure(batch, bound, bound.outputs).items()},
        "weights": dict(engine.export_weights()),
        "half": dict(engine.export_weights(["model.norm.weight", "lm_head.weight"], torch.bfloat16)),
        "shapes": list(engine.weight_shapes()),
        "samples": [(s.name, s.kind, s.inputs, s.values) for s in engine.weight_samples(3).samples],
    }


def weights_after_a_step(engine: TrainEngine) -> dict[str, Tensor]:
    """Takes the first step of `train` and returns full weights, to compare engines after a load."""
    next(train(engine))
    return dict(engine.export_weights())


def main(rank: int, folder: Path, kind: str) -> None:
    """Trains with an engine, saves a checkpoint, and continues from a checkpoint of the included engine."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    group = distributed.group.WORLD
    assert isinstance(group, ProcessGroup)
    engine = start(kind, folder, group)
    found = results(engine)
    checkpoints = EngineCheckpoints(engine)
    checkpoints.save(folder / "two")
    checkpoints.result()
    resumed = start(kind, folder, group)
    load(resumed, folder / "one")
    found["resumed"] = weights_after_a_step(resumed)
    torch.save(found, folder / f"{rank}.pt")
    distributed.destroy_process_group()
