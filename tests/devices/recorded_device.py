"""A device that records its operations."""

import weakref
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from flowrl.devices.device import Device, MemoryUsage, OffloadedTensor


class RecordedDevice:
    """Passes the name of each operation to a function, and then runs it on another device.

    Host copies treat its memory as that of a GPU: they copy tensors and release their memory.
    """

    has_own_memory = True

    def __init__(self, device: Device, record: Callable[[str], None]) -> None:
        self._device, self._record = device, record
        self.id, self.index, self.capability = device.id, device.index, device.capability
        self.peak_flops = device.peak_flops

    def wait_for_stream(self) -> None:
        self._record("wait for stream")
        self._device.wait_for_stream()

    def synchronize(self) -> None:
        self._record("synchronize")
        self._device.synchronize()

    def release_cached(self) -> None:
        self._record("release cached")
        self._device.release_cached()

    def release_ipc(self) -> None:
        self._record("release ipc")
        self._device.release_ipc()

    def memory(self) -> MemoryUsage:
        return self._device.memory()

    def begin_peak(self) -> None:
        self._device.begin_peak()

    def host_buffer(self, num_bytes: int) -> Tensor:
        self._record("host buffer")
        buffer = self._device.host_buffer(num_bytes)
        weakref.finalize(buffer, self._record, "unpin").atexit = False  # as that of a GPU
        return buffer

    def copy_to_host(self, copies: Sequence[tuple[Tensor, Tensor]]) -> Callable[[], None]:
        self._record("copy to host")
        wait = self._device.copy_to_host(copies)

        def recorded() -> None:
            self._record("copied")
            wait()

        return recorded

    def send(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return self._device.send(tensors)

    def fetch(self, tensors: Mapping[str, Tensor]) -> Callable[[], dict[str, Tensor]]:
        return self._device.fetch(tensors)

    def offload(self, tensor: Tensor) -> OffloadedTensor:
        self._record("offload")
        return self._device.offload(tensor)

    def random_state(self) -> Tensor:
        return self._device.random_state()

    def restore_random_state(self, state: Tensor) -> None:
        self._device.restore_random_state(state)

    def make_deterministic(self) -> None:
        self._device.make_deterministic()
