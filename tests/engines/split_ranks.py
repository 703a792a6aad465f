"""Program of two TP ranks that measures saved activations with and without sequence-parallel norms."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from flowrl.config import EngineConfig, OptimizerConfig, UserError
from flowrl.data.batch.tensordicts import make_tensordict
from flowrl.engines.models.loading import CriticModel
from flowrl.engines.models.sequence_sharding import SequenceSharding, head_weights
from flowrl.engines.parallel.rank_mesh import RankMesh, rank_mesh
from flowrl.engines.train.base import Outputs
from flowrl.engines.train.fsdp.engine import FsdpEngine
from flowrl.engines.train.fsdp.outputs import PolicyModel, policy_outputs, value_outputs
from flowrl.engines.train.microbatch import MicroBatch
from tests.engines.strategies import VALUES, critic_loss
from tests.engines.tiny import convolving, llama

ROWS, LENGTH = 3, 48
TOKENS = ROWS * LENGTH


class _SavedBytes:
    """Counts the bytes of activations that autograd saves, each storage once."""

    def __init__(self) -> None:
        self._bytes: dict[int, int] = {}
        self._tensors: list[Tensor] = []

    def keep(self, tensor: Tensor) -> Tensor:
        own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if {TOKENS, TOKENS // 2}.intersection(own.shape):
            self._bytes[own.untyped_storage().data_ptr()] = own.untyped_storage().nbytes()
            self._tensors.append(own)  # so that no other is made in its place
        return tensor

    def total(self) -> int:
        return sum(self._bytes.values())


def _saved_bytes(mesh: RankMesh, **settings: bool) -> int:
    counter = _SavedBytes()

    def outputs(model: nn.Module, micro: MicroBatch, requested: Outputs) -> dict[str, Tensor]:
        with saved_tensors_hooks(counter.keep, lambda tensor: tensor):
            return value_outputs(model, micro, requested)

    engine = FsdpEngine(
        CriticModel(llama().model),
        outputs,
        OptimizerConfig(lr=1e-3),
        EngineConfig.model_validate({"strategy": "fsdp"} | settings),
        mesh=mesh,
    )
    ids = torch.arange(ROWS * LENGTH) % 30 + 2
    tokens = {
        "input_ids": ids,
        "response_mask": torch.ones_like(ids, dtype=torch.bool),
        "weight": torch.ones(len(ids), dtype=torch.float64),
    }
    rows = make_tensordict({"prompt_id": torch.arange(ROWS)}, tokens, torch.full((ROWS,), LENGTH), ROWS)
    engine.update(rows, critic_loss, VALUES)
    return counter.total()


def _error_of(model: nn.Module, mesh: RankMesh) -> str:
    try:
        FsdpEngine(model, policy_outputs, None, EngineConfig(strategy="fsdp", sequence_parallel_norms=True), mesh=mesh)
    except UserError as error:
        return str(error)
    return ""


def _head_gradients(rank: int) -> list[Tensor | None]:
    """Returns the gradients of a replicated head, of which rank r trains weight and bias by r + 1."""
    head = nn.Linear(2, 1)
    sharding = SequenceSharding(distributed.group.WORLD, distributed.group.WORLD)  # pyright: ignore[reportArgumentType] (set in main)
    weight, bias = head_weights(head, sharding)
    assert bias is not None
    ((rank + 1) * (weight.sum() + bias.sum())).backward()
    return [head.weight.grad, head.bias.grad]


def main(rank: int, folder: Path) -> None:
    """Joins the other rank and writes the saved bytes, by split norms and activation checkpointing."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    mesh = rank_mesh(distributed.group.WORLD, device="cpu", tp=2)
    results: dict[Any, Any] = {
        (split, is_checkpointed): _saved_bytes(
            mesh, sequence_parallel_norms=split, gradient_checkpointing=is_checkpointed
        )
        for split in (False, True)
        for is_checkpointed in (False, True)
    }
    widened = llama()
    widened.model.widening = nn.Linear(32, 32)
    results["widened"] = _error_of(PolicyModel(widened), mesh)
    gated = llama()
    gated.model.layers[1].gate = nn.Linear(32, 32)
    results["gated"] = _error_of(PolicyModel(gated), mesh)
    results["convolving"] = _error_of(PolicyModel(convolving()), mesh)
    sharded = rank_mesh(distributed.group.WORLD, device="cpu")
    assert sharded.devices is not None
    results["of one"] = _error_of(PolicyModel(llama()), sharded)
    results["groups"] = (sharded.data is sharded.all_ranks, sharded.devices.get_group("shard") is sharded.all_ranks)
    results["head"] = _head_gradients(rank)
    torch.save(results, folder / f"{rank}.pt")
    distributed.destroy_process_group()
