"""Gradients of one optimizer step: made zero, summed over ranks, measured, and scaled."""

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor, Replicate

from flowrl.engines.parallel.rank_mesh import RankMesh


class Gradients(Protocol):
    """What an optimizer step does with gradients, whole on each rank or in parts."""

    def zero(self) -> None:
        """Before the backward passes: a parameter that none of them reaches has a gradient of 0."""
        ...

    def sum(self) -> None:
        """After them: each rank holds its part of the sum over all ranks."""
        ...

    def norm(self) -> float:
        """The Euclidean norm over all parameters and ranks, the same on every rank."""
        ...

    def scale(self, factor: float) -> None: ...

    def drop(self) -> None:
        """Gives their memory back."""
        ...


class WholeGradients:
    """Every rank has all of them, as views of one buffer per dtype.

    Backward passes then add into what is summed over ranks, without a copy.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], mesh: RankMesh) -> None:
        self._parameters, self._mesh = parameters, mesh
        self._buffers: list[Tensor] = []

    def zero(self) -> None:
        self._buffers = []
        for dtype in sorted({parameter.dtype for parameter in self._parameters}, key=str):
            parameters = [parameter for parameter in self._parameters if parameter.dtype == dtype]
            sizes = [parameter.numel() for parameter in parameters]
            buffer = torch.zeros(sum(sizes), dtype=dtype, device=parameters[0].device)
            for parameter, gradient in zip(parameters, buffer.split(sizes), strict=True):
                parameter.grad = gradient.view_as(parameter)
            self._buffers.append(buffer)

    def sum(self) -> None:
        if self._mesh.data is not None:
            for buffer in self._buffers:
                distributed.all_reduce(buffer, group=self._mesh.data)

    def norm(self) -> float:
        return math.hypot(*(_norm(buffer) for buffer in self._buffers))

    def scale(self, factor: float) -> None:
        for buffer in self._buffers:
            buffer.mul_(factor)

    def drop(self) -> None:
        _drop(self._parameters)
        self._buffers = []


class ShardedGradients:
    """Every rank has its part of each, which FSDP2 sums over ranks at the end of each backward pass."""

    def __init__(self, parameters: Sequence[nn.Parameter], mesh: RankMesh) -> None:
        self._parameters, self._mesh = parameters, mesh

    def zero(self) -> None:
        _drop(self._parameters)

    def sum(self) -> None:
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def norm(self) -> float:
        assert self._mesh.everyone is not None
        num_ranks = self._mesh.everyone.size()
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for parameter in self._parameters:
            gradient = parameter.grad
            assert isinstance(gradient, DTensor), "a sharded model's gradients are sharded"
            total += gradient.to_local().double().square().sum().to(total.device) / _copies(gradient, num_ranks)
        return math.sqrt(self._mesh.sum(total).item())

    @property
    def _device(self) -> torch.device:
        assert self._mesh.devices is not None
        return torch.device(self._mesh.devices.device_type)

    def scale(self, factor: float) -> None:
        for parameter in self._parameters:
            assert parameter.grad is not None
            parameter.grad.mul_(factor)

    def drop(self) -> None:
        _drop(self._parameters)


def _norm(buffer: Tensor) -> float:
    """In at least float32: a sum in a half-precision buffer's own dtype would be rounded to three digits."""
    return torch.linalg.vector_norm(buffer, dtype=torch.promote_types(buffer.dtype, torch.float32)).item()


def _copies(gradient: DTensor, num_ranks: int) -> int:
    """How many of the ranks hold the same part."""
    mesh = gradient.device_mesh
    sizes = zip(mesh.shape, gradient.placements, strict=True)
    parts = math.prod(size for size, placement in sizes if not isinstance(placement, Replicate))
    return num_ranks // parts


def _drop(parameters: Sequence[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = None
