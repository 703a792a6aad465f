"""8-bit copies of a language model for generation (W8A8, dynamic per-token activation scales).

Shape suffixes: B tokens of a call, K inputs, N outputs.

Weights are quantized per output channel, and inputs per token. The result of a row therefore does not depend on other
rows. Integer sums are exact in any order.

Only linear layers inside the decoder layers are quantized. Embeddings and norms take little time. Quantization errors
of the head would directly change the logits.
"""

from copy import deepcopy
from functools import cache

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from flowrl.engines.models.parameters import set_parameter, unique_parameters

_LARGEST = 127
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny
"""Quantization scale of a row in which all values are zero."""

_MAX_ROWS = 4096
"""Number of tokens that a layer computes at a time. It bounds the memory of int32 and float32 intermediate results."""

_EXACT_INPUTS = 1024
"""Number of int8 products whose sum is exact in float32."""


class Int8Linear(nn.Module):
    """Linear layer with an int8 weight. Outputs have the dtype of the inputs."""

    weight: Tensor
    """Quantized weight, int8 [N, K]."""
    scale: Tensor
    """Scale of each output channel, float32 [N]."""

    def __init__(self, layer: nn.Linear | Conv1D, device: torch.device) -> None:
        """Creates a replacement for `layer` with the same bias and without a weight. `load_weight` sets the weight."""
        super().__init__()
        self.is_transposed = isinstance(layer, Conv1D)
        self.original = torch.empty_like(layer.weight, device="meta", requires_grad=False)
        """Meta tensor with the shape and dtype of the original weight."""
        outputs, inputs = reversed(layer.weight.shape) if self.is_transposed else layer.weight.shape
        self.register_buffer("weight", torch.zeros(outputs, inputs, dtype=torch.int8, device=device))
        self.register_buffer("scale", torch.ones(outputs, device=device))
        self.bias = layer.bias

    @torch.no_grad()
    def load_weight(self, weight: Tensor) -> None:
        """Quantizes a weight to integers from -127 to 127. The largest magnitude of each output channel becomes 127."""
        weight_NK = weight.detach().to(self.weight.device, torch.float32)
        weight_NK = weight_NK.T if self.is_transposed else weight_NK
        scale_N1 = _scales(weight_NK)
        self.scale.copy_(scale_N1.squeeze(1))
        self.weight.copy_((weight_NK / scale_N1).round_())

    def forward(self, inputs: Tensor) -> Tensor:
        inputs_BK = inputs.reshape(-1, inputs.shape[-1])
        outputs_BN = inputs.new_empty(len(inputs_BK), len(self.weight))
        for start in range(0, len(inputs_BK), _MAX_ROWS):
            rows = slice(start, start + _MAX_ROWS)
            block_BK = inputs_BK[rows].float()
            scale_B1 = _scales(block_BK)
            sums_BN = int8_product((block_BK / scale_B1).round_().to(torch.int8), self.weight)
            block_BN = (sums_BN * scale_B1).mul_(self.scale)
            outputs_BN[rows] = block_BN if self.bias is None else block_BN.add_(self.bias)
        return outputs_BN.view(*inputs.shape[:-1], -1)


def quantized_copy(model: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    """Copies a model and replaces all linear layers inside the decoder layers by 8-bit layers.

    The weights of the copy are uninitialized until `write_weights` sets them.
    """
    weights = {id(w): nn.Parameter(torch.empty_like(w, device="meta"), requires_grad=False) for w in model.parameters()}
    buffers = {id(buffer): buffer.to(device, copy=True) for buffer in model.buffers()}
    quantized = deepcopy(model, {**weights, **buffers})
    for name, layer in list(quantized.named_modules()):
        # Names inside the decoder layers contain a layer index; names of head and embeddings do not.
        if isinstance(layer, nn.Linear | Conv1D) and any(part.isdigit() for part in name.split(".")):
            owner, _, leaf = name.rpartition(".")
            setattr(quantized.get_submodule(owner), leaf, Int8Linear(layer, device))
    for names, weight in unique_parameters(quantized):
        empty = nn.Parameter(torch.empty_like(weight, device=device), requires_grad=False)
        for name in names:
            set_parameter(quantized, name, empty)
    return quantized.eval()


def int8_layers(model: nn.Module) -> dict[str, Int8Linear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, Int8Linear)}


def int8_product(left_BK: Tensor, right_NK: Tensor) -> Tensor:
    """Returns the exact product left right^T of two int8 matrices, int32 [B, N]."""
    if left_BK.is_cuda and not (right_NK.shape[0] % 8 or right_NK.shape[1] % 8):
        # cuBLAS requires more than 16 rows.
        padded_BK = nn.functional.pad(left_BK, (0, 0, 0, max(0, 17 - len(left_BK))))
        return torch.ops.aten._int_mm(padded_BK, right_NK.t())[: len(left_BK)]
    if left_BK.device.type == "cpu" and _cpu_is_exact():
        return torch.ops.aten._int_mm(left_BK, right_NK.t())
    return int8_product_by_blocks(left_BK, right_NK)


def int8_product_by_blocks(left_BK: Tensor, right_NK: Tensor) -> Tensor:
    """Slower variant of `int8_product`. It computes float32 products of blocks of inputs, which are small enough for
    exact sums.
    """
    blocks = zip(left_BK.split(_EXACT_INPUTS, 1), right_NK.split(_EXACT_INPUTS, 1), strict=True)
    first, *others = ((left.float() @ right.float().t()).to(torch.int32) for left, right in blocks)
    return sum(others, start=first)


@cache
def _cpu_is_exact() -> bool:
    """Returns whether this CPU sums int8 products in 32 bits. Without VNNI, oneDNN sums in 16 bits, which overflow."""
    largest = torch.full((32, 64), _LARGEST, dtype=torch.int8)
    return bool((torch.ops.aten._int_mm(largest, largest.t()) == 64 * _LARGEST**2).all())


def _scales(rows: Tensor) -> Tensor:
    """Returns the scale of each row, [..., 1], with which the largest magnitude of the row becomes 127."""
    return rows.abs().amax(-1, keepdim=True).div_(_LARGEST).clamp_min_(_SMALLEST_SCALE)
