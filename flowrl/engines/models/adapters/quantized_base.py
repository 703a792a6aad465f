"""Quantized frozen weights under a LoRA adapter (QLoRA, Dettmers et al. 2023, https://arxiv.org/abs/2305.14314).

torchao quantizes the weights. `nf4` has 4-bit codes in blocks of 64 values with 8-bit scales, and `int8` has one scale
per row. A layer keeps only the codes. It dequantizes them for each product in the forward and backward passes.

A weight sync or an export merges the adapter into the dequantized weights, so that rollouts and exported models match
the trained policy.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from flowrl.config import BaseQuantization, UserError

_BLOCK = 64
"""Number of values that share a scale in nf4."""

_SCALE_BLOCK = 256
"""Largest number of nf4 scales that are quantized together."""


class QuantizedLinear(nn.Linear):
    """A frozen linear layer with a quantized weight. `weight` is a meta tensor, which has only the shape and dtype.

    `weight` is [outputs, inputs] if the layer replaces an `nn.Linear`, and [inputs, outputs] if it replaces a `Conv1D`.
    """

    def __init__(self, layer: nn.Linear | Conv1D, weight: Tensor, quantization: BaseQuantization) -> None:
        """Quantizes the full weight of a layer, on the device of the weight. The layer keeps its bias."""
        super().__init__(1, 1, bias=False, device="meta")
        self.is_transposed = isinstance(layer, Conv1D)
        self.out_features, self.in_features = reversed(weight.shape) if self.is_transposed else weight.shape
        self.weight = nn.Parameter(torch.empty_like(layer.weight, device="meta"), requires_grad=False)
        self.bias = layer.bias
        self._codes = _quantize(weight.detach(), quantization)

    def dequantize(self) -> Tensor:
        """Returns the dequantized weight, in the dtype of the original weight."""
        return _dequantize(self._codes)

    def forward(self, input: Tensor) -> Tensor:
        outputs = _Product.apply(input, self)
        assert isinstance(outputs, Tensor)
        return outputs if self.bias is None else outputs + self.bias.to(outputs.dtype)


class _Product(torch.autograd.Function):
    """The product of inputs and a frozen quantized weight. Keeps only the codes for the backward pass."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, layer: QuantizedLinear) -> Tensor:  # Any: torch's context
        ctx.layer, ctx.dtype = layer, inputs.dtype
        weight = layer.dequantize().to(inputs.dtype)
        return nn.functional.linear(inputs, weight.T if layer.is_transposed else weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:  # Any: as above
        (gradient,), layer = gradients, ctx.layer
        weight = layer.dequantize().to(gradient.dtype)
        return (gradient @ (weight.T if layer.is_transposed else weight)).to(ctx.dtype), None


def round_to_codes(weight: Tensor, quantization: BaseQuantization) -> Tensor:
    """Quantizes and dequantizes a full weight, and returns the result."""
    return _dequantize(_quantize(weight.detach(), quantization))


def _quantize(weight: Tensor, quantization: BaseQuantization) -> Any:  # Any: torchao's tensors
    # Imported here, because torchao is optional.
    from torchao.quantization import Int8Tensor, NF4Tensor, PerRow  # noqa: PLC0415  # pyright: ignore[reportMissingImports]

    if quantization == "int8":
        return Int8Tensor.from_hp(weight, granularity=PerRow())
    if weight.numel() % (2 * _BLOCK):
        raise UserError(
            f"lora.base_quantization is nf4, which quantizes blocks of {_BLOCK} values, but the model has a weight of "
            f"shape {list(weight.shape)}: set lora.base_quantization: int8, or exclude the layer from lora.targets"
        )
    num_scales = weight.numel() // _BLOCK
    return NF4Tensor.from_tensor(weight.contiguous(), _BLOCK, math.gcd(num_scales, _SCALE_BLOCK))


def _dequantize(codes: Any) -> Tensor:  # Any: as above
    return codes.get_original_weight() if hasattr(codes, "get_original_weight") else codes.dequantize()
