"""The decode step without module calls equals the forward pass of transformers."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from flowrl.engines.models.int8 import quantized_copy
from flowrl.engines.rollout.hf.decode_step import ShortStep, has_short_step
from flowrl.engines.rollout.hf.kv_cache import SlotCache, with_slot_attention
from tests.engines.tables import VOCABULARY
from tests.engines.tiny import convolving, llama, qwen2, to_float64

ROWS, PROMPT = 18, 6

Step = Callable[[PreTrainedModel, Tensor, Tensor, SlotCache], Tensor]


def full_step(model: PreTrainedModel, ids: Tensor, positions: Tensor, cache: SlotCache) -> Tensor:
    mask = cache.mask(model.dtype)
    output = model(ids[:, None], position_ids=positions[:, None], attention_mask=mask, past_key_values=cache)
    return output.logits[:, -1]


def short_step(model: PreTrainedModel, ids: Tensor, positions: Tensor, cache: SlotCache) -> Tensor:
    return ShortStep(model).logits(ids, positions, cache)


@torch.no_grad()
def decoded(model: PreTrainedModel, step: Step, prompt: int) -> Tensor:
    """Returns the logits of three steps, [3, R, V]. Row i first has a prefill of `prompt` tokens and i % 3 further
    steps, in which the other rows stay.
    """
    ids = torch.randint(VOCABULARY, (ROWS, prompt + 5), generator=torch.Generator().manual_seed(0))
    cache = SlotCache(2, ROWS, prompt, "cpu")
    if prompt:
        cache.begin_prefill(torch.arange(ROWS))
        model.base_model(input_ids=ids[:, :prompt], past_key_values=cache, use_cache=True)
    logits, rows = [], torch.arange(ROWS)
    for number in range(5):
        positions = prompt + (number - rows % 3).clamp(min=0)
        cache.begin_step(positions, prompt + number + 1)
        logits.append(step(model, ids[rows, positions], positions, cache))
    return torch.stack(logits[2:])


@pytest.mark.parametrize("prompt", [0, PROMPT, 31])
@pytest.mark.parametrize(
    "build",
    [
        qwen2,
        llama,
        lambda: qwen2(num_key_value_heads=4, tie_word_embeddings=False, hidden_act="gelu"),
        lambda: qwen2(rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}),
    ],
    ids=["qwen2", "llama", "other settings", "scaled rope"],
)
def test_the_logits_are_those_of_the_model(build: Callable[[], PreTrainedModel], prompt: int) -> None:
    model = with_slot_attention(build())
    assert has_short_step(model)
    torch.testing.assert_close(
        decoded(model, short_step, prompt), decoded(model, full_step, prompt), rtol=1e-6, atol=1e-6
    )


def hooked() -> PreTrainedModel:
    def double(module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
        return 2 * output

    model = qwen2()
    model.get_submodule("model.layers.0.mlp").register_forward_hook(double)
    return model


@pytest.mark.parametrize(
    "build",
    [
        convolving,
        hooked,
        lambda: to_float64(qwen2()),
        lambda: qwen2(dtype=torch.bfloat16),
        lambda: quantized_copy(qwen2(), torch.device("cpu")),
        lambda: qwen2(use_sliding_window=True, sliding_window=8, max_window_layers=1),
        lambda: qwen2(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
    ],
    ids=["another layer", "hook", "float64", "bfloat16", "int8", "sliding window", "rope that depends on the length"],
)
def test_models_that_compute_something_else_are_excluded(build: Callable[[], PreTrainedModel]) -> None:
    assert not has_short_step(build())
