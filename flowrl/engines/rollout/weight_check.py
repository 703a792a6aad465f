"""Whether a rollout computes with the actor's weights: a few columns of some of them, compared bit for bit.

A linear layer answers a unit vector with a column of its matrix, and a vector of zeros with its bias. Both are exact,
because sums with zeros round nothing. So what an engine serves can be asked for, however it keeps it: fused with other
matrices, packed for its kernels, or cut over devices. Every version looks at other columns and other layers.

Shape suffixes: J inputs of a layer that are looked at, N its outputs.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from flowrl.config import CheckFailed
from flowrl.engines.models.lora import ModelWeight, model_weights

INPUTS = 4
"""Columns of a matrix that one version looks at."""

QUANTISED = 0.3
"""Error of a quantised column that still counts as its own, relative to its norm: int4 in groups of 128 has about 0.1,
int8 and fp8 less; a matrix in another's place has 1.4. A stale one does not show."""

Kind = Literal["matrix", "table", "plain"]


@dataclass(frozen=True)
class WeightSample:
    """A part of one weight, as the actor has it."""

    name: str
    """The one that `save_pretrained` gives it."""
    kind: Kind
    """Of a linear layer; of an embedding; anything else, such as a norm or a bias."""
    inputs: tuple[int, ...]
    """Of matrices and embeddings the columns; of others that have several dimensions the rows. A vector is whole."""
    bits: np.ndarray
    """[J, N], or the vector; bfloat16 as int16."""
    is_bfloat16: bool

    @property
    def values(self) -> Tensor:
        """A copy: what travelled is read-only."""
        tensor = torch.tensor(self.bits)
        return tensor.view(torch.bfloat16) if self.is_bfloat16 else tensor


@dataclass(frozen=True)
class WeightSamples:
    """What a version's weights are compared by."""

    version: int
    samples: tuple[WeightSample, ...]


@dataclass(frozen=True)
class Difference:
    """A weight that is not what it should be."""

    name: str
    largest: float


@dataclass(frozen=True)
class Compared:
    """What came of a comparison."""

    count: int = 0
    """Weights that were compared."""
    wrong: tuple[Difference, ...] = ()
    unreached: tuple[str, ...] = ()
    """Weights of which the engine does not tell what it serves."""

    @staticmethod
    def of(found: Iterable[tuple[str, Difference | bool]]) -> "Compared":
        """From each weight's name and what is wrong with it: True is nothing, False that it cannot be told."""
        pairs = list(found)
        wrong = tuple(result for _, result in pairs if isinstance(result, Difference))
        unreached = tuple(name for name, result in pairs if result is False)
        return Compared(len(pairs) - len(unreached), wrong, unreached)


# What is looked at.


def chosen_names(names: Sequence[str], version: int) -> list[str]:
    """One weight of each kind, such as the query matrices of all layers: every layer's in as many versions as there are
    layers."""
    kinds: dict[str, list[str]] = {}
    for name in names:
        kinds.setdefault(re.sub(r"\.\d+\.", ".#.", name), []).append(name)
    return [alike[version % len(alike)] for alike in kinds.values()]


def chosen_inputs(width: int, version: int) -> list[int]:
    """A few of `width` columns, spread; all of them within width / INPUTS versions that follow one another."""
    count = min(INPUTS, width)
    return sorted({(version + place * width // count) % width for place in range(count)})


def weight_samples(
    model: PreTrainedModel,
    version: int,
    *,
    part: int = 0,
    parts: int | None = None,
    dtype: torch.dtype | None = None,
    wanted: bool = True,
) -> WeightSamples:
    """What a rollout must serve if it has the model's weights.

    Args:
        version: of the weights; chooses what is looked at.
        part, parts: with parts, all of each weight, of every parts-th weight from `part` on.
        dtype: that floating-point weights are sent in; None is their own.
        wanted: ranks that do not want the samples help with them and get none.
    All ranks that hold parts of the model call it.
    """
    weights = model_weights(model)
    names = list(weights) if parts is None else list(weights)[part::parts]
    alike = chosen_names(names, version) if parts is None else names
    found = []
    for name in alike:
        kind, dim = _kind(model, name, weights[name].stored)
        width = weights[name].stored.shape[dim] if dim is not None else 0
        # A layer's turn comes once in as many versions as there are layers: its columns go on from there.
        visit = version // max(1, len(names) // len(alike))
        inputs = chosen_inputs(width, visit) if parts is None else list(range(width))
        values = _columns(weights[name], dim, inputs, dtype).detach()
        if wanted:
            is_bfloat16 = values.dtype == torch.bfloat16
            bits = (values.view(torch.int16) if is_bfloat16 else values).cpu().clone().numpy()
            found.append(WeightSample(name, kind, tuple(inputs), bits, is_bfloat16))
    return WeightSamples(version, tuple(found))


def _kind(model: nn.Module, name: str, weight: Tensor) -> tuple[Kind, int | None]:
    """What a weight is, and the dimension of its inputs; None for one that is looked at whole."""
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    module = module.base_layer if isinstance(module, LoraLinear) else module
    if leaf == "weight" and isinstance(module, nn.Embedding):
        return "table", 1
    if leaf == "weight" and isinstance(module, nn.Linear | Conv1D):
        return "matrix", 0 if isinstance(module, Conv1D) else 1
    return "plain", 0 if weight.ndim > 1 else None


def _columns(weight: ModelWeight, dim: int | None, inputs: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
    """[J, N] contiguous, or the whole vector. Parts are put together after the choice where that can be."""
    dtype = dtype if weight.stored.is_floating_point() else None
    if dim is None:
        return weight.gather(dtype).contiguous()
    index = torch.tensor(inputs, dtype=torch.int64, device=weight.stored.device)
    stored = weight.stored
    if weight.adapter is None and isinstance(stored, DTensor) and dim == 1 and stored.ndim == 2 and _by_rows(stored):
        own = stored.to_local().detach().index_select(1, index).to(dtype or stored.dtype)
        shape = torch.Size((stored.shape[0], len(inputs)))
        chosen = DTensor.from_local(
            own, stored.device_mesh, stored.placements, run_check=False, shape=shape, stride=(len(inputs), 1)
        ).full_tensor()
    else:
        # Of an adapter the whole product: that of some columns may round otherwise.
        chosen = weight.gather(dtype).index_select(dim, index)
    return (chosen.T if dim == 1 else chosen).contiguous()


def _by_rows(weight: DTensor) -> bool:
    return all(isinstance(p, Replicate) or (type(p) is Shard and p.dim == 0) for p in weight.placements)


# What is compared.


def compare(name: str, found: Tensor, expected: Tensor, *, tolerance: float = 0.0) -> Difference | bool:
    """True if what is served is what it should be; shapes are the same, and not-a-number equals itself.

    Args:
        tolerance: 0 asks for equal values, once they are in the type that is served; above it the error's norm may be
            so large, relative to the expected one's.
    """
    expected = expected.to(found.device, found.dtype)
    if found.shape != expected.shape:
        return Difference(name, float("inf"))
    is_equal = (found == expected) | (found.isnan() & expected.isnan())
    if bool(is_equal.all()):
        return True
    error = (found.double() - expected.double()).masked_fill(is_equal, 0.0)
    if tolerance and float(error.norm()) <= tolerance * float(expected.double().norm()):
        return True
    return Difference(name, float(error.abs().max()))


@torch.no_grad()
def compare_model(model: PreTrainedModel, samples: WeightSamples) -> Compared:
    """Compares the weights of a model of transformers with samples of another's, bit for bit. A layer that keeps
    integers instead is asked for its columns, which are then as near as these can be."""
    weights = model_weights(model)

    def result(sample: WeightSample) -> Difference | bool:
        if sample.name not in weights:
            return False
        stored = weights[sample.name].stored
        if sample.kind == "matrix" and not stored.is_floating_point():
            found = _answered(model, sample).to(sample.values.dtype)
            return compare(sample.name, found, sample.values, tolerance=QUANTISED)
        _, dim = _kind(model, sample.name, stored)
        return compare(sample.name, _columns(weights[sample.name], dim, sample.inputs), sample.values)

    return Compared.of((sample.name, result(sample)) for sample in samples.samples)


def _answered(model: PreTrainedModel, sample: WeightSample) -> Tensor:
    """Columns [J, N] of the matrix by which a layer multiplies, whatever it keeps."""
    layer = model.get_submodule(sample.name.rpartition(".")[0])
    width = layer.get_buffer("weight").shape[1]
    index = torch.tensor(sample.inputs, device=layer.get_buffer("weight").device)
    units = nn.functional.one_hot(index, width).to(model.dtype)
    return layer(units) - layer(torch.zeros_like(units))


def merged(parts: Sequence[Compared]) -> Compared:
    """Of ranks that each serve their part of the same weights."""
    wrong: dict[str, Difference] = {}
    for difference in (each for part in parts for each in part.wrong):
        known = wrong.get(difference.name)
        wrong[difference.name] = difference if known is None or known.largest < difference.largest else known
    unreached = dict.fromkeys(name for part in parts for name in part.unreached)
    return Compared(min(part.count for part in parts), tuple(wrong.values()), tuple(unreached))


def refuse_wrong(compared: Compared, version: int) -> None:
    """Raises CheckFailed if a weight is not what it should be."""
    if not compared.wrong:
        return
    worst = max(compared.wrong, key=lambda each: each.largest)
    others = [each.name for each in compared.wrong if each is not worst]
    shown = f" ({', '.join(others[:3])}{', ...' if len(others) > 3 else ''} too)" if others else ""
    raise CheckFailed(
        f"the rollout does not serve the actor's weights of version {version}: {len(compared.wrong)} of the "
        f"{compared.count} weights that were compared differ, {worst.name} by up to {worst.largest:.3g}{shown}; likely "
        f"causes, the first first: {_causes(compared)}"
    )


def _causes(compared: Compared) -> str:
    if len(compared.wrong) == compared.count:
        return (
            "the update has not arrived, or the actor was changed while it was on its way; the rollout was started "
            "from another model"
        )
    return (
        "the engine's loader skipped these weights, as one of tied, fused or packed ones may; it put one in another's "
        "place; the actor was changed while they were on their way; something else wrote into the engine's weights"
    )
