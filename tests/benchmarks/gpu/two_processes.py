"""Two processes on one GPU: the memory that an evicted trainer returns, and weights that are sent by CUDA IPC.

This process trains and sends. The process of observer.py measures and receives.
"""

import math
import time
from typing import Literal

import torch
from torch import nn

from flowrl.config import EngineConfig, OptimizerConfig
from flowrl.controller.host.host import Host
from flowrl.controller.placement.plan import Mesh
from flowrl.controller.wire import Construction, Request
from flowrl.controller.worker import Dispatch, get_contract, register
from flowrl.engines.models.weights import full_weights, weight_buckets, weight_shapes
from flowrl.engines.rollout.cuda_ipc import IpcSender
from flowrl.engines.rollout.weight_metadata import WeightMetadata
from flowrl.engines.train.fsdp.engine import FsdpEngine
from flowrl.engines.train.fsdp.outputs import PolicyModel, policy_outputs
from flowrl.workers.model_worker import ModelWorker
from tests.benchmarks.gpu.cells import Cell
from tests.benchmarks.gpu.models import LOGPROBS, build_model, free_memory, make_rows, model_config, token_loss
from tests.benchmarks.gpu.observer import Observer, draw_weight, start_observer

_CELL_S = 15.0
_NUM_SYNCS = 20
_BUCKET_BYTES = 500e6
_ROLE = "actor"

_PROCESS_BYTES = 2e9
"""Largest GPU memory of a process without tensors: its CUDA context, its libraries and their workspaces."""
_NOISE_BYTES = 64 * 1024**2
"""Growth that is not a leak, because drivers allocate in steps of a few MB."""


class Trainer(ModelWorker):
    """Worker with a random model, so that the controller's own host can construct, call and evict it."""

    engine: FsdpEngine

    def __init__(self, size: str, offload: Literal["none", "idle"]) -> None:
        device = torch.device(self.device)
        self.offloads_when_idle = offload == "idle"
        engine = EngineConfig(offload=offload, compute_dtype="bfloat16")
        model = PolicyModel(build_model(size, device))
        self.engine = FsdpEngine(model, policy_outputs, OptimizerConfig(lr=1e-6), engine, device=device)
        self.num_parameters: int = sum(parameter.numel() for parameter in model.parameters())

    @register(Dispatch.ONE_TO_ALL)
    def train(self, num_rows: int, length: int, vocabulary: int) -> float:
        """Takes an optimizer step on random rows. Returns the norm of the gradient."""
        metrics = self.engine.update(make_rows(num_rows, length, vocabulary), token_loss, LOGPROBS)
        return metrics["grad_norm"].result()

    @register(Dispatch.ONE_TO_ALL, memory=())
    def num_resident_bytes(self) -> int:
        """Returns the bytes of float32 weights and of Adam's two moments."""
        return 12 * self.num_parameters


def two_process_cells(device: torch.device) -> list[Cell]:
    return [
        Cell("memory after eviction, offload idle", lambda: _measure_eviction(device, "idle"), _CELL_S),
        Cell("memory after eviction, offload none", lambda: _measure_eviction(device, "none"), _CELL_S),
        Cell(f"CUDA IPC, {_NUM_SYNCS} syncs", lambda: _measure_transfer(device), _CELL_S),
    ]


def _measure_eviction(device: torch.device, offload: Literal["none", "idle"]) -> str:
    """Trains, evicts the trainer and measures from the other process. Raises AssertionError if memory is kept."""
    size, num_rows, length = ("0.5B", 16, 1024) if device.type == "cuda" else ("tiny", 2, 8)
    rows = {"num_rows": num_rows, "length": length, "vocabulary": model_config(size).vocab_size}
    free_memory(device)
    with start_observer(device) as observer:
        before = observer.used_bytes()
        host = Host()
        construction = Construction(
            _ROLE, Trainer, (size, offload), {}, Mesh(1, 1, 1, 1), 0, 0, 0, str(device), torch.get_num_threads()
        )
        host.construct(construction)
        _call(host, "train", **rows)
        training = observer.used_bytes()
        host.evict(_ROLE, 0, 0)
        evicted = observer.used_bytes()
        resident = 0 if offload == "idle" else _call(host, "num_resident_bytes")
        norm = _call(host, "train", **rows)
    kept, used = evicted - before, training - before
    assert math.isfinite(norm), f"the gradient norm after an eviction is {norm}"
    limit = resident + _PROCESS_BYTES
    assert kept <= limit, f"an evicted trainer keeps {kept / 1e9:.2f} GB of {used / 1e9:.2f}, limit {limit / 1e9:.2f}"
    return f"{used / 1e9:.2f} GB while training, {kept / 1e9:.2f} GB after the eviction (limit {limit / 1e9:.2f})"


def _call(host: Host, method: str, **arguments: int):
    contract = get_contract(getattr(Trainer, method))
    assert contract is not None
    return host.call(Request(1, _ROLE, 0, 0, method, arguments, contract, returns_batch=False))[0]


def _measure_transfer(device: torch.device) -> str:
    """Sends versions of a bfloat16 model. Raises AssertionError if a bit differs, or if the used memory grows."""
    free_memory(device)
    with start_observer(device) as observer:
        model = build_model("0.5B" if device.type == "cuda" else "tiny", device, torch.bfloat16)
        sender, times, used = IpcSender(device), [], []
        num_bytes = sum(weight.numel() * weight.element_size() for _, weight in full_weights(model))
        for version in range(1, _NUM_SYNCS + 1):
            _set_version(model, version, device)
            start_s = time.perf_counter()
            _send(sender, model, version, observer)
            times.append(time.perf_counter() - start_s)
            used.append(observer.used_bytes())
    # The first sync allocates, in both processes.
    growth = used[-1] - used[1]
    assert growth <= _NOISE_BYTES, f"the used memory grows by {growth / 1e6:.0f} MB from sync 2 to {_NUM_SYNCS}"
    duration_s = sorted(times)[len(times) // 2]
    speed = f"{num_bytes / 1e9:.2f} GB in {duration_s * 1e3:.0f} ms with the comparison"
    return f"bit-equal, growth {growth / 1e6:.0f} MB, {speed}, {num_bytes / duration_s / 1e9:.1f} GB/s"


def _set_version(model: nn.Module, version: int, device: torch.device) -> None:
    with torch.no_grad():
        for name, weight in full_weights(model):
            weight.copy_(draw_weight(name, version, tuple(weight.shape), weight.dtype, device))


def _send(sender: IpcSender, model: nn.Module, version: int, observer: Observer) -> None:
    for names in weight_buckets(weight_shapes(model), _BUCKET_BYTES):
        metadata = WeightMetadata.of(weight_shapes(model, names))
        changed = observer.find_changed(sender.share(full_weights(model, names), metadata), version)
        assert not changed, f"{len(changed)} weights of version {version} differ, the first is {changed[0]}"
    sender.release()
