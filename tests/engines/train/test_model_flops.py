"""The FLOPs of a model equal those that torch counts in its forward and backward passes."""

import json
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, PreTrainedModel

from flowrl.algorithms.hidden_logprobs import logprobs_from_hidden
from flowrl.config import LoraConfig
from flowrl.engines.models.adapters.lora import add_adapter
from flowrl.engines.models.loading import CriticModel
from flowrl.engines.train.model_flops import ModelFlops, Passes, count_pairs, model_flops, planned_flops
from tests.engines.families import FAMILIES
from tests.engines.tiny import convolving, qwen2

ROWS, LENGTH = 2, 7
TOKENS = ROWS * LENGTH


def counted(forward: Callable[[Tensor], Tensor]) -> tuple[int, int]:
    """Returns the FLOPs that torch counts in a forward pass, and in a forward and backward pass."""
    # torch has no formula for its fused attention on CPUs. That for GPUs also counts recomputed attention weights.
    # Without the mapping, torch omits the products that flowrl's head adds in place.
    mapping = {torch.ops.aten.addmm_: lambda _, left, right, **__: 2 * math.prod(left) * right[1]}
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False, custom_mapping=mapping) as counter:
        output = forward(torch.full((ROWS, LENGTH), 3))
        num_forward = counter.get_total_flops()
        output.sum().backward()
    return num_forward, counter.get_total_flops()


def formula(model: nn.Module) -> tuple[int, int]:
    """Returns the same figures of the formula, with all pairs of tokens of a row instead of the causal ones."""
    flops = model_flops(model)
    assert flops is not None
    forward, training = (
        flops.count([LENGTH] * ROWS, TOKENS, is_training=is_training, is_causal=False) for is_training in (False, True)
    )
    return forward, training


def build(name: str) -> PreTrainedModel:
    """Returns a model whose experts run in products that torch counts."""
    config = FAMILIES[name].config()
    return AutoModelForCausalLM.from_config(config, experts_implementation="eager").float()


@pytest.mark.parametrize("rank", [0, 3], ids=["all weights", "adapter"])
@pytest.mark.parametrize("name", FAMILIES)
def test_flops_equal_those_that_torch_counts(name: str, rank: int) -> None:
    model = build(name).eval()
    if rank:
        if name == "OPT":
            pytest.skip("the order of its modules is not that of their execution")
        add_adapter(model, LoraConfig(rank=rank))
    assert counted(lambda ids: model(ids).logits) == formula(model)


@pytest.mark.parametrize("targets", [("q_proj", "v_proj"), ("k_proj",), ("down_proj",)], ids="+".join)
def test_only_gradients_that_an_adapter_needs_are_counted(targets: tuple[str, ...]) -> None:
    model = qwen2()
    add_adapter(model, LoraConfig(rank=2, targets=targets))
    assert counted(lambda ids: model(ids).logits) == formula(model)


def test_the_value_head_of_a_critic_is_counted_for_each_token() -> None:
    model = CriticModel(qwen2().model)
    assert counted(model) == formula(model)


@pytest.mark.parametrize("rank", [0, 3], ids=["all weights", "adapter"])
@pytest.mark.parametrize("name", FAMILIES)
def test_recomputed_layers_are_counted_separately(name: str, rank: int) -> None:
    model = build(name)
    if rank:
        if name == "OPT":
            pytest.skip("the order of its modules is not that of their execution")
        add_adapter(model, LoraConfig(rank=rank))
    forward, training = formula(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    if rank:
        model.disable_input_require_grads()  # transformers would compute gradients that an adapter does not need
    model.train()
    flops = model_flops(model)
    assert flops is not None
    recomputed = flops.count_recomputed([LENGTH] * ROWS, TOKENS, layers=True, head=False, is_causal=False)
    assert counted(lambda ids: model(ids).logits) == (forward, training + recomputed)


def test_logits_that_are_recomputed_in_tiles_are_counted_separately() -> None:
    """A head with 64 x 9,000 weights has two tiles of columns. The first token of a row has no log-probability."""
    model, num_targets = qwen2(vocab_size=9000), ROWS * (LENGTH - 1)

    def logprobs(ids: Tensor) -> Tensor:
        hidden = model.model(ids).last_hidden_state
        return logprobs_from_hidden(hidden, model.lm_head.weight, ids, torch.ones_like(ids, dtype=torch.bool))

    flops = model_flops(model)
    assert flops is not None
    forward, training = (
        flops.count([LENGTH] * ROWS, num_targets, is_training=is_training, is_causal=False)
        for is_training in (False, True)
    )
    recomputed = flops.count_recomputed([LENGTH] * ROWS, num_targets, layers=False, head=True)
    assert recomputed == num_targets * 2 * 64 * 9000
    assert counted(logprobs) == (forward, training + recomputed)


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=3)], ids=["all weights", "adapter"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_planned_model_has_the_flops_of_the_loaded_model(name: str, lora: LoraConfig | None) -> None:
    architecture = FAMILIES[name].config()
    model = AutoModelForCausalLM.from_config(architecture)
    if lora is not None:
        add_adapter(model, lora)
    assert planned_flops(json.dumps(architecture.to_dict()), has_head=True, lora=lora) == model_flops(model)


def test_a_planned_critic_has_the_flops_of_the_loaded_critic() -> None:
    model = qwen2()
    planned = planned_flops(json.dumps(model.config.to_dict()), has_head=False)
    assert planned is not None and planned == model_flops(CriticModel(model.model))


def test_flops_of_a_model_by_hand() -> None:
    """Width 64, 4 heads of 16, 2 key-value heads, MLP 96, 2 layers, 32 tokens in the vocabulary."""
    weights = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96)
    head = 32 * 64
    flops = model_flops(qwen2(vocab_size=32))
    assert flops is not None and flops == ModelFlops(
        per_token=Passes(2 * weights, 4 * weights),
        per_target=Passes(2 * head, 4 * head),
        per_pair={None: Passes(2 * 2 * 2 * 64, 2 * 4 * 2 * 64)},
        recomputed_per_token=2 * (weights - 2 * 64 * 96),
    )
    # Rows of 3 and 1 tokens have 6 and 1 causal pairs. Two tokens have a log-probability.
    forward = 4 * 2 * weights + 2 * 2 * head + 7 * 2 * 2 * 2 * 64
    assert flops.count([3, 1], 2, is_training=False) == forward
    assert flops.count([3, 1], 2, is_training=True) == 3 * forward
    # Each layer computes all matrices but the last one again, and attention. The head computes its logits again.
    recomputed = 4 * 2 * (weights - 2 * 64 * 96) + 7 * 2 * 2 * 2 * 64
    assert flops.count_recomputed([3, 1], 2, layers=True, head=True) == recomputed + 2 * 2 * head


@pytest.mark.parametrize(("window", "num_pairs"), [(None, 15), (8, 15), (5, 15), (2, 9), (1, 5)])
def test_a_window_limits_the_pairs_of_a_row_of_five_tokens(window: int | None, num_pairs: int) -> None:
    assert count_pairs(5, window) == num_pairs


def test_a_model_with_other_matrices_has_no_count() -> None:
    assert model_flops(convolving()) is None
