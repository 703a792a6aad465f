"""Sums, measures, scales and frees the gradients of an optimizer step.

Gradients of 16-bit weights are summed in float32, over micro-batches and over ranks. A sum in bfloat16 ignores terms
below 1/256 of its value.
"""

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor, Replicate

from flowrl.engines.parallel.rank_mesh import RankMesh


class Gradients(Protocol):
    """Gradient operations of an optimizer step, for replicated or sharded gradients."""

    def zero(self) -> None:
        """Sets the gradients to zero before the backward passes."""
        ...

    def sum(self) -> None:
        """Completes the sum of the gradients over all ranks after the backward passes."""
        ...

    def cast(self) -> None:
        """Casts the gradients to the dtypes of the weights, which the optimizer requires."""
        ...

    def norm(self) -> float:
        """Returns the L2 norm of the gradients over all parameters and ranks."""
        ...

    def scale(self, factor: float) -> None: ...

    def free(self) -> None: ...


class ReplicatedGradients:
    """Full gradients on every rank. They are views of one buffer per dtype, so that `sum` needs no copy for its
    all-reduce.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], mesh: RankMesh) -> None:
        self._parameters, self._mesh = parameters, mesh
        self._buffers: list[Tensor] = []
        _allow_other_dtypes(parameters)

    def zero(self) -> None:
        self._buffers = []
        for dtype in sorted({_sum_dtype(parameter) for parameter in self._parameters}, key=str):
            parameters = [parameter for parameter in self._parameters if _sum_dtype(parameter) == dtype]
            num_values = sum(parameter.numel() for parameter in parameters)
            self._use(torch.zeros(num_values, dtype=dtype, device=parameters[0].device))

    def _use(self, buffer: Tensor) -> None:
        """Stores gradients in `buffer`: those of all parameters whose gradients are summed in its dtype."""
        parameters = [parameter for parameter in self._parameters if _sum_dtype(parameter) == buffer.dtype]
        sizes = [parameter.numel() for parameter in parameters]
        for parameter, gradient in zip(parameters, buffer.split(sizes), strict=True):
            parameter.grad = gradient.view_as(parameter)
        self._buffers.append(buffer)

    def sum(self) -> None:
        if self._mesh.data is not None:
            for buffer in self._buffers:
                distributed.all_reduce(buffer, group=self._mesh.data)

    def cast(self) -> None:
        _cast(self._parameters)
        self._buffers = []

    def norm(self) -> float:
        return math.hypot(*(torch.linalg.vector_norm(buffer).item() for buffer in self._buffers))

    def scale(self, factor: float) -> None:
        for buffer in self._buffers:
            buffer.mul_(factor)

    def free(self) -> None:
        _free(self._parameters)
        self._buffers = []


class ShardedGradients:
    """Gradient shards, which FSDP2 reduce-scatters at the end of each backward pass and adds to existing gradients."""

    def __init__(self, parameters: Sequence[nn.Parameter], mesh: RankMesh) -> None:
        self._parameters, self._mesh = parameters, mesh
        _allow_other_dtypes(parameters)

    def zero(self) -> None:
        _free(self._parameters)
        for parameter in self._parameters:
            if _sum_dtype(parameter) != parameter.dtype:
                parameter.grad = torch.zeros_like(parameter, dtype=_sum_dtype(parameter))

    def sum(self) -> None:
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def cast(self) -> None:
        _cast(self._parameters)

    def norm(self) -> float:
        assert self._mesh.all_ranks is not None
        num_ranks = self._mesh.all_ranks.size()
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for parameter in self._parameters:
            gradient = parameter.grad
            assert isinstance(gradient, DTensor), "a sharded model's gradients are sharded"
            # Several ranks may hold the same shard, which would be counted several times.
            num_copies = num_ranks // _num_shards(gradient)
            norm = torch.linalg.vector_norm(gradient.to_local())
            total += norm.double().square().to(total.device) / num_copies
        return math.sqrt(self._mesh.sum(total).item())

    @property
    def _device(self) -> torch.device:
        assert self._mesh.devices is not None
        return torch.device(self._mesh.devices.device_type)

    def scale(self, factor: float) -> None:
        for parameter in self._parameters:
            assert parameter.grad is not None
            parameter.grad.mul_(factor)

    def free(self) -> None:
        _free(self._parameters)


def _sum_dtype(parameter: nn.Parameter) -> torch.dtype:
    """Returns the dtype in which the gradients of a weight are summed, which is at least float32."""
    return torch.promote_types(parameter.dtype, torch.float32)


def _allow_other_dtypes(parameters: Sequence[nn.Parameter]) -> None:
    """Lets gradients have another dtype than their weights, which torch rejects by default.

    torch forgets it when it moves a DTensor, because it then swaps the weight with a new one.
    """
    for parameter in parameters:
        parameter.grad_dtype = None


def _cast(parameters: Sequence[nn.Parameter]) -> None:
    for parameter in parameters:
        assert parameter.grad is not None
        parameter.grad = parameter.grad.to(parameter.dtype)


def _num_shards(gradient: DTensor) -> int:
    """Returns the number of distinct shards of a DTensor."""
    sizes = zip(gradient.device_mesh.shape, gradient.placements, strict=True)
    return math.prod(size for size, placement in sizes if not isinstance(placement, Replicate))


def _free(parameters: Sequence[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = None
