"""Operations on devices. Only this module calls `torch.cuda`."""

import gc
import os
import shutil
import sysconfig
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from flowrl.devices.device_rates import find_peak_flops

COLLECTIVE_TIMEOUT = timedelta(days=7)
"""Timeout of process groups. It exceeds the timeouts of calls, because errors of calls name the late rank.

A shorter timeout could end the ranks that wait for the late rank first, with an error that does not name the cause.
"""

_DETERMINISTIC = {
    # cuBLAS reads it when the process creates its first handle. A workspace of variable size allows other algorithms.
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    # transformers reads it in each call of flash-attn, whose backward pass otherwise adds in any order.
    "FLASH_ATTENTION_DETERMINISTIC": "1",
    # vLLM reads it at its start. The logits of a row then do not depend on the other rows of the batch.
    "VLLM_BATCH_INVARIANT": "1",
}
"""Environment variables of a process with deterministic operations on GPUs."""

_BUFFER_BITS = 4
"""Number of leading bits of the sizes of reused buffers. A buffer is at most 1/8 larger than needed."""

_PORTABLE = 1
"""Flag of cudaHostRegister that pins memory for all GPUs of the process."""


@dataclass(frozen=True)
class MemoryUsage:
    """Memory of a device in bytes."""

    allocated: int
    """Memory of this process's tensors. On the CPU, the resident memory of the process."""
    peak: int
    """Largest value of `allocated` since `begin_peak`. On the CPU, the current value."""
    reserved: int
    """Memory that this process keeps from other processes: `allocated` plus the free blocks in torch's cache."""
    free: int
    """Memory that every process can allocate."""
    total: int

    @property
    def peak_fraction(self) -> float:
        """Fraction of the memory that was in use at the peak of this process. Blocks in torch's cache that were free at
        the peak do not count, because torch could use them for other tensors.
        """
        return 1 - (self.free + self.reserved - self.peak) / self.total


class OffloadedTensor(Protocol):
    """A tensor of a device in host memory."""

    def prefetch(self) -> None:
        """Starts to copy the tensor back to the device, unless a copy is already there or on its way. Does not wait."""
        ...

    def restore(self) -> Tensor:
        """Returns the tensor on the device, and drops this object's reference to it. Later operations of the current
        stream wait for the copy.
        """
        ...


class Device(Protocol):
    """Operations on a device."""

    @property
    def id(self) -> str:
        """Name that is equal in all processes: the UUID of a GPU, or `cpu`."""
        ...

    @property
    def peak_flops(self) -> float | None:
        """Peak FLOP/s of dense bfloat16 matrix products, or None if it is unknown."""
        ...

    @property
    def has_own_memory(self) -> bool:
        """Whether the memory of the device is separate from host memory."""
        ...

    @property
    def index(self) -> int | None:
        """Index of a GPU among the GPUs that this process can use, or None for the CPU."""
        ...

    @property
    def capability(self) -> tuple[int, int] | None:
        """CUDA compute capability, or None for the CPU."""
        ...

    def wait_for_stream(self) -> None:
        """Waits for the operations on the current stream, whose results another stream or process will read."""
        ...

    def synchronize(self) -> None:
        """Waits for the operations on all streams of the device."""
        ...

    def release_cached(self) -> None:
        """Returns the freed blocks in torch's cache to the device, so that other processes can allocate them."""
        ...

    def release_ipc(self) -> None:
        """Frees exported IPC buffers that all receivers have closed."""
        ...

    def memory(self) -> MemoryUsage: ...

    def begin_peak(self) -> None:
        """Begins to measure `MemoryUsage.peak`."""
        ...

    def host_buffer(self, num_bytes: int) -> Tensor:
        """Returns a new buffer `[num_bytes]` of host memory. For a GPU, the buffer is pinned until the tensor is freed,
        so that copies can be asynchronous.
        """
        ...

    def copy_to_host(self, copies: Sequence[tuple[Tensor, Tensor]]) -> Callable[[], None]:
        """Starts to copy tensors of the device to `host_buffer` memory. `copies` are pairs (destination, source).

        The copies wait for earlier operations of the current stream. Later operations do not wait for the copies.
        Returns a function that waits for the copies.
        """
        ...

    def send(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Returns copies of host tensors on the device. They are sent in one copy, which later operations of the
        current stream wait for. For the CPU, returns the tensors. Does not wait.
        """
        ...

    def fetch(self, tensors: Mapping[str, Tensor]) -> Callable[[], dict[str, Tensor]]:
        """Starts to copy tensors of the device to the host. Returns a function that waits for the copies and returns
        them. For the CPU, this function returns the tensors.
        """
        ...

    def offload(self, tensor: Tensor) -> OffloadedTensor:
        """Starts to copy a tensor to host memory, while later operations run. The caller may drop the tensor at once,
        but must not change it. For the CPU, keeps the tensor.
        """
        ...

    def random_state(self) -> Tensor:
        """Returns the state of torch's random number generator of the device."""
        ...

    def restore_random_state(self, state: Tensor) -> None: ...

    def make_deterministic(self) -> None:
        """Makes the process use only operations whose results are the same bit by bit in each run.

        Must run before the process uses the device. torch then raises RuntimeError in other operations.
        """
        ...


class _KeptTensor:
    """An offloaded tensor of the CPU. Keeps the tensor until `restore`, because it is in host memory already."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor: Tensor | None = tensor

    def prefetch(self) -> None: ...

    def restore(self) -> Tensor:
        tensor, self._tensor = self._tensor, None
        assert tensor is not None, "the tensor has already been restored"
        return tensor


class CpuDevice:
    """The CPU. It has no streams, and torch keeps no cache of its memory."""

    id = "cpu"
    has_own_memory = False
    index = None
    peak_flops = None
    capability = None

    def wait_for_stream(self) -> None: ...

    def synchronize(self) -> None: ...

    def release_cached(self) -> None: ...

    def release_ipc(self) -> None: ...

    def memory(self) -> MemoryUsage:
        import psutil  # noqa: PLC0415 (Ray has a copy of psutil, which can be imported after ray)

        resident, machine = psutil.Process().memory_info().rss, psutil.virtual_memory()
        return MemoryUsage(resident, resident, resident, machine.available, machine.total)

    def begin_peak(self) -> None: ...

    def host_buffer(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def copy_to_host(self, copies: Sequence[tuple[Tensor, Tensor]]) -> Callable[[], None]:
        for destination, source in copies:
            destination.copy_(source)
        return lambda: None

    def send(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return list(tensors)

    def fetch(self, tensors: Mapping[str, Tensor]) -> Callable[[], dict[str, Tensor]]:
        return lambda: dict(tensors)

    def offload(self, tensor: Tensor) -> OffloadedTensor:
        return _KeptTensor(tensor)

    def random_state(self) -> Tensor:
        return torch.get_rng_state()

    def restore_random_state(self, state: Tensor) -> None:
        torch.set_rng_state(state)

    def make_deterministic(self) -> None:
        torch.use_deterministic_algorithms(True)
        # Otherwise torch would fill each new tensor with NaN.
        torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue] (torch replaces the module at import)


class CudaDevice:
    """A GPU."""

    has_own_memory = True

    def __init__(self, index: int | None = None) -> None:
        """`index` is None for the current GPU of the process."""
        self.index = torch.cuda.current_device() if index is None else index

    @property
    def id(self) -> str:
        return str(torch.cuda.get_device_properties(self.index).uuid)

    @property
    def peak_flops(self) -> float | None:
        return find_peak_flops(torch.cuda.get_device_properties(self.index).name)

    @property
    def capability(self) -> tuple[int, int]:
        properties = torch.cuda.get_device_properties(self.index)
        return properties.major, properties.minor

    def wait_for_stream(self) -> None:
        torch.cuda.current_stream(self.index).synchronize()

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.index)

    def release_cached(self) -> None:
        torch.cuda.empty_cache()

    def release_ipc(self) -> None:
        torch.cuda.ipc_collect()

    def memory(self) -> MemoryUsage:
        free, total = torch.cuda.mem_get_info(self.index)
        allocated, reserved = torch.cuda.memory_allocated(self.index), torch.cuda.memory_reserved(self.index)
        peak = torch.cuda.max_memory_allocated(self.index)
        return MemoryUsage(allocated, peak, reserved, free, total)

    def begin_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.index)

    def host_buffer(self, num_bytes: int) -> Tensor:
        buffer = torch.empty(num_bytes, dtype=torch.uint8)
        if num_bytes:
            # Not `pin_memory`, because torch's allocator of pinned memory rounds sizes up to powers of two.
            cudart, address = torch.cuda.cudart(), buffer.data_ptr()
            assert cudart is not None
            error = int(cudart.cudaHostRegister(address, num_bytes, _PORTABLE))
            if error:
                raise RuntimeError(f"{num_bytes} bytes of host memory cannot be pinned: CUDA reports error {error}")
            weakref.finalize(buffer, cudart.cudaHostUnregister, address).atexit = False
        return buffer

    def copy_to_host(self, copies: Sequence[tuple[Tensor, Tensor]]) -> Callable[[], None]:
        stream = torch.cuda.Stream(self.index)
        stream.wait_stream(torch.cuda.current_stream(self.index))
        with torch.cuda.stream(stream):
            for destination, source in copies:
                destination.copy_(source, non_blocking=True)
        return stream.synchronize

    def send(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        # torch's allocator of pinned memory reuses a buffer only when its copies to the device are done.
        host = torch.empty(packed_size(tensors), dtype=torch.uint8, pin_memory=True)
        for own, tensor in zip(unpack_bytes(host, tensors), tensors, strict=True):
            own.copy_(tensor)
        return unpack_bytes(host.to(f"cuda:{self.index}", non_blocking=True), tensors)

    def fetch(self, tensors: Mapping[str, Tensor]) -> Callable[[], dict[str, Tensor]]:
        copies = {
            name: torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
            for name, tensor in tensors.items()
        }
        copied = torch.cuda.current_stream(self.index).record_event()

        def wait() -> dict[str, Tensor]:
            copied.synchronize()
            return copies

        return wait

    def offload(self, tensor: Tensor) -> OffloadedTensor:
        return _PinnedTensor(tensor, self._pinned_buffers)

    @cached_property
    def _pinned_buffers(self) -> "_PinnedBuffers":
        return _PinnedBuffers(self)

    def random_state(self) -> Tensor:
        return torch.cuda.get_rng_state(self.index)

    def restore_random_state(self, state: Tensor) -> None:
        torch.cuda.set_rng_state(state, self.index)

    def make_deterministic(self) -> None:
        _CPU.make_deterministic()
        os.environ |= _DETERMINISTIC


class _PinnedBuffers:
    """A stream for copies between a GPU and host memory, and the pinned buffers of these copies."""

    def __init__(self, device: CudaDevice) -> None:
        self.index, self.stream = device.index, torch.cuda.Stream(device.index)
        self._allocate = device.host_buffer
        self._free: list[Tensor] = []

    def take_buffer(self, num_bytes: int) -> Tensor:
        """Returns a free buffer of at least `num_bytes`, or allocates one. Frees the smaller buffers before it."""
        while self._free:
            buffer = self._free.pop()
            if len(buffer) >= num_bytes:
                return buffer
            self.stream.synchronize()  # a copy may still use the buffer, which is freed now
        # Micro-batches differ in size by a few tokens, and a new buffer takes time to pin.
        step = 1 << max(0, num_bytes.bit_length() - _BUFFER_BITS)
        return self._allocate(-(-num_bytes // step) * step)

    def return_buffer(self, buffer: Tensor) -> None:
        """Makes a buffer free. Its copies may still run, because all copies of buffers run on one stream."""
        self._free.append(buffer)


class _PinnedTensor:
    """A tensor in pinned host memory."""

    def __init__(self, tensor: Tensor, copies: _PinnedBuffers) -> None:
        self._copies, buffer = copies, copies.take_buffer(tensor.nbytes)
        weakref.finalize(self, copies.return_buffer, buffer).atexit = False
        self._host = buffer[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        self._prefetched: tuple[Tensor, torch.cuda.Event] | None = None
        copies.stream.wait_stream(torch.cuda.current_stream(copies.index))
        with torch.cuda.stream(copies.stream):
            self._host.copy_(tensor, non_blocking=True)
        tensor.record_stream(copies.stream)  # torch then reuses the memory of the tensor only after the copy

    def prefetch(self) -> None:
        if self._prefetched is not None:
            return
        stream = self._copies.stream
        tensor = torch.empty_like(self._host, device=f"cuda:{self._copies.index}")
        # The new tensor may reuse memory that earlier operations still read.
        stream.wait_stream(torch.cuda.current_stream(self._copies.index))
        with torch.cuda.stream(stream):
            tensor.copy_(self._host, non_blocking=True)
        tensor.record_stream(stream)  # if it is dropped during the copy
        copied = torch.cuda.Event()
        copied.record(stream)
        self._prefetched = tensor, copied

    def restore(self) -> Tensor:
        self.prefetch()
        assert self._prefetched is not None
        (tensor, copied), self._prefetched = self._prefetched, None
        torch.cuda.current_stream(self._copies.index).wait_event(copied)
        return tensor


_TRITON_CAPABILITY = (7, 0)
"""Lowest CUDA compute capability that Triton supports."""

_ALIGNMENT = 16
"""Alignment in bytes of the tensors in a buffer, which vectorized loads of GPUs need."""


def packed_size(tensors: Iterable[Tensor]) -> int:
    """Returns the size in bytes of a buffer that contains several tensors."""
    return sum(-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors)


def unpack_bytes(buffer: Tensor, tensors: Iterable[Tensor]) -> list[Tensor]:
    """Returns parts of a buffer of bytes as tensors with the dtypes and shapes of `tensors`, one after the other."""
    parts, start = [], 0
    for tensor in tensors:
        parts.append(buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
        start += packed_size([tensor])
    return parts


@torch.no_grad()
def local_tensor(tensor: Tensor) -> Tensor:
    """Returns the shard of a sharded tensor on this rank, without a gradient. Returns any other tensor unchanged.

    An operation on a shard avoids torch's dispatch of sharded tensors, which takes about 0.1 ms of CPU time.
    """
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def get_device(device: torch.device | str) -> Device:
    """Returns the operations on a device. A GPU without an index is the current GPU of the process."""
    device = torch.device(device)
    return CudaDevice(device.index) if device.type == "cuda" else _CPU


_CPU = CpuDevice()


def has_gpu() -> bool:
    """Returns whether torch can use a GPU. Does not create a CUDA context."""
    return torch.cuda.is_available()


def count_gpus() -> int:
    """Returns the number of GPUs that this process can use. Does not create a CUDA context."""
    return torch.cuda.device_count()


def used_device(name: str) -> Device | None:
    """Returns the operations on a device, or None for a GPU if this process has not used CUDA.

    In this case, an operation would create a CUDA context, which needs 0.5 GB of GPU memory.
    """
    return get_device(name) if name == "cpu" or torch.cuda.is_initialized() else None


def find_compiler_problem(device: Device) -> str | None:
    """Returns the reason for which torch.compile cannot build kernels for a GPU on this host, or None if it can.

    torch.compile uses Triton, which needs a C compiler and the headers of Python (triton/runtime/build.py).
    """
    if find_spec("triton") is None:
        return "the package triton is not installed"
    if device.capability is not None and device.capability < _TRITON_CAPABILITY:
        return "Triton does not support this GPU"
    compilers = [os.environ["CC"]] if os.environ.get("CC") else ["gcc", "clang"]
    if not any(map(shutil.which, compilers)):
        return f"this host has no C compiler ({' or '.join(compilers)})"
    scheme = sysconfig.get_default_scheme()
    headers = sysconfig.get_path("include", "posix_prefix" if scheme == "posix_local" else scheme)
    return None if Path(headers, "Python.h").exists() else f"{headers} has no Python.h"


def can_fork() -> bool:
    """Returns whether forked processes could use CUDA. They cannot if an import has already used the CUDA driver."""
    process_id = os.fork()
    if process_id == 0:
        os._exit(torch.cuda._is_in_bad_fork())
    status = os.waitpid(process_id, 0)[1]
    return status == 0 and not torch.cuda.is_initialized()


def use_exact_float32() -> None:
    """Makes float32 products and convolutions on GPUs exact: without TF32, which has 10 bits of mantissa.

    torch's defaults differ between products and convolutions. If float32 is too slow for a model, it computes in
    bfloat16 (`engine.compute_dtype`).
    """
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


def release_unused_memory() -> None:
    """Frees tensors in reference cycles, and returns freed memory to the device that this process uses."""
    gpu = used_device("cuda")
    if gpu is not None:
        gc.collect()
    (gpu or get_device("cpu")).release_cached()
