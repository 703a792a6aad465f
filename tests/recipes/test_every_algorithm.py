"""Every estimator, loss and correction takes a GRPO step with finite metrics; some are compared over full runs."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from flowrl import Batch, Cluster, Placement
from flowrl.config import AnyAdvantage, AnyPolicyLoss
from flowrl.config.base import CUSTOM, members_of
from flowrl.config.placement import SINGLE
from flowrl.data.metric import merge_metrics
from flowrl.run.advantages import Advantages
from flowrl.run.datasets import read_prompts
from flowrl.workers import Actor, Reference, Reward, Rollout
from recipes.grpo.config import GRPOConfig
from recipes.grpo.train import train
from recipes.ppo.config import PPOConfig
from recipes.ppo.train import train as train_ppo
from tests.configs import with_float64_models
from tests.engines.closeness import FLOAT64_RTOL, reduction_rtol
from tests.recipes.conftest import settings
from tests.slow_cases import as_parameters, one_of

CLOCK = {"seconds", "elapsed_s", "tokens_per_s", "memory_mb"}
CLOCK |= {f"idle_{role}" for role in ("actor", "critic", "reference", "reward", "rollout")}
CLOCK |= {"wait_data_s", "wait_weights_s", "rewards/reward/seconds"}
OWN_MODULE = "tests.algorithms.own_functions"

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    **{name: ({"estimator": name}, {}) for name in members_of(AnyAdvantage) if name not in ("gae", CUSTOM)},
    **{f"loss {name}": ({"estimator": "grpo"}, {"loss": name}) for name in members_of(AnyPolicyLoss) if name != CUSTOM},
    "loss clip_cov that selects": (
        {"estimator": "grpo"},
        {"loss": {"kind": "clip_cov", "cov_fraction": 0.1, "cov_low": -9.0, "cov_high": 9.0}},
    ),
    "loss kl_cov that selects": ({"estimator": "grpo"}, {"loss": {"kind": "kl_cov", "cov_fraction": 0.1}}),
    "truncated": ({"estimator": "rloo", "correction": {"kind": "truncated", "normalize": True}}, {}),
    "masked": ({"estimator": "rloo", "correction": {"kind": "masked", "level": "geometric"}}, {}),
    "rejection": ({"estimator": "rloo", "correction": {"kind": "rejection", "high": 0.1}}, {}),
    "own": (
        {"estimator": f"{OWN_MODULE}:sign", "options": {"bar": 0.5}, "correction": {"kind": f"{OWN_MODULE}:kept_half"}},
        {
            "loss": {"kind": f"{OWN_MODULE}:half_reinforce", "options": {"weight": 0.25}},
            "kl_loss_coef": 0.1,
            "kl_loss_kind": f"{OWN_MODULE}:squared",
            "aggregation": f"{OWN_MODULE}:tenth",
        },
    ),
    "shaping": (
        {
            "estimator": "rloo",
            "shaping": [
                {"kind": "length_penalty", "correct_from": 0.5, "coef": 0.5},
                {"kind": "overlong_penalty", "max_length": 6, "buffer": 4},
                {"kind": "normalize_rewards", "shift_mean": True},
                {"kind": "clip_rewards", "low": -2.0, "high": 2.0},
                {"kind": f"{OWN_MODULE}:scaled", "options": {"by": 0.5}},
            ],
        },
        {},
    ),
    "adaptive KL": (
        {"estimator": "rloo", "kl_coef": 0.1, "kl_control": {"kind": "adaptive", "target": 1.0, "horizon": 64.0}},
        {},
    ),
    "straight-through": ({"estimator": "grpo"}, {"kl_loss_coef": 0.1, "kl_loss_gradient": "k2"}),
    "unbiased KL": ({"estimator": "grpo"}, {"kl_loss_coef": 0.1, "kl_loss_kind": "k1", "kl_loss_unbiased": True}),
}
FAST_CASES = ("grpo", "loss gspo", "loss kl_cov that selects", "truncated", "own", "shaping", "adaptive KL")


def configured(
    make: Callable[..., GRPOConfig], name: str, engine: dict[str, int] | None = None, **changes: Any
) -> GRPOConfig:
    """Returns the GRPO config of a case, with one step."""
    algorithm, actor = CASES[name]
    base = make().actor
    actor_settings = {"model": base.model, "optimizer": base.optimizer, "engine": engine or {}} | actor
    return make(algorithm=algorithm, actor=actor_settings, steps=1, **changes)


def metrics_of(config: GRPOConfig) -> dict[str, float]:
    record = (config.output / "metrics.jsonl").read_text().splitlines()[1]
    return {
        name: value for name, value in json.loads(record).items() if name not in CLOCK and not name.startswith("usage/")
    }


@pytest.fixture(scope="module")
def rollouts(task_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Batch:
    """Samples and scores one batch, which all cases train on."""
    base = settings(task_folder, tmp_path_factory.mktemp("rollouts"))
    own: dict[str, Any] = {"algorithm": {"estimator": "grpo"}, "actor": base["actor"] | {"kl_loss_coef": 0.02}}
    config = GRPOConfig.model_validate(base | own | {"samples_per_prompt": 4})
    assert config.reference is not None and config.reward is not None
    prompts, _ = read_prompts(config)
    rows, samples = prompts.take(config.prompts_per_step), config.samples_per_prompt
    with Cluster(SINGLE, backend="inline", roles=config.roles, num_threads=1) as cluster:
        actor: Any = cluster.group("actor", Actor, config.actor)
        reference: Any = cluster.group("reference", Reference, config.reference)
        reward: Any = cluster.group("reward", Reward, config.reward)
        rollout: Any = cluster.group("rollout", Rollout, config.rollout, config.actor.model, seed=config.seed)
        batch = Batch.from_rows(rows).repeat(samples)
        batch["sample"] = Batch.from_rows([{"sample": index} for _ in rows for index in range(samples)])
        batch = batch.union(rollout.generate(batch))
        batch = batch.union(reward.score(batch))
        batch["old_logprobs"] = actor.logprobs(batch)
        batch["ref_logprobs"] = reference.logprobs(batch)
        batch["sum_squared_probs"] = actor.sum_squared_probs(batch)
        batch["greedy_scores"] = batch.select("scores")
        return Batch.of_payload(batch.payload(*batch.columns))


def train_step(config: GRPOConfig, rollouts: Batch) -> dict[str, float]:
    """Runs one training step on the rollouts, outside of a run; returns its metrics."""
    advantages = Advantages(config)
    with Cluster(SINGLE, backend="inline", roles=("actor",), num_threads=1) as cluster:
        actor: Any = cluster.group("actor", Actor, config.actor)
        batch, metrics = advantages.compute(rollouts.with_seed((config.seed, 1)))
        minibatches = batch.minibatches(config.minibatch_size, epochs=config.ppo_epochs)
        updates = [actor.update(minibatch).get() for minibatch in minibatches]
        values = metrics.get()
    merged = {name: metric.result() for name, metric in merge_metrics(updates).items()}
    return merged | {
        name: value if isinstance(value, float | int) else value.result() for name, value in values.items()
    }


@pytest.mark.parametrize("name", as_parameters(CASES, *FAST_CASES))
def test_step_has_finite_metrics(name: str, grpo_config: Callable[..., GRPOConfig], rollouts: Batch) -> None:
    metrics = train_step(configured(grpo_config, name), rollouts)
    assert math.isfinite(metrics["actor/loss"]) and metrics["actor/grad_norm"] >= 0
    assert metrics["actor/skipped_update"] == 0
    if "selects" in name:
        assert metrics["actor/selected_fraction"] > 0
    if "correction" in CASES[name][0]:
        assert metrics["correction/weight"] > 0
    assert ("reward_shaping" in metrics) == ("shaping" in CASES[name][0])


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["inline", pytest.param("ray", marks=pytest.mark.slow)])
def test_kl_below_target_lowers_the_coefficient(
    backend: str, request: pytest.FixtureRequest, ppo_config: Callable[..., PPOConfig]
) -> None:
    """A KL far below its target lowers the coefficient by 0.2 * 32 / 64 in each step of 32 rows."""
    if backend == "ray":
        request.getfixturevalue("ray_session")
    control = {"kind": "adaptive", "target": 1.0, "horizon": 64.0}
    algorithm = {"estimator": "gae", "kl_coef": 0.1, "kl_control": control}
    placement = Placement(device="cpu", pools={"main": [1]}, roles=dict.fromkeys(PPOConfig.possible_roles(), "main"))
    config = ppo_config(algorithm=algorithm, backend=backend, placement=placement)
    train_ppo(config)
    records = [json.loads(line) for line in (config.output / "metrics.jsonl").read_text().splitlines()[1:]]
    assert [record["kl_coef"] for record in records] == pytest.approx([0.1, 0.09, 0.081])


TERMS_RTOL = reduction_rtol(torch.float64, length=128, depth=2 * 7)


def assert_same(expected: dict[str, float], actual: dict[str, float]) -> None:
    for metric, value in expected.items():
        # The gaps between rollout and trainer are rounding errors themselves.
        if not metric.startswith(("rollout_gap", "mismatch/")):
            # Terms of size one cancel in a loss, so the error of a metric near zero is relative to that of its terms.
            assert actual[metric] == pytest.approx(value, rel=FLOAT64_RTOL, abs=TERMS_RTOL), metric


@pytest.mark.parametrize(
    "name", one_of("shaping", "gpg", "loss gspo", "loss clip_cov that selects", "loss decoupled_ppo", "truncated")
)
def test_metrics_do_not_depend_on_micro_batches(
    name: str, grpo_config: Callable[..., GRPOConfig], rollouts: Batch
) -> None:
    one_pass = with_float64_models(configured(grpo_config, name))
    split = with_float64_models(configured(grpo_config, name, engine={"max_tokens_per_microbatch": 40}))
    assert_same(train_step(one_pass, rollouts), train_step(split, rollouts))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["own", "loss clip_cov that selects", "shaping"])
def test_metrics_do_not_depend_on_ranks(
    name: str, ray_session: None, grpo_config: Callable[..., GRPOConfig], tmp_path: Path
) -> None:
    two = Placement(
        device="cpu", pools={"main": [2]}, roles=dict.fromkeys(("actor", "reference", "reward", "rollout"), "main")
    )
    inline = with_float64_models(configured(grpo_config, name, output=tmp_path / "inline"))
    placed = with_float64_models(
        configured(grpo_config, name, output=tmp_path / "placed", backend="ray", placement=two)
    )
    train(inline)
    train(placed)
    assert_same(metrics_of(inline), metrics_of(placed))
