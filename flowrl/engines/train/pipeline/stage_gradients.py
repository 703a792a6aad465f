"""The gradients of one pipeline stage, as a part of the gradient of the model."""

import math
from contextlib import AbstractContextManager

import torch
from torch import distributed, nn

from flowrl.devices.device import local_tensor
from flowrl.engines.parallel.gradients import Gradients
from flowrl.engines.parallel.pipeline_mesh import PipelineMesh


class StageGradients:
    """Implements `Gradients`. The norm includes all stages, and counts a weight that two stages share once."""

    def __init__(
        self,
        own: Gradients,
        tied: Gradients | None,
        weight: nn.Parameter | None,
        mesh: PipelineMesh,
        device: torch.device,
    ) -> None:
        """`own` has the gradients of weights that only this stage has. `tied` has the gradient of `weight`, which the
        first and the last stage share. Both are None in a stage without a shared weight.
        """
        assert (tied is None) == (weight is None)
        self._own, self._tied, self._weight, self._mesh, self._device = own, tied, weight, mesh, device

    @property
    def _parts(self) -> list[Gradients]:
        return [self._own] if self._tied is None else [self._own, self._tied]

    def zero(self) -> None:
        for part in self._parts:
            part.zero()

    def begin_sum(self) -> None:
        for part in self._parts:
            part.begin_sum()

    def last_pass(self) -> AbstractContextManager[None]:
        """Overlaps the sum of the gradients of `own`. That of the shared weight is summed afterwards, so that all ranks
        issue their collectives in the same order.
        """
        return self._own.last_pass()

    def sum(self) -> None:
        for part in self._parts:
            part.sum()
        if self._weight is not None:
            assert self._weight.grad is not None and self._mesh.ends is not None
            gradient = local_tensor(self._weight.grad)
            if gradient.numel():
                total = gradient.to(self._device).contiguous()
                distributed.all_reduce(total, group=self._mesh.ends)
                if total is not gradient:
                    gradient.copy_(total)

    def cast(self) -> None:
        for part in self._parts:
            part.cast()

    def norm(self) -> float:
        norm = self._own.norm()
        if self._tied is not None:
            tied = self._tied.norm()  # a collective of the stage
            norm = math.hypot(norm, tied) if self._mesh.stage == 0 else norm
        square = torch.tensor(norm, dtype=torch.float64, device=self._device).square()
        distributed.all_reduce(square, group=self._mesh.gradients)
        return math.sqrt(square.item())

    def scale(self, factor: float) -> None:
        for part in self._parts:
            part.scale(factor)

    def free(self) -> None:
        for part in self._parts:
            part.free()
