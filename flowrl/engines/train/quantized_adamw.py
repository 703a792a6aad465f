"""AdamW with 8-bit moments, in blocks with a scale. Imports torchao, and is imported only for this optimizer.

Dettmers et al. 2022, https://arxiv.org/abs/2110.02861. Unlike in torchao, blocks are parts of rows, so that ranks can
share the scales like the weights, and checkpoints can be loaded by another number of ranks.
"""

from typing import Any

import torch
from torch import Tensor
from torchao.optim import AdamW8bit  # pyright: ignore[reportMissingImports]

from flowrl.devices.device import find_compiler_problem, get_device, local_tensor
from flowrl.engines.train.module_engine import BLOCK, shard_like

MIN_ROWS, MIN_SIZE = 64, 4096
"""Minimum numbers of rows and values of a weight with quantized moments. Value heads have fewer rows."""


class QuantizedAdamW(AdamW8bit):
    """torchao's optimizer, with the blocks of this module.

    Moments are quantized for matrices of at least `MIN_ROWS` rows and `MIN_SIZE` values whose rows have whole blocks on
    each rank. The fused matrices of all experts of a layer count as one. Other weights have moments in their own dtype.
    The step is compiled on GPUs, where it needs less memory. On CPUs, the compiler would take a minute for each shape
    of a weight.
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
    """Returns whether the moments of a weight are quantized. Only `tp` changes the result, because it shards rows."""
    has_size = weight.ndim >= 2 and weight.shape[:-1].numel() >= MIN_ROWS and weight.numel() >= MIN_SIZE
    return has_size and local_tensor(weight).shape[-1] % BLOCK == 0
