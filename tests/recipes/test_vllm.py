"""Recipes whose rollouts are real vLLM, on the CPU: split and colocated, and with a rollout that is killed."""

import importlib.util
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from flowrl import Placement
from flowrl.config import load
from flowrl.run.advantages import Advantages
from flowrl.run.datasets import read_prompts
from flowrl.run.loop import Run
from flowrl.workers import Actor, Reference, Rollout, reward_worker
from recipes.grpo.config import GRPOConfig
from recipes.grpo.train import train as train_grpo
from recipes.ppo.config import PPOConfig
from recipes.ppo.train import train as train_ppo
from tests.engines.vllm_checks import process_id

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs the extra vllm"),
]

VLLM = {"engine": "vllm", "max_response_tokens": 6, "transfer": {"chunk_mb": 0.5}}
COLOCATED = Placement(device="cpu", pools={"main": [1]}, roles=dict.fromkeys(GRPOConfig.roles, "main"))


def metrics_of(config: PPOConfig | GRPOConfig) -> list[dict[str, float]]:
    return [json.loads(line) for line in (config.output / "metrics.jsonl").read_text().splitlines()]


def check(lines: list[dict[str, float]]) -> None:
    """Three steps, in each of which the rollout's log-probabilities are the trainer's, and weights that change."""
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    for line in lines[1:]:
        assert line["rollout_gap"] < 1e-4
        assert line["actor/grad_norm"] > 0
    assert lines[1]["reward"] != lines[2]["reward"]


def test_ppo_split_runs_with_vllm(ray_session: None, ppo_config: Callable[..., PPOConfig], tmp_path: Path) -> None:
    placement = load(Path("placement/split.yaml"), ["device=cpu"], Placement)
    config = ppo_config(output=tmp_path / "ppo", backend="ray", placement=placement, rollout=VLLM)
    train_ppo(config)
    check(metrics_of(config))


def test_grpo_colocated_gives_the_same_numbers_when_its_rollout_is_killed(
    ray_session: None, grpo_config: Callable[..., GRPOConfig], tmp_path: Path
) -> None:
    sound = grpo_config(output=tmp_path / "sound", backend="ray", placement=COLOCATED, rollout=VLLM)
    train_grpo(sound)
    check(metrics_of(sound))
    hurt = grpo_config(output=tmp_path / "hurt", backend="ray", placement=COLOCATED, rollout=VLLM)
    killed = train_and_kill(hurt, at_steps=(2,))
    assert len(killed) == 1
    for expected, line in zip(metrics_of(sound), metrics_of(hurt), strict=True):
        for name in ("reward", "accuracy", "response_length", "actor/loss", "actor/kl_loss"):
            assert line.get(name) == pytest.approx(expected.get(name), abs=1e-5), name


SLEEPING = {**VLLM, "vllm": {"sleep": True}}
"""On the CPU nothing moves; an engine that was not woken in time refuses all the same."""


def test_ppo_colocated_gives_the_same_numbers_with_roles_that_leave_the_device(
    ray_session: None, ppo_config: Callable[..., PPOConfig], tmp_path: Path
) -> None:
    placement = load(Path("placement/colocated.yaml"), ["device=cpu", "pools.main=[1]"], Placement)
    found = []
    for name, rollout, offload in (("stay", VLLM, "none"), ("leave", SLEEPING, "idle")):
        config = ppo_config(output=tmp_path / name, backend="ray", placement=placement, rollout=rollout)
        engine = config.actor.engine.model_copy(update={"offload": offload})
        roles = {role: getattr(config, role).model_copy(update={"engine": engine}) for role in ("actor", "critic")}
        train_ppo(config.model_copy(update=roles))
        check(metrics_of(config))
        found.append(metrics_of(config))
    for expected, line in zip(*found, strict=True):
        for name in ("reward", "accuracy", "response_length", "actor/loss", "critic/loss"):
            assert line.get(name) == expected.get(name), name
    calls = [event["name"] for event in json.loads((tmp_path / "leave" / "trace.json").read_text())["traceEvents"]]
    # Once to the rollout and back for the evaluation before the first step, and in each of the three steps.
    assert calls.count("evict") >= 8
    stayed = json.loads((tmp_path / "stay" / "trace.json").read_text())["traceEvents"]
    assert "evict" not in [event["name"] for event in stayed]


@pytest.mark.slow
def test_a_sleeping_rollout_that_is_killed_comes_back_in_its_turn(
    ray_session: None, grpo_config: Callable[..., GRPOConfig], tmp_path: Path
) -> None:
    config = grpo_config(output=tmp_path / "hurt", backend="ray", placement=COLOCATED, rollout=SLEEPING)
    assert len(train_and_kill(config, at_steps=(2,))) == 1
    check(metrics_of(config))


def train_and_kill(config: GRPOConfig, at_steps: tuple[int, ...]) -> list[int]:
    """GRPO's loop, with the rollout's process killed while weights are on their way to it; who was killed."""
    prompts, held_out = read_prompts(config)
    advantages = Advantages(config.algorithm, config.actor, seed=config.seed)
    killed = []
    with Run(config) as run:
        actor = run.group("actor", Actor, config.actor, temperature=config.rollout.temperature)
        reference = run.group("reference", Reference, config.reference, temperature=config.rollout.temperature)
        reward = run.group("reward", reward_worker(config.reward), config.reward)
        rollout = run.group("rollout", Rollout, config.rollout, config.actor.model, seed=config.seed)
        run.evaluate_with(rollout, reward, held_out)
        for step, batch in run.rollouts(rollout, prompts):
            batch["scores"] = reward.score(batch)
            batch["old_logprobs"] = actor.logprobs(batch)
            batch["ref_logprobs"] = reference.logprobs(batch)
            batch, metrics = advantages.compute(batch, step)
            run.log(metrics)
            for minibatch in batch.minibatches(
                config.minibatch_size, epochs=config.ppo_epochs, seed=(config.seed, step)
            ):
                run.log(actor.update(minibatch))
            (victim,) = rollout.run(process_id)
            run.sync_weights(actor, rollout)
            if step in at_steps:
                os.kill(victim, signal.SIGKILL)
                killed.append(victim)
        run.finish(actor)
    return killed
