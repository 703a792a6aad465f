"""Program of two ranks that train a sharded model with and without offloaded activations."""

from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.distributed.tensor import DTensor

from flowrl.config import EngineConfig
from flowrl.engines.parallel.rank_mesh import rank_mesh
from flowrl.engines.train.fsdp import activation_offload
from flowrl.engines.train.fsdp.engine import FsdpEngine
from flowrl.engines.train.fsdp.outputs import PolicyModel, policy_outputs
from tests.engines.copying_device import CopyingDevice, offload_to
from tests.engines.strategies import OPTIMIZER, POLICY, ROWS, policy_loss
from tests.engines.tables import table, take_rows
from tests.engines.tiny import qwen2

CASES: dict[str, dict[str, Any]] = {
    "fsdp": {"strategy": "fsdp"},
    "ddp": {"strategy": "ddp"},
    "sp": {"strategy": "ddp", "sp": 2},
    "tp": {"tp": 2},
    "tp, sequence-parallel norms": {"tp": 2, "sequence_parallel_norms": True},
}
"""Name -> settings of the engine, and parallel sizes."""


def train(case: str, *, offloads: bool) -> tuple[list[torch.Tensor], list[str]]:
    """Returns the weights after three steps on this rank, and the names of the copies."""
    settings = CASES[case]
    sizes = {name: settings.get(name, 1) for name in ("tp", "sp")}
    config = {name: value for name, value in settings.items() if name not in sizes}
    group = distributed.group.WORLD
    assert group is not None
    engine = FsdpEngine(
        PolicyModel(qwen2(num_hidden_layers=4)),
        policy_outputs,
        OPTIMIZER,
        EngineConfig.model_validate({"max_tokens_per_microbatch": 20, "gradient_checkpointing": True} | config),
        mesh=rank_mesh(group, device="cpu", **sizes),
    )
    device = CopyingDevice()
    if offloads:
        offload_to(device, engine.language_model)
    is_row_shared = max(sizes.values()) > 1
    rows = ROWS[1][0] if is_row_shared else ROWS[2][group.rank()]
    for seed in range(3):
        engine.update(take_rows(table(11, seed=seed), torch.tensor(rows)), policy_loss, POLICY)
    weights = [p.to_local() if isinstance(p, DTensor) else p for p in engine.model.parameters()]
    return [weight.detach() for weight in weights], [name for name, _ in device.events]


def main(rank: int, folder: Path) -> None:
    """Joins the other rank through a file and writes the results of this rank: case -> results without and with."""
    torch.set_num_threads(1)
    activation_offload.MIN_BYTES = 0
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    results = {case: [train(case, offloads=offloads) for offloads in (False, True)] for case in CASES}
    torch.save(results, folder / f"{rank}.pt")
    distributed.destroy_process_group()
