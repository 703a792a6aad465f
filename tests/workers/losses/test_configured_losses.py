"""The configured policy loss with each source of the old log-probabilities."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from flowrl import Batch, Cluster
from flowrl.config import ActorConfig, ModelConfig, OptimizerConfig
from flowrl.config.placement import SINGLE
from flowrl.controller.errors import ContractError
from flowrl.workers import LANGUAGE_MODELING, Actor
from flowrl.workers.losses.configured_losses import policy_loss
from tests.engines.closeness import FLOAT64_RTOL, assert_norm_close
from tests.errors import rejects

LENGTHS = [8, 4, 7]
MASK = [position > 2 for length in LENGTHS for position in range(length)]
GAP = 0.25


@pytest.fixture(scope="module")
def model(model: ModelConfig) -> ModelConfig:
    return model.model_copy(update={"dtype": "float64"})


def gradients(actor: Actor) -> dict[str, Tensor]:
    parameters = actor.language_model.named_parameters()
    return {name: parameter.grad.clone() for name, parameter in parameters if parameter.grad is not None}


def train(
    model: ModelConfig, old_logprobs: str, *, stored_gap: float | None = None, **settings: Any
) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Returns metrics and gradients of a batch under the initial weights.

    Args:
        stored_gap: difference between the column `old_logprobs` and the log-probabilities of the actor; None: no
            column. The column `rollout_logprobs` has a difference of 0.25.
    """
    base = {"model": model, "optimizer": OptimizerConfig(lr=0.1), "temperature": 0.7, "old_logprobs": old_logprobs}
    generator = torch.Generator().manual_seed(0)
    ids_T = torch.randint(2, 15, (len(MASK),), generator=generator)
    advantages_T, noise_T = torch.randn(2, len(MASK), generator=generator, dtype=torch.float64)
    tokens: dict[str, Any] = {"input_ids": ids_T, "response_mask": MASK, "advantages": advantages_T}
    tokens["ref_logprobs"] = noise_T / 9 - 2.5
    with Cluster(SINGLE, backend="inline", num_threads=1) as cluster:
        actor: Any = cluster.group("actor", Actor, ActorConfig.model_validate(base | settings))
        logprobs_T = actor.logprobs(Batch.from_columns(tokens={"input_ids": ids_T}, lengths=LENGTHS)).get("logprobs")
        tokens["rollout_logprobs"] = logprobs_T + GAP
        if stored_gap is not None:
            tokens["old_logprobs"] = logprobs_T - stored_gap
        metrics = actor.forward_backward(Batch.from_columns(tokens=tokens, lengths=LENGTHS)).get()
        return {name.removeprefix("actor/"): metric.result() for name, metric in metrics.items()}, *actor.run(gradients)


SLOW = ("gmpo", "sapo", "cispo", "dppo_tv", "dppo_kl")
LOSSES: list[Any] = ["ppo", "gspo", "reinforce", *(pytest.param(loss, marks=pytest.mark.slow) for loss in SLOW)]
KL_LOSS = {"kl_loss_coef": 0.1, "kl_loss_kind": "k3", "entropy_coef": 0.01}


@pytest.mark.parametrize("loss", LOSSES)
def test_current_log_probabilities_give_the_gradient_and_metrics_of_recomputed_ones(
    model: ModelConfig, loss: str
) -> None:
    expected, expected_gradients = train(model, "recompute", stored_gap=0.0, loss=loss, **KL_LOSS)
    actual, actual_gradients = train(model, "current", loss=loss, **KL_LOSS)
    assert_norm_close(actual_gradients, expected_gradients, FLOAT64_RTOL)
    assert set(actual) == set(expected) | {"kl", "rollout_gap"}
    assert {name: actual[name] for name in expected} == pytest.approx(expected, rel=FLOAT64_RTOL, abs=FLOAT64_RTOL)


def test_the_first_step_has_ratio_1_and_kl_0_exactly(model: ModelConfig) -> None:
    metrics, _ = train(ModelConfig(path=model.path), "current")
    assert metrics["ratio"] == metrics["ratio_min"] == metrics["ratio_max"] == 1
    assert metrics["approx_kl"] == metrics["clip_fraction"] == 0


def test_the_loss_computes_the_metrics_of_old_logprobs(model: ModelConfig) -> None:
    metrics, _ = train(model, "current")
    assert metrics["rollout_gap"] == pytest.approx(GAP)
    assert metrics["kl"] > 0
    with_loss, _ = train(model, "current", **KL_LOSS)
    assert with_loss["kl"] == pytest.approx(with_loss["kl_loss"])


def test_the_kl_loss_has_the_value_of_one_estimate_and_the_gradient_of_another(model: ModelConfig) -> None:
    k2, expected_gradients = train(model, "current", kl_loss_coef=0.1, kl_loss_kind="k2")
    k3, _ = train(model, "current", kl_loss_coef=0.1, kl_loss_kind="k3")
    mixed, gradients = train(model, "current", kl_loss_coef=0.1, kl_loss_kind="k3", kl_loss_gradient="k2")
    assert mixed["kl_loss"] == pytest.approx(k3["kl_loss"], rel=FLOAT64_RTOL) != k2["kl_loss"]
    assert_norm_close(gradients, expected_gradients, FLOAT64_RTOL)


@pytest.mark.parametrize(
    ("kind", "old", "value", "gradient"),
    [
        # p = 1/2 and q = 1/4 under the reference: k1 is log 2, with the gradient 1 in log p; w is p / old.
        ("k1", 0.4, 1.25 * math.log(2), 1.25 * (math.log(2) + 1)),
        # k3 is q / p - 1 - log(q / p), with the gradient 1 - q / p.
        ("k3", 0.4, 1.25 * (math.log(2) - 0.5), 1.25 * (math.log(2) - 0.5 + 0.5)),
        # Without earlier updates, w is 1, but has a gradient.
        ("k3", None, math.log(2) - 0.5, math.log(2)),
    ],
)
def test_the_unbiased_kl_loss_is_weighted_by_the_ratio_with_its_gradient(
    kind: str, old: float | None, value: float, gradient: float
) -> None:
    settings: dict[str, Any] = {"model": {"path": "model"}, "optimizer": {"lr": 0.1}, "loss": "reinforce"}
    settings |= {"kl_loss_coef": 0.1, "kl_loss_kind": kind, "kl_loss_unbiased": True}
    settings["old_logprobs"] = "current" if old is None else "recompute"
    logprobs = torch.tensor([[0.5]], dtype=torch.float64).log().requires_grad_()
    columns = {"advantages": torch.zeros_like(logprobs), "ref_logprobs": torch.full_like(logprobs, 0.25).log()}
    columns |= {} if old is None else {"old_logprobs": torch.full_like(logprobs, old).log()}
    inputs = {"logprobs": logprobs, "entropy": torch.zeros_like(logprobs), "mask": torch.ones(1, 1).bool()}
    loss, metrics = policy_loss(ActorConfig.model_validate(settings)).function(**inputs, **columns)
    loss.sum().backward()
    assert loss.item() == pytest.approx(0.1 * value) and metrics["kl_loss"].item() == pytest.approx(value)
    assert logprobs.grad is not None and logprobs.grad.item() == pytest.approx(0.1 * gradient)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_language_modeling_does_not_use_the_temperature_of_the_rollout(model: ModelConfig, temperature: float) -> None:
    config = ActorConfig(model=model, optimizer=OptimizerConfig(lr=0.1), temperature=temperature)
    tokens = {"input_ids": list(range(2, 10)), "response_mask": MASK[:8]}
    with Cluster(SINGLE, backend="inline", num_threads=1) as cluster:
        actor: Any = cluster.group("actor", Actor, config)
        metrics = actor.forward_backward(Batch.from_columns(tokens=tokens, lengths=[8]), LANGUAGE_MODELING).get()
        (policy,) = actor.run(lambda worker: worker.language_model)
    logprobs_LV = policy(torch.arange(2, 10)[None]).logits[0].log_softmax(-1)
    expected = -logprobs_LV[2:-1].gather(1, torch.arange(5, 10)[:, None]).mean().item()
    (loss,) = (metric.result() for name, metric in metrics.items() if name.endswith("loss"))
    assert loss == pytest.approx(expected, rel=FLOAT64_RTOL)


@pytest.mark.parametrize("loss", ["ppo", "gspo"])
def test_a_stored_column_replaces_the_current_log_probabilities(model: ModelConfig, loss: str) -> None:
    """A recipe may take several updates on one batch, of which only it knows."""
    expected, expected_gradients = train(model, "recompute", stored_gap=0.1, loss=loss)
    actual, actual_gradients = train(model, "current", stored_gap=0.1, loss=loss)
    assert expected["ratio"] == pytest.approx(1.1052, abs=1e-4) and actual == expected
    assert_norm_close(actual_gradients, expected_gradients, 0.0)


@pytest.mark.parametrize("old_logprobs", ["auto", "recompute", "rollout"])
def test_a_batch_without_old_logprobs_is_rejected(model: ModelConfig, old_logprobs: str) -> None:
    with rejects("old_logprobs", "ppo", error=ContractError):
        train(model, old_logprobs)
