"""Program of two ranks of the checkpoint tests: DDP replicas, FSDP2 shards or TP shards of a model."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, distributed, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from flowrl.config import EngineConfig, OptimizerConfig
from flowrl.data.checksums import CheckpointError
from flowrl.engines.checkpoint.engine_checkpoint import EngineCheckpoints, load
from flowrl.engines.parallel.rank_mesh import rank_mesh
from flowrl.engines.train.fsdp.engine import FsdpEngine
from flowrl.engines.train.module_engine import describe_module, load_module_state, module_state
from tests.engines.losses import LOGPROBS, Bigram, bigram_loss, bigram_outputs
from tests.engines.tables import VOCABULARY, table

STRATEGIES: tuple[Literal["fsdp", "tp"], ...] = ("fsdp", "tp")

WIDTH = 17
"""Odd, so that two ranks hold shards of different sizes."""


@dataclass
class Sharded:
    """Engine with an FSDP2 model whose gradients are set by the test."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    group: ProcessGroup | None
    num_steps: int = 0

    @property
    def architecture(self) -> str:
        return describe_module(self.model)

    @property
    def has_optimizer_state(self) -> bool:
        return bool(self.optimizer.state)

    def save_state(self, *, with_optimizer: bool) -> dict[str, Tensor]:
        return module_state(self.model, self.optimizer if with_optimizer else None)

    def load_state(self, tensors: Mapping[str, Tensor], counters: Mapping[str, float]) -> None:
        load_module_state(self.model, self.optimizer, tensors)
        assert counters["scale"] == 2.0**-7
        self.num_steps = int(counters["num_steps"])

    def counters(self) -> dict[str, float]:
        return {"num_steps": self.num_steps, "scale": 2.0**-7}

    def step(self) -> None:
        """Takes a step with a gradient that depends on the weights and the step, but not on the sharding."""
        for parameter in self.model.parameters():
            parameter.grad = torch.sin(parameter.detach() * (3 + self.num_steps))
        self.optimizer.step()
        self.num_steps += 1


def sharded(group: ProcessGroup | None, how: Literal["fsdp", "tp"] | None = None) -> Sharded:
    model = Bigram(VOCABULARY, WIDTH)
    if how == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    elif how == "tp":  # one layer is split by its outputs, the others are replicated
        parallelize_module(model, init_device_mesh("cpu", (2,)), {"output": ColwiseParallel()})
    # Not foreach, which takes no mixture of DTensors and tensors.
    return Sharded(model, torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False), group)


def copied(group: ProcessGroup | None) -> FsdpEngine:
    config = OptimizerConfig(lr=1e-2, warmup_steps=5)
    return FsdpEngine(
        Bigram(VOCABULARY, WIDTH), bigram_outputs, config, EngineConfig(), mesh=rank_mesh(group, device="cpu")
    )


def full_parameters(model: nn.Module) -> dict[str, Tensor]:
    actual = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return {
        name: value.full_tensor() if isinstance(value, DTensor) else value.clone() for name, value in actual.items()
    }


def save(engine: Sharded | FsdpEngine, folder: Path, *, asynchronous: bool) -> list[str]:
    checkpoints = EngineCheckpoints(engine)
    checkpoints.save(folder, asynchronous=asynchronous)
    saved = checkpoints.result()
    assert saved is not None
    return sorted(saved.files)


def main(rank: int, folder: Path) -> None:
    """Resumes from a checkpoint of one process under both strategies, and saves checkpoints for one process."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    group = distributed.group.WORLD
    results: dict = {}
    for how in STRATEGIES:
        engine = sharded(group, how)
        load(engine, folder / "one-sharded")
        engine.step()
        results[how, "weights"] = full_parameters(engine.model)
        results[how, "files"] = save(engine, folder / f"two-{how}", asynchronous=True)
    ddp = copied(group)
    load(ddp, folder / "one-copied")
    ddp.update(table(3, seed=10 + rank), bigram_loss, LOGPROBS)
    results["copied", "weights"] = full_parameters(ddp.model)
    results["copied", "files"] = save(ddp, folder / "two-copied", asynchronous=False)
    torch.manual_seed(rank)
    save(ddp, folder / "two-random", asynchronous=False)
    results["drawn"] = torch.rand(3)
    distributed.barrier()  # only rank 0 writes the index of ddp
    load(ddp, folder / "two-random")
    results["drawn again"] = torch.rand(3)
    blocked = EngineCheckpoints(ddp)
    blocked.save(folder / ("nowhere" if rank == 1 else "blocked"))
    try:
        blocked.result()
    except CheckpointError as error:
        results["blocked"] = str(error)
    torch.save(results, folder / f"{rank}.pt")
    distributed.destroy_process_group()
