"""A language model whose layers multiply in 8-bit integers: a copy that samples, and is never trained.

Shape suffixes: B rows (tokens of a call), K inputs, N outputs.

The linear layers inside of the model's layers are quantised: each output's weights by a scale of their own, and each
token's inputs, as they come, by one of theirs, so that what a row says depends on no row beside it. Sums of products of
integers are exact in any order, on any number of threads. Embeddings and norms are looked up or cheap, and the head's
errors would go straight into the logits: they stay as they are.
"""

from copy import deepcopy
from functools import cache

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from flowrl.engines.models.offload import named_weights

_LARGEST = 127
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny
"""Of rows that are all zero."""

_ROWS_AT_ONCE = 4096
"""Tokens whose sums are in memory as integers and as floats at once."""

_EXACT_INPUTS = 1024
"""So many products of 8-bit integers have a sum that float32 holds exactly."""


class Int8Linear(nn.Module):
    """A linear layer that keeps its weight in 8 bits. Gives what it was given, in the same type."""

    weight: Tensor
    """int8 [N, K]."""
    scale: Tensor
    """float32 [N], what each output's integers are multiplied by."""

    def __init__(self, layer: nn.Linear | Conv1D, device: torch.device) -> None:
        """In the place of a layer, whose weight it has yet to `take`, and whose bias it makes its own."""
        super().__init__()
        self.transposed = isinstance(layer, Conv1D)
        self.replaced = torch.empty_like(layer.weight, device="meta", requires_grad=False)
        """Shape and type of the weight that it takes, which is not kept."""
        outputs, inputs = reversed(layer.weight.shape) if self.transposed else layer.weight.shape
        self.register_buffer("weight", torch.zeros(outputs, inputs, dtype=torch.int8, device=device))
        self.register_buffer("scale", torch.ones(outputs, device=device))
        self.bias = layer.bias

    @torch.no_grad()
    def take(self, weight: Tensor) -> None:
        """Quantises a weight, in place of the one before: the nearest of 255 steps up to each output's largest."""
        weight_NK = weight.detach().to(self.weight.device, torch.float32)
        weight_NK = weight_NK.T if self.transposed else weight_NK
        scale_N1 = _scales(weight_NK)
        self.scale.copy_(scale_N1.squeeze(1))
        self.weight.copy_((weight_NK / scale_N1).round_())

    def forward(self, inputs: Tensor) -> Tensor:
        """[..., K] -> [..., N]."""
        inputs_BK = inputs.reshape(-1, inputs.shape[-1])
        outputs_BN = inputs.new_empty(len(inputs_BK), len(self.weight))
        for start in range(0, len(inputs_BK), _ROWS_AT_ONCE):
            rows = slice(start, start + _ROWS_AT_ONCE)
            part_BK = inputs_BK[rows].float()
            scale_B1 = _scales(part_BK)
            sums_BN = int8_product((part_BK / scale_B1).round_().to(torch.int8), self.weight)
            part_BN = (sums_BN * scale_B1).mul_(self.scale)
            outputs_BN[rows] = part_BN if self.bias is None else part_BN.add_(self.bias)
        return outputs_BN.view(*inputs.shape[:-1], -1)


def quantized_copy(model: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    """The same model with 8-bit layers, on memory of its own, whose weights are yet to be written.

    `engines.weights.write_weights` writes them, and quantises where that is wanted.

    Args:
        model: not changed; its weights may be on `meta`.
        device: of the copy.
    """
    weights = {id(w): nn.Parameter(torch.empty_like(w, device="meta"), requires_grad=False) for w in model.parameters()}
    buffers = {id(buffer): buffer.to(device, copy=True) for buffer in model.buffers()}
    found = deepcopy(model, {**weights, **buffers})
    for name, layer in list(found.named_modules()):
        # What is repeated has a number in its name; the head and what stands around layers have none.
        if isinstance(layer, nn.Linear | Conv1D) and any(part.isdigit() for part in name.split(".")):
            owner, _, leaf = name.rpartition(".")
            setattr(found.get_submodule(owner), leaf, Int8Linear(layer, device))
    for names, weight in named_weights(found):
        made = nn.Parameter(torch.empty_like(weight, device=device), requires_grad=False)
        for name in names:
            owner, _, leaf = name.rpartition(".")
            found.get_submodule(owner)._parameters[leaf] = made
    return found.eval()


def int8_layers(model: nn.Module) -> dict[str, Int8Linear]:
    """The layers of a model that are quantised, by their names; none for a model of floats."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Int8Linear)}


def int8_product(left_BK: Tensor, right_NK: Tensor) -> Tensor:
    """left x right^T of 8-bit integers, int32 [B, N], exact."""
    if left_BK.is_cuda and not (right_NK.shape[0] % 8 or right_NK.shape[1] % 8):
        # cuBLAS takes more than 16 rows.
        padded_BK = nn.functional.pad(left_BK, (0, 0, 0, max(0, 17 - len(left_BK))))
        return torch.ops.aten._int_mm(padded_BK, right_NK.t())[: len(left_BK)]
    if left_BK.device.type == "cpu" and _cpu_is_exact():
        return torch.ops.aten._int_mm(left_BK, right_NK.t())
    return product_by_parts(left_BK, right_NK)


def product_by_parts(left_BK: Tensor, right_NK: Tensor) -> Tensor:
    """The same by products of floats, slower and as exact."""
    parts = zip(left_BK.split(_EXACT_INPUTS, 1), right_NK.split(_EXACT_INPUTS, 1), strict=True)
    first, *others = ((left.float() @ right.float().t()).to(torch.int32) for left, right in parts)
    return sum(others, start=first)


@cache
def _cpu_is_exact() -> bool:
    """Whether this CPU adds products of bytes in 32 bits. Without VNNI oneDNN does in 16, and overflows."""
    largest = torch.full((32, 64), _LARGEST, dtype=torch.int8)
    return bool((torch.ops.aten._int_mm(largest, largest.t()) == 64 * _LARGEST**2).all())


def _scales(rows: Tensor) -> Tensor:
    """[..., 1], the step that brings each row's largest magnitude to 127."""
    return rows.abs().amax(-1, keepdim=True).div_(_LARGEST).clamp_min_(_SMALLEST_SCALE)
