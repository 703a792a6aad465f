"""Compares sampled weights of a rollout with the actor's weights bit by bit.

Without its bias, a linear layer maps a unit vector to one column of its matrix. With its bias, it maps a zero vector to
the bias. Both outputs are exact, because adding zeros does not round. The check uses only outputs of layers and
therefore works for fused, repacked and sharded weights.

Shape suffixes: J sampled inputs of a layer, N outputs of the layer.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from flowrl.config import CheckFailed
from flowrl.engines.models.adapters.lora import model_weights
from flowrl.engines.models.weight_samples import WeightSample, WeightSamples, sampled_columns, select_columns
from flowrl.engines.models.weights import to_tensors

QUANTIZED_TOLERANCE = 0.3
"""Largest accepted error of quantized columns: norm of the error divided by the norm of the columns.

The error is about 0.1 for int4 in groups of 128, and 1.4 for a swapped matrix. Quantized weights of an old version have
a small error and are not detected."""


@dataclass(frozen=True)
class Difference:
    """A weight of the rollout that differs from the actor's weight."""

    name: str
    largest: float
    """Largest absolute difference."""


@dataclass(frozen=True)
class Compared:
    """Result of comparing an engine's weights with the actor's weights."""

    count: int = 0
    """Number of compared weights."""
    wrong: tuple[Difference, ...] = ()
    unreached: tuple[str, ...] = ()
    """Names of weights that the engine cannot read back."""

    @staticmethod
    def of(results: Iterable[tuple[str, Difference | bool]]) -> "Compared":
        """Merges pairs (weight name, result). A result is True (equal), False (unreadable) or a `Difference`."""
        pairs = list(results)
        wrong = tuple(result for _, result in pairs if isinstance(result, Difference))
        unreached = tuple(name for name, result in pairs if result is False)
        return Compared(len(pairs) - len(unreached), wrong, unreached)


def compare(name: str, actual: Tensor, expected: Tensor, *, tolerance: float = 0.0) -> Difference | bool:
    """Returns True if a weight equals the expected weight, otherwise the difference. NaN equals NaN.

    `tolerance` is the accepted norm of the error, relative to the norm of `expected`. 0 requires equality.
    """
    expected = expected.to(actual.device, actual.dtype)
    if actual.shape != expected.shape:
        return Difference(name, float("inf"))
    is_equal = (actual == expected) | (actual.isnan() & expected.isnan())
    if bool(is_equal.all()):
        return True
    error = (actual.double() - expected.double()).masked_fill(is_equal, 0.0)
    if tolerance and float(error.norm()) <= tolerance * float(expected.double().norm()):
        return True
    return Difference(name, float(error.abs().max()))


@torch.no_grad()
def compare_model(model: PreTrainedModel, samples: WeightSamples) -> Compared:
    """Compares a transformers model with samples of the actor's weights. Quantized weights may differ by
    `QUANTIZED_TOLERANCE`.
    """
    weights = model_weights(model)

    def result(sample: WeightSample) -> Difference | bool:
        if sample.name not in weights:
            return False
        stored = weights[sample.name].stored
        if sample.kind == "matrix" and not stored.is_floating_point():
            columns = _quantized_columns(model, sample).to(sample.values.dtype)
            return compare(sample.name, columns, sample.values, tolerance=QUANTIZED_TOLERANCE)
        return compare(sample.name, sampled_columns(weights[sample.name], sample.dim, sample.inputs), sample.values)

    return Compared.of((sample.name, result(sample)) for sample in samples.samples)


def compare_arrays(weights: Mapping[str, np.ndarray], samples: WeightSamples) -> Compared:
    """Compares exported weights, stored as arrays by a user's engine, with samples of the actor's weights."""
    tensors = to_tensors(weights)

    def result(sample: WeightSample) -> Difference | bool:
        stored = tensors.get(sample.exported_name)
        if stored is None:
            return False
        return compare(sample.name, select_columns(stored, sample.dim, sample.inputs), sample.values)

    return Compared.of((sample.name, result(sample)) for sample in samples.samples)


def _quantized_columns(model: PreTrainedModel, sample: WeightSample) -> Tensor:
    """Returns the sampled columns [J, N] of a quantized layer's matrix, in dequantized form."""
    layer = model.get_submodule(sample.name.rpartition(".")[0])
    width = layer.get_buffer("weight").shape[1]
    index = torch.tensor(sample.inputs, device=layer.get_buffer("weight").device)
    units = nn.functional.one_hot(index, width).to(model.dtype)
    return layer(units) - layer(torch.zeros_like(units))


def merge_stages(stages: Sequence[Compared]) -> Compared:
    """Merges the results of pipeline stages for the same weights. Each stage reaches only weights of its own layers, so
    a weight is unreached if no stage reaches it.
    """
    first, *others = stages
    unreached = tuple(name for name in first.unreached if all(name in stage.unreached for stage in others))
    wrong = tuple(difference for stage in stages for difference in stage.wrong)
    return Compared(first.count + len(first.unreached) - len(unreached), wrong, unreached)


def merge_compared(ranks: Sequence[Compared]) -> Compared:
    """Merges the results of several ranks, each of which has a shard of the weights."""
    wrong: dict[str, Difference] = {}
    for difference in (difference for rank in ranks for difference in rank.wrong):
        known = wrong.get(difference.name)
        wrong[difference.name] = difference if known is None or known.largest < difference.largest else known
    unreached = dict.fromkeys(name for rank in ranks for name in rank.unreached)
    return Compared(min(rank.count for rank in ranks), tuple(wrong.values()), tuple(unreached))


def check_compared(compared: Compared, version: int) -> None:
    """Raises CheckFailed if a weight differs from the actor's weight."""
    if not compared.wrong:
        return
    worst = max(compared.wrong, key=lambda difference: difference.largest)
    others = [difference.name for difference in compared.wrong if difference is not worst]
    shown = f" (also {', '.join(others[:3])}{', ...' if len(others) > 3 else ''})" if others else ""
    raise CheckFailed(
        f"the rollout does not serve the actor's weights of version {version}: {len(compared.wrong)} of "
        f"{compared.count} compared weights differ, {worst.name} by up to {worst.largest:.3g}{shown}; likely causes, "
        f"most likely first: {_causes(compared)}"
    )


def _causes(compared: Compared) -> str:
    if len(compared.wrong) == compared.count:
        return (
            "the update has not arrived, or the actor changed during the transfer; the rollout was started from "
            "another model"
        )
    return (
        "the engine's loader skipped these weights (tied, fused or packed ones); it swapped two of them; the actor "
        "changed during the transfer; something else wrote into the engine's weights"
    )
