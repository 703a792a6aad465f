import math

import pytest
import torch
from torch import Tensor, nn

from flowrl.config import EngineConfig, OptimizerConfig
from flowrl.data.batch.tensordicts import lengths
from flowrl.engines.train.base import Denominators, Outputs
from flowrl.engines.train.fsdp.engine import FsdpEngine
from flowrl.engines.train.microbatch import MicroBatch
from tests.engines.closeness import FLOAT64_RTOL, assert_norm_close
from tests.engines.losses import LOGPROBS, Bigram, bigram_loss, bigram_outputs, logprobs, policy_logits
from tests.engines.tables import VOCABULARY, table, take_rows
from tests.engines.tiny import qwen2, to_float64

OPTIMIZER = OptimizerConfig(lr=1e-2, max_grad_norm=None)


def bigram_engine(max_tokens: int = 1000, optimizer: OptimizerConfig | None = OPTIMIZER) -> FsdpEngine:
    return FsdpEngine(
        Bigram(VOCABULARY, 8).double(), bigram_outputs, optimizer, EngineConfig(max_tokens_per_microbatch=max_tokens)
    )


def qwen2_outputs(model: nn.Module, micro: MicroBatch, outputs: Outputs) -> dict[str, Tensor]:
    return {"logprobs": logprobs(policy_logits(model, micro.input_ids), micro.input_ids)}


def gradient(dtype: torch.dtype, max_tokens: int) -> dict[str, torch.Tensor]:
    """Returns the gradient of one step of a Qwen2 over nine rows."""
    model = qwen2(initializer_range=0.05)
    model = to_float64(model) if dtype == torch.float64 else model
    engine = FsdpEngine(model, qwen2_outputs, OPTIMIZER, EngineConfig(max_tokens_per_microbatch=max_tokens))
    engine.forward_backward(table(9), bigram_loss, LOGPROBS)
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize(
    ("dtype", "max_tokens"), [*((torch.float64, tokens) for tokens in (1, 13, 40)), (torch.float32, 13)]
)
def test_the_gradient_does_not_depend_on_the_size_of_micro_batches(dtype: torch.dtype, max_tokens: int):
    assert_norm_close(gradient(dtype, max_tokens), gradient(dtype, 1000))


@pytest.mark.parametrize("max_tokens", [1, 17])
def test_training_does_not_depend_on_the_size_of_micro_batches(max_tokens: int):
    single, split = bigram_engine(), bigram_engine(max_tokens)
    reports = [
        [engine.update(table(9, seed), bigram_loss, LOGPROBS) for seed in range(3)] for engine in (single, split)
    ]
    assert_norm_close(split.model.state_dict(), single.model.state_dict())
    for expected, report in zip(*reports, strict=True):
        values = {name: metric.result() for name, metric in expected.items()}
        assert {name: metric.result() for name, metric in report.items()} == pytest.approx(values, rel=FLOAT64_RTOL)


def test_denominators_count_trained_tokens_and_rows_that_have_one():
    seen = []
    rows = table(9)
    rows["tokens", "response_mask"][: int(lengths(rows)[0])] = False
    engine = bigram_engine(max_tokens=20)
    engine.update(rows, lambda *inputs: (seen.append(inputs[-1]), bigram_loss(*inputs))[1], LOGPROBS)
    mask = rows["tokens", "response_mask"]
    with_tokens = sum(bool(part.any()) for part in mask.split(lengths(rows).tolist()))
    assert with_tokens < 9 and set(seen) == {Denominators(int(mask.sum()), with_tokens)}


def test_values_are_returned_in_the_order_of_the_batch():
    def outputs(model: nn.Module, micro: MicroBatch, _: Outputs) -> dict[str, Tensor]:
        values_BL = micro.input_ids.double() + micro.index[:, None] / 100
        return {"values": values_BL, "scores": micro.rows["prompt_id"]}

    rows, settings = table(12), EngineConfig(max_tokens_per_microbatch=15)
    engine = FsdpEngine(Bigram(VOCABULARY, 8), outputs, None, settings)
    found = engine.forward(rows, Outputs(("values", "scores")))
    row_of_token = torch.repeat_interleave(torch.arange(12), lengths(rows))
    assert_norm_close(found["values"], rows["tokens", "input_ids"] + row_of_token.double() / 100)
    assert found["scores"].tolist() == list(range(12))


def test_evaluation_computes_no_gradients_and_keeps_the_weights():
    engine = bigram_engine(optimizer=None)
    assert not engine.forward(table(5), LOGPROBS)["logprobs"].requires_grad
    assert all(parameter.grad is None for parameter in engine.model.parameters())


def test_an_empty_batch_evaluates_to_empty_columns():
    empty = take_rows(table(3), torch.zeros(0, dtype=torch.int64))
    assert bigram_engine().forward(empty, LOGPROBS)["logprobs"].shape == (0,)


def test_a_step_without_trained_tokens_is_skipped_and_reported():
    engine, rows = bigram_engine(), table(4)
    rows["tokens", "response_mask"].zero_()
    before = [parameter.clone() for parameter in engine.model.parameters()]
    report = engine.update(rows, bigram_loss, LOGPROBS)
    assert {name: metric.result() for name, metric in report.items()} == {"skipped_update": 1.0}
    assert engine.steps.num_steps == 0
    assert all(torch.equal(a, b) for a, b in zip(before, engine.model.parameters(), strict=True))


def test_clipping_scales_the_gradient_and_reports_the_norm_before_clipping():
    free, clipped = bigram_engine(), bigram_engine(optimizer=OptimizerConfig(lr=1e-2, eps=1e3, max_grad_norm=1e-3))
    norms = [engine.update(table(5), bigram_loss, LOGPROBS)["grad_norm"] for engine in (free, clipped)]
    assert norms[0] == norms[1] and norms[0].result() > 1e-3
    start = nn.utils.parameters_to_vector(Bigram(VOCABULARY, 8).double().parameters())
    moved = nn.utils.parameters_to_vector(clipped.model.parameters()) - start
    # A huge eps makes Adam's first step lr / eps times the gradient.
    assert moved.norm().item() == pytest.approx(1e-2 / 1e3 * 1e-3, rel=1e-3)


def test_a_non_finite_gradient_is_rejected_before_the_step():
    engine = bigram_engine()
    before = [parameter.clone() for parameter in engine.model.parameters()]
    with pytest.raises(FloatingPointError, match=r"\bnan\b.* step 0\b"):
        engine.update(table(4), lambda values, *_: (values["logprobs"].sum() * math.nan, {}), LOGPROBS)
    assert all(torch.equal(a, b) for a, b in zip(before, engine.model.parameters(), strict=True))


def test_weight_decay_applies_only_to_matrices():
    engine = bigram_engine(optimizer=OptimizerConfig(lr=0.1, weight_decay=0.5))
    start = Bigram(VOCABULARY, 8).double()
    engine.update(table(4), bigram_loss, LOGPROBS)
    model = engine.model
    assert isinstance(model, Bigram)
    assert_norm_close(model.unused.weight, start.unused.weight * (1 - 0.1 * 0.5))
    assert torch.equal(model.unused.bias, start.unused.bias)


def test_gradients_are_freed_after_a_step():
    engine = bigram_engine()
    engine.update(table(4), bigram_loss, LOGPROBS)
    assert all(parameter.grad is None for parameter in engine.model.parameters())


def test_the_model_is_trained_in_place():
    model = Bigram(VOCABULARY, 8)
    weight = model.output.weight
    before = weight.clone()
    FsdpEngine(model, bigram_outputs, OPTIMIZER, EngineConfig()).update(
        table(4), lambda values, *_: (values["logprobs"].sum(), {}), LOGPROBS
    )
    assert model.output.weight is weight and not torch.equal(weight, before)


def test_the_learning_rate_of_each_step_is_reported():
    engine = bigram_engine(optimizer=OptimizerConfig(lr=1.0, schedule="linear", total_steps=4))
    assert [engine.update(table(3), bigram_loss, LOGPROBS)["lr"].result() for _ in range(3)] == [1.0, 0.75, 0.5]
