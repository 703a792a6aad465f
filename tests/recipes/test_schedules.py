"""Recipes under every schedule, with real models: the same numbers where nothing is stale, and the right ones else."""

import importlib.util
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from flowrl.config import Placement
from flowrl.controller.cluster import Cluster
from flowrl.data.batch import Batch
from flowrl.run.checkpoints import Checkpoints
from flowrl.run.chrome import read_trace
from flowrl.run.estimate import estimate_advantages
from flowrl.run.loss_columns import loss_columns
from flowrl.run.prompts import read_prompts
from flowrl.run.run import Run
from flowrl.run.step_state import Carried
from flowrl.workers import Actor, Reference, Rollout, reward_worker
from recipes.grpo.config import GRPOConfig
from recipes.grpo.train import train as train_grpo
from recipes.ppo.config import PPOConfig
from recipes.ppo.train import train as train_ppo
from tests.recipes.test_numbers import metrics_of
from tests.recipes.witnesses import WritingActor, WritingRollout, ranks_of

GrpoConfigs = Callable[..., GRPOConfig]
ROLES = {"actor": "train", "reference": "train", "reward": "train", "critic": "train", "rollout": "make"}
ALIKE = {"pools": {"train": [1], "make": [1]}, "roles": ROLES}


def detached(makers: int = 2, trainers: int = 1, **more: Any) -> Placement:
    pools = {"train": [trainers], "make": [makers]}
    return Placement.model_validate({"device": "cpu", "pools": pools, "roles": ROLES} | more)


def weights(config: GRPOConfig | PPOConfig) -> dict[str, torch.Tensor]:
    return load_file(config.output / "model" / "model.safetensors")


def test_async_without_staleness_is_sync_bit_for_bit(ppo_config: Callable[..., PPOConfig], tmp_path: Path) -> None:
    schedules = ({"kind": "sync"}, {"kind": "async", "max_staleness": 0})
    changes: dict[str, Any] = {"placement": Placement(**ALIKE), "evaluate_every": 2}
    runs = [ppo_config(output=tmp_path / schedule["kind"], schedule=schedule, **changes) for schedule in schedules]
    for config in runs:
        train_ppo(config)
    assert metrics_of(runs[0]) == metrics_of(runs[1])
    assert all(torch.equal(weights(runs[1])[name], weight) for name, weight in weights(runs[0]).items())


def with_staleness_one(config: GRPOConfig) -> dict[str, torch.Tensor]:
    """What one step off is, written down: the responses of step k+1 are sampled before step k is trained."""
    prompts, _ = read_prompts(config)
    carried = Carried(config.algorithm)
    with Cluster(config.placement, backend="inline", roles=type(config).roles) as cluster:
        actor: Any = cluster.group("actor", Actor, config.actor, temperature=1.0)
        reference: Any = cluster.group("reference", Reference, config.reference, temperature=1.0)
        reward: Any = cluster.group("reward", reward_worker(config.reward), config.reward)
        rollout: Any = cluster.group("rollout", Rollout, config.rollout, config.actor.model, seed=config.seed)

        def generated() -> Batch:
            rows = prompts.take(config.prompts_per_step)
            batch = Batch.from_rows(rows).repeat(config.samples_per_prompt)
            batch["sample"] = Batch.from_rows([{"sample": i} for _ in rows for i in range(config.samples_per_prompt)])
            return batch.union(rollout.generate(batch))

        coming = generated()
        for step in range(1, config.steps + 1):
            batch, coming = coming, generated()
            batch["scores"] = reward.score(batch)
            batch["old_logprobs"] = actor.logprobs(batch)
            batch["ref_logprobs"] = reference.logprobs(batch)
            batch = loss_columns(
                estimate_advantages(batch, config.algorithm, carried.now), config.actor, seed=(config.seed, step)
            )
            carried.advance(batch)
            for minibatch in batch.minibatches(config.minibatch_rows, epochs=config.epochs, seed=(config.seed, step)):
                actor.update(minibatch)
            rollout.load_weights(actor.weights(), step)
        actor.save(config.output.absolute())
    return load_file(config.output / "model.safetensors")


def test_one_step_off_trains_on_responses_of_the_weights_before(grpo_config: GrpoConfigs, tmp_path: Path) -> None:
    schedule = {"kind": "one_step_off"}
    config = grpo_config(steps=4, placement=Placement(**ALIKE), schedule=schedule)
    train_grpo(config)
    expected = with_staleness_one(config.model_copy(update={"output": tmp_path / "by_hand"}))
    assert all(torch.equal(weights(config)[name], weight) for name, weight in expected.items())
    assert [line["staleness"] for line in metrics_of(config)[1:]] == [0, 1, 1, 1]
    assert [line["staleness_1"] for line in metrics_of(config)[1:]] == [0, 1, 1, 1]


def test_one_step_off_loses_no_prompt_at_a_resume(grpo_config: GrpoConfigs) -> None:
    changes: dict[str, Any] = {"placement": Placement(**ALIKE), "schedule": {"kind": "one_step_off"}}
    changes |= {"checkpoint": {"every": 2}, "resume": "auto"}
    first = grpo_config(steps=2, **changes)
    train_grpo(first)
    state = Checkpoints(first.output).read(2).driver()
    assert state["objects"]["prompts"]["untrained"] == []  # nothing is generated beyond the last step
    config = grpo_config(steps=4, **changes)
    train_grpo(config)
    assert [line["staleness"] for line in metrics_of(config)[3:]] == [0, 1]


def streamed(config: GRPOConfig) -> list[dict[str, float]]:
    """The lines of a run, of which what holds for every asynchronous one is checked."""
    summary = train_grpo(config)
    lines = metrics_of(config)[1:]
    bound = config.schedule.staleness
    assert all(line["staleness_max"] <= bound for line in lines)
    shares = [sum(line[f"staleness_{k}"] for k in range(bound + 1)) for line in lines]
    assert shares == pytest.approx([1.0] * len(lines))
    assert summary["groups"]["trained"] == config.steps * config.prompts_per_step
    assert all(line["correction/weight"] > 0 for line in lines)  # on by itself, as responses are stale
    assert read_trace(config.output).counts
    return lines


ASYNC = {"kind": "async", "max_staleness": 2}


@pytest.mark.parametrize("loss", ["ppo", "decoupled_ppo"])
def test_grpo_streams_inline(grpo_config: GrpoConfigs, loss: str) -> None:
    actor = grpo_config().actor.model_dump() | {"loss": loss}
    lines = streamed(grpo_config(steps=5, placement=Placement(**ALIKE), schedule=ASYNC, evaluate_every=2, actor=actor))
    assert lines[0]["staleness_max"] == 0
    assert all(0 < line["correction/effective_samples"] <= 1 for line in lines)


@pytest.mark.parametrize("interrupt", [True, False])
def test_grpo_streams_from_two_makers_to_two_trainers(
    grpo_config: GrpoConfigs, ray_session: None, interrupt: bool
) -> None:
    schedule = ASYNC | {"interrupt": interrupt}
    placement = detached(2, 2)
    streamed(grpo_config(steps=6, backend="ray", placement=placement, schedule=schedule, evaluate_every=3))


def written(config: GRPOConfig, folder: Path) -> tuple[dict[int, set[int]], dict[int, set[int]]]:
    """Prompt -> the replicas of the rollout that answered it, and the ranks of the actor that trained on it."""
    made, trained = folder / "made", folder / "trained"
    prompts, _ = read_prompts(config)
    with Run(config) as run:
        actor: Any = run.group("actor", WritingActor, config.actor, diary=trained, temperature=1.0)
        rollout: Any = run.group(
            "rollout", WritingRollout, config.rollout, config.actor.model, seed=config.seed, diary=made
        )
        run.keep(actor)
        for step, batch in run.rollouts(rollout, prompts):
            batch["scores"] = Batch.from_rows([{"score": float(row % 3)} for row in range(batch.num_rows)])
            batch["old_logprobs"] = actor.logprobs(batch)
            batch["ref_logprobs"] = batch["old_logprobs"]
            batch = loss_columns(estimate_advantages(batch, config.algorithm), config.actor, seed=(config.seed, step))
            for minibatch in batch.minibatches(config.minibatch_rows, epochs=config.epochs, seed=(config.seed, step)):
                actor.update(minibatch)
            run.publish(actor, rollout)
        run.finish(actor)
    return ranks_of(made), ranks_of(trained)


@pytest.mark.parametrize(
    ("feeds", "pairs"), [([[0], [1]], {(0, 0), (1, 1)}), ([[0], [0, 1]], {(0, 0), (1, 0), (1, 1)})]
)
def test_each_trainer_trains_on_what_its_own_makers_answered(
    grpo_config: GrpoConfigs, ray_session: None, tmp_path: Path, feeds: list[list[int]], pairs: set[tuple[int, int]]
) -> None:
    placement = detached(2, 2, routes={"rollout": feeds})
    config = grpo_config(steps=6, backend="ray", placement=placement, schedule=ASYNC, epochs=2)
    made, trained = written(config, tmp_path)
    assert sorted(trained) == sorted(made) == list(range(6 * config.prompts_per_step))
    assert all(len(ranks) == 1 for ranks in (*made.values(), *trained.values()))
    assert {(*made[prompt], *trained[prompt]) for prompt in trained} <= pairs
    assert set().union(*trained.values()) == set().union(*made.values()) == {0, 1}


def test_a_killed_maker_loses_no_prompt(grpo_config: GrpoConfigs, ray_session: None) -> None:
    config = grpo_config(steps=8, backend="ray", placement=detached(2), schedule=ASYNC, samples_per_prompt=2)
    prompts, _ = read_prompts(config)
    trained: list[int] = []
    with Run(config) as run:
        actor: Any = run.group("actor", Actor, config.actor, temperature=1.0)
        rollout: Any = run.group("rollout", Rollout, config.rollout, config.actor.model, seed=config.seed)
        run.keep(actor)
        victim, other = rollout.run(process_id)
        for step, batch in run.rollouts(rollout, prompts):
            trained += batch["prompt_id"].get("prompt_id").tolist()[::2]
            batch["old_logprobs"] = actor.logprobs(batch)
            if step == 3:
                os.kill(victim, signal.SIGKILL)
            run.publish(actor, rollout)
        assert run.finish(actor)["makers_lost"] >= 1
        assert rollout.run(process_id)[1] == other
    assert sorted(trained) == list(range(8 * 16))


def process_id(worker: Any) -> int:
    return os.getpid()


@pytest.mark.vllm
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs the extra vllm")
def test_grpo_streams_from_vllm(grpo_config: GrpoConfigs, ray_session: None) -> None:
    vllm = {"engine": "vllm", "max_response_tokens": 6, "transfer": {"chunk_mb": 0.5}}
    changes: dict[str, Any] = {"rollout": vllm, "schedule": ASYNC, "evaluate_every": 2}
    lines = streamed(grpo_config(steps=5, backend="ray", placement=detached(1), **changes))
    assert all(line["weights_unreached"] == 0 for line in lines if "weights_unreached" in line)
