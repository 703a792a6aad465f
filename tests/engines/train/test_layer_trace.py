"""The traced bytes of a layer equal the bytes that autograd saves in a forward pass with data."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig

from flowrl.config import LoraConfig
from flowrl.engines.models.adapters.lora import add_adapter
from flowrl.engines.models.loading import has_attention_softcap
from flowrl.engines.parallel.sharding import layers
from flowrl.engines.train.layer_trace import LayerTrace, Pass, trace_layers
from tests.engines.families import FAMILIES

ROWS, LENGTH = 4, 64
PRECISIONS = {"float32": ("float32", None), "half": ("bfloat16", None), "autocast": ("float32", "bfloat16")}


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


def saved_bytes(config: PreTrainedConfig, precision: str, adapter_rank: int = 0) -> int:
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


def trace(config: PreTrainedConfig, precision: str, **settings) -> LayerTrace:
    weight_dtype, compute_dtype = PRECISIONS[precision]
    values = {"device_type": "cpu", "is_training": True, "can_pack": False} | settings
    return trace_layers(
        Pass(
            json.dumps(config.to_dict(), default=str),
            ROWS,
            LENGTH,
            values.pop("device_type"),
            weight_dtype,
            compute_dtype,
            **values,
        )
    )


def cast_bytes(config: PreTrainedConfig, precision: str) -> int:
    """Returns the bytes of the weights of a layer that autocast has cast, which the trace includes."""
    if precision != "autocast":
        return 0
    layer = layers(AutoModelForCausalLM.from_config(config))[-1]
    return 2 * sum(weight.numel() for weight in layer.parameters() if weight.dim() == 2)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_traced_layer_keeps_what_autograd_saves(name: str, precision: str) -> None:
    few, many = (saved_bytes(config_of(name, n), precision) for n in (2, 3))
    config = config_of(name, 3)
    traced = trace(config, precision).per_layer - cast_bytes(config, precision)
    assert traced == pytest.approx(many - few, rel=0.03)


def test_an_adapter_of_a_traced_layer_keeps_what_autograd_saves() -> None:
    few, many = (saved_bytes(config_of("Qwen2", n), "float32", adapter_rank=4) for n in (2, 3))
    traced = trace(config_of("Qwen2", 3), "float32", lora=LoraConfig(rank=4)).per_layer
    assert traced == pytest.approx(many - few, rel=0.03)


def llama(**settings) -> LlamaConfig:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2}
    return LlamaConfig(vocab_size=64, **{**sizes, **settings})


def test_gradient_checkpointing_keeps_the_input_of_each_layer() -> None:
    every, inputs = (trace(llama(), "half", gradient_checkpointing=value) for value in (False, True))
    assert inputs.per_layer == ROWS * LENGTH * 256 * 2
    assert inputs.peak > every.per_layer


def test_weights_cast_under_gradient_checkpointing_are_kept_until_the_end_of_the_forward_pass() -> None:
    every, inputs = (trace(llama(), "autocast", gradient_checkpointing=value) for value in (False, True))
    assert (every.cached, inputs.cached) == (0, cast_bytes(llama(), "autocast"))
    assert inputs.per_layer == ROWS * LENGTH * 256 * 4


def test_a_model_with_fewer_layers_than_the_trace_is_traced() -> None:
    """The list of layer types of a Qwen2 with one layer has one entry."""
    one, three = (trace(config_of("Qwen2", n), "half") for n in (1, 3))
    assert one == three


@pytest.mark.parametrize(("precision", "added"), [("float32", 4 * 2 * (256 - 64)), ("half", 0), ("autocast", 0)])
def test_float32_attention_on_a_gpu_saves_repeated_keys_and_values(precision: str, added: int) -> None:
    """256 is the width of the query heads, and 64 that of the key heads. The torch of the tests has grouped kernels."""
    # In half precision, one kernel attends within all rows of a GPU's pack, as in padded rows.
    on_cpu = trace(llama(), precision, can_pack=precision == "float32")
    on_gpu = trace(llama(), precision, can_pack=True, device_type="cuda")
    assert on_gpu.per_layer - on_cpu.per_layer == ROWS * LENGTH * added


def test_tensor_parallelism_divides_heads_and_mlp() -> None:
    """A layer keeps (2 Q + 2 K + 4 M) bfloat16 numbers per token that two ranks share, and the factor of 4 heads."""
    whole, half = (trace(llama(), "half", tp=tp).per_layer for tp in (1, 2))
    shared = 2 * (2 * 256 + 2 * 64 + 4 * 512) + 4 * 8
    assert whole - half == ROWS * LENGTH * shared // 2


def test_a_pass_without_gradients_keeps_nothing() -> None:
    traced = trace(llama(), "half", is_training=False)
    assert traced.per_layer == 0 and traced.peak > 0
