"""Weights that stay on GPUs on their way to vLLM: CUDA IPC on the same GPU, NCCL to others.

vLLM's own packing, receivers and communicator do the work; this module is both ends of them. The actor's process loads
it only for such a transport. Not tested on GPUs.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.distributed.weight_transfer.ipc_engine import (
    IPCWeightTransferEngine,
    IPCWeightTransferInitInfo,
    IPCWeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.nccl_common import trainer_init
from vllm.distributed.weight_transfer.nccl_engine import (
    NCCLWeightTransferEngine,
    NCCLWeightTransferInitInfo,
    NCCLWeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.packed_tensor import packed_ipc_producer, packed_nccl_broadcast_producer


@dataclass(frozen=True)
class Described:
    """Names, types and shapes of the weights of a part, in the order in which they travel."""

    names: tuple[str, ...]
    dtype_names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, weights: Iterable[tuple[str, torch.dtype, Sequence[int]]]) -> "Described":
        names, dtypes, shapes = zip(*weights, strict=True)
        return cls(names, tuple(str(dtype).removeprefix("torch.") for dtype in dtypes), tuple(map(tuple, shapes)))

    @property
    def num_bytes(self) -> int:
        sizes = zip(self.dtype_names, self.shapes, strict=True)
        return sum(getattr(torch, name).itemsize * torch.Size(shape).numel() for name, shape in sizes)

    def lists(self) -> tuple[list[str], list[str], list[list[int]]]:
        """As vLLM's update infos take them."""
        return list(self.names), list(self.dtype_names), [list(shape) for shape in self.shapes]


@dataclass(frozen=True)
class SharedPart:
    """A part that lies in a GPU's memory, for the process beside it to read."""

    described: Described
    tensor_sizes: tuple[int, ...]
    """Bytes of each weight in the buffer."""
    handles: Mapping[str, tuple]
    """GPU, by its UUID -> what opens the buffer there."""

    @property
    def names(self) -> tuple[str, ...]:
        return self.described.names

    @classmethod
    def merged(cls, parts: Sequence["SharedPart"]) -> "SharedPart":
        """The same weights on the GPUs of all ranks that hold them."""
        handles = itertools.chain.from_iterable(part.handles.items() for part in parts)
        return cls(parts[0].described, parts[0].tensor_sizes, dict(handles))

    def update_info(self) -> IPCWeightTransferUpdateInfo:
        names, dtype_names, shapes = self.described.lists()
        return IPCWeightTransferUpdateInfo(
            names, dtype_names, shapes, ipc_handles=dict(self.handles), tensor_sizes=list(self.tensor_sizes)
        )


class IpcSender:
    """The actor's end on one GPU. One part is there at a time, until the next one or `release`."""

    def __init__(self) -> None:
        self._held: Iterator[Any] | None = None

    def share(self, weights: Iterable[tuple[str, Tensor]], num_bytes: int) -> SharedPart:
        """Copies weights into a buffer of so many bytes; whoever reads them must be done before the next call."""
        self.release()
        uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
        producer = packed_ipc_producer(iter(weights), uuid, itemgetter(1), buffer_size_bytes=num_bytes)
        chunk = next(producer)
        self._held = producer  # which holds the buffer
        described = Described(tuple(chunk.names), tuple(chunk.dtype_names), tuple(map(tuple, chunk.shapes)))
        return SharedPart(described, tuple(chunk.tensor_sizes), chunk.ipc_handle)

    def release(self) -> None:
        """Lets go of the buffer."""
        if self._held is not None:
            self._held = None
            torch.cuda.ipc_collect()


@dataclass(frozen=True)
class Link:
    """Where the actor and all workers of all replicas meet, and how they pack."""

    host: str
    port: int
    world_size: int
    """The actor's first rank, and each GPU of each replica."""
    buffer_bytes: int

    def init_info(self, first_rank: int) -> NCCLWeightTransferInitInfo:
        """`first_rank`: in the link, of the replica's first worker."""
        return NCCLWeightTransferInitInfo(
            master_address=self.host,
            master_port=self.port,
            rank_offset=first_rank,
            world_size=self.world_size,
            packed=True,
            packed_buffer_size_bytes=self.buffer_bytes,
        )


class NcclSender:
    """The actor's end: its first rank alone sends."""

    def __init__(self, link: Link) -> None:
        """Joins; returns when all have."""
        self._link = link
        self._group = trainer_init(
            {"master_address": link.host, "master_port": link.port, "world_size": link.world_size}
        )

    def send(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Broadcasts weights, while every replica receives them."""
        packed_nccl_broadcast_producer(
            iter(weights), self._group, 0, itemgetter(1), buffer_size_bytes=self._link.buffer_bytes
        )
        torch.cuda.synchronize()


class _Named:
    """A model of vLLM's, as its receivers use it, that is given a weight with several names under each."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.also: Mapping[str, Sequence[str]] = {}

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        named = ((each, weight) for name, weight in weights for each in (name, *self.also.get(name, ())))
        self._model.load_weights(named)


class Receivers:
    """The ends of one vLLM worker. `make` builds a receiver of vLLM's, of a class, for a model."""

    def __init__(self, make: Callable[[type[WeightTransferEngine], Any], Any], model: Any) -> None:
        self._make, self._model = make, _Named(model)
        self._ipc: Any = None
        self._nccl: Any = None

    def join(self, link: Link, first_rank: int) -> None:
        """Joins; returns when all have."""
        self._nccl = self._make(NCCLWeightTransferEngine, self._model)
        self._nccl.init_transfer_engine(link.init_info(first_rank))

    def receive(self, part: SharedPart | Described, also: Mapping[str, Sequence[str]]) -> None:
        """Loads a part. `also`: other names of its weights."""
        self._model.also = also
        if isinstance(part, Described):
            self._nccl.receive_weights(NCCLWeightTransferUpdateInfo(*part.lists()))
            return
        if self._ipc is None:
            self._ipc = self._make(IPCWeightTransferEngine, self._model)
            self._ipc.init_transfer_engine(IPCWeightTransferInitInfo(packed=True))
        self._ipc.receive_weights(part.update_info())
        # The actor writes the next part where this one is.
        torch.cuda.synchronize()
        self._ipc._packed_importer.close()

    def shutdown(self) -> None:
        for receiver in (self._ipc, self._nccl):
            if receiver is not None:
                receiver.shutdown()
