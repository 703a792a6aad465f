"""Compares vLLM's weights with the actor's weights by running vLLM's layers on unit vectors (see weight_check.py).

Shape suffixes: J sampled inputs of a layer, N outputs of the layer on this rank.
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

from flowrl.engines.models.weight_samples import WeightSample, WeightSamples
from flowrl.engines.rollout.weight_check import (
    QUANTIZED_TOLERANCE,
    Compared,
    Difference,
    compare,
    merge_compared,
    merge_stages,
)

_UNITS = 256
"""Number of unit vectors per call of a layer."""


@dataclass(frozen=True)
class _Layer:
    """A vLLM layer that contains a weight."""

    module: nn.Module
    fused_index: int | None
    """Index of the weight among the matrices that are fused into the layer. None if the layer has one matrix."""

    @property
    def tolerance(self) -> float:
        method = getattr(self.module, "quant_method", None)
        is_exact = method is None or type(method) in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
        return 0.0 if is_exact else QUANTIZED_TOLERANCE


def compare_weights(engine: LLMEngine, samples: WeightSamples) -> Compared:
    """Compares the weights of all workers of an engine with samples of the actor's weights."""
    found = engine.collective_rpc(partial(_compare_served, samples=samples))
    tp = engine.vllm_config.parallel_config.tensor_parallel_size
    return merge_stages([merge_compared(found[start : start + tp]) for start in range(0, len(found), tp)])


def _compare_served(wrapped: Any, samples: WeightSamples) -> Compared:  # Any: vLLM's worker
    """Compares the weights of this worker (or its shards) with samples of the actor's weights."""
    runner = wrapped.worker.model_runner
    modules = dict(runner.model.named_modules(remove_duplicate=False))
    packed: Mapping[str, Sequence[str]] = getattr(runner.model, "packed_modules_mapping", {})
    dtype = runner.model_config.dtype

    def result(sample: WeightSample) -> Difference | bool:
        path, _, leaf = sample.name.rpartition(".")
        layer = _find_layer(modules, packed, path)
        if layer is None:
            return False
        pairs = _actual_and_expected(layer, leaf, sample, dtype)
        results = [compare(sample.name, actual, expected, tolerance=layer.tolerance) for actual, expected in pairs]
        wrong = [result for result in results if isinstance(result, Difference)]
        return max(wrong, key=lambda difference: difference.largest) if wrong else bool(results)

    with torch.inference_mode():
        return Compared.of((sample.name, result(sample)) for sample in samples.samples)


def _find_layer(modules: Mapping[str, nn.Module], packed: Mapping[str, Sequence[str]], path: str) -> _Layer | None:
    if path in modules:
        return _Layer(modules[path], None)
    head, _, last = path.rpartition(".")
    for fused, names in packed.items():
        if last in names and f"{head}.{fused}" in modules:
            return _Layer(modules[f"{head}.{fused}"], list(names).index(last))
    return None


def _actual_and_expected(
    layer: _Layer, leaf: str, sample: WeightSample, dtype: torch.dtype
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields pairs of actual and expected values. Yields nothing if the weight cannot be read back."""
    module: Any = layer.module  # vLLM's layers, which torch does not type
    values = sample.values
    if isinstance(module, VocabParallelEmbedding):
        if leaf == "weight":
            yield from _vocabulary(module, sample, dtype)
    elif isinstance(module, LinearBase) and leaf == "bias":
        # A layer without a bias returns zeros.
        zeros_1J = torch.zeros(1, _width(module), dtype=dtype, device=values.device)
        yield from _outputs(layer, _run_kernel(module, zeros_1J, getattr(module, "bias", None)), values[None])
    elif isinstance(module, LinearBase) and leaf == "weight":
        yield from _matrix(layer, sample, dtype)
    elif isinstance(param := getattr(module, leaf, None), Tensor):
        actual = param[list(sample.inputs)] if param.ndim > 1 else param
        if actual.shape == values.shape:
            yield actual, values


def _vocabulary(
    module: Any, sample: WeightSample, dtype: torch.dtype
) -> Iterator[tuple[Tensor, Tensor]]:  # Any: vLLM's VocabParallelEmbedding
    """Yields actual and expected values of an embedding or output head, for this rank's vocabulary shard."""
    own = slice(module.shard_indices.org_vocab_start_index, module.shard_indices.org_vocab_end_index)
    count = own.stop - own.start
    if sample.kind == "matrix":
        for units_JD, rows in _units(module.embedding_dim, sample.inputs, dtype, module.weight.device):
            yield _run_kernel(module, units_JD, None)[:, :count], sample.values[rows, own]
    elif isinstance(module.quant_method, UnquantizedEmbeddingMethod):
        yield module.weight[:count, list(sample.inputs)].T, sample.values[:, own]


def _matrix(layer: _Layer, sample: WeightSample, dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
    module = layer.module
    assert isinstance(module, LinearBase)
    width = _width(module)
    first = module.tp_rank * width if isinstance(module, RowParallelLinear) else 0
    own = [row for row, column in enumerate(sample.inputs) if first <= column < first + width]
    values_JN = sample.values[own]
    columns = [sample.inputs[row] - first for row in own]
    device = next((weight.device for weight in module.parameters()), torch.device("cpu"))
    if not columns:
        yield values_JN, values_JN  # another rank holds these columns
    for units_JD, rows in _units(width, columns, dtype, device):
        yield from _outputs(layer, _run_kernel(module, units_JD, None), values_JN[rows])


def _units(
    width: int, columns: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[Tensor, slice]]:
    """Yields batches of unit vectors for `columns`. Each batch comes with the slice of `columns` that it covers."""
    for start in range(0, len(columns), _UNITS):
        index = torch.tensor(columns[start : start + _UNITS], device=device)
        yield nn.functional.one_hot(index, width).to(dtype), slice(start, start + len(index))


def _width(module: LinearBase) -> int:
    return module.input_size_per_partition if isinstance(module, RowParallelLinear) else module.input_size


def _run_kernel(module: Any, inputs_JD: Tensor, bias: Tensor | None) -> Tensor:  # Any: vLLM's layer, whose method it is
    """Runs the layer's kernel without communication between ranks."""
    device = next((weight.device for weight in module.parameters()), inputs_JD.device)
    return module.quant_method.apply(module, inputs_JD.to(device), bias)


def _outputs(layer: _Layer, actual_JN: Tensor, values_JN: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields this rank's actual and expected outputs, separately for each matrix that the layer fuses."""
    module: Any = layer.module  # vLLM's layers, some of which do not declare these attributes
    start = expected_start = 0
    for index, size in enumerate(module.output_partition_sizes):
        num_shards, own_shard = _output_shards(module, index)
        if layer.fused_index in (None, index):
            first = own_shard * size + (expected_start if layer.fused_index is None else 0)
            yield actual_JN[:, start : start + size], values_JN[:, first : first + size]
        start += size
        expected_start += num_shards * size


def _output_shards(module: Any, index: int) -> tuple[int, int]:  # Any: as above
    """Returns the number of output shards of a fused matrix, and the index of this rank's shard."""
    if not hasattr(module, "output_size_per_partition") or isinstance(module, RowParallelLinear):
        return 1, 0
    replicas = module.num_kv_head_replicas if isinstance(module, QKVParallelLinear) and index else 1
    return module.tp_size // replicas, module.tp_rank // replicas
