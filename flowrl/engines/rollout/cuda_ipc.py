"""Weights in GPU memory that two processes on the same GPU share through CUDA IPC.

The actor copies a bucket of weights into one buffer, and the rollout copies the weights out of it. No library except
torch is needed. On the CPU, the buffer is in shared memory, which a `torch.multiprocessing` connection can send.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from flowrl.devices.device import get_device, unpack_bytes
from flowrl.engines.rollout.weight_metadata import WeightMetadata, pack

_DEVICE_INDEX = 6
"""Position of the device index in the arguments with which torch opens an IPC buffer."""


@dataclass(frozen=True)
class IpcBucket:
    """A bucket of weights in a buffer that other processes on the same device can open."""

    metadata: WeightMetadata
    handles: Mapping[str, tuple[Callable[..., Tensor], tuple[Any, ...]]]
    """Maps a GPU's UUID to the function and the arguments that open the buffer on that GPU."""

    @property
    def names(self) -> tuple[str, ...]:
        return self.metadata.names

    @classmethod
    def merged(cls, buckets: Sequence["IpcBucket"]) -> "IpcBucket":
        """Merges the buckets of all ranks into one bucket that contains the handles of all ranks."""
        handles = itertools.chain.from_iterable(bucket.handles.items() for bucket in buckets)
        return cls(buckets[0].metadata, dict(handles))


class IpcSender:
    """Sender in an actor process, for one device. Keeps one bucket in memory until the next `share` or `release`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffer: Tensor | None = None

    def share(self, weights: Iterable[tuple[str, Tensor]], metadata: WeightMetadata) -> IpcBucket:
        """Copies weights, possibly from another device, into a new buffer. The receiver must have read the previous
        buffer.
        """
        self._drop_buffer()
        self._buffer = pack((weight for _, weight in weights), metadata.part(0, 1), self._device)
        # The receiver's stream does not wait for the copies on this stream.
        get_device(self._device).wait_for_stream()
        return IpcBucket(metadata, {get_device(self._device).id: reduce_tensor(self._buffer)})

    def release(self) -> None:
        """Returns the memory of the last bucket to the GPU, so that other processes can allocate it."""
        self._drop_buffer()
        get_device(self._device).release_cached()

    def _drop_buffer(self) -> None:
        if self._buffer is not None:
            self._buffer = None
            get_device(self._device).release_ipc()


def read_bucket(bucket: IpcBucket, device: torch.device) -> list[tuple[str, Tensor]]:
    """Returns copies of a bucket's weights and closes the buffer, which the sender can then free.

    Each receiver must open a buffer exactly once, because torch counts the receivers of a buffer.
    """
    own = get_device(device)
    assert own.id in bucket.handles, f"the actor has no bucket on {own.id}, only on {', '.join(bucket.handles)}"
    rebuild, arguments = bucket.handles[own.id]
    if own.index is not None:
        arguments = (*arguments[:_DEVICE_INDEX], own.index, *arguments[_DEVICE_INDEX + 1 :])
    metadata = bucket.metadata
    copies = [part.clone() for part in unpack_bytes(rebuild(*arguments), metadata.part(0, 1))]
    own.wait_for_stream()
    return list(zip(metadata.names, copies, strict=True))
