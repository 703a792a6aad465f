"""A run on Ray whose roles sleep: overlap, staleness, and recovery of killed processes."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flowrl.data.batch.batch import Batch
from flowrl.data.chat import ChatTokenizer
from flowrl.data.prompts import PromptStream, read_conversations
from flowrl.report.chrome_trace import read_trace
from flowrl.run.interrupt import Interrupted
from flowrl.run.loop import Run
from flowrl.run.restarts import with_restarts
from tests.run.sleeping_run import SleepingConfig, sleeping_config, train
from tests.schedules.sleeping_replicas import Durations, SleepingActor, SleepingRollout
from tests.small_task import prepare_small

ASYNC = {"kind": "async", "max_staleness": 2}


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sleeping") / "task"
    prepare_small(folder)
    return folder


def lines(config: SleepingConfig) -> list[dict[str, float]]:
    return [json.loads(line) for line in (config.output / "metrics.jsonl").read_text().splitlines()]


def in_order(config: SleepingConfig) -> list[list[int]]:
    rows = config.batch_size
    return [list(range(step * rows, (step + 1) * rows)) for step in range(config.steps)]


@pytest.mark.parametrize(
    "schedule", [*(pytest.param({"kind": kind}, marks=pytest.mark.slow) for kind in ("sync", "one_step_off")), ASYNC]
)
def test_prompts_are_trained_in_order_and_no_token_is_too_old(
    task: Path, tmp_path: Path, ray_session: None, schedule: dict[str, Any]
) -> None:
    config = sleeping_config(task, tmp_path / "out", schedule=schedule)
    summary, trained = train(config, Durations(0.1, sigma=0.5), 0.02)
    assert trained == in_order(config)
    assert max(line["oldest"] for line in lines(config)) <= config.schedule.staleness
    assert summary["steps"] == 6
    last = lines(config)[-1]
    assert {"idle_actor", "idle_rollout", "wait_data_s", "wait_weights_s"} <= last.keys()
    assert ("staleness" in last) == (config.schedule.staleness > 0)
    assert bool(read_trace(config.output).counts) == config.schedule.is_streaming


@pytest.mark.parametrize("backend", ["inline", pytest.param("ray", marks=pytest.mark.slow)])
@pytest.mark.parametrize("interrupt", [True, False])
def test_a_recipes_own_generate_call_uses_the_newest_weights_on_every_replica(
    task: Path, tmp_path: Path, ray_session: None, backend: str, interrupt: bool
) -> None:
    """The recipe evaluates after each step, without a line for weights. Prompts of the schedule are running."""
    schedule = ASYNC | {"interrupt": interrupt}
    config = sleeping_config(task, tmp_path / "out", schedule=schedule, backend=backend, steps=4)
    tokenizer = ChatTokenizer(config.actor.model.path)
    prompts = PromptStream(read_conversations(config.data.train)[:64], tokenizer, seed=0, max_prompt_tokens=16)
    held_out = Batch.from_rows(prompts.evaluation_rows(4)).with_samples(1)
    generated: list[list[int]] = []
    with Run(config) as run:
        actor: Any = run.group("actor", SleepingActor, 0.01)
        rollout: Any = run.group("rollout", SleepingRollout, Durations(0.05), 4)
        for batch in run.rollouts(rollout, prompts, policy=actor):
            run.log(actor.update(batch))
            run.sync_weights(actor, rollout)
            generated.append(rollout.generate.submit(held_out, temperature=0.0).get("weight_version").tolist())
        run.finish()
        generated.append(rollout.generate(held_out, temperature=0.0).get("weight_version").tolist())
    assert generated == [[version] * 8 for version in (1, 2, 3, 4, 4)]


def pump_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "flowrl-event-pump"]


@pytest.mark.slow
def test_prompts_and_weights_are_sent_while_the_driver_computes(task: Path, tmp_path: Path, ray_session: None) -> None:
    """After step 1, the driver calls nothing until replicas received weights and were polled again."""
    config = sleeping_config(task, tmp_path / "out", schedule=ASYNC, steps=4)
    submitted: set[str] = set()

    def compute(run: Run, step: int) -> None:
        begun_ns, until_s = time.time_ns(), time.monotonic() + 60
        while step == 1 and not {"load_weights", "poll"} <= submitted and time.monotonic() < until_s:
            time.sleep(0.01)
            with run.cluster.calls.lock:
                submitted.update(call.method for call in run.cluster.calls.events if call.submitted_ns > begun_ns)

    _, trained = train(config, Durations(0.4), 0.01, compute)
    assert {"load_weights", "poll"} <= submitted
    assert trained == in_order(config)
    assert pump_threads() == []


@pytest.mark.slow
def test_generation_hides_one_second_of_work_of_the_driver_per_step(
    task: Path, tmp_path: Path, ray_session: None
) -> None:
    """Generation takes longer than the driver, so it is the critical path of both runs."""
    costs = Durations(1.2)  # 8 prompts per step on 8 slots

    def seconds_per_step(name: str, compute: Callable[[Run, int], None]) -> float:
        config = sleeping_config(task, tmp_path / name, schedule=ASYNC, steps=8)
        _, trained = train(config, costs, 0.01, compute)
        assert trained == in_order(config)
        recorded = lines(config)[2:-1]
        return sum(line["seconds"] for line in recorded) / len(recorded)

    alone_s = seconds_per_step("alone", lambda run, step: None)
    assert seconds_per_step("computing", lambda run, step: time.sleep(1.0)) < alone_s + 0.5


@pytest.mark.slow
@pytest.mark.parametrize("num_signals", [1, 2])
def test_ctrl_c_while_the_driver_computes_ends_the_run_and_its_thread(
    task: Path, tmp_path: Path, ray_session: None, num_signals: int
) -> None:
    config = sleeping_config(task, tmp_path / "out", schedule=ASYNC)

    def compute(run: Run, step: int) -> None:
        for _ in range(num_signals if step == 3 else 0):
            signal.raise_signal(signal.SIGINT)
            time.sleep(0.5)  # an earlier signal counts as a duplicate

    with pytest.raises(Interrupted, match=r"step 3 of 6\b"):
        train(config, Durations(0.2), 0.01, compute)
    assert pump_threads() == []
    assert (config.output / "summary.json").exists() == (num_signals == 1)


@pytest.mark.slow
def test_a_killed_replica_is_replaced_and_its_prompts_are_redistributed(
    task: Path, tmp_path: Path, ray_session: None
) -> None:
    config = sleeping_config(task, tmp_path / "out", schedule=ASYNC, steps=12)
    tokenizer = ChatTokenizer(config.actor.model.path)
    prompts = PromptStream(read_conversations(config.data.train)[:64], tokenizer, seed=0, max_prompt_tokens=16)
    trained: list[list[int]] = []
    with Run(config) as run:
        actor: Any = run.group("actor", SleepingActor, 0.02)
        rollout: Any = run.group("rollout", SleepingRollout, Durations(0.2), 4)
        run.add_checkpointable(actor)
        first, other = rollout.run(process_id)
        for batch in run.rollouts(rollout, prompts, policy=actor):
            trained.append(batch["prompt_id"].get("prompt_id").tolist())
            if run.step == 3:
                os.kill(first, signal.SIGKILL)
            run.log(actor.update(batch))
            run.sync_weights(actor, rollout)
        summary = run.finish()
        assert rollout.run(process_id)[1] == other
    assert trained == in_order(config)
    assert summary["replicas_lost"] >= 1 and summary["groups"]["trained"] == 96


@pytest.mark.slow
def test_a_killed_trainer_restarts_no_replica_and_every_prompt_is_trained_in_its_step(
    task: Path, tmp_path: Path, ray_session: None, capsys: pytest.CaptureFixture[str]
) -> None:
    config = sleeping_config(task, tmp_path / "out", schedule=ASYNC, steps=8, checkpoint={"every": 1})
    replica_processes: list[list[int]] = []
    trained: dict[int, list[int]] = {}

    def attempt(config: SleepingConfig) -> None:
        tokenizer = ChatTokenizer(config.actor.model.path)
        prompts = PromptStream(read_conversations(config.data.train)[:64], tokenizer, seed=0, max_prompt_tokens=16)
        with Run(config) as run:
            actor: Any = run.group("actor", SleepingActor, 0.02)
            rollout: Any = run.group("rollout", SleepingRollout, Durations(0.2), 4)
            run.add_checkpointable(actor)
            replica_processes.append(rollout.run(process_id))
            (victim,) = actor.run(process_id)
            for batch in run.rollouts(rollout, prompts, policy=actor):
                trained[run.step] = batch["prompt_id"].get("prompt_id").tolist()
                if run.step == 5 and len(replica_processes) == 1:
                    os.kill(victim, signal.SIGKILL)
                run.log(actor.update(batch))
                run.sync_weights(actor, rollout)
            run.finish()

    with_restarts(attempt, config)
    assert len(replica_processes) == 2 and replica_processes[0] == replica_processes[1]
    assert list(trained.values()) == in_order(config)
    output = capsys.readouterr().out
    assert "restart 1 of 3" in output and "lost:" not in output


def process_id(worker: Any) -> int:
    return os.getpid()
