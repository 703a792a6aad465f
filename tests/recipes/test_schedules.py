"""Recipes with real models under every schedule: results, staleness, resumes and killed replicas."""

import importlib.util
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from safetensors.torch import load_file

from flowrl.checkpoints.checkpoints import Checkpoints
from flowrl.checkpoints.saved_rows import FILE
from flowrl.config import Placement
from flowrl.controller.cluster import Cluster
from flowrl.data.batch.batch import Batch
from flowrl.report.chrome_trace import read_trace
from flowrl.run.advantages import Advantages
from flowrl.run.datasets import read_prompts
from flowrl.run.interrupt import Interrupted
from flowrl.run.loop import Run
from flowrl.workers import Actor, Reference, Reward, Rollout
from recipes.grpo.config import GRPOConfig
from recipes.grpo.train import train as train_grpo
from recipes.ppo.config import PPOConfig
from recipes.ppo.train import train as train_ppo
from tests.configs import with_float64_models
from tests.recipes import crashing
from tests.recipes.conftest import FinishedRun
from tests.recipes.test_numbers import assert_same, metrics_of
from tests.recipes.test_resume import assert_bitwise_identical, from_step, without_evaluations
from tests.recipes.witnesses import WritingActor, WritingRollout, ranks_of

GrpoConfigs = Callable[..., GRPOConfig]
AnyConfig = TypeVar("AnyConfig", GRPOConfig, PPOConfig)
ROLES = {"actor": "train", "reference": "train", "reward": "train", "critic": "train", "rollout": "make"}
ALIKE = {"pools": {"train": [1], "make": [1]}, "roles": ROLES}


def detached(num_replicas: int = 2, num_trainers: int = 1, **more: Any) -> Placement:
    pools = {"train": [num_trainers], "make": [num_replicas]}
    return Placement.model_validate({"device": "cpu", "pools": pools, "roles": ROLES} | more)


def weights(config: GRPOConfig | PPOConfig) -> dict[str, torch.Tensor]:
    return load_file(config.output / "model" / "model.safetensors")


def test_async_without_staleness_is_bitwise_identical_to_sync(
    ppo_config: Callable[..., PPOConfig], tmp_path: Path
) -> None:
    schedules = ({"kind": "sync"}, {"kind": "async", "max_staleness": 0})
    changes: dict[str, Any] = {"placement": Placement(**ALIKE), "steps": 2, "evaluate_every": 2}
    runs = [ppo_config(output=tmp_path / schedule["kind"], schedule=schedule, **changes) for schedule in schedules]
    for config in runs:
        train_ppo(config)
    assert metrics_of(runs[0]) == metrics_of(runs[1])
    assert all(torch.equal(weights(runs[1])[name], weight) for name, weight in weights(runs[0]).items())


def with_staleness_one(config: GRPOConfig) -> dict[str, torch.Tensor]:
    """Reference loop of one_step_off: responses of step k + 1 are sampled before step k is trained."""
    prompts, _ = read_prompts(config)
    advantages = Advantages(config)
    assert config.reference is not None and config.reward is not None
    with Cluster(config.placement, backend="inline", roles=config.roles) as cluster:
        actor: Any = cluster.group("actor", Actor, config.actor)
        reference: Any = cluster.group("reference", Reference, config.reference)
        reward: Any = cluster.group("reward", Reward, config.reward)
        rollout: Any = cluster.group("rollout", Rollout, config.rollout, config.actor.model, seed=config.seed)

        def generated() -> Batch:
            rows = prompts.take(config.prompts_per_step)
            batch = Batch.from_rows(rows).repeat(config.samples_per_prompt)
            batch["sample"] = Batch.from_rows([{"sample": i} for _ in rows for i in range(config.samples_per_prompt)])
            return batch.union(rollout.generate(batch))

        coming = generated()
        for step in range(1, config.steps + 1):
            batch, coming = coming.with_seed((config.seed, step)), generated()
            batch = batch.union(reward.score(batch))
            batch["old_logprobs"] = actor.logprobs(batch)
            batch["ref_logprobs"] = reference.logprobs(batch)
            batch, _ = advantages.compute(batch)
            for minibatch in batch.minibatches(config.minibatch_size, epochs=config.ppo_epochs):
                actor.update(minibatch)
            rollout.load_weights(actor.weights(), step)
        actor.save(config.output.absolute())
    return load_file(config.output / "model.safetensors")


def test_one_step_off_trains_on_responses_of_the_previous_weights(grpo_config: GrpoConfigs, tmp_path: Path) -> None:
    schedule = {"kind": "one_step_off"}
    sizes = {"batch_size": 16, "minibatch_size": 8, "evaluate_every": 0}
    config = grpo_config(placement=Placement(**ALIKE), schedule=schedule, **sizes)
    train_grpo(config)
    expected = with_staleness_one(config.model_copy(update={"output": tmp_path / "by_hand"}))
    assert all(torch.equal(weights(config)[name], weight) for name, weight in expected.items())
    assert [line["staleness"] for line in metrics_of(config)] == [0, 1, 1]


def test_one_step_off_on_ray_has_a_staleness_of_one(one_step_off_run: FinishedRun[GRPOConfig]) -> None:
    """Its first checkpoints contain rollouts that are not trained yet."""
    config = one_step_off_run.config
    assert [line["staleness"] for line in metrics_of(config)[1:]] == [0, 1, 1, 1]
    assert [line["staleness_1"] for line in metrics_of(config)[1:]] == [0, 1, 1, 1]
    for step in (1, 2, 3):
        checkpoint = Checkpoints(config.output).read(step)
        versions = load_file(checkpoint.path / FILE)["tokens/weight_version"]
        assert checkpoint.driver()["objects"]["prompts"]["untrained"] and set(versions.tolist()) == {-1, step - 1}


ONE_STEP_OFF: dict[str, Any] = {"placement": Placement(**ALIKE), "schedule": {"kind": "one_step_off"}}
EVERY_STEP = {"every": 1, "keep_last": None}


def assert_one_step_off_resumes(straight: AnyConfig, train: Callable[[AnyConfig], object], output: Path) -> None:
    """Checks a resume from a checkpoint with pending rollouts of the previous weights."""
    train(straight)
    checkpoint = Checkpoints(straight.output).read(2)
    prompt_ids = checkpoint.driver()["objects"]["prompts"]["untrained"]
    prompts, samples = straight.prompts_per_step, straight.samples_per_prompt
    assert prompt_ids == list(range(2 * prompts, 3 * prompts))
    rows = load_file(checkpoint.path / FILE)
    assert rows["rows/prompt_id"].tolist() == [prompt_id for prompt_id in prompt_ids for _ in range(samples)]
    assert set(rows["tokens/weight_version"].tolist()) == {-1, 1}
    again = from_step(straight, 2, output)
    train(again)
    assert_bitwise_identical(again, straight)
    assert [line["staleness"] for line in metrics_of(again)[1:]] == [0, 1, 1, 1]


@pytest.mark.slow
def test_grpo_one_step_off_resumes_bitwise_identically(grpo_config: GrpoConfigs, tmp_path: Path) -> None:
    straight = grpo_config(steps=4, checkpoint=EVERY_STEP | {"asynchronous": False}, **ONE_STEP_OFF)
    assert_one_step_off_resumes(straight, train_grpo, tmp_path / "again")


@pytest.mark.slow
def test_ppo_one_step_off_resumes_bitwise_identically(ppo_config: Callable[..., PPOConfig], tmp_path: Path) -> None:
    straight = ppo_config(steps=4, checkpoint=EVERY_STEP, **ONE_STEP_OFF)
    assert_one_step_off_resumes(straight, train_ppo, tmp_path / "again")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_one_step_off_resumes_bitwise_identically_from_two_replicas_and_under_another_placement(
    grpo_config: GrpoConfigs, ray_session: None, tmp_path: Path
) -> None:
    changes: dict[str, Any] = {"backend": "ray", "placement": detached(2), "checkpoint": EVERY_STEP}
    straight = with_float64_models(grpo_config(steps=4, **ONE_STEP_OFF | changes))
    assert_one_step_off_resumes(straight, train_grpo, tmp_path / "again")
    elsewhere = from_step(straight, 2, tmp_path / "elsewhere")
    train_grpo(elsewhere.model_copy(update={"backend": "inline", "placement": Placement(**ALIKE)}))
    for line, expected in zip(metrics_of(elsewhere), metrics_of(straight), strict=True):
        assert_same(without_evaluations(expected), without_evaluations(line))


@pytest.mark.slow
def test_one_step_off_resumes_bitwise_identically_after_ctrl_c(
    grpo_config: GrpoConfigs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    actor = grpo_config().actor.model_dump() | {"kl_loss_kind": "tests.recipes.crashing:kl"}
    straight = grpo_config(steps=4, output=tmp_path / "straight", actor=actor, **ONE_STEP_OFF)
    train_grpo(straight)
    crashing.reset_calls()
    monkeypatch.setenv(crashing.ASK_AT, "3")  # a step has two minibatches
    settings: dict[str, Any] = {"actor": actor, "checkpoint": {"every": 100}, "resume": "auto"}
    config = grpo_config(steps=4, **settings, **ONE_STEP_OFF)
    with pytest.raises(Interrupted, match=r"\b2 of 4\b"):
        train_grpo(config)
    train_grpo(config)
    assert_bitwise_identical(config, straight)


@pytest.mark.slow
def test_a_one_step_off_run_that_is_extended_is_bitwise_identical_to_a_longer_run(
    grpo_config: GrpoConfigs, tmp_path: Path
) -> None:
    straight = grpo_config(steps=3, output=tmp_path / "straight", **ONE_STEP_OFF)
    train_grpo(straight)
    changes: dict[str, Any] = {"checkpoint": {"every": 100}, "resume": "auto"}
    train_grpo(grpo_config(steps=1, **changes, **ONE_STEP_OFF))
    longer = grpo_config(steps=3, **changes, **ONE_STEP_OFF)
    train_grpo(longer)
    assert_bitwise_identical(longer, straight)


def train_streaming(config: GRPOConfig) -> list[dict[str, float]]:
    """Trains, checks the invariants of asynchronous runs, and returns the log records."""
    return check_streaming(FinishedRun(config, train_grpo(config)))


def check_streaming(run: FinishedRun[GRPOConfig]) -> list[dict[str, float]]:
    """Checks the invariants of asynchronous runs, and returns the log records."""
    config, summary = run
    lines = metrics_of(config)[1:]
    bound = config.schedule.staleness
    assert all(line["staleness_max"] <= bound for line in lines)
    shares = [sum(line[f"staleness_{k}"] for k in range(bound + 1)) for line in lines]
    assert shares == pytest.approx([1.0] * len(lines))
    assert summary["groups"]["trained"] == config.steps * config.prompts_per_step
    assert all(line["correction/weight"] > 0 for line in lines)  # enabled automatically, because responses are stale
    assert read_trace(config.output).counts
    return lines


ASYNC = {"kind": "async", "max_staleness": 2}


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["ppo", "decoupled_ppo"])
def test_grpo_streams_inline(grpo_config: GrpoConfigs, loss: str) -> None:
    actor = grpo_config().actor.model_dump(exclude={"old_logprobs"}) | {"loss": loss}
    lines = train_streaming(
        grpo_config(steps=5, placement=Placement(**ALIKE), schedule=ASYNC, evaluate_every=2, actor=actor)
    )
    assert lines[0]["staleness_max"] == 0
    assert all(0 < line["correction/effective_samples"] <= 1 for line in lines)


def test_async_resumes_with_complete_rollouts_and_trains_every_prompt_once(
    grpo_config: GrpoConfigs, tmp_path: Path
) -> None:
    schedule = {"kind": "async", "max_staleness": 3}
    changes: dict[str, Any] = {"placement": Placement(**ALIKE), "schedule": schedule}
    first = grpo_config(steps=4, checkpoint=EVERY_STEP, **changes)
    begun = trained_prompts(first)
    checkpoint = Checkpoints(first.output).read(2)
    state = checkpoint.driver()["objects"]["prompts"]
    finished = sum(version is not None for _, version in state["groups"])
    again = from_step(first, 2, tmp_path / "again")
    rest = trained_prompts(again)
    trained = [prompt for step in range(1, 5) for prompt in (begun if step <= 2 else rest)[step]]
    assert list(rest) == [3, 4] and sorted(trained) == list(range(4 * first.prompts_per_step))
    assert (FILE in checkpoint.manifest.files) == (finished > 0)
    if finished:
        rows = load_file(checkpoint.path / FILE)
        assert len(rows["rows/length"]) == finished * first.samples_per_prompt
    assert all(line["staleness_max"] <= 3 for line in metrics_of(again)[1:])


def trained_prompts(config: GRPOConfig) -> dict[int, list[int]]:
    """Trains and returns the prompts of each step."""
    prompts, _ = read_prompts(config)
    prompts_by_step = {}
    with Run(config) as run:
        actor: Any = run.group("actor", Actor, config.actor)
        rollout: Any = run.group("rollout", Rollout, config.rollout, config.actor.model, seed=config.seed)
        run.add_checkpointable(actor)
        for batch in run.rollouts(rollout, prompts, policy=actor):
            prompts_by_step[run.step] = batch["prompt_id"].get("prompt_id").tolist()[:: config.samples_per_prompt]
            batch["old_logprobs"] = actor.logprobs(batch)
            run.sync_weights(actor, rollout)
        run.finish()
    return prompts_by_step


def test_grpo_streams_from_two_replicas_to_two_trainers(async_run: FinishedRun[GRPOConfig]) -> None:
    assert len(check_streaming(async_run)) == async_run.config.steps


@pytest.mark.slow
@pytest.mark.parametrize("interrupt", [True, False])
def test_grpo_streams_all_groups_from_two_replicas_to_two_trainers(
    grpo_config: GrpoConfigs, ray_session: None, interrupt: bool
) -> None:
    schedule = ASYNC | {"interrupt": interrupt}
    placement = detached(2, 2)
    train_streaming(grpo_config(steps=6, backend="ray", placement=placement, schedule=schedule, evaluate_every=3))


def train_with_diaries(config: GRPOConfig, folder: Path) -> tuple[dict[int, set[int]], dict[int, set[int]]]:
    """Returns, per prompt, the rollout replicas that generated it and the actor ranks that trained on it."""
    generated_by, trained = folder / "made", folder / "trained"
    prompts, _ = read_prompts(config)
    advantages = Advantages(config)
    with Run(config) as run:
        actor: Any = run.group("actor", WritingActor, config.actor, diary=trained)
        rollout: Any = run.group(
            "rollout", WritingRollout, config.rollout, config.actor.model, seed=config.seed, diary=generated_by
        )
        run.add_checkpointable(actor)
        for batch in run.rollouts(rollout, prompts, policy=actor):
            batch["scores"] = Batch.from_rows([{"score": float(row % 3)} for row in range(batch.num_rows)])
            batch["old_logprobs"] = actor.logprobs(batch)
            batch["ref_logprobs"] = batch["old_logprobs"]
            batch, _ = advantages.compute(batch)
            for minibatch in batch.minibatches(config.minibatch_size, epochs=config.ppo_epochs):
                actor.update(minibatch)
            run.sync_weights(actor, rollout)
        run.finish()
    return ranks_of(generated_by), ranks_of(trained)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("feeds", "pairs"), [([[0], [1]], {(0, 0), (1, 1)}), ([[0], [0, 1]], {(0, 0), (1, 0), (1, 1)})]
)
def test_each_trainer_trains_on_rollouts_of_its_own_replicas(
    grpo_config: GrpoConfigs, ray_session: None, tmp_path: Path, feeds: list[list[int]], pairs: set[tuple[int, int]]
) -> None:
    placement = detached(2, 2, routes={"rollout": feeds})
    config = grpo_config(steps=6, backend="ray", placement=placement, schedule=ASYNC, ppo_epochs=2)
    generated_by, trained = train_with_diaries(config, tmp_path)
    assert sorted(trained) == sorted(generated_by) == list(range(6 * config.prompts_per_step))
    assert all(len(ranks) == 1 for ranks in (*generated_by.values(), *trained.values()))
    assert {(*generated_by[prompt], *trained[prompt]) for prompt in trained} <= pairs
    assert set().union(*trained.values()) == set().union(*generated_by.values()) == {0, 1}


@pytest.mark.slow
def test_a_killed_replica_loses_no_prompt(grpo_config: GrpoConfigs, ray_session: None) -> None:
    config = grpo_config(steps=8, backend="ray", placement=detached(2), schedule=ASYNC, samples_per_prompt=2)
    prompts, _ = read_prompts(config)
    trained: list[int] = []
    with Run(config) as run:
        actor: Any = run.group("actor", Actor, config.actor)
        rollout: Any = run.group("rollout", Rollout, config.rollout, config.actor.model, seed=config.seed)
        run.add_checkpointable(actor)
        victim, other = rollout.run(process_id)
        for batch in run.rollouts(rollout, prompts, policy=actor):
            trained += batch["prompt_id"].get("prompt_id").tolist()[::2]
            batch["old_logprobs"] = actor.logprobs(batch)
            if run.step == 3:
                os.kill(victim, signal.SIGKILL)
            run.sync_weights(actor, rollout)
        assert run.finish()["replicas_lost"] >= 1
        assert rollout.run(process_id)[1] == other
    assert sorted(trained) == list(range(8 * 16))


def process_id(worker: Any) -> int:
    return os.getpid()


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs the extra vllm")
def test_grpo_streams_from_vllm(grpo_config: GrpoConfigs, ray_session: None) -> None:
    vllm = {"engine": "vllm", "max_response_tokens": 6, "transfer": {"bucket_mb": 0.5}}
    changes: dict[str, Any] = {"rollout": vllm, "schedule": ASYNC, "evaluate_every": 2}
    lines = train_streaming(grpo_config(steps=5, backend="ray", placement=detached(1), **changes))
    assert all(line["weights_unreached"] == 0 for line in lines if "weights_unreached" in line)
