"""Broadcast of weights from ranks of the actor to all devices of a rollout: with NCCL on GPUs, and with gloo on CPUs.

Each sender broadcasts its part of the weights in a group of its own, which contains the sender and all receivers. A
part has consecutive rows of each weight (`WeightMetadata.part`). No library except torch is needed.
"""

import socket
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import TCPStore  # pyright: ignore[reportPrivateImportUsage] (documented there)

from flowrl.devices.device import COLLECTIVE_TIMEOUT, get_device, packed_size, unpack_bytes
from flowrl.engines.rollout.weight_metadata import WeightMetadata, pack


@dataclass(frozen=True)
class TransferGroup:
    """Rendezvous of all senders and receivers of a broadcast."""

    host: str
    port: int
    num_senders: int
    num_receivers: int
    """Number of devices of all replicas of the rollout."""


class BroadcastSender:
    """Sends one part of the weights."""

    def __init__(
        self, group: TransferGroup, index: int, device: torch.device, listener: socket.socket | None = None
    ) -> None:
        """Waits until all receivers have joined.

        Args:
            group: the rendezvous.
            index: index of the sender.
            device: device that broadcasts.
            listener: for sender 0, the socket that listens on the address of the rendezvous. The constructor takes
                ownership of the socket. None for other senders.
        """
        self._device, self._index, self._count = device, index, group.num_senders
        self._store = _open_store(group, listener)
        self._group = _join(self._store, group, index, 0, device)
        _meet([self._group], device)

    def send(self, weights: Iterable[Tensor], metadata: WeightMetadata) -> None:
        """Broadcasts this sender's parts of the weights in a bucket. `weights` has one part per weight, on any device.
        Every receiver must call `BroadcastReceiver.receive` for the same bucket.
        """
        _broadcast(self._group, pack(weights, metadata.part(self._index, self._count), self._device)).wait()
        get_device(self._device).wait_for_stream()


class BroadcastReceiver:
    """Receives the weights of all senders on one device."""

    def __init__(self, group: TransferGroup, index: int, device: torch.device) -> None:
        """Waits until all senders and receivers have joined. `index` is the index of the receiver."""
        self._device = device
        self._store = _open_store(group)
        self._groups = [_join(self._store, group, sender, 1 + index, device) for sender in range(group.num_senders)]
        _meet(self._groups, device)

    def receive(self, metadata: WeightMetadata) -> list[tuple[str, Tensor]]:
        """Receives the weights that the metadata describes."""
        count = len(self._groups)
        layouts = [metadata.part(index, count) for index in range(count)]
        buffers = [torch.empty(packed_size(parts), dtype=torch.uint8, device=self._device) for parts in layouts]
        for work in [_broadcast(group, buffer) for group, buffer in zip(self._groups, buffers, strict=True)]:
            work.wait()
        parts = [unpack_bytes(buffer, layout) for buffer, layout in zip(buffers, layouts, strict=True)]
        weights = [torch.cat(own) if count > 1 else own[0] for own in zip(*parts, strict=True)]
        return [
            (name, weight.view(shape))
            for name, weight, shape in zip(metadata.names, weights, metadata.shapes, strict=True)
        ]


def _open_store(group: TransferGroup, listener: socket.socket | None = None) -> Store:
    return TCPStore(
        group.host,
        group.port,
        is_master=listener is not None,
        timeout=COLLECTIVE_TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=None if listener is None else listener.detach(),
    )


def _join(
    store: Store, group: TransferGroup, sender: int, rank: int, device: torch.device
) -> Any:  # Any: a backend, whose methods torch does not type
    """Joins the group of a sender, in which the sender has rank 0. The group is not registered in torch.distributed."""
    own, size = PrefixStore(f"sender {sender}", store), 1 + group.num_receivers
    if device.type == "cpu":
        return distributed.ProcessGroupGloo(own, rank, size, COLLECTIVE_TIMEOUT)
    options = distributed.ProcessGroupNCCL.Options()
    options._timeout = COLLECTIVE_TIMEOUT
    return distributed.ProcessGroupNCCL(own, rank, size, options)


def _meet(groups: Iterable[Any], device: torch.device) -> None:  # Any: as above
    """Waits until all members have joined, by a broadcast in each group. NCCL connects members only in a collective."""
    for group in groups:
        _broadcast(group, torch.zeros(1, dtype=torch.uint8, device=device)).wait()
    get_device(device).wait_for_stream()


def _broadcast(group: Any, buffer: Tensor) -> distributed.Work:  # Any: as above
    options = distributed.BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    return group.broadcast([buffer], options)
