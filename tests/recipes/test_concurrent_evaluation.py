"""Evaluations alongside training in real runs: their values, the records of their steps, resumes and lost replicas."""

import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from flowrl.checkpoints.checkpoints import Checkpoints
from flowrl.config import Placement
from flowrl.controller.cluster import Cluster
from flowrl.data.batch.batch import Batch
from flowrl.report.rollout_log import read_rows
from flowrl.report.run_observer import RunObserver
from flowrl.run.advantages import Advantages
from flowrl.run.datasets import read_prompts
from flowrl.run.evaluation import Evaluation, PendingEvaluation, evaluate
from flowrl.run.loop import Run
from flowrl.workers import Actor, Reward, Rollout
from recipes.grpo.config import GRPOConfig
from tests.configs import with_float64_models
from tests.recipes.test_numbers import metrics_of
from tests.recipes.test_schedules import ALIKE, detached, process_id

GrpoConfigs = Callable[..., GRPOConfig]
ASYNC = {"kind": "async", "max_staleness": 2, "concurrent_evaluation": True}
SAMPLED = {"samples": 3, "temperature": 1.0}


def with_sets(grpo_config: GrpoConfigs, **changes: Any) -> GRPOConfig:
    """Returns a config with two evaluation sets of different intervals, samples and sizes."""
    data = grpo_config().data.model_dump()
    own = {"files": data["test"], "every": 3, "rows": 5, "evaluation": SAMPLED}
    data |= {"evaluation_rows": 7, "tests": {"sampled": own}}
    defaults: dict[str, Any] = {"steps": 5, "evaluate_every": 2, "placement": Placement(**ALIKE), "schedule": ASYNC}
    actor = grpo_config().actor.model_dump() | {"kl_loss_coef": 0.0, "optimizer": {"lr": 0.02}}
    return grpo_config(**defaults | {"data": data, "actor": actor, "reference": None} | changes)


class BetweenSteps(RunObserver):
    """Calls a function after the evaluation and the checkpoint of each step, from the second on."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function

    def calls_done(self, step: int, values: Mapping[str, float]) -> None:
        self._function()


def train(config: GRPOConfig, between_steps: Callable[[Run, Any, Any], None]) -> dict[str, Any]:
    """Trains and calls `between_steps(run, actor, rollout)` from the second step on. Returns the summary."""
    prompts, held_out = read_prompts(config)
    advantages = Advantages(config)
    with Run(config) as run:
        actor = run.group("actor", Actor, config.actor)
        reward = run.rewards()
        rollout = run.group("rollout", Rollout, config.rollout, config.actor.model, seed=config.seed)
        run.add_checkpointable(actor, advantages)
        observer = BetweenSteps(lambda: between_steps(run, actor, rollout))
        run._observers.observers = (*run._observers.observers, observer)

        def evaluate_sets(sets: Mapping[str, Batch]) -> Evaluation:
            result = evaluate(rollout, reward, sets, config.evaluation_by_set)
            assert isinstance(result, PendingEvaluation) == (0 < run.step < config.steps)
            return result

        run.add_evaluation(held_out, evaluate_sets)
        for batch in run.rollouts(rollout, prompts, policy=actor, reward=reward):
            batch["old_logprobs"] = actor.logprobs(batch)
            batch, metrics = advantages.compute(batch)
            run.log(metrics)
            run.log(actor.update(batch))
            run.sync_weights(actor, rollout)
        return run.finish()


def evaluate_blocking(config: GRPOConfig, weights: dict[int, Any], due: dict[int, tuple[str, ...]]) -> dict[int, Any]:
    """Returns, by step, blocking evaluations of the weights of a step on its sets."""
    _, held_out = read_prompts(config)
    placement = Placement.model_validate(
        {"device": "cpu", "pools": {"main": [1]}, "roles": {"rollout": "main", "reward": "main"}}
    )
    assert config.reward is not None
    with Cluster(placement, backend="inline", roles=("rollout", "reward")) as cluster:
        reward: Any = cluster.group("reward", Reward, config.reward)
        rollout: Any = cluster.group("rollout", Rollout, config.rollout, config.actor.model, seed=config.seed)
        results = {}
        for step, names in due.items():
            rollout.load_weights(weights[step], step)
            sets = {name: held_out[name] for name in names}
            results[step] = evaluate(rollout, reward, sets, config.evaluation_by_set)
    return results


def evaluation_metrics(record: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in record.items() if name.startswith(("accuracy", "evaluation/"))}


def test_the_record_of_a_step_has_the_values_of_a_blocking_evaluation_of_its_weights(
    grpo_config: GrpoConfigs,
) -> None:
    config = with_float64_models(with_sets(grpo_config))
    weights, pending = dict[int, Any](), list[int]()

    def keep(run: Run, actor: Any, rollout: Any) -> None:
        weights[run.step] = actor.weights().get()
        pending.extend(step for step, _ in run._observers.state()["pending_evaluations"])

    summary = train(config, keep)
    records = metrics_of(config)
    assert [record["step"] for record in records] == [0, 1, 2, 3, 4, 5] and set(pending) == {2, 3, 4}
    due = {2: ("",), 3: ("sampled",), 4: ("",), 5: ("", "sampled")}
    assert {record["step"] for record in records[1:] if evaluation_metrics(record)} == set(due)
    responses = []
    for step, expected in evaluate_blocking(config, weights, due).items():
        assert evaluation_metrics(records[step]) == dict(expected)
        rows = read_rows(config.output / "rollouts", "evaluation", step)
        assert [row["response"] for row in rows] == [row["response"] for row in expected.rows]
        assert {(row["version"], row["newest_version"]) for row in rows} == {(step, step)}
        responses.append([row["response"] for row in rows][:5])
    assert len({tuple(texts) for texts in responses}) > 1  # the weights differ
    assert summary["accuracy_after"] == records[5]["accuracy"]
    assert summary["accuracy/sampled_before"] == records[0]["accuracy/sampled"]


@pytest.mark.slow
def test_a_resumed_run_repeats_an_unfinished_evaluation(grpo_config: GrpoConfigs, tmp_path: Path) -> None:
    """The checkpoint of a step is complete only when its evaluation has finished."""
    config = with_sets(grpo_config, steps=6, checkpoint={"every": 2, "keep_last": None})
    lost: list[int] = []

    def crash(run: Run, actor: Any, rollout: Any) -> None:
        if run.step == 4:
            lost.extend(step for step, _ in run._observers.state()["pending_evaluations"])
            raise RuntimeError("crash")

    with pytest.raises(RuntimeError, match="crash"):
        train(config, crash)
    assert lost[-1] == 4 and Checkpoints(config.output).steps() == [2]
    assert [record["step"] for record in metrics_of(config) if "accuracy" in record] == [0, 2]
    summary = train(config.model_copy(update={"resume": "auto"}), lambda *_: None)
    records = metrics_of(config)
    assert [record["step"] for record in records] == list(range(7))
    assert [record["step"] for record in records if "accuracy" in record] == [0, 2, 4, 6]
    assert [record["step"] for record in records if "accuracy/sampled" in record] == [0, 3, 6]
    assert summary["accuracy_after"] == records[6]["accuracy"]
    assert Checkpoints(config.output).steps() == [2, 4, 6]


@pytest.mark.slow
def test_a_checkpoint_that_begins_during_an_evaluation_keeps_its_result(grpo_config: GrpoConfigs) -> None:
    config = with_sets(grpo_config, checkpoint={"every": 2, "keep_last": None, "keep_best": 1})
    train(config, lambda *_: None)
    records = metrics_of(config)
    assert Checkpoints(config.output).steps() == [2, 4, 5]
    state = Checkpoints(config.output).read(4).driver()
    assert state["pending_evaluations"][-1] == [4, 7]
    resumed = config.model_copy(update={"resume": "auto", "steps": 6})
    with Run(resumed) as run:
        assert run.step == 5
        run._observers.evaluations.restore(state["outcomes"], state["pending_evaluations"], run._observers.history)
        assert run._observers.evaluations.summary(4)["accuracy_after"] == records[4]["accuracy"]
        assert run._observers.evaluations.summary(4)["accuracy/sampled_after"] is None


@pytest.mark.slow
def test_a_killed_replica_loses_no_evaluation(grpo_config: GrpoConfigs, ray_session: None) -> None:
    """Kills each replica once while an evaluation runs on one of them."""
    config = with_sets(grpo_config, steps=9, evaluate_every=1, backend="ray", placement=detached(2))
    killed: list[int] = []

    def kill(run: Run, actor: Any, rollout: Any) -> None:
        if run.step in (3, 6):
            killed.append(run.step)
            os.kill(rollout.run(process_id)[len(killed) - 1], signal.SIGKILL)

    summary = train(config, kill)
    assert len(killed) == 2 and summary["replicas_lost"] >= 2
    for record in metrics_of(config):
        rows = read_rows(config.output / "rollouts", "evaluation", int(record["step"]))
        versions = {(row["version"], row["newest_version"]) for row in rows}
        assert versions == {(record["step"], record["step"])} and "accuracy" in record
