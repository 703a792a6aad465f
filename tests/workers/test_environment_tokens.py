"""Tokens of an environment contribute nothing to a step: gradients, KL, entropy and denominators, in float64.

The expected values are sums over the policy's tokens alone, computed with the model itself.
"""

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from flowrl.config import ActorConfig, EngineConfig, OptimizerConfig
from flowrl.data.batch.tensordicts import lengths, make_tensordict
from flowrl.engines.train.base import Denominators
from flowrl.engines.train.fsdp.engine import FsdpEngine
from flowrl.engines.train.fsdp.outputs import PolicyModel, policy_outputs
from flowrl.engines.train.microbatch import microbatches
from flowrl.workers import Actor, Critic
from flowrl.workers.losses.configured_losses import policy_loss, value_loss
from flowrl.workers.losses.loss import BoundLoss
from recipes.grpo.config import GRPOConfig
from recipes.ppo.config import PPOConfig
from tests.configs import on_policy_settings, ppo_settings
from tests.engines.closeness import assert_norm_close
from tests.engines.tiny import qwen2, to_float64

SEGMENTS = [(3, 2, 4, 3), (1, 4, 1, 1, 2, 2), (5, 3)]
"""Number of tokens of the prompt and of each segment of the rows; the policy and an environment alternate."""

COLUMNS = ("advantages", "old_logprobs", "ref_logprobs", "rollout_logprobs", "loss_weights")


def rows(seed: int = 0) -> TensorDict:
    generator = torch.Generator().manual_seed(seed)
    flags = [[index % 2 == 1] * num for row in SEGMENTS for index, num in enumerate(row)]
    mask = torch.tensor([flag for segment in flags for flag in segment])
    draws = torch.rand(len(COLUMNS), len(mask), generator=generator, dtype=torch.float64)
    tokens = dict(zip(COLUMNS, -0.5 - draws, strict=True)) | {"advantages": 2 * draws[0] - 1}
    ids = torch.randint(2, 32, (len(mask),), generator=generator)
    return make_tensordict(
        {}, {"input_ids": ids, "response_mask": mask, **tokens}, torch.tensor(list(map(sum, SEGMENTS)))
    )


def actor(**settings: Any) -> ActorConfig:
    config = on_policy_settings(algorithm={"estimator": "grpo"}, minibatch_size=4)
    config["actor"] |= {"old_logprobs": "recompute"} | settings
    return GRPOConfig.model_validate(config).actor


def step(batch: TensorDict, config: ActorConfig, **engine: Any) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Returns the gradient of a step and its metrics."""
    model = PolicyModel(to_float64(qwen2(initializer_range=0.1)))
    settings = {"packing": "never", "max_tokens_per_microbatch": 1000} | engine
    trained = FsdpEngine(model, policy_outputs, OptimizerConfig(lr=1e-3), EngineConfig.model_validate(settings))
    bound = BoundLoss.of(policy_loss(config), {"response_mask": torch.bool}, Actor.COMPUTED, temperature=1.0)
    metrics = trained.forward_backward(batch, bound, bound.outputs)
    gradient = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return gradient, {name: metric.result() for name, metric in metrics.items()}


def expected(
    batch: TensorDict, coefs: dict[str, float], denominator: str
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Computes the loss of REINFORCE with the terms of the policy's tokens only, row by row."""
    model = to_float64(qwen2(initializer_range=0.1))
    totals, num_tokens = [], 0
    sums = {"entropy": 0.0, "kl": 0.0}
    for part in torch.arange(int(lengths(batch).sum())).split(lengths(batch).tolist()):
        own = {name: batch["tokens", name][part] for name in (*COLUMNS, "input_ids", "response_mask")}
        logprobs_LV = model(input_ids=own["input_ids"][None]).logits[0].log_softmax(-1)
        policy = [t for t in range(len(part)) if own["response_mask"][t]]
        terms = []
        for t in policy:
            before = logprobs_LV[t - 1]
            logprob, entropy = before[own["input_ids"][t]], -(before.exp() * before).sum()
            gap = own["ref_logprobs"][t] - logprob
            kl = gap.exp() - 1 - gap
            weighted = own["loss_weights"][t] * own["advantages"][t] * logprob
            terms.append(-weighted + coefs.get("kl", 0) * kl - coefs.get("entropy", 0) * entropy)
            sums["entropy"] += float(entropy.detach())
            sums["kl"] += float(kl.detach())
        num_tokens += len(policy)
        total = torch.stack(terms).sum()
        totals.append(total / len(policy) if denominator == "seq_mean_token_mean" else total)
    count = {"token_mean": num_tokens, "seq_mean_token_sum_norm": 10 * len(totals)}.get(denominator, len(totals))
    (torch.stack(totals).sum() / count).backward()
    gradient = {f"language_model.{n}": p.grad for n, p in model.named_parameters() if p.grad is not None}
    return gradient, {name: value / num_tokens for name, value in sums.items()}


def check(batch: TensorDict, config: ActorConfig, coefs: dict[str, float]) -> dict[str, float]:
    gradient, metrics = step(batch, config)
    own_gradient, own_metrics = expected(batch, coefs, config.aggregation)
    assert_norm_close(gradient, own_gradient)
    names = {"entropy": "entropy", "kl": "kl_loss"}
    assert {name: metrics[names[name]] for name in coefs} == pytest.approx({name: own_metrics[name] for name in coefs})
    return metrics


def test_environment_tokens_have_no_policy_gradient() -> None:
    check(rows(), actor(loss="reinforce"), {})


def test_environment_tokens_contribute_no_kl() -> None:
    batch = rows()
    batch["tokens", "advantages"] = torch.zeros_like(batch["tokens", "advantages"])
    check(batch, actor(loss="reinforce", kl_loss_coef=0.5), {"kl": 0.5})


def test_environment_tokens_contribute_no_entropy() -> None:
    batch = rows()
    batch["tokens", "advantages"] = torch.zeros_like(batch["tokens", "advantages"])
    check(batch, actor(loss="reinforce", entropy_coef=0.5), {"entropy": 0.5})


@pytest.mark.parametrize(
    "aggregation", ["token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "seq_mean_token_sum_norm"]
)
def test_environment_tokens_do_not_count_in_a_denominator(aggregation: str) -> None:
    scale = {"aggregation_scale": 10} if aggregation.endswith("norm") else {}
    config = actor(loss="reinforce", aggregation=aggregation, kl_loss_coef=0.2, entropy_coef=0.1, **scale)
    check(rows(), config, {"kl": 0.2, "entropy": 0.1})


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("loss", ["ppo", "gspo", "decoupled_ppo"])
def test_columns_of_environment_tokens_change_nothing(loss: str, column: str) -> None:
    config = actor(loss=loss, kl_loss_coef=0.2, entropy_coef=0.1)
    batch, changed = rows(), rows()
    batch["tokens", "behavior_logprobs"] = batch["tokens", "rollout_logprobs"]
    is_behavior = column == "rollout_logprobs"
    changed["tokens", "behavior_logprobs"] = changed["tokens", "rollout_logprobs"]
    for name in (column, *(["behavior_logprobs"] if is_behavior else [])):
        values = changed["tokens", name].clone()
        values[~changed["tokens", "response_mask"]] = float("nan")
        changed["tokens", name] = values
    gradient, metrics = step(changed, config)
    own_gradient, own_metrics = step(batch, config)
    assert metrics == own_metrics and all(torch.equal(gradient[name], own_gradient[name]) for name in own_gradient)


@pytest.mark.parametrize("max_tokens", [1, 16, 1000])
def test_packed_rows_have_the_gradient_of_padded_rows(max_tokens: int) -> None:
    config = actor(kl_loss_coef=0.2, entropy_coef=0.1)
    padded, metrics = step(rows(), config)
    packed, own_metrics = step(rows(), config, packing="always", max_tokens_per_microbatch=max_tokens)
    assert_norm_close(packed, padded)
    assert own_metrics == pytest.approx(metrics)


def test_environment_tokens_do_not_count_in_the_value_loss() -> None:
    """Two rows; the policy's tokens have errors of 1, 3 and 2, so the mean of half the squares is 7 / 3."""
    mask = torch.tensor([False, True, False, False, True, False, True])
    values = torch.tensor([9.0, 1.0, 9.0, 9.0, 3.0, 9.0, 2.0], dtype=torch.float64)
    tokens = {"input_ids": torch.zeros(7, dtype=torch.int64), "response_mask": mask, "values": values}
    batch = make_tensordict({}, tokens | {"returns": torch.zeros(7, dtype=torch.float64)}, torch.tensor([5, 2]))
    critic = PPOConfig.model_validate(ppo_settings(algorithm={"estimator": "gae"})).critic
    (micro,) = microbatches(batch, 100)
    own = {"values": micro.tokens["values"].requires_grad_()}
    bound = BoundLoss.of(value_loss(critic), {"response_mask": torch.bool}, Critic.COMPUTED, temperature=1.0)
    loss, _ = bound(own, micro, Denominators(tokens=3, rows=2))
    assert loss.item() == pytest.approx(7 / 3)
