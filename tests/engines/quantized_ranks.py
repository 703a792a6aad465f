"""Program of the ranks of the tests of quantized moments: layouts of a model on two ranks."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

import torch
from torch import distributed
from transformers import PreTrainedModel

from flowrl.config import EngineConfig, OptimizerConfig
from flowrl.engines.checkpoint.engine_checkpoint import EngineCheckpoints, load
from flowrl.engines.parallel.pipeline_mesh import pipeline_mesh
from flowrl.engines.parallel.rank_mesh import rank_mesh
from flowrl.engines.train.fsdp.engine import FsdpEngine
from flowrl.engines.train.fsdp.outputs import PolicyModel, policy_outputs
from flowrl.engines.train.pipeline.engine import PipelineEngine
from tests.engines.strategies import POLICY, policy_loss
from tests.engines.tables import table, take_rows
from tests.engines.tiny import qwen2, qwen3_moe

MODELS: Mapping[str, Callable[[], PreTrainedModel]] = {
    "dense": qwen2,
    "experts": lambda: qwen3_moe(hidden_size=64, moe_intermediate_size=64),
}


LAYOUTS: Mapping[str, tuple[str, ...]] = {"dense": ("fsdp", "zero1", "pp"), "experts": ("fsdp",)}
"""Model -> layouts of two ranks that continue from a checkpoint of one process."""

OPTIMIZER = OptimizerConfig(kind="adamw_8bit", lr=1e-2)


def engine_of(offload: Literal["none", "optimizer"] = "none", model: str = "dense") -> FsdpEngine:
    """Returns an engine in one process."""
    return FsdpEngine(PolicyModel(MODELS[model]()), policy_outputs, OPTIMIZER, EngineConfig(offload=offload))


def divided_engine(layout: str, group: distributed.ProcessGroup, model: str = "dense") -> FsdpEngine:
    arguments = (PolicyModel(MODELS[model]()), policy_outputs, OPTIMIZER)
    if layout == "pp":
        return PipelineEngine(*arguments, EngineConfig(), mesh=pipeline_mesh(group, device="cpu", pp=2))
    settings = EngineConfig(strategy="zero1" if layout == "zero1" else "fsdp")
    mesh = rank_mesh(group, device="cpu", tp=2 if layout == "tp" else 1)
    return FsdpEngine(*arguments, settings, mesh=mesh)


def train(engine: FsdpEngine, *steps: int, rank: int = 0, num_ranks: int = 1) -> None:
    for step in steps:
        engine.update(take_rows(table(11, seed=step), torch.arange(rank, 11, num_ranks)), policy_loss, POLICY)


def save(engine: FsdpEngine, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    checkpoints = EngineCheckpoints(engine)
    checkpoints.save(folder)
    checkpoints.result()


def main(rank: int, folder: Path, model: str) -> None:
    """In each layout, loads a checkpoint of one process, saves it again, takes a step, and saves the result. Trains and
    saves a tensor-parallel model.
    """
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    group = distributed.group.WORLD
    assert isinstance(group, distributed.ProcessGroup)
    for layout in LAYOUTS[model]:
        engine = divided_engine(layout, group, model)
        load(engine, folder / "one")
        save(engine, folder / f"{layout}-loaded")
        train(engine, 2, rank=0 if layout == "pp" else rank, num_ranks=1 if layout == "pp" else 2)
        save(engine, folder / f"{layout}-trained")
    if model == "dense":
        parallel = divided_engine("tp", group)
        train(parallel, 0)
        save(parallel, folder / "tp")
    distributed.destroy_process_group()
