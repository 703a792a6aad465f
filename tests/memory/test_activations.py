"""What layers keep for the backward pass, counted beforehand, is what autograd keeps."""

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from flowrl.algorithms import hidden_logprobs, logprobs
from flowrl.config import LoraConfig
from flowrl.engines.models.loading import caps_attention
from flowrl.engines.models.lora import add_adapter
from flowrl.engines.rollout import sampling
from flowrl.engines.rollout.hf import decoder, kv_cache
from flowrl.memory.activations import CHUNK_ELEMENTS, TILE_SIDES, TILED_FROM, Precision, layer_bytes
from flowrl.memory.model_size import ModelSize, size_of
from flowrl.memory.rollout_memory import MIN_ROWS, PREFILL_TOKENS, SAMPLED_ELEMENTS, SLOT_MULTIPLE
from flowrl.workers import policy_model
from tests.engines.families import FAMILIES, build

ROWS, LENGTH = 4, 64
PRECISIONS: tuple[Precision, ...] = ("plain", "half", "autocast")


def config_of(name: str, layers: int) -> PreTrainedConfig:
    """Of a family, wide enough that norms' factors and the like do not matter."""
    config = FAMILIES[name].config()
    for key, value in (("hidden_size", 192), ("intermediate_size", 320), ("ffn_dim", 320), ("n_embd", 192)):
        if hasattr(config, key):
            setattr(config, key, value)
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = (config.layer_types * layers)[:layers]
    return config


def kept_bytes(config: PreTrainedConfig, precision: Precision, adapter_rank: int = 0) -> int:
    """Bytes of all tensors that autograd keeps of a forward pass, weights and their copies left out."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16 if precision == "half" else torch.float32)
    if caps_attention(model):
        model.set_attn_implementation("eager")
    if adapter_rank:
        add_adapter(model, LoraConfig(rank=adapter_rank))
    weights = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    shapes = {shape for tensor in model.parameters() for shape in (tensor.shape, tensor.shape[::-1])}
    found = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights and tensor.shape not in shapes:
            found[storage.data_ptr()] = storage  # kept, so that no other takes its place
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with hooks, torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
        output = model.base_model(input_ids=torch.randint(3, config.vocab_size, (ROWS, LENGTH)), use_cache=False)
        assert output.last_hidden_state.requires_grad
    return sum(storage.nbytes() for storage in found.values())


def sized(config: PreTrainedConfig) -> ModelSize:
    size = size_of(config.to_dict())
    assert size is not None
    return size


def per_layer_and_token(name: str, precision: Precision, adapter_rank: int = 0) -> tuple[float, int]:
    """(what autograd keeps, what is counted), in bytes."""
    few, many = (kept_bytes(config_of(name, n), precision, adapter_rank) for n in (1, 2))
    size = sized(config_of(name, 1))
    counted = layer_bytes(size, precision, longest=LENGTH, adapter_rank=adapter_rank)
    return (many - few) / (ROWS * LENGTH), counted


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_layer_keeps_what_is_counted(name: str, precision: Precision) -> None:
    kept, counted = per_layer_and_token(name, precision)
    assert counted == pytest.approx(kept, rel=0.03)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", ["LLaMA", "Qwen2", "Gemma", "GPT-2"])
def test_a_layer_with_an_adapter_keeps_what_is_counted(name: str, precision: Precision) -> None:
    kept, counted = per_layer_and_token(name, precision, adapter_rank=4)
    assert counted == pytest.approx(kept, rel=0.06)


@pytest.mark.parametrize("name", FAMILIES)
def test_parameters_are_counted_from_the_configuration(name: str) -> None:
    model = build(name)
    size = sized(model.config)
    assert size.parameters == sum(weight.numel() for weight in model.parameters())
    head = 0 if size.tied else size.embedding
    assert size.layers * size.layer + size.backbone_ends == size.parameters - head


def test_a_model_of_another_family_has_no_size() -> None:
    assert size_of({"model_type": "mamba"}) is None


def test_what_the_head_makes_at_a_time_is_what_is_counted() -> None:
    assert policy_model._TILED_FROM == TILED_FROM
    assert logprobs._CHUNK_ELEMENTS == CHUNK_ELEMENTS
    assert hidden_logprobs._TILE_SIDES["cpu"] == TILE_SIDES["cpu"]
    assert TILE_SIDES["cuda"] == hidden_logprobs._OTHER_TILE_SIDES


def test_what_a_rollout_makes_at_a_time_is_what_is_counted() -> None:
    assert SLOT_MULTIPLE == kv_cache.SLOT_MULTIPLE
    assert decoder._MIN_ROWS == MIN_ROWS
    assert decoder._PREFILL_TOKENS == PREFILL_TOKENS
    assert sampling._CHUNK_ELEMENTS == SAMPLED_ELEMENTS
