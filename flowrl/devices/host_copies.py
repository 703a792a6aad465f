"""Copies of tensors in host memory, from which a device gets them back after other roles have used its memory."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, UntypedStorage

from flowrl.devices.device import Device, local_tensor, packed_size, unpack_bytes

_WORD = 4
_NUM_SUMS = 1021
"""Number of sums in a digest. It is prime, so that an exchange of two rows of a matrix usually changes the digest."""

_MIN_DIGEST_BYTES = 16 * _WORD * _NUM_SUMS
"""Minimum size of memory with a digest, in bytes. Smaller memory is always copied."""


@dataclass
class _Copy:
    """A copy of the memory of one or more tensors."""

    host: Tensor
    """Bytes in host memory."""
    buffer: Tensor
    """Host memory of several copies, which stays pinned as long as this object exists."""
    digest: Tensor | None = None
    """Digest of the bytes; None if they must be copied again."""


class HostCopies:
    """Keeps copies of tensors in host memory while other roles use their device memory.

    `offload` releases the device memory of tensors. They remain valid objects, but must not be used until `onload`.
    Host memory is pinned, and allocated again only if a tensor changes its size. On the CPU, all methods do nothing.
    """

    def __init__(self, device: Device, *, compares: bool = True) -> None:
        """`compares`: whether to copy only tensors that have changed since their last copy, which excludes frozen
        weights. A digest detects changed tensors, but can miss the small changes of a training step, after which
        `mark_changed` must be called. Without `compares`, all tensors are copied, and no digests are computed.
        """
        self._device, self._compares = device, compares
        self._copies: dict[int, _Copy] = {}
        """Maps the address of a storage object to the copy of its memory."""
        self._offloaded: dict[int, UntypedStorage] = {}
        self._wait: Callable[[], None] | None = None
        """Waits for the copies of the last `start_copy`."""

    def start_copy(self, tensors: Iterable[Tensor]) -> None:
        """Starts to copy tensors to host memory. Later operations on the device may run at the same time.

        A tensor that changes afterwards is copied again by `offload`.
        """
        if self._device.has_own_memory:
            self._start_copy(_storages(tensors))

    def offload(self, tensors: Iterable[Tensor]) -> None:
        """Copies tensors to host memory, waits for the copies, and releases the memory of the tensors."""
        if not self._device.has_own_memory:
            return
        storages = _storages(tensors)
        self._start_copy(storages)
        self._finish()
        for storage in storages:
            self._offloaded[storage._cdata] = storage
            storage.resize_(0)

    def onload(self) -> None:
        """Allocates the memory of all offloaded tensors and starts to copy their contents back. Does not wait: later
        operations of the current stream see the contents.
        """
        for key, storage in self._offloaded.items():
            host = self._copies[key].host
            storage.resize_(host.nbytes)
            _bytes_of(storage).copy_(host, non_blocking=True)
        self._offloaded = {}

    def read(self, tensor: Tensor) -> Tensor:
        """Returns a copy of an offloaded tensor in host memory. Returns other tensors themselves."""
        storage = local_tensor(tensor).untyped_storage()
        if storage._cdata not in self._offloaded:
            return tensor
        copied = torch.empty_like(tensor, device="cpu")
        local, host = local_tensor(tensor), self._copies[storage._cdata].host.view(tensor.dtype)
        start = host.storage_offset() + local.storage_offset()
        local_tensor(copied).copy_(host.as_strided(local.size(), local.stride(), start))
        return copied

    def mark_changed(self, tensors: Iterable[Tensor]) -> None:
        """Makes the next copy of tensors unconditional. A digest may miss the few small changes of a training step."""
        if not self._copies:
            return
        for storage in _storages(tensors):
            if (copied := self._copies.get(storage._cdata)) is not None:
                copied.digest = None

    def forget(self) -> None:
        """Drops all copies, after other tensors have replaced the copied ones."""
        if self._copies:
            self._finish()
            self._device.wait_for_stream()  # for the copies of `onload`
        self._copies, self._offloaded = {}, {}

    def _start_copy(self, storages: Sequence[UntypedStorage]) -> None:
        self._finish()
        new = [storage for storage in storages if self._lacks(storage)]
        if new:
            self._allocate(new)
        changed = [(_bytes_of(storage), self._copies[storage._cdata]) for storage in storages]
        digests = _digests([memory for memory, _ in changed]) if self._compares else [None] * len(changed)
        pairs = []
        for (memory, copied), digest in zip(changed, digests, strict=True):
            if digest is None or copied.digest is None or not torch.equal(digest, copied.digest):
                pairs.append((copied.host, memory))
            copied.digest = digest
        if pairs:
            self._wait = self._device.copy_to_host(pairs)

    def _lacks(self, storage: UntypedStorage) -> bool:
        known = self._copies.get(storage._cdata)
        return known is None or known.host.nbytes != storage.nbytes()

    def _allocate(self, storages: Sequence[UntypedStorage]) -> None:
        memories = [_bytes_of(storage) for storage in storages]
        buffer = self._device.host_buffer(packed_size(memories))
        for storage, host in zip(storages, unpack_bytes(buffer, memories), strict=True):
            self._copies[storage._cdata] = _Copy(host, buffer)

    def _finish(self) -> None:
        if self._wait is not None:
            self._wait()
            self._wait = None


def _storages(tensors: Iterable[Tensor]) -> list[UntypedStorage]:
    """Returns the memory of tensors, once if they share it, and without memory that is already free."""
    storages = (local_tensor(tensor).untyped_storage() for tensor in tensors)
    return list({storage._cdata: storage for storage in storages if storage.nbytes()}.values())


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _digests(memories: Sequence[Tensor]) -> list[Tensor | None]:
    """Returns the digest `[_NUM_SUMS]` of each memory, in host memory: sums of every `_NUM_SUMS`-th word.

    On a GPU, they take about one hundredth of the time of copies to the host. Returns None for little memory.
    """
    large = [memory for memory in memories if memory.nbytes >= _MIN_DIGEST_BYTES]
    if not large:
        return [None] * len(memories)
    sums = iter(torch.stack([_digest(memory) for memory in large]).cpu())
    return [next(sums) if memory.nbytes >= _MIN_DIGEST_BYTES else None for memory in memories]


def _digest(memory: Tensor) -> Tensor:
    row = _WORD * _NUM_SUMS
    num_rows = memory.nbytes // row
    words = memory[: num_rows * row].view(torch.int32).view(num_rows, _NUM_SUMS)
    digest = words.sum(0, dtype=torch.int64)
    rest = memory[num_rows * row :].long()
    positions = torch.arange(len(rest), device=memory.device)
    return digest.scatter_add_(0, positions // _WORD, rest << (8 * (positions % _WORD)))
