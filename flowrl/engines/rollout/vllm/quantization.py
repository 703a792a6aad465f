"""How vLLM is told to quantise weights as it loads them, at its start and at every update.

fp8 is vLLM's own: a scale per output, and one per token for the inputs. int8 and int4 are torchao's through vLLM:
weights in integers, a scale per output or per 128 inputs, and products in the model's own type. Head, embeddings and
norms stay as they are.
"""

import json
from typing import Any

import torch

from flowrl.engines.rollout.responses import RolloutError

_FP8 = "fp8_per_channel"
_CAPABILITY = {"fp8": (8, 9), "int8": (7, 5), "int4": (8, 0)}
"""The first GPUs that have it."""

_INT4_GROUP = 128


def quantization_options(quantization: str | None) -> dict[str, Any]:  # Any: fields of vLLM's EngineArgs
    """What `EngineArgs` is given.

    Raises:
        RolloutError: the device has no such numbers.
    """
    if quantization is None:
        return {}
    _check_device(quantization)
    if quantization == "fp8":
        return {"quantization": _FP8}
    # An extra that only these need.
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
    # Not a config of the model's folder: that would say that its weights are quantised already.
    described = json.dumps(config_to_dict(settings))
    return {"quantization": "torchao", "hf_overrides": {"quantization_config_dict_json": described}}


def _check_device(quantization: str) -> None:
    if not torch.cuda.is_available():
        if quantization == "int4":
            raise RolloutError("quantization is int4, which vLLM multiplies on GPUs only: set quantization: int8")
        return
    has, needs = torch.cuda.get_device_capability(), _CAPABILITY[quantization]
    if has < needs:
        instead = "int8" if has >= _CAPABILITY["int8"] else "null"
        raise RolloutError(
            f"quantization is {quantization}, which vLLM has on GPUs of compute capability {needs[0]}.{needs[1]} and "
            f"above, and this one's is {has[0]}.{has[1]}: set quantization: {instead}"
        )
