"""A CPU that copies offloaded tensors as a GPU does, and records the copies."""

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from flowrl.devices.device import CpuDevice, OffloadedTensor
from flowrl.engines.train.fsdp.activation_offload import offload_inputs

Event = tuple[str, int]
"""`out`, `back` or `use`, and the number of the offloaded tensor."""


class CopyingDevice(CpuDevice):
    def __init__(self) -> None:
        self.events: list[Event] = []
        self.offloaded: list[torch.Size] = []
        """Shapes of the offloaded tensors."""

    def offload(self, tensor: Tensor) -> OffloadedTensor:
        self.offloaded.append(tensor.shape)
        return CopiedTensor(self, tensor, len(self.offloaded) - 1)

    def in_host_memory(self, tensor: Tensor) -> Tensor:
        """Returns a copy of a tensor in host memory."""
        return tensor.clone()


class CopiedTensor:
    """A copy of a tensor, which `prefetch` copies again."""

    def __init__(self, device: CopyingDevice, tensor: Tensor, number: int) -> None:
        self._device, self._number = device, number
        self._host, self._prefetched = device.in_host_memory(tensor), None
        self._record("out")

    def prefetch(self) -> None:
        if self._prefetched is None:
            self._record("back")
            self._prefetched = self._host.clone()

    def restore(self) -> Tensor:
        self.prefetch()
        self._record("use")
        restored, self._prefetched = self._prefetched, None
        assert restored is not None
        return restored

    def _record(self, event: str) -> None:
        self._device.events.append((event, self._number))


def offload_to(device: CpuDevice, model: PreTrainedModel) -> None:
    """Offloads the inputs of the layers of a model, which may be sharded already."""
    offload_inputs(model, [layer for layer in model.modules() if isinstance(layer, GradientCheckpointingLayer)], device)
