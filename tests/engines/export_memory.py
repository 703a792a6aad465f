"""Rank processes that measure the memory of an export, and of an export whose writer fails."""

import ctypes
from itertools import product
from pathlib import Path

import torch
from torch import distributed

from flowrl.config import EngineConfig, ExportConfig, LoraConfig, ModelConfig, OptimizerConfig, UserError
from flowrl.engines.checkpoint.engine_checkpoint import EngineCheckpoints
from flowrl.engines.checkpoint.export import describe_export, export_model
from flowrl.engines.checkpoint.model_folder import save_model
from flowrl.engines.models.adapters.lora import add_adapter
from flowrl.engines.models.loading import load_policy
from flowrl.engines.parallel.rank_mesh import RankMesh, rank_mesh
from flowrl.engines.train.fsdp.engine import FsdpEngine
from flowrl.engines.train.fsdp.outputs import PolicyModel, policy_outputs
from tests.engines.loading import memory

LORA = LoraConfig(rank=4)

_M_MMAP_THRESHOLD = -3
"""Number of the option in glibc's malloc.h."""


def _engine(path: Path, mesh: RankMesh, lora: LoraConfig | None = None) -> FsdpEngine:
    model = load_policy(ModelConfig(path=path), on_meta=True)
    if lora is not None:
        add_adapter(model, lora)
    config = EngineConfig(strategy="fsdp")
    return FsdpEngine(PolicyModel(model), policy_outputs, OptimizerConfig(lr=1e-2), config, mesh=mesh)


def _return_freed_memory() -> None:
    """Makes glibc return the memory of freed tensors to the system, so that resident memory has only live tensors."""
    torch.set_num_threads(1)
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 65536)


def _reset_peak() -> int:
    """Resets the peak memory of this process on Linux, and returns its current memory."""
    Path("/proc/self/clear_refs").write_text("5")
    return memory("VmRSS")


def measure_ranks(rank: int, folder: Path, ranks: int, tp: int, shard_bytes: int) -> None:
    """Exports `large` from all ranks, after `small` has loaded all code, and writes the growth of rank 0's peak memory.

    Also saves checkpoints of both, without and with an adapter.
    """
    _return_freed_memory()
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    mesh = rank_mesh(distributed.group.WORLD, device="cpu", tp=tp)
    config = ExportConfig(max_shard_gb=shard_bytes / 1e9)
    for name, output in (("small", "warm"), ("large", "out")):
        engine, before = _engine(folder / name, mesh), _reset_peak()
        save_model(engine.language_model, folder / name, folder / output, config, is_writer=rank == 0)
        grown = memory("VmHWM") - before
    if rank == 0:
        (folder / "grown.txt").write_text(str(grown))
    for size, (name, lora) in product(("small", "large"), (("full", None), ("adapted", LORA))):
        engine, checkpoint = _engine(folder / size, mesh, lora), folder / f"{size}-{name}"
        checkpoint.mkdir(exist_ok=True)
        distributed.barrier()
        checkpoints = EngineCheckpoints(engine)
        files = describe_export(engine.describe_model(), ModelConfig(path=folder / size), lora)
        checkpoints.save(checkpoint, extra_files=files)
        checkpoints.result()
    distributed.destroy_process_group()


def measure_checkpoint(rank: int, folder: Path, name: str, shard_bytes: int) -> None:
    """Exports the large checkpoint of `measure_ranks`, after the small one has loaded all code.

    Writes the growth of the peak memory of this process.
    """
    _return_freed_memory()
    for size in ("small", "large"):
        before, config = _reset_peak(), ExportConfig(max_shard_gb=shard_bytes / 1e9)
        export_model(folder / f"{size}-{name}", folder / f"exported-{size}-{name}", config)
    (folder / f"{name}.txt").write_text(str(memory("VmHWM") - before))


def fail_together(rank: int, folder: Path) -> None:
    """Exports a model to a folder that rank 0 cannot write, and writes the error of each rank."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    engine = _engine(folder / "start", rank_mesh(distributed.group.WORLD, device="cpu"))
    error = ""
    try:
        save_model(engine.language_model, folder / "start", folder / "file" / "out", is_writer=rank == 0)
    except UserError as raised:
        error = repr(raised)
    (folder / f"{rank}.txt").write_text(error)
    distributed.barrier()
    distributed.destroy_process_group()
