"""Sums, measures, scales and frees the gradients of an optimizer step.

Gradients of 16-bit weights are summed in float32, over micro-batches and over ranks. A sum in bfloat16 ignores terms
below 1/256 of its value.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, distributed, nn
from torch.distributed import ProcessGroup, Work
from torch.distributed.tensor import DTensor, Replicate

from flowrl.devices.device import local_tensor
from flowrl.engines.parallel.rank_mesh import RankMesh

BUCKET_BYTES = 2**26
"""Minimum size of a bucket of gradients in bytes, except for the last bucket. It makes the latency of an all-reduce
small compared with the transfer.
"""


class Gradients(Protocol):
    """Gradient operations of an optimizer step, for replicated or sharded gradients."""

    def zero(self) -> None:
        """Sets the gradients to zero before the backward passes."""
        ...

    def begin_sum(self) -> None:
        """Begins the sum of the gradients over all ranks, before the backward passes of the last loss."""
        ...

    def last_pass(self) -> AbstractContextManager[None]:
        """Inside the `with` block, which runs the last backward pass, begins to sum gradients as soon as they are
        complete. A rank without rows does not enter the block.
        """
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


class _Bucket(NamedTuple):
    """Adjacent gradients that one all-reduce sums."""

    gradients: Tensor
    """Part of a buffer, [N]."""
    incomplete: set[int]
    """Ids of the parameters whose gradients the last backward pass has not completed yet."""


class _BucketSum:
    """Sums buckets over ranks. Their all-reduces start in a fixed order, so that all ranks issue the same collectives.
    A complete bucket therefore waits until all earlier buckets have started.
    """

    def __init__(self, buckets: Sequence[_Bucket], group: ProcessGroup) -> None:
        self._buckets, self._group = buckets, group
        self._index = {number: bucket for bucket in buckets for number in bucket.incomplete}
        self._works: list[Work] = []

    def complete(self, parameter: Tensor) -> None:
        """Marks the gradient of a parameter as complete, and starts the all-reduces of the next complete buckets."""
        self._index[id(parameter)].incomplete.remove(id(parameter))  # KeyError if called twice
        while len(self._works) < len(self._buckets) and not self._buckets[len(self._works)].incomplete:
            self._begin_next()

    def begin_rest(self) -> None:
        """Starts the all-reduces of the remaining buckets, even if the last backward pass has not reached all their
        parameters.
        """
        while len(self._works) < len(self._buckets):
            self._begin_next()

    def abandon(self) -> None:
        """After an error of this rank, fills the remaining buckets with NaN and starts their all-reduces. No other rank
        then takes a step on incomplete gradients. Does not wait, because other ranks may have ended.
        """
        for bucket in self._buckets[len(self._works) :]:
            bucket.gradients.fill_(math.nan)
        self.begin_rest()

    def wait(self) -> None:
        for work in self._works:
            work.wait()

    def _begin_next(self) -> None:
        gradients = self._buckets[len(self._works)].gradients
        work = distributed.all_reduce(gradients, group=self._group, async_op=True)
        assert work is not None, "this rank is a member of the group"
        self._works.append(work)


class ReplicatedGradients:
    """Full gradients on every rank. They are views of one buffer per dtype, so that `sum` needs no copy."""

    def __init__(self, parameters: Sequence[nn.Parameter], mesh: RankMesh, *, overlaps: bool = False) -> None:
        """With `overlaps`, sums gradients in buckets during the last backward pass, starting at the last layer."""
        self._parameters, self._mesh, self._overlaps = parameters, mesh, overlaps
        self._buffers: list[Tensor] = []
        self._sum: _BucketSum | None = None
        """The running sum, from `begin_sum` to `sum`. None at other times and on a single rank."""
        _allow_other_dtypes(parameters)

    def zero(self) -> None:
        self._buffers = []
        for dtype in sorted({_sum_dtype(parameter) for parameter in self._parameters}, key=str):
            parameters = [parameter for parameter in self._parameters if _sum_dtype(parameter) == dtype]
            num_values = sum(parameter.numel() for parameter in parameters)
            self._use(torch.zeros(num_values, dtype=dtype, device=parameters[0].device))

    def _use(self, buffer: Tensor) -> None:
        """Makes the gradients that are summed in the dtype of `buffer` views of `buffer`."""
        parameters = self._summed_in(buffer.dtype)
        sizes = [parameter.numel() for parameter in parameters]
        for parameter, gradient in zip(parameters, buffer.split(sizes), strict=True):
            parameter.grad = gradient.view_as(parameter)
        self._buffers.append(buffer)

    def _summed_in(self, dtype: torch.dtype) -> list[nn.Parameter]:
        return [parameter for parameter in self._parameters if _sum_dtype(parameter) == dtype]

    def _buckets(self) -> Iterator[_Bucket]:
        """Yields the buckets of each buffer, from the last parameters to the first. Without overlap, a buffer is one
        bucket.
        """
        for buffer in self._buffers:
            start = end = buffer.numel()
            incomplete: set[int] = set()
            for parameter in reversed(self._summed_in(buffer.dtype)):
                start -= parameter.numel()
                incomplete.add(id(parameter))
                is_full = self._overlaps and buffer[start:end].nbytes >= BUCKET_BYTES
                if is_full or start == 0:
                    yield _Bucket(buffer[start:end], incomplete)
                    end, incomplete = start, set()

    def begin_sum(self) -> None:
        if self._mesh.data is not None:
            self._sum = _BucketSum(list(self._buckets()), self._mesh.data)

    @contextmanager
    def last_pass(self) -> Iterator[None]:
        if not self._overlaps or self._sum is None:
            yield
            return
        hooks = [parameter.register_post_accumulate_grad_hook(self._sum.complete) for parameter in self._parameters]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def sum(self) -> None:
        if self._sum is None:
            self.begin_sum()
        if self._sum is not None:
            self._sum.begin_rest()
            self._sum.wait()
            self._sum = None

    def cast(self) -> None:
        _cast(self._parameters)
        self._buffers = []

    def norm(self) -> float:
        return math.hypot(*(torch.linalg.vector_norm(buffer).item() for buffer in self._buffers))

    def scale(self, factor: float) -> None:
        for buffer in self._buffers:
            buffer.mul_(factor)

    def free(self) -> None:
        if self._sum is not None and self._overlaps:
            self._sum.abandon()  # the loss has failed, and other ranks may have begun more buckets
        _free(self._parameters)
        self._buffers, self._sum = [], None


class ShardedGradients:
    """Gradient shards, which FSDP2 reduce-scatters at the end of each backward pass and adds to existing gradients."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], mesh: RankMesh, experts: Iterable[nn.Parameter] = ()
    ) -> None:
        """`experts`: expert-parallel weights, which FSDP2 ignores. Each rank computes the complete gradient of its own
        experts for its copy of the model, so `sum` sums only over the copies.
        """
        self._parameters, self._mesh = parameters, mesh
        own = {id(weight) for weight in experts}
        self._experts = [parameter for parameter in parameters if id(parameter) in own]
        _allow_other_dtypes(parameters)

    def zero(self) -> None:
        _free(self._parameters)
        for parameter in self._parameters:
            if _sum_dtype(parameter) != parameter.dtype:
                parameter.grad = torch.zeros_like(parameter, dtype=_sum_dtype(parameter))

    def begin_sum(self) -> None:
        """Does nothing, because FSDP2 sums the gradients of a layer during each backward pass."""

    def last_pass(self) -> AbstractContextManager[None]:
        """Returns a context without effect, because FSDP2 sums gradients in every backward pass."""
        return nullcontext()

    def sum(self) -> None:
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        assert self._mesh.devices is not None, "several ranks"
        if self._mesh.devices["replicate"].size() > 1:
            for parameter in self._experts:
                assert parameter.grad is not None
                group = self._mesh.devices.get_group("replicate")
                distributed.all_reduce(local_tensor(parameter.grad), group=group)

    def cast(self) -> None:
        _cast(self._parameters)

    def norm(self) -> float:
        assert self._mesh.all_ranks is not None
        num_ranks = self._mesh.all_ranks.size()
        groups: dict[int, list[Tensor]] = {}
        for gradient in self._sharded():
            groups.setdefault(_num_shards(gradient), []).append(local_tensor(gradient))
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for num_shards, shards in groups.items():
            square = nn.utils.get_total_norm(shards).double().square()
            # Several ranks may hold the same shard. The factor counts each shard once.
            total += square.to(total.device) * (num_shards / num_ranks)
        return math.sqrt(self._mesh.sum(total).item())

    def _sharded(self) -> Iterator[DTensor]:
        for parameter in self._parameters:
            assert isinstance(parameter.grad, DTensor), "a sharded model's gradients are sharded"
            yield parameter.grad

    @property
    def _device(self) -> torch.device:
        assert self._mesh.devices is not None
        return torch.device(self._mesh.devices.device_type)

    def scale(self, factor: float) -> None:
        for gradient in self._sharded():
            local_tensor(gradient).mul_(factor)

    def free(self) -> None:
        _free(self._parameters)


def _sum_dtype(parameter: nn.Parameter) -> torch.dtype:
    """Returns the dtype in which the gradients of a weight are summed, which is at least float32."""
    return torch.promote_types(parameter.dtype, torch.float32)


def _allow_other_dtypes(parameters: Sequence[nn.Parameter]) -> None:
    """Allows gradients of another dtype than their weights, which torch rejects by default.

    A move of a DTensor to another device resets this setting, because torch then replaces the weight.
    """
    for parameter in parameters:
        parameter.grad_dtype = None


def _cast(parameters: Sequence[nn.Parameter]) -> None:
    for parameter in parameters:
        assert parameter.grad is not None
        if parameter.grad.dtype != parameter.dtype:
            parameter.grad = parameter.grad.to(parameter.dtype)


def _num_shards(gradient: DTensor) -> int:
    """Returns the number of distinct shards of a DTensor."""
    sizes = zip(gradient.device_mesh.shape, gradient.placements, strict=True)
    return math.prod(size for size, placement in sizes if not isinstance(placement, Replicate))


def _free(parameters: Sequence[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = None
