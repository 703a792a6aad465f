"""What is looked at, and what counts as equal; the engines are in test_vllm_rollout.py and tests/workers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

from flowrl.config import CheckFailed, LoraConfig
from flowrl.engines.models.lora import add_adapter
from flowrl.engines.models.weights import export_weights, load_weights
from flowrl.engines.rollout.weight_check import (
    Compared,
    Difference,
    chosen_inputs,
    chosen_names,
    compare,
    compare_model,
    merged,
    refuse_wrong,
    weight_samples,
)
from tests.engines.tiny import llama, qwen2

LAYERS = 5
NAMES = [f"model.layers.{layer}.{part}.weight" for layer in range(LAYERS) for part in ("q", "norm")]


def test_every_version_looks_at_one_weight_of_each_kind_and_as_many_versions_as_layers_at_all():
    seen = [chosen_names([*NAMES, "lm_head.weight"], version) for version in range(LAYERS)]
    assert seen[2] == ["model.layers.2.q.weight", "model.layers.2.norm.weight", "lm_head.weight"]
    assert {name for names in seen for name in names} == {*NAMES, "lm_head.weight"}


@pytest.mark.parametrize("width", [1, 3, 4, 7, 64])
def test_all_columns_are_looked_at_in_turn_and_a_few_at_a_time(width: int):
    seen = [chosen_inputs(width, version) for version in range(-(-width // 4) + 1)]
    assert all(len(places) == min(4, width) and max(places) < width for places in seen)
    assert {place for places in seen for place in places} == set(range(width))


def test_columns_go_on_when_a_layers_turn_comes_again():
    first, second = (weight_samples(qwen2(), version).samples for version in (0, 2))
    assert [each.name for each in first] == [each.name for each in second]
    assert all(set(a.inputs).isdisjoint(b.inputs) for a, b in zip(first, second, strict=True) if a.kind != "plain")


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
    whole = [compare_model(copy, weight_samples(model, 1, part=part, parts=3)) for part in range(3)]
    assert sum(each.count for each in whole) == len(model.state_dict())
    assert not any(each.wrong for each in whole)


@pytest.mark.parametrize("name", ["lm_head.weight", "model.norm.weight", "model.layers.1.self_attn.q_proj.bias"])
def test_a_weight_that_is_a_last_bit_off_is_named(name: str):
    model, copy = (qwen2(tie_word_embeddings=False) for _ in range(2))
    with torch.no_grad():
        weight = copy.get_parameter(name)
        weight.copy_(weight.nextafter(torch.tensor(9.0)))
    (wrong,) = compare_model(copy, weight_samples(model, 1)).wrong
    assert wrong.name == name and 0 < wrong.largest < 1e-6


def test_samples_of_a_model_with_an_adapter_are_of_what_it_computes_with():
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


def test_the_comparison_is_of_values_in_the_type_that_is_served():
    third = torch.tensor([1 / 3, -0.0])
    assert compare("a", torch.tensor([1 / 3, 0.0], dtype=torch.bfloat16), third) is True
    wrong = compare("a", third, third.bfloat16())
    assert isinstance(wrong, Difference) and wrong.largest == pytest.approx(0.333984375 - 1 / 3, rel=1e-4)
    nan = torch.tensor([float("nan"), 1.0])
    assert compare("a", nan, nan.clone()) is True
    assert isinstance(compare("a", torch.tensor([1.0, 1.0]), nan), Difference)


def test_a_quantised_weight_may_be_as_far_off_as_its_type_rounds():
    expected = torch.tensor([3.0, 4.0])
    assert compare("a", torch.tensor([3.0, 4.4]), expected, tolerance=0.1) is True
    wrong = compare("a", torch.tensor([3.0, 4.6]), expected, tolerance=0.1)
    assert isinstance(wrong, Difference) and wrong.largest == pytest.approx(0.6, rel=1e-6)


class Rounded(torch.nn.Module):
    """A layer that keeps integers of 8 bits and a scale per output, as a quantised engine may."""

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


def test_a_layer_that_keeps_integers_is_asked_for_its_columns():
    model, rounded = qwen2(), qwen2()
    layers: Any = rounded.model.layers
    attention = layers[0].self_attn
    attention.q_proj, attention.o_proj = Rounded(attention.q_proj), Rounded(attention.o_proj)
    compared = compare_model(rounded, weight_samples(model, 0))
    assert compared.wrong == compared.unreached == ()
    attention.q_proj, attention.o_proj = attention.o_proj, attention.q_proj
    wrong = {each.name for each in compare_model(rounded, weight_samples(model, 0)).wrong}
    assert {f"model.layers.0.self_attn.{name}_proj.weight" for name in "qo"} <= wrong


def test_ranks_of_one_engine_answer_together_and_the_sentence_names_the_worst():
    parts = [
        Compared(9, (Difference("a", 1e-6),), ("c",)),
        Compared(9, (Difference("a", 2e-6), Difference("b", 0.5)), ("c",)),
    ]
    whole = merged(parts)
    assert whole == Compared(9, (Difference("a", 2e-6), Difference("b", 0.5)), ("c",))
    with pytest.raises(CheckFailed, match=r"version 7: 2 of the 9 weights .* differ, b by up to 0.5 \(a too\); likely"):
        refuse_wrong(whole, 7)
    refuse_wrong(Compared(9, (), ("c",)), 7)
