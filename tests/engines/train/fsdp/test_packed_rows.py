"""Packed and padded rows have the same outputs and gradients, for models of every family."""

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from flowrl.config import EngineConfig, OptimizerConfig
from flowrl.engines.models.attention import ROWS, Pack, pack_rows
from flowrl.engines.models.loading import CriticModel, RewardModel, hidden_width
from flowrl.engines.parallel.sharding import EngineError
from flowrl.engines.train.base import Outputs
from flowrl.engines.train.fsdp.engine import FsdpEngine
from flowrl.engines.train.fsdp.outputs import PolicyModel, policy_outputs
from flowrl.engines.train.microbatch import MicroBatch
from tests.engines.closeness import FLOAT32_RTOL, FLOAT64_RTOL, assert_norm_close
from tests.engines.families import FAMILIES, build
from tests.engines.losses import LOGPROBS, Bigram, bigram_outputs
from tests.engines.strategies import POLICY, policy_loss
from tests.engines.tables import VOCABULARY, table
from tests.engines.tiny import convolving, qwen2, to_float64

LENGTHS = [1, 7, 7, 33, 50]
"""Some rows are longer than sliding windows."""

Run = Callable[[Tensor, Tensor, Tensor, Pack | None], Tensor]
"""Maps ids, mask, lengths, and a pack or None to values of tokens [B, L] or rows [B]."""


@pytest.fixture(params=FAMILIES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def run_packed_and_padded(model: torch.nn.Module, run: Run, device: str = "cpu") -> Iterator[list[Tensor]]:
    """Yields the values of `run` and their gradients, for packed and then for padded rows."""
    lengths = torch.tensor(LENGTHS)
    mask = torch.arange(max(LENGTHS)) < lengths[:, None]
    ids = torch.randint(2, VOCABULARY, mask.shape, generator=torch.Generator().manual_seed(0)) * mask
    for pack in (pack_rows(LENGTHS).to(device), None):
        model.zero_grad()
        values = run(ids.to(device), mask.to(device), lengths.to(device), pack).cpu()
        values = values.where(mask, 0) if values.shape == mask.shape else values
        (values * torch.rand(values.shape, generator=torch.Generator().manual_seed(1))).mean().backward()
        yield [values.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def with_row_attention(name: str) -> PreTrainedModel:
    model = build(name)
    model.set_attn_implementation(ROWS)
    return model


def backbone(language_model: PreTrainedModel) -> PreTrainedModel:
    assert isinstance(language_model.base_model, PreTrainedModel)
    return language_model.base_model


def logprobs_and_entropies(model: PolicyModel, ids: Tensor, mask: Tensor, _: Tensor, pack: Pack | None) -> Tensor:
    """Returns the sum of log-probabilities and entropies."""
    output = model(ids, mask, 0.7, "gradient", pack)
    return output.logprobs + output.entropy


def test_packed_rows_have_the_log_probabilities_and_gradients_of_padded_ones(name: str):
    default, row_attention = PolicyModel(build(name)), PolicyModel(with_row_attention(name))
    packed, _ = run_packed_and_padded(row_attention, partial(logprobs_and_entropies, row_attention))
    # Padded rows use the default attention of the model.
    _, padded = run_packed_and_padded(default, partial(logprobs_and_entropies, default))
    assert_norm_close(packed, padded)


def test_packed_rows_have_the_values_of_padded_ones(name: str):
    model = CriticModel(backbone(with_row_attention(name)), head="fresh")
    packed, padded = run_packed_and_padded(model, lambda ids, mask, lengths, pack: model(ids, pack))
    assert_norm_close(packed, padded)


def test_packed_rows_have_the_scores_of_padded_ones(name: str):
    language_model = with_row_attention(name)
    head = torch.nn.Linear(hidden_width(backbone(language_model)), 1)
    language_model.add_module("score", head)
    model = RewardModel(language_model, head)
    packed, padded = run_packed_and_padded(model, lambda ids, mask, lengths, pack: model(ids, lengths, pack))
    assert_norm_close(packed, padded)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_packed_rows_equal_padded_ones_on_a_gpu_in_bfloat16(name: str):
    model = PolicyModel(with_row_attention(name)).to("cuda", torch.bfloat16)
    packed, padded = run_packed_and_padded(
        model, lambda ids, mask, lengths, pack: model(ids, mask, pack=pack)[0], "cuda"
    )
    assert_norm_close(packed[0], padded[0], rtol=0.1)


def trained(dtype: torch.dtype, **settings: object) -> dict[str, Tensor]:
    """Returns the weights after two steps."""
    vocabulary = settings.pop("vocabulary", VOCABULARY)
    model = qwen2(vocab_size=vocabulary, initializer_range=0.1)
    model = PolicyModel(to_float64(model) if dtype == torch.float64 else model)
    engine = FsdpEngine(
        model, policy_outputs, OptimizerConfig(lr=1e-2, eps=1e-3), EngineConfig.model_validate(settings)
    )
    for seed in range(2):
        engine.update(table(9, seed), policy_loss, POLICY)
    return {name: weight.detach() for name, weight in model.named_parameters()}


@pytest.mark.parametrize(
    ("settings", "dtype", "rtol"),
    [
        ({"max_tokens_per_microbatch": 20}, torch.float64, FLOAT64_RTOL),
        ({"max_tokens_per_microbatch": 20}, torch.float32, FLOAT32_RTOL),
        ({"vocabulary": 8192}, torch.float64, FLOAT64_RTOL),
        ({"gradient_checkpointing": True}, torch.float64, FLOAT64_RTOL),
        ({"compute_dtype": "bfloat16"}, torch.float32, 0.02),
        ({"compute_dtype": "float16"}, torch.float32, 0.02),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_packed_rows_train_the_same_weights_as_padded_rows(settings: dict, dtype: torch.dtype, rtol: float):
    packed, padded = (trained(dtype, packing=packing, **settings) for packing in ("always", "never"))
    assert_norm_close(packed, padded, rtol)


def test_a_model_without_packing_support_is_padded():
    packs = []

    def outputs(model: torch.nn.Module, micro: MicroBatch, requested: Outputs) -> dict[str, Tensor]:
        packs.append(micro.pack)
        return policy_outputs(model, micro, requested)

    engine = FsdpEngine(PolicyModel(convolving()), outputs, None, EngineConfig())
    engine.forward(table(9), LOGPROBS)
    assert packs and all(pack is None for pack in packs)


def test_requested_packing_that_is_unsupported_is_rejected():
    always = EngineConfig(packing="always")
    with pytest.raises(EngineError, match=r"engine\.packing .*always.*Lfm2ForCausalLM.*conv"):
        FsdpEngine(PolicyModel(convolving()), policy_outputs, None, always)
    with pytest.raises(EngineError, match=r"engine\.packing .*always.*Bigram"):
        FsdpEngine(Bigram(VOCABULARY, 8), bigram_outputs, None, always)
