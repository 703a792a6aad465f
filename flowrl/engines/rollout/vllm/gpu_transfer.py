"""GPU transports of weights to vLLM: CUDA IPC within a GPU, and NCCL between GPUs. They have not been tested on
GPUs.
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

from flowrl.data.dtypes import dtype_name, torch_dtype


@dataclass(frozen=True)
class WeightMetadata:
    """Names, dtypes and shapes of the weights in a bucket, in the order in which they are sent."""

    names: tuple[str, ...]
    dtype_names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, weights: Iterable[tuple[str, torch.dtype, Sequence[int]]]) -> "WeightMetadata":
        names, dtypes, shapes = zip(*weights, strict=True)
        return cls(names, tuple(dtype_name(dtype) for dtype in dtypes), tuple(map(tuple, shapes)))

    @property
    def num_bytes(self) -> int:
        sizes = zip(self.dtype_names, self.shapes, strict=True)
        return sum(torch_dtype(name).itemsize * torch.Size(shape).numel() for name, shape in sizes)

    def lists(self) -> tuple[list[str], list[str], list[list[int]]]:
        """Returns the fields as lists, as vLLM's weight update requires."""
        return list(self.names), list(self.dtype_names), [list(shape) for shape in self.shapes]


@dataclass(frozen=True)
class IpcBucket:
    """A bucket of weights in GPU memory. Other processes on the same GPU open it with a CUDA IPC handle."""

    metadata: WeightMetadata
    tensor_sizes: tuple[int, ...]
    """Size of each weight in bytes."""
    handles: Mapping[str, tuple]
    """Maps a GPU's UUID to the IPC handle of the buffer on that GPU."""

    @property
    def names(self) -> tuple[str, ...]:
        return self.metadata.names

    @classmethod
    def merged(cls, buckets: Sequence["IpcBucket"]) -> "IpcBucket":
        """Merges the buckets of all ranks into one bucket that contains the IPC handles of all ranks."""
        handles = itertools.chain.from_iterable(bucket.handles.items() for bucket in buckets)
        return cls(buckets[0].metadata, buckets[0].tensor_sizes, dict(handles))

    def update_info(self) -> IPCWeightTransferUpdateInfo:
        names, dtype_names, shapes = self.metadata.lists()
        return IPCWeightTransferUpdateInfo(
            names, dtype_names, shapes, ipc_handles=dict(self.handles), tensor_sizes=list(self.tensor_sizes)
        )


class IpcSender:
    """Sender of CUDA IPC in an actor process, for one GPU. Keeps one bucket in memory until the next `share` or
    `release`.
    """

    def __init__(self) -> None:
        self._held: Iterator[Any] | None = None

    def share(self, weights: Iterable[tuple[str, Tensor]], num_bytes: int) -> IpcBucket:
        """Copies weights into a shared buffer of `num_bytes`. The receiver must read the buffer before the next
        call.
        """
        self.release()
        uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
        producer = packed_ipc_producer(iter(weights), uuid, itemgetter(1), buffer_size_bytes=num_bytes)
        bucket = next(producer)
        self._held = producer  # keeps the buffer alive
        metadata = WeightMetadata(tuple(bucket.names), tuple(bucket.dtype_names), tuple(map(tuple, bucket.shapes)))
        return IpcBucket(metadata, tuple(bucket.tensor_sizes), bucket.ipc_handle)

    def release(self) -> None:
        if self._held is not None:
            self._held = None
            torch.cuda.ipc_collect()


@dataclass(frozen=True)
class TransferGroup:
    """Rendezvous of the NCCL group. Its members are the actor's rank 0 and every device of every rollout replica."""

    host: str
    port: int
    world_size: int
    """Number of GPUs of all replicas, plus 1 for the actor."""
    buffer_bytes: int
    """Size of the packed broadcast buffer in bytes."""

    def init_info(self, first_rank: int) -> NCCLWeightTransferInitInfo:
        """Returns the settings with which vLLM joins the group. `first_rank` is the group rank of the replica's first
        worker.
        """
        return NCCLWeightTransferInitInfo(
            master_address=self.host,
            master_port=self.port,
            rank_offset=first_rank,
            world_size=self.world_size,
            packed=True,
            packed_buffer_size_bytes=self.buffer_bytes,
        )


class NcclSender:
    """Sender of the NCCL broadcast, on the actor's rank 0."""

    def __init__(self, group: TransferGroup) -> None:
        self._buffer_bytes = group.buffer_bytes
        self._group = trainer_init(
            {"master_address": group.host, "master_port": group.port, "world_size": group.world_size}
        )

    def send(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Broadcasts weights. Every replica must call `GpuReceivers.receive` at the same time."""
        packed_nccl_broadcast_producer(
            iter(weights), self._group, 0, itemgetter(1), buffer_size_bytes=self._buffer_bytes
        )
        torch.cuda.synchronize()


class _TiedModel:
    """Wraps a vLLM model, so that `load_weights` loads a tied weight under each of its names."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.tied: Mapping[str, Sequence[str]] = {}

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        named = ((alias, weight) for name, weight in weights for alias in (name, *self.tied.get(name, ())))
        self._model.load_weights(named)


class GpuReceivers:
    """Receiver of both GPU transports in one vLLM worker. `make` creates vLLM's receiver for a model."""

    def __init__(self, make: Callable[[type[WeightTransferEngine], Any], Any], model: Any) -> None:
        self._make, self._model = make, _TiedModel(model)
        self._ipc: Any = None
        self._nccl: Any = None

    def join(self, group: TransferGroup, first_rank: int) -> None:
        self._nccl = self._make(NCCLWeightTransferEngine, self._model)
        self._nccl.init_transfer_engine(group.init_info(first_rank))

    def receive(self, bucket: IpcBucket | WeightMetadata, tied: Mapping[str, Sequence[str]]) -> None:
        """Loads an IPC bucket, or receives the broadcast that the metadata describes. `tied` maps a weight name to its
        tied names.
        """
        self._model.tied = tied
        if isinstance(bucket, WeightMetadata):
            self._nccl.receive_weights(NCCLWeightTransferUpdateInfo(*bucket.lists()))
            return
        if self._ipc is None:
            self._ipc = self._make(IPCWeightTransferEngine, self._model)
            self._ipc.init_transfer_engine(IPCWeightTransferInitInfo(packed=True))
        self._ipc.receive_weights(bucket.update_info())
        # The actor overwrites this buffer with the next bucket.
        torch.cuda.synchronize()
        self._ipc._packed_importer.close()

    def shutdown(self) -> None:
        for receiver in (self._ipc, self._nccl):
            if receiver is not None:
                receiver.shutdown()
