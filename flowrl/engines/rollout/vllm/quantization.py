"""vLLM options that quantize weights whenever vLLM loads them.

vLLM implements fp8 itself, with one scale per output of a weight and one per input token. For int8 and int4, torchao
quantizes only the weights, with one scale per output (int8) or per group of 128 inputs (int4). Head, embeddings and
norms are not quantized.
"""

import json
from typing import Any

from flowrl.devices.device import get_device, has_gpu
from flowrl.engines.rollout.base import RolloutError

_FP8 = "fp8_per_channel"
_CAPABILITY = {"fp8": (8, 9), "int8": (7, 5), "int4": (8, 0)}
"""Minimum CUDA compute capability for each quantization."""

_INT4_GROUP = 128


def quantization_options(quantization: str | None) -> dict[str, Any]:  # Any: fields of vLLM's EngineArgs
    """Returns `EngineArgs` options for a quantization. Raises RolloutError if the device does not support it."""
    if quantization is None:
        return {}
    _check_device(quantization)
    if quantization == "fp8":
        return {"quantization": _FP8}
    # torchao is an optional dependency.
    from torchao.core.config import config_to_dict  # noqa: PLC0415  # pyright: ignore[reportMissingImports]
    from torchao.quantization import (  # noqa: PLC0415  # pyright: ignore[reportMissingImports]
        Int4WeightOnlyConfig,
        Int8WeightOnlyConfig,
    )

    settings = (
        Int8WeightOnlyConfig()
        if quantization == "int8"
        else Int4WeightOnlyConfig(group_size=_INT4_GROUP, int4_packing_format="tile_packed_to_4d")
    )
    # Passed as an override, because a config in the model folder would mean that its weights are already quantized.
    options = json.dumps(config_to_dict(settings))
    return {"quantization": "torchao", "hf_overrides": {"quantization_config_dict_json": options}}


def _check_device(quantization: str) -> None:
    if not has_gpu():
        if quantization == "int4":
            raise RolloutError("quantization is int4, which vLLM supports on GPUs only: set quantization: int8")
        return
    actual, required = get_device("cuda").capability, _CAPABILITY[quantization]
    assert actual is not None
    if actual < required:
        alternative = "int8" if actual >= _CAPABILITY["int8"] else "null"
        raise RolloutError(
            f"quantization is {quantization}, which needs compute capability {required[0]}.{required[1]}, but this GPU "
            f"has {actual[0]}.{actual[1]}: set quantization: {alternative}"
        )
