"""Descriptions of weights that one process sends and another receives."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flowrl.data.dtypes import dtype_name, torch_dtype
from flowrl.devices.device import packed_size, unpack_bytes
from flowrl.engines.models.weights import find_rows


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
    def sizes(self) -> list[int]:
        """Size of each weight in bytes."""
        return [tensor.nbytes for tensor in self.part(0, 1)]

    def part(self, index: int, count: int) -> list[Tensor]:
        """Returns part `index` of `count` of each weight, as meta tensors. A part has consecutive rows, as FSDP2's
        shards.

        A weight without dimensions is only in part 0. Parts that receive no rows have no elements.
        """
        tensors = []
        for name, shape in zip(self.dtype_names, self.shapes, strict=True):
            rows, *rest = shape or (1,)
            start, stop = find_rows(rows, index, count)
            own = shape if count == 1 else (stop - start, *rest)
            tensors.append(torch.empty(own, dtype=torch_dtype(name), device="meta"))
        return tensors


def pack(weights: Iterable[Tensor], layout: Sequence[Tensor], device: torch.device) -> Tensor:
    """Returns a new buffer of bytes on a device with copies of weights, possibly from another device. `unpack_bytes`
    splits the buffer. `layout` has a meta tensor with the shape and dtype of each weight.
    """
    buffer = torch.empty(packed_size(layout), dtype=torch.uint8, device=device)
    for part, weight in zip(unpack_bytes(buffer, layout), weights, strict=True):
        assert (weight.shape, weight.dtype) == (part.shape, part.dtype), "the layout describes the weight"
        part.copy_(weight.detach())
    return buffer


def with_tied_names(
    weights: Iterable[tuple[str, Tensor]], tied: Mapping[str, Sequence[str]]
) -> Iterator[tuple[str, Tensor]]:
    """Yields each weight under its name and its tied names. `tied` maps a name to its tied names."""
    return ((alias, weight) for name, weight in weights for alias in (name, *tied.get(name, ())))
