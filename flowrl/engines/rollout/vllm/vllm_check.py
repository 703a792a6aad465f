"""What vLLM serves, asked of its own layers: see weight_check.py. Runs in each of an engine's worker processes.

Shape suffixes: J inputs of a layer that are looked at, N outputs that this process has.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.linear import (
    LinearBase,
    QKVParallelLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding
from vllm.v1.engine.llm_engine import LLMEngine

from flowrl.engines.rollout.weight_check import (
    QUANTISED,
    Compared,
    Difference,
    WeightSample,
    WeightSamples,
    compare,
    merged,
)

_UNITS = 256
"""Unit vectors that a layer is given at once."""


@dataclass(frozen=True)
class _Layer:
    """A layer of vLLM's model that serves a weight."""

    module: nn.Module
    part: int | None
    """Which of the matrices that vLLM has fused into it; None where the weight is all of it."""

    @property
    def tolerance(self) -> float:
        method = getattr(self.module, "quant_method", None)
        exact = method is None or type(method) in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
        return 0.0 if exact else QUANTISED


def compare_weights(engine: LLMEngine, samples: WeightSamples) -> Compared:
    """Compares what an engine serves with samples of the actor's weights, each worker its part."""
    return merged(engine.collective_rpc(partial(_compare_served, samples=samples)))


def _compare_served(wrapped: Any, samples: WeightSamples) -> Compared:  # Any: vLLM's worker
    """Compares what this worker serves with the actor's samples: of a weight that ranks share, its own part."""
    runner = wrapped.worker.model_runner
    modules = dict(runner.model.named_modules(remove_duplicate=False))
    packed: Mapping[str, Sequence[str]] = getattr(runner.model, "packed_modules_mapping", {})
    dtype = runner.model_config.dtype

    def result(sample: WeightSample) -> Difference | bool:
        path, _, leaf = sample.name.rpartition(".")
        layer = _find(modules, packed, path)
        if layer is None:
            return False
        told = list(_served(layer, leaf, sample, dtype))
        results = [compare(sample.name, found, wanted, tolerance=layer.tolerance) for found, wanted in told]
        wrong = [each for each in results if isinstance(each, Difference)]
        return max(wrong, key=lambda each: each.largest) if wrong else bool(results)

    with torch.inference_mode():
        return Compared.of((sample.name, result(sample)) for sample in samples.samples)


def _find(modules: Mapping[str, nn.Module], packed: Mapping[str, Sequence[str]], path: str) -> _Layer | None:
    if path in modules:
        return _Layer(modules[path], None)
    head, _, last = path.rpartition(".")
    for fused, parts in packed.items():
        if last in parts and f"{head}.{fused}" in modules:
            return _Layer(modules[f"{head}.{fused}"], list(parts).index(last))
    return None


def _served(layer: _Layer, leaf: str, sample: WeightSample, dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
    """What is served, and what should be, in parts; nothing where that cannot be told."""
    module: Any = layer.module  # vLLM's, whose attributes torch's types do not know
    values = sample.values
    if isinstance(module, VocabParallelEmbedding):
        if leaf == "weight":
            yield from _vocabulary(module, sample, dtype)
    elif isinstance(module, LinearBase) and leaf == "bias":
        # Also of a layer that has none: it answers with zeros.
        zeros_1J = torch.zeros(1, _width(module), dtype=dtype, device=values.device)
        yield from _outputs(layer, _answer(module, zeros_1J, getattr(module, "bias", None)), values[None])
    elif isinstance(module, LinearBase) and leaf == "weight":
        yield from _matrix(layer, sample, dtype)
    elif isinstance(param := getattr(module, leaf, None), Tensor):
        found = param[list(sample.inputs)] if param.ndim > 1 else param
        if found.shape == values.shape:
            yield found, values


def _vocabulary(
    module: Any, sample: WeightSample, dtype: torch.dtype
) -> Iterator[tuple[Tensor, Tensor]]:  # Any: vLLM's VocabParallelEmbedding
    """Of an embedding or a head the tokens that this rank has. A tied head has its own packed copy: it is asked."""
    own = slice(module.shard_indices.org_vocab_start_index, module.shard_indices.org_vocab_end_index)
    count = own.stop - own.start
    if sample.kind == "matrix":
        for units_JD, rows in _units(module.embedding_dim, sample.inputs, dtype, module.weight.device):
            yield _answer(module, units_JD, None)[:, :count], sample.values[rows, own]
    elif isinstance(module.quant_method, UnquantizedEmbeddingMethod):
        yield module.weight[:count, list(sample.inputs)].T, sample.values[:, own]


def _matrix(layer: _Layer, sample: WeightSample, dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
    module = layer.module
    assert isinstance(module, LinearBase)
    width = _width(module)
    first = module.tp_rank * width if isinstance(module, RowParallelLinear) else 0
    mine = [row for row, place in enumerate(sample.inputs) if first <= place < first + width]
    values_JN = sample.values[mine]
    places = [sample.inputs[row] - first for row in mine]
    device = next((weight.device for weight in module.parameters()), torch.device("cpu"))
    if not places:
        yield values_JN, values_JN  # another rank has these columns
    for units_JD, rows in _units(width, places, dtype, device):
        yield from _outputs(layer, _answer(module, units_JD, None), values_JN[rows])


def _units(
    width: int, places: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[Tensor, slice]]:
    """Unit vectors, some at a time, and which of the places they are for."""
    for start in range(0, len(places), _UNITS):
        index = torch.tensor(places[start : start + _UNITS], device=device)
        yield nn.functional.one_hot(index, width).to(dtype), slice(start, start + len(index))


def _width(module: LinearBase) -> int:
    return module.input_size_per_partition if isinstance(module, RowParallelLinear) else module.input_size


def _answer(module: Any, inputs_JD: Tensor, bias: Tensor | None) -> Tensor:  # Any: vLLM's layer, whose method it is
    """What the layer's own kernel gives, before ranks exchange anything."""
    device = next((weight.device for weight in module.parameters()), inputs_JD.device)
    return module.quant_method.apply(module, inputs_JD.to(device), bias)


def _outputs(layer: _Layer, found_JN: Tensor, values_JN: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The layer's answer and the expected one, matrix by matrix, of the outputs that this rank has."""
    module: Any = layer.module  # the sizes of vLLM's layers, which their types do not all have
    start = expected_start = 0
    for number, size in enumerate(module.output_partition_sizes):
        cuts, own = _cuts(module, number)
        if layer.part in (None, number):
            first = own * size + (expected_start if layer.part is None else 0)
            yield found_JN[:, start : start + size], values_JN[:, first : first + size]
        start += size
        expected_start += cuts * size


def _cuts(module: Any, number: int) -> tuple[int, int]:  # Any: as above
    """Into how many parts the outputs of a layer's matrix are cut, and which is this rank's."""
    if not hasattr(module, "output_size_per_partition") or isinstance(module, RowParallelLinear):
        return 1, 0
    replicas = module.num_kv_head_replicas if isinstance(module, QKVParallelLinear) and number else 1
    return module.tp_size // replicas, module.tp_rank // replicas
