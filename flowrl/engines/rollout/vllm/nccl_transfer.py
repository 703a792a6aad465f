"""NCCL transport of weights between GPUs, with vLLM's sender and receiver. It has not been tested on GPUs."""

import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
from vllm.distributed.utils import StatelessProcessGroup
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.distributed.weight_transfer.nccl_engine import (
    NCCLWeightTransferEngine,
    NCCLWeightTransferInitInfo,
    NCCLWeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

from flowrl.devices.device import COLLECTIVE_TIMEOUT, get_device
from flowrl.engines.rollout.base import RolloutError
from flowrl.engines.rollout.cuda_ipc import WeightMetadata


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

    def __init__(self, group: TransferGroup, listener: socket.socket, device: torch.device) -> None:
        """Waits until all members have joined.

        Args:
            group: the rendezvous.
            listener: listens on the address of the rendezvous. The constructor takes ownership.
            device: GPU that broadcasts.
        """
        self._buffer_bytes, self._device = group.buffer_bytes, device
        # Not vLLM's `trainer_init`, which binds the port itself, after another process could have taken it.
        rendezvous = StatelessProcessGroup.create(
            group.host,
            group.port,
            0,
            group.world_size,
            store_timeout=int(COLLECTIVE_TIMEOUT.total_seconds()),
            listen_socket=listener,
        )
        # The first use of vLLM's current stream would move all later operations of the trainer to a new stream.
        with get_device(device).keep_stream():
            self._group = PyNcclCommunicator(rendezvous, device)
        _check_enabled(self._group)

    def send(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Broadcasts weights. Every replica must call `NcclReceiver.receive` at the same time."""
        # vLLM reads the weights on streams that do not wait for the optimizer step on the current stream.
        get_device(self._device).wait_for_stream()
        # An engine with `offload: parameters` has its weights in host memory.
        on_gpu = ((name, weight.to(self._device)) for name, weight in weights)
        packed_nccl_broadcast_producer(on_gpu, self._group, 0, itemgetter(1), buffer_size_bytes=self._buffer_bytes)
        get_device(self._device).synchronize()


class NcclReceiver:
    """Receiver of the NCCL broadcast in one vLLM worker. `make` creates vLLM's receiver for a model."""

    def __init__(self, make: Callable[[type[WeightTransferEngine], Any], Any], model: Any) -> None:
        self._make, self._model = make, _TiedModel(model)
        self._engine: Any = None

    def join(self, group: TransferGroup, first_rank: int) -> None:
        self._engine = self._make(NCCLWeightTransferEngine, self._model)
        self._engine.init_transfer_engine(group.init_info(first_rank))
        _check_enabled(self._engine.model_update_group)

    def receive(self, metadata: WeightMetadata, tied: Mapping[str, Sequence[str]]) -> None:
        """Receives the broadcast that the metadata describes. `tied` maps a weight name to its tied names."""
        self._model.tied = tied
        self._engine.receive_weights(NCCLWeightTransferUpdateInfo(*metadata.lists()))

    def shutdown(self) -> None:
        if self._engine is not None:
            self._engine.shutdown()


class _TiedModel:
    """Wraps a vLLM model, so that `load_weights` loads a tied weight under each of its names."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.tied: Mapping[str, Sequence[str]] = {}

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self._model.load_weights(with_tied_names(weights, self.tied))


def with_tied_names(
    weights: Iterable[tuple[str, Tensor]], tied: Mapping[str, Sequence[str]]
) -> Iterator[tuple[str, Tensor]]:
    """Yields each weight under its name and its tied names."""
    return ((alias, weight) for name, weight in weights for alias in (name, *tied.get(name, ())))


def _check_enabled(group: Any) -> None:  # Any: vLLM's communicator
    """Raises RolloutError if the communicator is disabled, because it would skip each broadcast silently."""
    if group.disabled:
        raise RolloutError(
            "vLLM has disabled NCCL, because it cannot load the library or VLLM_DISABLE_PYNCCL is set: install NCCL, "
            "unset the variable, or set rollout.transfer.via: object_store"
        )
