"""Weight loading and error reporting in vLLM's worker processes.

With one device, vLLM's worker runs in the leader process. With several devices, each device has its own worker process.
"""

import ctypes
import mmap
import os
import signal
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import connection, parent_process
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.parallel_state import get_pp_group
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from flowrl.engines.models.file_layout import FilePart, split_parts
from flowrl.engines.rollout.broadcast import BroadcastReceiver, TransferGroup
from flowrl.engines.rollout.cuda_ipc import IpcBucket, read_bucket
from flowrl.engines.rollout.weight_metadata import WeightMetadata, with_tied_names

TRANSFER = "flowrl_tensors"
"""Name of `TensorTransfer` in vLLM's registry."""

_ALIGNMENT = 64
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Option numbers of glibc's `mallopt`."""


@dataclass(frozen=True)
class SharedTensors:
    """Tensors in anonymous shared memory. Other processes on this machine map them without a copy."""

    owner: int
    """Process id of the process that created the memory."""
    file: int
    """File descriptor of the memory in the owner process."""
    layout: Mapping[str, tuple[int, torch.dtype, tuple[int, ...]]]
    """Maps a name to (offset in bytes, dtype, shape)."""

    @classmethod
    @contextmanager
    def of(cls, tensors: Mapping[str, Tensor]) -> Iterator["SharedTensors"]:
        """Copies tensors to shared memory, tied tensors once. Other processes can map them inside the `with` block."""
        layout, size, unique = {}, 0, dict[int, tuple[int, Tensor]]()
        for name, tensor in tensors.items():
            if id(tensor) not in unique:
                unique[id(tensor)] = size, tensor
                size += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
            layout[name] = unique[id(tensor)][0], tensor.dtype, tuple(tensor.shape)
        file = os.memfd_create("flowrl-weights")
        try:
            os.ftruncate(file, max(size, 1))
            for offset, tensor in unique.values():
                _write(file, offset, tensor)
            yield cls(os.getpid(), file, layout)
        finally:
            os.close(file)

    def map(self) -> dict[str, Tensor]:
        """Returns the tensors without a copy. Writes are visible only in the calling process (copy-on-write)."""
        with open(f"/proc/{self.owner}/fd/{self.file}", "rb") as file:
            memory = torch.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), dtype=torch.uint8)
        tensors = {}
        for name, (offset, dtype, shape) in self.layout.items():
            size = dtype.itemsize * torch.Size(shape).numel()
            tensors[name] = memory[offset : offset + size].view(dtype).view(shape)
        return tensors


def _write(file: int, offset: int, tensor: Tensor) -> None:
    """Writes a tensor with pwrite. This is twice as fast as copying it to mapped memory."""
    remaining = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    while remaining:
        written = os.pwrite(file, remaining, offset)
        remaining, offset = remaining[written:], offset + written


@dataclass
class NoInit(WeightTransferInitInfo):
    """Empty initialization message for vLLM. Tensors in host memory need no connection."""


@dataclass
class Tensors(WeightTransferUpdateInfo):
    """Update message for vLLM: the weights of one bucket, or a description of a GPU transfer."""

    weights: Mapping[str, Tensor] | SharedTensors | IpcBucket | WeightMetadata
    tied: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Maps a weight name to its tied names. Only GPU transfers use it."""
    parts: Mapping[str, Sequence[FilePart]] = field(default_factory=dict)
    """Maps a weight name to the weight's file entries, if their names or shapes differ from the model."""


class TensorTransfer(WeightTransferEngine[NoInit, Tensors]):
    """vLLM weight transfer engine for all transports."""

    receiver: BroadcastReceiver | None = None
    """Receiver of a broadcast. None before `join_transfer_group`."""
    init_info_cls = NoInit
    update_info_cls = Tensors

    def init_transfer_engine(self, init_info: NoInit) -> None:
        if self.device.type == "cpu":
            keep_freed_memory()

    def start_weight_update(self) -> None:
        if self.device.type == "cpu":
            _set_up_experts_again(self.model)
        initialize_layerwise_reload(self.model)

    @torch.no_grad()
    def receive_weights(self, update_info: Tensors) -> None:
        weights = update_info.weights
        load: Any = self.model.load_weights  # a method of vLLM's models, which torch does not type
        if isinstance(weights, WeightMetadata):
            assert self.receiver is not None, "the engine has joined the broadcast"
            named = with_tied_names(self.receiver.receive(weights), update_info.tied)
        elif isinstance(weights, IpcBucket):
            named = with_tied_names(read_bucket(weights, self.device), update_info.tied)
        else:
            named = (weights.map() if isinstance(weights, SharedTensors) else weights).items()
        load(split_parts(named, update_info.parts))

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        self.receiver = None


WeightTransferEngineFactory.register_engine(TRANSFER, TensorTransfer)


def keep_freed_memory() -> None:
    """Configures glibc to reuse freed memory. This makes weight updates on the CPU 25 % faster."""
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(_MMAP_THRESHOLD, 32 * 2**20)  # glibc's maximum
        set_option(_TRIM_THRESHOLD, 256 * 2**20)


def _set_up_experts_again(model: torch.nn.Module) -> None:
    """Makes vLLM pack the weights of experts again on CPUs after an update.

    vLLM 0.32 packs them only when it sets up the kernel of a layer (`UnquantizedFusedMoEMethod._setup_kernel`). After
    an update, the kernel would read weights that are not packed.
    """
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if isinstance(method, UnquantizedFusedMoEMethod):
            method.moe_kernel = None


class WorkerExtension:
    """Methods that vLLM adds to its workers (`worker_extension_cls`)."""

    weight_transfer_engine: Any
    model_runner: Any
    rank: int
    device: torch.device
    _weight_update_active: bool

    def attempt(self, method: str, *args: Any) -> tuple[str, str] | None:  # Any: the method's own
        """Calls a method of the worker. If the method raises, returns the error and the traceback. Otherwise returns
        None.

        If several workers raised, vLLM would read only the first error. It would mistake the other errors for results
        of the next call.
        """
        try:
            getattr(self, method)(*args)
        except Exception as error:  # noqa: BLE001 (process boundary: the leader re-raises it)
            return f"{type(error).__name__}: {error}", traceback.format_exc()
        return None

    def join_transfer_group(self, group: TransferGroup, first: int) -> None:
        self.weight_transfer_engine.receiver = BroadcastReceiver(group, first + self.rank, self.device)

    def end_update(self) -> None:
        """Ends a failed update, so that another update can begin. Layers that received no weights keep their old
        weights.
        """
        self._weight_update_active = False
        engine = self.weight_transfer_engine
        for layer in engine.model.modules():
            info = get_layerwise_info(layer)
            if info.can_load():
                info.load_numel = 0
                info.loaded_weights.clear()
        finalize_layerwise_reload(engine.model, engine.model_config)

    def allocate_received_states(self) -> None:
        """Allocates the buffers for the hidden states that a pipeline stage receives.

        vLLM 0.32 allocates them in a run that measures memory. It skips this run on CPUs without compilation.
        """
        runner = self.model_runner
        if not get_pp_group().is_first_rank and runner.intermediate_tensors is None:
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
            )

    def follow_leader(self) -> None:
        """Makes this process end with its leader. A watchdog thread waits for the end of the leader, also during a
        collective. Ctrl-C, which reaches both processes, is left to the leader.
        """
        leader = parent_process()
        assert leader is not None, "a worker in the leader's process needs no watchdog"
        signal.signal(signal.SIGINT, signal.SIG_IGN)

        def watch() -> None:
            connection.wait([leader.sentinel])
            os._exit(1)

        threading.Thread(target=watch, daemon=True, name="flowrl-follow-leader").start()
