"""Real vLLM with quantized weights, before and after updates."""

import importlib.util
from pathlib import Path
from typing import get_args

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from flowrl import Cluster, Placement
from flowrl.config import ModelConfig, RolloutConfig
from flowrl.engines.models.weights import export_weights
from flowrl.workers import Rollout
from tests.engines import tiny, vllm_checks

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs the extra vllm"),
]

SIZES = {**tiny.SIZES, "hidden_size": 128, "intermediate_size": 256, "max_position_embeddings": 512}
PROMPTS = [[2 + (row + i) % 28 for i in range(3 + row)] for row in range(9)]

CASES = {"int8": ("float32", 0.5 * 1.01, (127, 128)), "fp8": ("bfloat16", 2**-4 * 1.01, (448, 448))}
"""Quantization -> the model's type, the largest error of a weight, and between what the largest number is: in steps of
int8, of which a scale is one; and for fp8, with 3 bits after the leading one, as a share of the weight."""


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["int8", "fp8"])
def test_weights_are_quantized_again_at_every_update(quantization: str, ray_session: None, tmp_path: Path) -> None:
    if quantization == "int8" and importlib.util.find_spec("torchao") is None:
        pytest.skip("needs the extra vllm-integers")
    dtype, largest_error, largest = CASES[quantization]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES)).to(getattr(torch, dtype)).eval()
    tiny.save(model, tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    config = RolloutConfig.model_validate({"engine": "vllm", "max_response_tokens": 12, "quantization": quantization})
    placement = Placement(device="cpu", pools={"main": [1]}, roles={"rollout": "main"})
    with Cluster(placement, dedicated=("rollout",), num_threads=1) as cluster:
        folder = ModelConfig.model_validate({"path": tmp_path, "dtype": dtype})
        group = cluster.group("rollout", Rollout, config, folder, seed=0)
        stale = {}
        for version in range(3):
            if version:
                with torch.no_grad():
                    for weight in model.parameters():
                        weight.add_(0.3 * weight.abs().mean() * torch.randn_like(weight))
                (stale,) = group.run(vllm_checks.quantization_errors, export_weights(model))
                group.load_weights(export_weights(model), version)
            (errors,) = group.run(vllm_checks.quantization_errors, export_weights(model))
            assert set(errors) == {f"{name}_proj" for name in ("qkv", "o", "gate_up", "down")}
            for error, top in errors.values():
                assert error <= largest_error and largest[0] <= top <= largest[1]
            assert all(error > 2 * largest_error for error, _ in stale.values())
            (responses,) = group.run(vllm_checks.generate, PROMPTS, list(range(len(PROMPTS))))
            assert {v for row in responses["versions"] for v in row} == {version}


def test_every_quantization_is_covered() -> None:
    kinds = set(get_args(get_args(RolloutConfig.model_fields["quantization"].annotation)[0]))
    assert kinds == {*CASES, "int4"}, "int4 needs a GPU"
