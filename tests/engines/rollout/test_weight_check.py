"""Comparison of weights, without engines."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

from flowrl.config import CheckFailed, LoraConfig
from flowrl.engines.models.adapters.lora import add_adapter
from flowrl.engines.models.weight_samples import weight_samples
from flowrl.engines.models.weights import export_weights, load_weights
from flowrl.engines.rollout.weight_check import (
    Compared,
    Difference,
    check_compared,
    compare,
    compare_model,
    merge_compared,
    merge_stages,
)
from tests.engines.tiny import llama, qwen2


def gpt2(seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    return GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=64, n_embd=16, n_layer=2, n_head=2))


MATRICES = {"embed_tokens", "lm_head", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.mark.parametrize(
    ("make", "matrices"),
    [
        (qwen2, MATRICES),
        (llama, MATRICES),
        (gpt2, {"wte", "wpe", "lm_head", "c_attn", "c_fc", "c_proj"}),
        (lambda **of: qwen2(torch.bfloat16, **of), MATRICES),
    ],
)
def test_a_copy_passes_and_another_model_does_not(make: Callable[..., PreTrainedModel], matrices: set[str]):
    model, copy = make(seed=0), make(seed=1)
    wrong = compare_model(copy, weight_samples(model, 1)).wrong
    assert {each.name.split(".")[-2] for each in wrong} >= matrices
    load_weights(copy, export_weights(model))
    for version in range(3):
        compared = compare_model(copy, weight_samples(model, version))
        assert compared.wrong == compared.unreached == () and compared.count >= 11
    complete = [compare_model(copy, weight_samples(model, 1, subset=subset, num_subsets=3)) for subset in range(3)]
    assert sum(each.count for each in complete) == len(model.state_dict())
    assert not any(each.wrong for each in complete)


@pytest.mark.parametrize("name", ["lm_head.weight", "model.norm.weight", "model.layers.1.self_attn.q_proj.bias"])
def test_a_weight_with_a_different_last_bit_is_reported(name: str):
    model, copy = (qwen2(tie_word_embeddings=False) for _ in range(2))
    with torch.no_grad():
        weight = copy.get_parameter(name)
        weight.copy_(weight.nextafter(torch.tensor(9.0)))
    (wrong,) = compare_model(copy, weight_samples(model, 1)).wrong
    assert wrong.name == name and 0 < wrong.largest < 1e-6


def test_samples_of_a_model_with_an_adapter_are_merged():
    model, plain = qwen2(), qwen2()
    add_adapter(model, LoraConfig(rank=4))
    with torch.no_grad():
        layers: Any = model.model.layers
        layers[0].self_attn.q_proj.lora_B["default"].weight.fill_(0.1)
    assert {each.name for each in compare_model(plain, weight_samples(model, 0)).wrong} == {
        "model.layers.0.self_attn.q_proj.weight"
    }
    load_weights(plain, export_weights(model))
    assert compare_model(plain, weight_samples(model, 0)).wrong == ()


def test_values_are_compared_in_the_dtype_of_the_engine():
    third = torch.tensor([1 / 3, -0.0])
    assert compare("a", torch.tensor([1 / 3, 0.0], dtype=torch.bfloat16), third) is True
    wrong = compare("a", third, third.bfloat16())
    assert isinstance(wrong, Difference) and wrong.largest == pytest.approx(0.333984375 - 1 / 3, rel=1e-4)
    nan = torch.tensor([float("nan"), 1.0])
    assert compare("a", nan, nan.clone()) is True
    assert isinstance(compare("a", torch.tensor([1.0, 1.0]), nan), Difference)


def test_a_quantized_weight_is_compared_with_a_tolerance():
    expected = torch.tensor([3.0, 4.0])
    assert compare("a", torch.tensor([3.0, 4.4]), expected, tolerance=0.1) is True
    wrong = compare("a", torch.tensor([3.0, 4.6]), expected, tolerance=0.1)
    assert isinstance(wrong, Difference) and wrong.largest == pytest.approx(0.6, rel=1e-6)


class Rounded(torch.nn.Module):
    """Linear layer with int8 weights and one scale per output."""

    scale: torch.Tensor
    weight: torch.Tensor

    def __init__(self, layer: torch.nn.Linear) -> None:
        super().__init__()
        self.register_buffer("scale", layer.weight.detach().abs().amax(1) / 127)
        self.register_buffer("weight", (layer.weight.detach() / self.scale[:, None]).round().to(torch.int8))
        self.bias = layer.bias

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = inputs @ (self.weight * self.scale[:, None]).T
        return outputs if self.bias is None else outputs + self.bias


def test_an_integer_layer_is_compared_by_its_outputs():
    model, rounded = qwen2(), qwen2()
    layers: Any = rounded.model.layers
    attention = layers[0].self_attn
    attention.q_proj, attention.o_proj = Rounded(attention.q_proj), Rounded(attention.o_proj)
    compared = compare_model(rounded, weight_samples(model, 0))
    assert compared.wrong == compared.unreached == ()
    attention.q_proj, attention.o_proj = attention.o_proj, attention.q_proj
    wrong = {each.name for each in compare_model(rounded, weight_samples(model, 0)).wrong}
    assert {f"model.layers.0.self_attn.{name}_proj.weight" for name in "qo"} <= wrong


def test_results_of_ranks_are_merged_and_the_error_names_the_largest_difference():
    ranks = [
        Compared(9, (Difference("a", 1e-6),), ("c",)),
        Compared(9, (Difference("a", 2e-6), Difference("b", 0.5)), ("c",)),
    ]
    merged = merge_compared(ranks)
    assert merged == Compared(9, (Difference("a", 2e-6), Difference("b", 0.5)), ("c",))
    with pytest.raises(CheckFailed, match=r"version 7\b.*\b2 of 9\b.*\bb\b.* 0\.5"):
        check_compared(merged, 7)
    check_compared(Compared(9, (), ("c",)), 7)


def test_stages_compare_the_weights_of_their_own_layers() -> None:
    """No stage reaches the experts."""
    wrong = Difference("layers.1.norm", 0.5)
    first = Compared(1, (), ("layers.1.norm", "layers.1.experts"))
    last = Compared(1, (wrong,), ("layers.0.norm", "layers.1.experts"))
    assert merge_stages([first, last]) == Compared(2, (wrong,), ("layers.1.experts",))
    assert merge_stages([first]) == first
