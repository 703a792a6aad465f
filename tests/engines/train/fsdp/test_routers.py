"""The auxiliary loss of the routers in an engine against its definition over the whole batch."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from flowrl.config import EngineConfig, OptimizerConfig, UserError
from flowrl.data.batch.tensordicts import lengths
from flowrl.data.metric import Mean, Metric
from flowrl.engines.models.routing import Routes, find_routers, replace_routes
from flowrl.engines.train.base import Denominators
from flowrl.engines.train.fsdp.engine import FsdpEngine
from flowrl.engines.train.fsdp.outputs import PolicyModel, policy_outputs
from flowrl.engines.train.fsdp.routers import ExpertLoad, Statistic
from flowrl.engines.train.microbatch import MicroBatch
from tests.engines.closeness import FLOAT32_RTOL, assert_norm_close
from tests.engines.families import build
from tests.engines.losses import LOGPROBS
from tests.engines.tables import table
from tests.engines.tiny import qwen2, qwen3_moe, to_float64

COEF = 0.1


def zero_loss(
    values: Mapping[str, Tensor], micro: MicroBatch, counts: Denominators
) -> tuple[Tensor, dict[str, Metric]]:
    return values["logprobs"].sum() * 0, {"loss": Mean(0.0, 1)}


def model_of(family: str = "Qwen3-MoE") -> PreTrainedModel:
    return to_float64(qwen3_moe() if family == "Qwen3-MoE" else build(family))


def engine_of(
    coef: float | None = COEF, model: PreTrainedModel | None = None, **settings: Any
) -> FsdpEngine:  # Any: settings of an engine
    return FsdpEngine(
        PolicyModel(model_of() if model is None else model),
        policy_outputs,
        OptimizerConfig(lr=1e-2),
        EngineConfig.model_validate(settings),
        router_loss_coef=coef,
    )


def gradients(engine: FsdpEngine) -> dict[str, Tensor]:
    return {
        name: torch.zeros_like(weight) if weight.grad is None else weight.grad.clone()
        for name, weight in engine.language_model.named_parameters()
    }


def definition(num_rows: int, family: str = "Qwen3-MoE") -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the loss and its gradient, from the routes of each row alone: the mean over the layers of
    E sum_e f_e P_e.
    """
    model, batch = model_of(family), table(num_rows)
    routes: dict[int, list[Routes]] = {}

    def record(layer: int, output: Routes) -> Routes:
        routes.setdefault(layer, []).append(output)
        return output

    with replace_routes(find_routers(model), record):
        for ids in batch["tokens", "input_ids"].split(lengths(batch).tolist()):
            model(input_ids=ids[None], use_cache=False)
    losses = []
    for outputs in routes.values():
        logits = torch.cat([output.logits for output in outputs])
        scores = logits.sigmoid() if family == "DeepSeek-V3" else logits.softmax(-1)
        probabilities = scores / scores.sum(-1, keepdim=True)
        chosen = torch.cat([output.experts for output in outputs]).flatten()
        num_experts = logits.shape[1]
        shares = torch.bincount(chosen, minlength=num_experts).double() / len(probabilities)
        losses.append(num_experts * (shares * probabilities.mean(0)).sum())
    loss = torch.stack(losses).mean()
    loss.backward()
    return loss.detach(), {
        name: torch.zeros_like(weight) if weight.grad is None else weight.grad
        for name, weight in model.named_parameters()
    }


SPLITS: list[dict[str, Any]] = [
    {"packing": "never", "max_tokens_per_microbatch": 1},
    {"packing": "never", "max_tokens_per_microbatch": 40},
    {"packing": "never", "max_tokens_per_microbatch": 1000},
    {"packing": "always", "max_tokens_per_microbatch": 40},
    {"packing": "always", "max_tokens_per_microbatch": 1000, "gradient_checkpointing": True},
    {"packing": "always", "max_tokens_per_microbatch": 40, "gradient_checkpointing": True},
]


@pytest.mark.parametrize("settings", SPLITS)
def test_the_gradient_is_that_of_the_definition_for_any_micro_batches(settings: dict[str, Any]) -> None:
    engine = engine_of(**settings)
    metrics = engine.forward_backward(table(11), zero_loss, LOGPROBS, weight=0.5)
    loss, expected = definition(11)
    assert metrics["router_loss"].result() == pytest.approx(float(loss), rel=1e-9)
    assert_norm_close(gradients(engine), {name: 0.5 * COEF * gradient for name, gradient in expected.items()})


def test_a_coefficient_of_0_adds_no_gradient_and_measures_the_load() -> None:
    engine = engine_of(0.0, max_tokens_per_microbatch=40)
    metrics = engine.forward_backward(table(11), zero_loss, LOGPROBS)
    assert not any(gradient.any() for gradient in gradients(engine).values())
    assert metrics["router_loss"].result() == pytest.approx(float(definition(11)[0]), rel=1e-9)
    assert 1 <= metrics["expert_load_max"].result() <= 2  # four experts, two per token
    assert 0 <= metrics["dead_experts"].result() <= 0.5
    loads = [metrics[f"expert_load/{i}"].result() for i in range(4)]
    assert sum(loads) == pytest.approx(4) and 1 < max(loads) <= metrics["expert_load_max"].result()


def test_null_selects_the_coefficient_of_the_model() -> None:
    engine = engine_of(None)
    engine.forward_backward(table(11), zero_loss, LOGPROBS)
    expected = {name: 0.001 * gradient for name, gradient in definition(11)[1].items()}
    assert_norm_close(gradients(engine), expected)


def test_null_is_rejected_for_a_model_without_a_coefficient() -> None:
    with pytest.raises(UserError, match="router_loss_coef"):
        FsdpEngine(PolicyModel(build("DeepSeek-V3")), policy_outputs, OptimizerConfig(lr=1e-2), EngineConfig())


def test_a_dense_model_has_no_statistics_of_experts() -> None:
    engine = FsdpEngine(PolicyModel(qwen2()), policy_outputs, OptimizerConfig(lr=1e-2), EngineConfig())
    assert engine.forward_backward(table(3), zero_loss, LOGPROBS).keys() == {"loss"}


def test_training_balances_the_experts() -> None:
    """All tokens prefer the first two experts. The loss spreads them."""
    engine = engine_of(1.0)
    with torch.no_grad():
        for router in find_routers(engine.language_model):
            weight = router.get_parameter("weight")
            weight[2:] = weight[:1] * -1
            weight[1] = weight[0]
    loads = [engine.update(table(11), zero_loss, LOGPROBS)["router_loss"].result() for _ in range(20)]
    assert loads[-1] < loads[0]


@pytest.mark.parametrize("family", ["Mixtral", "DeepSeek-V3"])
def test_the_gradient_of_other_families_is_that_of_the_definition(family: str) -> None:
    engine = engine_of(model=model_of(family), packing="never", max_tokens_per_microbatch=40)
    metrics = engine.forward_backward(table(11), zero_loss, LOGPROBS)
    loss, expected = definition(11, family)
    # transformers computes the routes of these families in float32.
    assert metrics["router_loss"].result() == pytest.approx(float(loss), rel=FLOAT32_RTOL)
    expected = {name: COEF * gradient for name, gradient in expected.items()}
    assert_norm_close(gradients(engine), expected, FLOAT32_RTOL)


@pytest.mark.parametrize("family", ["Mixtral", "DeepSeek-V3"])
def test_other_families_are_balanced(family: str) -> None:
    engine = FsdpEngine(
        PolicyModel(build(family)), policy_outputs, OptimizerConfig(lr=1e-2), EngineConfig(), router_loss_coef=1.0
    )
    first, *_, last = [engine.update(table(11), zero_loss, LOGPROBS)["router_loss"].result() for _ in range(10)]
    assert last < first


COUNTS = np.array([[4, 0, 0, 0], [1, 1, 2, 0]])
SUMS = np.array([[2.0, 1.0, 0.5, 0.5], [1.0, 1.0, 1.0, 1.0]])
"""Two layers with four tokens, one expert per token, and four experts."""


@pytest.mark.parametrize(
    ("statistic", "expected"),
    [
        ("expert_load_max", 4.0),
        ("dead_experts", 0.5),
        # The first layer: 4 x 1 x 1/2. The second: 4 x (1/4 + 1/4 + 1/2) x 1/4.
        ("router_loss", 1.5),
    ],
)
def test_statistics_by_hand(statistic: Statistic, expected: float) -> None:
    assert ExpertLoad(statistic, COUNTS, SUMS).result() == pytest.approx(expected)


def test_a_merged_load_is_that_of_all_tokens() -> None:
    other = ExpertLoad("dead_experts", np.array([[0, 3, 1, 0], [0, 4, 0, 0]]), SUMS)
    # Only the last expert of each layer has no token.
    assert ExpertLoad("dead_experts", COUNTS, SUMS).merge(other).result() == pytest.approx(0.25)
