"""What runs in vLLM's own processes: how weights get there, and how a failure there is told.

One process leads the devices of a replica. With one device vLLM's worker is in it; with several each has a process
that the leader starts. vLLM loads this module in each of them, whichever they are.
"""

import ctypes
import mmap
import os
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from multiprocessing import connection, parent_process
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from flowrl.engines.rollout.vllm.links import Described, Link, Receivers, SharedPart

TRANSFER = "flowrl_tensors"
"""The name under which vLLM knows `TensorTransfer`."""

_ALIGNMENT = 64
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""As `mallopt` numbers its options."""


@dataclass(frozen=True)
class SharedTensors:
    """Tensors in memory that another process of this machine can map; that has no name, so nothing of it can stay.

    The memory goes with the last tensor that lies in it, in whichever process.
    """

    owner: int
    """The process that opened the memory."""
    file: int
    """Its number there."""
    layout: Mapping[str, tuple[int, torch.dtype, tuple[int, ...]]]
    """Name -> first byte, type, shape."""

    @classmethod
    @contextmanager
    def of(cls, tensors: Mapping[str, Tensor]) -> Iterator["SharedTensors"]:
        """Copies tensors, once each however many names they have, for others to map while this is open."""
        layout, size, found = {}, 0, dict[int, tuple[int, Tensor]]()
        for name, tensor in tensors.items():
            if id(tensor) not in found:
                found[id(tensor)] = size, tensor
                size += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
            layout[name] = found[id(tensor)][0], tensor.dtype, tuple(tensor.shape)
        file = os.memfd_create("flowrl-weights")
        try:
            os.ftruncate(file, max(size, 1))
            for first, tensor in found.values():
                _write(file, first, tensor)
            yield cls(os.getpid(), file, layout)
        finally:
            os.close(file)

    def mapped(self) -> dict[str, Tensor]:
        """The tensors, without a copy; who writes into them writes for itself alone."""
        with open(f"/proc/{self.owner}/fd/{self.file}", "rb") as file:
            memory = torch.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), dtype=torch.uint8)
        found = {}
        for name, (first, dtype, shape) in self.layout.items():
            size = dtype.itemsize * torch.Size(shape).numel()
            found[name] = memory[first : first + size].view(dtype).view(shape)
        return found


def _write(file: int, first: int, tensor: Tensor) -> None:
    """Writes a tensor's bytes: half the time of a copy into the mapped memory, each page of which would be cleared."""
    left = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    while left:
        written = os.pwrite(file, left, first)
        left, first = left[written:], first + written


@dataclass
class Nothing(WeightTransferInitInfo):
    """Tensors that are handed over need no connection."""


@dataclass
class Tensors(WeightTransferUpdateInfo):
    weights: Mapping[str, Tensor] | SharedTensors | SharedPart | Described
    also: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Other names of weights that come from GPUs."""


class TensorTransfer(WeightTransferEngine[Nothing, Tensors]):
    """Weights that are in this machine's memory already, such as arrays of the object store, or on GPUs of it and of
    others."""

    init_info_cls = Nothing
    update_info_cls = Tensors

    def init_transfer_engine(self, init_info: Nothing) -> None:
        if self.device.type == "cpu":
            keep_freed_memory()

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    @torch.no_grad()
    def receive_weights(self, update_info: Tensors) -> None:
        given = update_info.weights
        if isinstance(given, SharedPart | Described):
            self.receivers.receive(given, update_info.also)
            return
        load: Any = self.model.load_weights  # a method of vLLM's models, which torch's types do not know
        load((given.mapped() if isinstance(given, SharedTensors) else given).items())

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    @cached_property
    def receivers(self) -> Receivers:
        """The ends of the ways from other GPUs."""
        return Receivers(lambda kind, model: kind(self.config, self.vllm_config, self.device, model), self.model)

    def shutdown(self) -> None:
        self.receivers.shutdown()


WeightTransferEngineFactory.register_engine(TRANSFER, TensorTransfer)


def keep_freed_memory() -> None:
    """Has the C library keep what a layer's weights leave for those of the next, instead of clearing new pages for
    each: a quarter of an update's time on the CPU. Elsewhere than with glibc it does nothing."""
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(_MMAP_THRESHOLD, 32 * 2**20)  # the largest that glibc takes
        set_option(_TRIM_THRESHOLD, 256 * 2**20)


class WorkerMethods:
    """Methods that vLLM adds to its workers (`worker_extension_cls`)."""

    weight_transfer_engine: Any
    _weight_update_active: bool

    def attempt(self, method: str, *args: Any) -> tuple[str, str] | None:  # Any: the method's own
        """Calls a method of the worker; gives what it raised and its traceback.

        Of several workers that raise, vLLM reads the answer of the first and takes the others' for those to the next
        call. So none of ours raises.
        """
        try:
            getattr(self, method)(*args)
        except Exception as error:  # noqa: BLE001 (process boundary: the leader raises it again)
            return f"{type(error).__name__}: {error}", traceback.format_exc()
        return None

    def join_link(self, link: Link, first_rank: int) -> None:
        """Joins a link from the actor's GPU; done when all have."""
        self.weight_transfer_engine.receivers.join(link, first_rank)

    def end_update(self) -> None:
        """Leaves an update that failed, so that another can begin: layers that have not come keep what they had."""
        self._weight_update_active = False
        engine = self.weight_transfer_engine
        for layer in engine.model.modules():
            info = get_layerwise_info(layer)
            if info.can_load():
                info.load_numel = 0
                info.loaded_weights.clear()
        finalize_layerwise_reload(engine.model, engine.model_config)

    def end_with_leader(self) -> None:
        """Ends this process as soon as the leader has ended, even in a collective that waits for others."""
        leader = parent_process()
        assert leader is not None, "a worker in the leader's process needs no watch"
        _end_with([leader.sentinel])


def _end_with(sentinels: list[int]) -> None:
    def watch() -> None:
        connection.wait(sentinels)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="flowrl-end-with-leader").start()
