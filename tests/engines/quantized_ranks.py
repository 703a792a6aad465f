"""Program of the ranks of the tests of quantized moments: FSDP2 shards of a model, on two ranks or with tp."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

import torch
from torch import distributed
from transformers import PreTrainedModel

from flowrl.config import EngineConfig, OptimizerConfig
from flowrl.engines.checkpoint.engine_checkpoint import EngineCheckpoints, load
from flowrl.engines.parallel.rank_mesh import SINGLE_PROCESS, rank_mesh
from flowrl.engines.train.fsdp.engine import FsdpEngine
from flowrl.engines.train.fsdp.outputs import PolicyModel, policy_outputs
from tests.engines.strategies import POLICY, policy_loss
from tests.engines.tables import table, take_rows
from tests.engines.tiny import qwen2, qwen3_moe

MODELS: Mapping[str, Callable[[], PreTrainedModel]] = {
    "dense": qwen2,
    "experts": lambda: qwen3_moe(hidden_size=64, moe_intermediate_size=64),
}


def engine_of(
    group: distributed.ProcessGroup | None = None,
    tp: int = 1,
    offload: Literal["none", "optimizer"] = "none",
    model: str = "dense",
) -> FsdpEngine:
    mesh = SINGLE_PROCESS if group is None else rank_mesh(group, device="cpu", tp=tp)
    settings = EngineConfig(strategy="auto" if group is None else "fsdp", offload=offload)
    optimizer = OptimizerConfig(kind="adamw_8bit", lr=1e-2)
    return FsdpEngine(PolicyModel(MODELS[model]()), policy_outputs, optimizer, settings, mesh=mesh)


def train(engine: FsdpEngine, *steps: int, rank: int = 0, num_ranks: int = 1) -> None:
    for step in steps:
        engine.update(take_rows(table(11, seed=step), torch.arange(rank, 11, num_ranks)), policy_loss, POLICY)


def save(engine: FsdpEngine, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    checkpoints = EngineCheckpoints(engine)
    checkpoints.save(folder)
    checkpoints.result()


def main(rank: int, folder: Path, model: str) -> None:
    """Loads a checkpoint of one process on shards, saves it again, takes a step, and saves the result. Trains and saves
    a tensor-parallel model.
    """
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    group = distributed.group.WORLD
    assert isinstance(group, distributed.ProcessGroup)
    shards = engine_of(group, model=model)
    load(shards, folder / "one")
    save(shards, folder / "fsdp-loaded")
    train(shards, 2, rank=rank, num_ranks=2)
    save(shards, folder / "fsdp-trained")
    if model == "dense":
        parallel = engine_of(group, tp=2)
        train(parallel, 0)
        save(parallel, folder / "tp")
    distributed.destroy_process_group()
