"""Log-probabilities and entropies of a policy, at once and in tiles, compared with the model's own logits."""

from itertools import product
from typing import Literal

import pytest
import torch
from torch import Tensor
from transformers import Gemma2Config, Gemma2ForCausalLM, PreTrainedModel

from flowrl.engines.models.attention import ROWS, pack_rows
from flowrl.engines.train.fsdp.outputs import PolicyModel
from tests.engines.closeness import FLOAT32_RTOL, FLOAT64_RTOL, assert_norm_close
from tests.engines.tiny import SIZES, qwen2

LARGE = 8192
"""Smallest vocabulary whose logits are computed in tiles."""


def gemma2(vocabulary: int) -> Gemma2ForCausalLM:
    """Returns a model with capped logits."""
    torch.manual_seed(0)
    settings = SIZES | {"vocab_size": vocabulary, "hidden_size": 32, "head_dim": 16, "final_logit_softcapping": 5.0}
    return Gemma2ForCausalLM(Gemma2Config(**settings)).eval()


MODELS = {
    "full": lambda: qwen2(),
    "tiles": lambda: qwen2(vocab_size=LARGE),
    "full, capped": lambda: gemma2(32),
    "tiles, capped": lambda: gemma2(LARGE),
}


def expected(model: PreTrainedModel, ids_BL: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Returns log-probabilities and entropies by definition, in float64."""
    logits_BLV = model(input_ids=ids_BL, use_cache=False).logits.double() / temperature
    logprobs_BLV = logits_BLV[:, :-1].log_softmax(-1)
    chosen_BL = logprobs_BLV.gather(-1, ids_BL[:, 1:, None]).squeeze(-1)
    entropy_BL = -(logprobs_BLV.exp() * logprobs_BLV).sum(-1)
    pad = torch.nn.functional.pad
    return pad(chosen_BL, (1, 0)), pad(entropy_BL, (1, 0))


def inputs() -> tuple[Tensor, Tensor]:
    ids_BL = torch.randint(2, 32, (3, 7), generator=torch.Generator().manual_seed(0))
    return ids_BL, torch.ones_like(ids_BL, dtype=torch.bool)


@pytest.mark.parametrize(
    ("name", "temperature", "dtype"),
    [*product(MODELS, (1.0, 0.7), (torch.float64,)), ("tiles, capped", 0.7, torch.float32)],
)
def test_results_equal_those_of_the_models_logits(name: str, temperature: float, dtype: torch.dtype):
    model, (ids_BL, mask_BL) = MODELS[name]().to(dtype), inputs()
    with torch.no_grad():
        logprobs_BL, entropy_BL, *_ = PolicyModel(model)(ids_BL, mask_BL, temperature, "value")
        reference = expected(model, ids_BL, temperature)
    rtol = FLOAT64_RTOL if dtype == torch.float64 else FLOAT32_RTOL
    assert_norm_close(logprobs_BL.double(), reference[0], rtol)
    assert_norm_close(entropy_BL.double(), reference[1], rtol)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("entropy", ["value", "gradient"])
def test_gradients_equal_those_of_the_models_logits(name: str, entropy: Literal["value", "gradient"]):
    model, (ids_BL, mask_BL) = MODELS[name]().double(), inputs()
    gradients = []
    for ours in (True, False):
        model.zero_grad()
        logprobs_BL, entropy_BL = (
            PolicyModel(model)(ids_BL, mask_BL, 0.7, entropy)[:2] if ours else expected(model, ids_BL, 0.7)
        )
        loss = logprobs_BL.sum() + (entropy_BL.square().sum() if entropy == "gradient" else 0)
        loss.backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None])
    for actual, reference in zip(*gradients, strict=True):
        assert_norm_close(actual, reference)


@pytest.mark.parametrize("name", MODELS)
def test_an_entropy_that_is_not_requested_is_zero(name: str):
    ids_BL, mask_BL = inputs()
    assert not PolicyModel(MODELS[name]())(ids_BL, mask_BL)[1].any()


def test_tiles_skip_masked_tokens():
    model, (ids_BL, mask_BL) = qwen2(vocab_size=LARGE), inputs()
    mask_BL[:, :4] = False
    logprobs_BL = PolicyModel(model)(ids_BL, mask_BL).logprobs
    assert not logprobs_BL[:, :4].any() and (logprobs_BL[:, 4:] < 0).all()


@pytest.mark.parametrize("name", MODELS)
def test_candidates_and_hidden_states_equal_those_of_the_model(name: str):
    model, (ids_BL, mask_BL) = MODELS[name]().double(), inputs()
    result = model(input_ids=ids_BL, use_cache=False, output_hidden_states=True)
    logprobs_BLV = (result.logits / 0.7).log_softmax(-1)
    candidates_BLK = torch.randint(0, 32, (*ids_BL.shape, 3), generator=torch.Generator().manual_seed(1))
    expected_BLK = logprobs_BLV[:, :-1].gather(-1, candidates_BLK[:, 1:])
    output = PolicyModel(model)(ids_BL, mask_BL, 0.7, topk=candidates_BLK, has_hidden=True)
    assert_norm_close(output.topk_logprobs[:, 1:], expected_BLK, FLOAT32_RTOL)
    assert_norm_close(output.hidden, result.hidden_states[-1], FLOAT32_RTOL)
    top = PolicyModel(model)(ids_BL, mask_BL, 0.7, topk=2)
    assert torch.equal(top.topk_ids[:, 1:], logprobs_BLV[:, :-1].topk(2).indices)
    assert_norm_close(top.topk_logprobs[:, 1:], logprobs_BLV[:, :-1].topk(2).values, FLOAT32_RTOL)


@pytest.mark.parametrize("name", ["full", "tiles"])
def test_packed_candidates_and_hidden_states_are_those_of_padded_rows(name: str):
    model = MODELS[name]().double()
    model.set_attn_implementation(ROWS)
    lengths = [2, 5, 7]
    mask_BL = torch.arange(7) < torch.tensor(lengths)[:, None]
    ids_BL = inputs()[0] * mask_BL
    outputs = [
        PolicyModel(model)(ids_BL, mask_BL, topk=2, has_hidden=True, pack=pack) for pack in (pack_rows(lengths), None)
    ]
    for packed, padded in zip(*([o.topk_ids, o.topk_logprobs, o.hidden] for o in outputs), strict=True):
        assert_norm_close(packed[mask_BL].double(), padded[mask_BL].double(), FLOAT32_RTOL)
