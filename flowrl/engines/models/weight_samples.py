"""Samples of a model's weights, which a rollout compares with its own weights (`flowrl.engines.rollout.weight_check`).

Shape suffixes: J sampled inputs of a layer, N outputs of the layer.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from flowrl.engines.models.adapters.lora import ModelWeight, model_weights
from flowrl.engines.models.adapters.quantized_base import QuantizedLinear
from flowrl.engines.models.routing import find_routers

INPUTS = 4
"""Number of matrix columns that are sampled per weight version."""

Kind = Literal["matrix", "table", "plain"]


@dataclass(frozen=True)
class WeightSample:
    """Sampled columns of one of the actor's weights."""

    name: str
    """Parameter name in `save_pretrained` format."""
    exported_name: str
    """Name under which the weight is sent. For a tied weight, this is the first of its names."""
    kind: Kind
    """`matrix` for a linear layer, `table` for an embedding, and `plain` for other weights such as norms and biases."""
    inputs: tuple[int, ...]
    """Indices of the sampled columns of a matrix or embedding, or of the sampled rows of another weight. Empty for a
    vector.
    """
    dim: int | None
    """Dimension of the weight that `inputs` indexes. None for a vector."""
    bits: np.ndarray
    """Sampled values, [J, N], with one row for each of the J entries of `inputs`. For a vector, such as a bias, all
    values, [N]. bfloat16 values are stored as int16."""
    is_bfloat16: bool

    @property
    def values(self) -> Tensor:
        """Returns a writable copy of the sampled values."""
        tensor = torch.tensor(self.bits)
        return tensor.view(torch.bfloat16) if self.is_bfloat16 else tensor


@dataclass(frozen=True)
class WeightSamples:
    """Samples of the actor's weights of one weight version."""

    version: int
    samples: tuple[WeightSample, ...]


def chosen_names(names: Sequence[str], version: int) -> list[str]:
    """Selects one weight from each set of names that differ only in the layer index, such as one query matrix.
    Successive versions cycle through the layers.
    """
    kinds: dict[str, list[str]] = {}
    for name in names:
        kinds.setdefault(re.sub(r"\.\d+\.", ".#.", name), []).append(name)
    return [kind[version % len(kind)] for kind in kinds.values()]


def chosen_inputs(width: int, version: int) -> list[int]:
    """Selects up to `INPUTS` evenly spaced columns. Successive versions cycle through all columns."""
    count = min(INPUTS, width)
    return sorted({(version + i * width // count) % width for i in range(count)})


def weight_samples(
    model: PreTrainedModel,
    version: int,
    *,
    subset: int = 0,
    num_subsets: int | None = None,
    dtype: torch.dtype | None = None,
    is_receiver: bool = True,
    read: Callable[[str], Tensor] | None = None,
) -> WeightSamples:
    """Returns samples of the model's weights. All ranks of a sharded model must call this together.

    Args:
        model: the actor's model.
        version: weight version of the samples.
        subset, num_subsets: with `num_subsets`, samples all columns of every `num_subsets`-th weight, starting at
            weight `subset`. None samples the layers and columns that `version` selects.
        dtype: dtype to which floating-point weights are cast. None keeps their dtype.
        is_receiver: True returns the samples on this rank. False takes part in the all-gathers and returns no samples.
        read: returns the full weight with an exported name, in `dtype`. With `read`, the model may be on the meta
            device. None gathers the weights from the model.
    """
    weights = model_weights(model)
    names = list(weights) if num_subsets is None else list(weights)[subset::num_subsets]
    chosen = chosen_names(names, version) if num_subsets is None else names
    exported_names: dict[int, str] = {}
    for name, weight in weights.items():
        exported_names.setdefault(id(weight.stored), name)
    samples, routers = [], find_routers(model)
    for name in chosen:
        exported_name = exported_names[id(weights[name].stored)]
        kind, dim = _kind(model, name, weights[name], routers)
        width = weights[name].stored.shape[dim] if dim is not None else 0
        # A layer is sampled once per num_layers versions, so the columns advance once per such visit.
        visit = version // max(1, len(names) // len(chosen))
        inputs = chosen_inputs(width, visit) if num_subsets is None else list(range(width))
        if read is None:
            values = sampled_columns(weights[name], dim, inputs, dtype).detach()
        else:
            values = select_columns(read(exported_name), dim, inputs).detach()
        if is_receiver:
            is_bfloat16 = values.dtype == torch.bfloat16
            bits = (values.view(torch.int16) if is_bfloat16 else values).cpu().clone().numpy()
            samples.append(WeightSample(name, exported_name, kind, tuple(inputs), dim, bits, is_bfloat16))
    return WeightSamples(version, tuple(samples))


def _kind(model: nn.Module, name: str, weight: ModelWeight, routers: Sequence[nn.Module]) -> tuple[Kind, int | None]:
    """Returns the kind of a weight (see `WeightSample.kind`), and the index of the tensor dimension that
    `WeightSample.inputs` indexes. Returns None instead of the index for a vector. The weights of `routers` count as
    matrices.
    """
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path) if weight.adapter is None else weight.adapter.base_layer
    if leaf == "weight" and isinstance(module, nn.Embedding):
        return "table", 1
    if leaf == "weight" and (isinstance(module, nn.Linear | Conv1D) or module in routers):
        is_transposed = isinstance(module, Conv1D) or (isinstance(module, QuantizedLinear) and module.is_transposed)
        return "matrix", 0 if is_transposed else 1
    return "plain", 0 if weight.stored.ndim > 1 else None


def sampled_columns(
    weight: ModelWeight, dim: int | None, inputs: Sequence[int], dtype: torch.dtype | None = None
) -> Tensor:
    """Returns the sampled columns of a weight as rows, [J, N], or all values of a vector, [N]."""
    dtype = dtype if weight.stored.is_floating_point() else None
    stored = weight.stored
    if weight.adapter is None and isinstance(stored, DTensor) and dim == 1 and stored.ndim == 2 and _by_rows(stored):
        index = torch.tensor(inputs, dtype=torch.int64, device=stored.device)
        own = stored.to_local().detach().index_select(1, index).to(dtype or stored.dtype)
        shape = torch.Size((stored.shape[0], len(inputs)))
        columns = DTensor.from_local(
            own, stored.device_mesh, stored.placements, run_check=False, shape=shape, stride=(len(inputs), 1)
        )
        return columns.full_tensor().T.contiguous()
    # Merge the complete adapter: a product of selected columns can round differently.
    return select_columns(weight.gather(dtype), dim, inputs)


def select_columns(weight: Tensor, dim: int | None, inputs: Sequence[int]) -> Tensor:
    """Returns the sampled columns of a full weight as rows, [J, N], or all values of a vector, [N]."""
    if dim is None:
        return weight.contiguous()
    chosen = weight.index_select(dim, torch.tensor(inputs, dtype=torch.int64, device=weight.device))
    return (chosen.T if dim == 1 else chosen).contiguous()


def _by_rows(weight: DTensor) -> bool:
    return all(isinstance(p, Replicate) or (type(p) is Shard and p.dim == 0) for p in weight.placements)
