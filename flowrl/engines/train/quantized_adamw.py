"""AdamW with moments of 8 bits in blocks with a scale. Imports torchao, and is imported only for this optimizer.

Dettmers et al. 2022, https://arxiv.org/abs/2110.02861. Unlike in torchao, blocks are parts of rows, so that ranks can
share the scales like the weights, and checkpoints can be loaded by another number of ranks.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchao.optim import AdamW8bit  # pyright: ignore[reportMissingImports]

from flowrl.devices.device import find_compiler_problem, get_device, local_tensor
from flowrl.engines.train.module_state import shard_like

BLOCK = 64
"""Number of values with a common scale. Widths of most models are multiples of it."""

MIN_SIZE = 4096
"""Minimum number of values of a weight with quantized moments."""


class QuantizedAdamW(AdamW8bit):
    """torchao's optimizer, with the blocks of this module.

    Moments are quantized for matrices of at least `MIN_SIZE` values whose rows have whole blocks on each rank. Other
    weights have moments in their own dtype. The step is compiled on GPUs, where it needs less memory. On CPUs, the
    compiler would take a minute for each shape of a weight.
    """

    def __init__(self, groups: Any, *, lr: float, betas: tuple[float, float], eps: float) -> None:  # Any: as torch
        super().__init__(groups, lr=lr, betas=betas, eps=eps, weight_decay=0.0, block_size=BLOCK)

    def step(self, closure: Any = None) -> Any:  # Any: as torch
        device = next((weight.device for group in self.param_groups for weight in group["params"]), None)
        if device is not None and device.type == "cuda" and find_compiler_problem(get_device(device)) is None:
            return super().step(closure)
        with torch.compiler.set_stance("force_eager"):
            return super().step(closure)

    def _new_buffer(self, p: Tensor, signed: bool) -> Tensor:
        if not has_quantized_moments(p):
            return torch.zeros_like(p)
        return shard_like(self._subclass_zeros(local_tensor(p), signed, BLOCK), p)


def has_quantized_moments(weight: Tensor) -> bool:
    """Returns whether the moments of a weight are quantized, which is equal on all ranks."""
    if weight.ndim != 2 or weight.numel() < MIN_SIZE or local_tensor(weight).shape[1] % BLOCK:
        return False
    return not isinstance(weight, DTensor) or not _has_empty_shard(weight)


def _has_empty_shard(weight: DTensor) -> bool:
    """Returns whether a rank has no rows. Each shard but the last has the same number of rows."""
    sizes = zip(weight.device_mesh.shape, weight.placements, strict=True)
    num_shards = 1
    for size, placement in sizes:
        num_shards *= size if placement.is_shard(0) else 1
    rows = -(-weight.shape[0] // num_shards)
    return rows * (num_shards - 1) >= weight.shape[0]
