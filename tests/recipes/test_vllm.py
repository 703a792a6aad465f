"""Recipes with real vLLM rollouts on the CPU: split, colocated, offloaded, and with a killed rollout process."""

import importlib.util
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from flowrl import Placement
from flowrl.config import TransferConfig, load
from flowrl.run.advantages import Advantages
from flowrl.run.datasets import read_prompts
from flowrl.run.evaluation import evaluate
from flowrl.run.loop import Run
from flowrl.workers import Actor, Reference, Reward, Rollout
from recipes.grpo.config import GRPOConfig
from recipes.grpo.train import train as train_grpo
from recipes.ppo.config import PPOConfig
from recipes.ppo.train import train as train_ppo
from tests.engines.closeness import random_rounding_rtol
from tests.engines.vllm_checks import process_id

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs the extra vllm"),
]

VLLM = {"engine": "vllm", "max_response_tokens": 6, "transfer": {"bucket_mb": 0.5}}
ROLLOUT_RTOL = random_rounding_rtol(torch.float32, length=256, depth=2 * 7 + 1)
"""Bound for the quickstart's model: two layers of seven products of at most 256 terms, and the head."""
COLOCATED = Placement(device="cpu", pools={"main": [1]}, roles=dict.fromkeys(GRPOConfig.possible_roles(), "main"))


def metrics_of(config: PPOConfig | GRPOConfig) -> list[dict[str, float]]:
    return [json.loads(line) for line in (config.output / "metrics.jsonl").read_text().splitlines()]


def check(lines: list[dict[str, float]]) -> None:
    """Checks three steps: rollout and trainer agree on log-probabilities, and the weights change."""
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    for line in lines[1:]:
        assert line["rollout_gap"] < ROLLOUT_RTOL * line["actor/entropy"]
        assert line["actor/grad_norm"] > 0
    assert lines[1]["reward"] != lines[2]["reward"]


def test_ppo_split_runs_with_vllm(ray_session: None, ppo_config: Callable[..., PPOConfig], tmp_path: Path) -> None:
    placement = load(Path("placement/split.yaml"), ["device=cpu"], Placement)
    config = ppo_config(output=tmp_path / "ppo", backend="ray", placement=placement, rollout=VLLM)
    train_ppo(config)
    check(metrics_of(config))


SLEEPING = {**VLLM, "vllm": {"sleep": True}}
"""Rollout settings with sleep mode. On the CPU no memory moves, but an engine that is asleep still rejects requests."""


@pytest.mark.slow
def test_ppo_colocated_metrics_are_bitwise_identical_with_offloaded_roles(
    ray_session: None, ppo_config: Callable[..., PPOConfig], tmp_path: Path
) -> None:
    placement = load(Path("placement/colocated.yaml"), ["device=cpu", "pools.main=[1]"], Placement)
    runs = []
    for name, rollout, offload in (("resident", VLLM, "none"), ("offloading", SLEEPING, "idle")):
        config = ppo_config(output=tmp_path / name, backend="ray", placement=placement, rollout=rollout)
        engine = config.actor.engine.model_copy(update={"offload": offload})
        roles = {role: getattr(config, role).model_copy(update={"engine": engine}) for role in ("actor", "critic")}
        runs.append(config.model_copy(update=roles))
        train_ppo(runs[-1])
        check(metrics_of(runs[-1]))
    resident, offloading = runs
    for expected, record in zip(metrics_of(resident), metrics_of(offloading), strict=True):
        for name in ("reward", "accuracy", "response_length", "actor/loss", "critic/loss"):
            assert record.get(name) == expected.get(name), name
    # Each of the four evaluations and steps evicts the trainers for the rollout, and the rollout for the trainers.
    assert event_names(offloading).count("evict") >= 8
    assert "evict" not in event_names(resident)


@pytest.mark.slow
def test_grpo_colocated_metrics_depend_on_neither_offload_nor_a_killed_rollout(
    ray_session: None, grpo_config: Callable[..., GRPOConfig], tmp_path: Path
) -> None:
    """Run A sleeps and offloads idle roles; run B keeps all roles resident and loses its rollout process."""
    offloading = grpo_config(output=tmp_path / "offloading", backend="ray", placement=COLOCATED, rollout=SLEEPING)
    engine = offloading.actor.engine.model_copy(update={"offload": "idle"})
    actor = offloading.actor.model_copy(update={"engine": engine})
    train_grpo(offloading.model_copy(update={"actor": actor}))
    check(metrics_of(offloading))
    resident = grpo_config(output=tmp_path / "resident", backend="ray", placement=COLOCATED, rollout=VLLM)
    assert len(train_and_kill(resident, at_steps=(2,))) == 1
    for expected, record in zip(metrics_of(offloading), metrics_of(resident), strict=True):
        for name in ("reward", "accuracy", "response_length", "actor/loss", "actor/kl_loss"):
            assert record.get(name) == expected.get(name), name
    # Each of the four evaluations and steps evicts the trainer for the rollout, and the rollout for the trainer.
    assert event_names(offloading).count("evict") >= 8
    assert "evict" not in event_names(resident)


@pytest.mark.slow
def test_a_tensor_parallel_rollout_on_the_devices_of_the_actor_takes_turns_with_it(
    ray_session: None, grpo_config: Callable[..., GRPOConfig], tmp_path: Path
) -> None:
    """The actor shards its weights over two ranks. One replica of the rollout uses the devices of both."""
    roles = dict.fromkeys(GRPOConfig.possible_roles(), "main") | {"rollout": {"pool": "main", "tp": 2}}
    placement = Placement.model_validate({"device": "cpu", "pools": {"main": [2]}, "roles": roles})
    config = grpo_config(output=tmp_path / "tp", backend="ray", placement=placement, rollout=SLEEPING)
    rollout = config.rollout.model_copy(update={"transfer": TransferConfig(bucket_mb=0.5, drop_weights=True)})
    engine = config.actor.engine.model_copy(update={"offload": "idle", "strategy": "fsdp"})
    actor = config.actor.model_copy(update={"engine": engine})
    config = config.model_copy(update={"actor": actor, "rollout": rollout})
    train_grpo(config)
    check(metrics_of(config))
    alone = grpo_config(output=tmp_path / "alone", backend="ray", placement=COLOCATED, rollout=VLLM)
    train_grpo(alone)
    for expected, record in zip(metrics_of(alone), metrics_of(config), strict=True):
        for name in ("reward", "accuracy", "response_length"):
            assert record.get(name) == expected.get(name), name
    # Each of the four evaluations and steps evicts both ranks of the actor for the rollout, and the rollout for them.
    assert event_names(config).count("evict") >= 12


def event_names(config: PPOConfig | GRPOConfig) -> list[str]:
    return [event["name"] for event in json.loads((config.output / "trace.json").read_text())["traceEvents"]]


@pytest.mark.slow
def test_killed_sleeping_rollout_is_replaced(
    ray_session: None, grpo_config: Callable[..., GRPOConfig], tmp_path: Path
) -> None:
    config = grpo_config(output=tmp_path / "hurt", backend="ray", placement=COLOCATED, rollout=SLEEPING)
    assert len(train_and_kill(config, at_steps=(2,))) == 1
    check(metrics_of(config))


def train_and_kill(config: GRPOConfig, at_steps: tuple[int, ...]) -> list[int]:
    """Runs GRPO's loop and kills the rollout process during weight sync; returns the ids of the killed processes."""
    prompts, held_out = read_prompts(config)
    advantages = Advantages(config)
    killed = []
    with Run(config) as run:
        actor = run.group("actor", Actor, config.actor)
        assert config.reference is not None and config.reward is not None
        reference = run.group("reference", Reference, config.reference)
        reward = run.group("reward", Reward, config.reward)
        rollout = run.group("rollout", Rollout, config.rollout, config.actor.model, seed=config.seed)
        run.log(evaluate(rollout, reward, held_out))
        for batch in run.rollouts(rollout, prompts, policy=actor):
            batch = batch.union(reward.score(batch))
            batch["old_logprobs"] = actor.logprobs(batch)
            batch["ref_logprobs"] = reference.logprobs(batch)
            batch, metrics = advantages.compute(batch)
            run.log(metrics)
            for minibatch in batch.minibatches(config.minibatch_size, epochs=config.ppo_epochs):
                run.log(actor.update(minibatch))
            (victim,) = rollout.run(process_id)
            run.sync_weights(actor, rollout)
            if run.step in at_steps:
                os.kill(victim, signal.SIGKILL)
                killed.append(victim)
            if run.due(config.evaluate_every):
                run.log(evaluate(rollout, reward, held_out))
        run.finish()
    return killed


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "transport"), [("sync", "object_store"), ("async", "gloo")])
def test_episodes_of_two_turns_are_trained_with_vllm(
    ray_session: None, grpo_config: Callable[..., GRPOConfig], schedule: str, transport: str
) -> None:
    roles = dict.fromkeys(GRPOConfig.possible_roles(), "train") | {"rollout": "make", "environment": "score"}
    config = grpo_config(
        backend="ray",
        placement={"device": "cpu", "pools": {"train": [1], "make": [1], "score": [1]}, "roles": roles},
        schedule={"kind": "async", "max_staleness": 1} if schedule == "async" else {"kind": "sync"},
        rollout=VLLM | {"max_response_tokens": 24, "transfer": {"bucket_mb": 0.5, "via": transport}},
        reward=None,
        environment={"name": "tests.recipes.turns:TwoTurns", "workers": 2},
        report={"rollouts": {"every": 1, "rows": 100}},
    )
    train_grpo(config)
    lines = [line for line in metrics_of(config) if line["step"]]
    assert len(lines) == config.steps
    for line in lines:
        assert 1 < line["turns"] <= 2 and line["environment/again"] > 0
        assert line["rollout_gap"] < ROLLOUT_RTOL * line["actor/entropy"] or schedule == "async"
    paths = sorted((config.output / "rollouts").glob("training-*.jsonl"))
    rows = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
    assert len(rows) == config.steps * config.batch_size
    assert any("1+1=" in row["response"] and row["environment_length"] for row in rows)
