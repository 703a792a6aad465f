"""The estimated activation bytes equal the bytes that autograd saves."""

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig

from flowrl.algorithms import hidden_logprobs, logprobs
from flowrl.config import LoraConfig
from flowrl.engines.models.loading import has_attention_softcap
from flowrl.engines.models.lora import add_adapter
from flowrl.engines.rollout import sampling
from flowrl.engines.rollout.hf import decoder, kv_cache
from flowrl.memory.activations import CHUNK_ELEMENTS, TILE_SIDES, TILED_FROM, Precision, layer_bytes
from flowrl.memory.model_size import ModelSize, model_size_from_config
from flowrl.memory.rollout_memory import MIN_ROWS, PREFILL_TOKENS, SAMPLED_ELEMENTS, SLOT_MULTIPLE
from flowrl.workers import policy_model
from tests.engines.families import FAMILIES, build

ROWS, LENGTH = 4, 64
PRECISIONS: tuple[Precision, ...] = ("float32", "half", "autocast")


def config_of(name: str, layers: int) -> PreTrainedConfig:
    """Returns a configuration of a family, wide enough that small tensors do not matter."""
    config = FAMILIES[name].config()
    for key, value in (("hidden_size", 192), ("intermediate_size", 320), ("ffn_dim", 320), ("n_embd", 192)):
        if hasattr(config, key):
            setattr(config, key, value)
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = (config.layer_types * layers)[:layers]
    return config


def saved_bytes(config: PreTrainedConfig, precision: Precision, adapter_rank: int = 0) -> int:
    """Returns the bytes that autograd saves in a forward pass, without weights and their copies."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16 if precision == "half" else torch.float32)
    if has_attention_softcap(model):
        model.set_attn_implementation("eager")
    if adapter_rank:
        add_adapter(model, LoraConfig(rank=adapter_rank))
    weights = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    shapes = {shape for tensor in model.parameters() for shape in (tensor.shape, tensor.shape[::-1])}
    storages = {}

    def save(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights and tensor.shape not in shapes:
            storages[storage.data_ptr()] = storage  # held, so that its address is not reused
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor)
    with hooks, torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
        output = model.base_model(input_ids=torch.randint(3, config.vocab_size, (ROWS, LENGTH)), use_cache=False)
        assert output.last_hidden_state.requires_grad
    return sum(storage.nbytes() for storage in storages.values())


def size_of(config: PreTrainedConfig) -> ModelSize:
    size = model_size_from_config(config.to_dict())
    assert size is not None
    return size


def per_layer_and_token(name: str, precision: Precision, adapter_rank: int = 0) -> tuple[float, int]:
    """Returns (bytes that autograd saves, estimated bytes)."""
    few, many = (saved_bytes(config_of(name, n), precision, adapter_rank) for n in (1, 2))
    size = size_of(config_of(name, 1))
    estimated = layer_bytes(size, precision, max_length=LENGTH, adapter_rank=adapter_rank)
    return (many - few) / (ROWS * LENGTH), estimated


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", FAMILIES)
def test_layer_estimate_equals_saved_tensors(name: str, precision: Precision) -> None:
    saved, estimated = per_layer_and_token(name, precision)
    assert estimated == pytest.approx(saved, rel=0.03)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", ["LLaMA", "Qwen2", "Gemma", "GPT-2"])
def test_layer_estimate_with_adapter_equals_saved_tensors(name: str, precision: Precision) -> None:
    saved, estimated = per_layer_and_token(name, precision, adapter_rank=4)
    assert estimated == pytest.approx(saved, rel=0.06)


@pytest.mark.parametrize(("precision", "added"), [("float32", 4 * 2 * (2048 - 512)), ("half", 0), ("autocast", 0)])
def test_float32_attention_on_a_gpu_saves_repeated_keys_and_values(precision: Precision, added: int) -> None:
    size = size_of(LlamaConfig(hidden_size=2048, num_attention_heads=32, num_key_value_heads=8))
    on_cpu, on_gpu = (layer_bytes(size, precision, max_length=64, device_type=kind) for kind in ("cpu", "cuda"))
    assert on_gpu - on_cpu == added


@pytest.mark.parametrize("name", FAMILIES)
def test_parameter_count_equals_the_model(name: str) -> None:
    model = build(name)
    size = size_of(model.config)
    assert size.parameters == sum(weight.numel() for weight in model.parameters())
    head = 0 if size.tied else size.embedding
    assert size.layers * size.layer + size.backbone_non_layer == size.parameters - head


def test_unknown_family_has_no_size() -> None:
    assert model_size_from_config({"model_type": "mamba"}) is None


def test_head_constants_equal_the_implementation() -> None:
    assert policy_model._TILED_FROM == TILED_FROM
    assert logprobs._CHUNK_ELEMENTS == CHUNK_ELEMENTS
    assert hidden_logprobs._TILE_SIDES["cpu"] == TILE_SIDES["cpu"]
    assert TILE_SIDES["cuda"] == hidden_logprobs._OTHER_TILE_SIDES


def test_rollout_constants_equal_the_implementation() -> None:
    assert SLOT_MULTIPLE == kv_cache.SLOT_MULTIPLE
    assert decoder._MIN_ROWS == MIN_ROWS
    assert decoder._PREFILL_TOKENS == PREFILL_TOKENS
    assert sampling._CHUNK_ELEMENTS == SAMPLED_ELEMENTS
