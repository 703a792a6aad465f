"""Streaming sources under a virtual clock: order, staleness, losses, refusals, checkpoints and metrics."""

import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flowrl.checkpoints.saved_rows import FILE, IDENTITY, SavedRows, save_rows
from flowrl.config import OnPolicyConfig, UserError
from flowrl.controller.errors import ProcessLost
from flowrl.data.batch.batch import Batch
from flowrl.data.batch.block import LocalRef
from flowrl.schedules.replica_stream import MAX_REFUSAL_MESSAGES, make_rollout_source
from flowrl.schedules.rollout_source import RolloutContext
from flowrl.schedules.scheduler import DROP_REASONS, GroupCounts, group_metrics
from flowrl.schedules.simulation import VirtualClock
from flowrl.weight_sync.verification import ComparedWeights
from tests.configs import grpo_settings
from tests.schedules.simulated_workers import (
    Calls,
    NumberedPrompts,
    SimulatedReplica,
    SimulatedRewards,
    SimulatedRollout,
    WeightSync,
    moments,
)
from tests.slow_cases import one_of

SAMPLES = 2


def config_of(steps: int = 40, prompts: int = 4, slots: int = 2, **schedule: Any) -> OnPolicyConfig:
    settings = grpo_settings(
        steps=steps,
        batch_size=prompts * SAMPLES,
        samples_per_prompt=SAMPLES,
        minibatch_size=1,
        rollout={"max_response_tokens": 1, "max_num_seqs": slots * SAMPLES},
        schedule={"kind": "async", **schedule},
    )
    return OnPolicyConfig.model_validate(settings)


class SimulatedRun:
    """A training loop: a trainer and replicas with the given durations."""

    def __init__(
        self,
        config: OnPolicyConfig,
        seconds: Callable[[int], float] = lambda prompt: 0.3,
        *,
        num_replicas: int = 2,
        train_s: float = 0.5,
        kills: Any = None,
        refuses: Callable[[int], bool] = lambda prompt: False,
        slower: Sequence[float] = (),
        fails: Callable[[int], bool] | None = None,
    ) -> None:
        self.config, self.train_s, self.clock = config, train_s, VirtualClock()
        slots = config.rollout.num_seqs // SAMPLES
        takes = [
            lambda prompt, times=times: times * seconds(prompt)
            for times in [*slower, *[1.0] * num_replicas][:num_replicas]
        ]
        self.rollout: Any = SimulatedRollout(
            [SimulatedReplica(rank, self.clock, takes[rank], slots, refuses, fails) for rank in range(num_replicas)]
        )
        self.weight_sync: Any = WeightSync(self.clock)
        self.calls: Any = Calls(self.clock)
        self.prompts: Any = NumberedPrompts()
        self.messages: list[str] = []
        now_ns = lambda: round(self.clock.now_s * 1e9)  # noqa: E731 (same signature as the default)
        notify = self.messages.append
        rewards: Any = None if fails is None else SimulatedRewards()
        context = RolloutContext(
            config, self.rollout, self.prompts, self.weight_sync, self.calls, notify, rewards, now_ns=now_ns
        )
        self.source = make_rollout_source(context)
        self.trained: Counter[int] = Counter()
        self.ages: list[int] = []
        self.mixed = 0
        """Number of rows with tokens of several versions."""
        self.at_end: Callable[[], None] = lambda: None
        """Callback at the end of each step."""
        if kills is not None:
            self._kill_at(kills)

    def _kill_at(self, chance: random.Random) -> None:
        times = moments(chance, 4.0)
        due = [next(times)]

        def kill() -> None:
            while self.clock.now_s >= due[0]:
                chance.choice(self.rollout.replicas).kill(chance)
                due[0] = self.clock.call_at(next(times))

        self.clock.call_at(due[0])
        self.calls.before.append(kill)

    def run(self, first: int = 1, last: int | None = None, version: int = 0, evaluate_every: int = 0) -> None:
        """Trains the steps; the driver runs at most one step ahead of the trainer."""
        for replica in self.rollout.replicas:
            replica.version = version
        self.source.begin(None, first - 1, version)
        ends = [0.0]
        for step in range(first, (last or self.config.steps) + 1):
            self.calls.wait_until(lambda: self.clock.now_s >= ends[-1 if len(ends) < 2 else -2])
            batch = self.source.next_batch(step, version)
            self._check(batch, version)
            ends.append(self.clock.call_at(max(self.clock.now_s, ends[-1]) + self.train_s))
            self.weight_sync.trained_at = ends[-1]
            version += 1
            self.source.sync_weights(self.rollout, self.rollout, version)
            self.at_end()
            if evaluate_every and step % evaluate_every == 0:
                self.rollout.before_call["generate"]()
                assert {replica.version for replica in self.rollout.replicas} == {version}
        self.ends = ends[1:]

    def _check(self, batch: Batch, version: int) -> None:
        ids, versions = batch.get("prompt_id").tolist(), batch.get("weight_version").tolist()
        assert batch.get("sample").tolist() == list(range(SAMPLES)) * (len(ids) // SAMPLES)
        assert ids == np.repeat(ids[::SAMPLES], SAMPLES).tolist()
        assert len(ids) == self.config.batch_size or self.config.on_failure == "drop"
        self.trained.update(ids[::SAMPLES])
        pairs = list(zip(versions[::2], versions[1::2], strict=True))
        self.ages += [version - min(pair) for pair in pairs]
        self.mixed += sum(first != last for first, last in pairs)


def test_every_prompt_is_trained_once_in_order_within_the_staleness_bound() -> None:
    run = SimulatedRun(config_of(max_staleness=1))
    run.run()
    assert run.trained == Counter(range(160)) == run.prompts.built  # each row is built once
    assert max(run.ages) == 1
    groups = {"admitted": 160, "waiting": 0, "running": 0, "complete": 0, "trained": 160}
    groups |= {"dropped": dict.fromkeys(DROP_REASONS, 0)}
    assert run.source.summary() == {"groups": groups, "replicas_lost": 0}


def test_a_slow_weight_comparison_does_not_block() -> None:
    run, results = SimulatedRun(config_of(max_staleness=1, steps=6)), list[float]()

    def read() -> None:
        for each in run.source.pop_metrics():
            if isinstance(each, ComparedWeights):
                results.append(each.get()["weights_compared"])

    run.weight_sync.compared_s = 1.2  # a step is 0.5
    run.at_end = read
    run.run()
    assert run.trained == Counter(range(24)) and results == [1.0] * len(results)
    in_steps = len(results)
    run.calls.wait_until(lambda: run.clock.now_s > run.ends[-1])
    read()
    assert in_steps >= 4 and len(results) > in_steps


@pytest.mark.parametrize(("mean_s", "train_s"), [(0.3, 0.3), (0.1, 0.3), (0.9, 0.3)])
def test_the_slower_side_never_waits(mean_s: float, train_s: float) -> None:
    """Two replicas with two slots generate a step's four prompts concurrently."""
    run = SimulatedRun(config_of(max_staleness=2), lambda prompt: mean_s, train_s=train_s)
    run.run()
    assert 35 * max(mean_s, train_s) / (run.ends[-1] - run.ends[4]) > 0.95


def long_tailed(prompt: int) -> float:
    return 0.2 * random.Random(prompt).lognormvariate(-0.5, 1.0)


@pytest.mark.parametrize(("seed", "steps"), [pytest.param(0, 500, marks=pytest.mark.slow), (1, 60), (2, 60), (3, 60)])
def test_with_random_losses_every_prompt_is_trained_once_or_dropped_with_a_reason(seed: int, steps: int) -> None:
    chance = random.Random(seed)
    bounds: dict[str, Any] = {"max_staleness": chance.choice([1, 2, 3]), "overprovision": chance.choice([0, 2])}
    config = config_of(steps=steps, max_concurrent=chance.choice([None, 6]), interrupt=chance.random() < 0.5, **bounds)
    run = SimulatedRun(config, long_tailed, num_replicas=3, train_s=chance.choice([0.1, 0.4]), kills=chance)
    run.run()
    summary = run.source.summary()
    assert summary["replicas_lost"] > steps / 100
    assert set(run.trained.values()) == {1} and len(run.trained) == 4 * steps == summary["groups"]["trained"]
    dropped = sum(summary["groups"]["dropped"].values())
    assert run.prompts.drawn == summary["groups"]["admitted"] == 4 * steps + dropped + len(left_over(run))
    assert max(run.ages) <= bounds["max_staleness"]
    assert dropped == 0 or bounds["overprovision"]


@pytest.mark.parametrize("max_staleness", [1, 4])
def test_a_straggler_does_not_slow_the_other_replicas_down(max_staleness: int) -> None:
    def steps_per_s(slower: Sequence[float], num_replicas: int) -> float:
        run = SimulatedRun(
            config_of(steps=60, max_staleness=max_staleness), num_replicas=num_replicas, train_s=0.02, slower=slower
        )
        run.run()
        return 39 / (run.ends[-1] - run.ends[20])

    assert steps_per_s((10.0,), 3) >= 0.95 * steps_per_s((), 2)


def left_over(run: SimulatedRun) -> list[int]:
    return list(run.source.snapshot()[0]["untrained"])


def resumed(run: SimulatedRun, path: Path, seconds: Callable[[int], float]) -> tuple[SimulatedRun, list[int]]:
    """Returns a run that is restored from a checkpoint, and the prompts whose rows the checkpoint holds."""
    state, rows = run.source.snapshot()
    state = json.loads(json.dumps(state))
    again = SimulatedRun(run.config, seconds, train_s=run.train_s)
    if rows is None:
        again.source.restore(state, None)
        return again, []
    save_rows(rows, path).get()
    again.source.restore(state, SavedRows(path, tuple(name for name in rows.columns if name not in IDENTITY)))
    return again, rows.get("prompt_id").tolist()[::SAMPLES]


def test_a_checkpoint_keeps_complete_rows_and_running_prompts_are_generated_first(tmp_path: Path) -> None:
    begun: list[int] = []

    def seconds(prompt: int) -> float:
        begun.append(prompt)
        return long_tailed(prompt)

    run = SimulatedRun(config_of(max_staleness=2), long_tailed, train_s=0.1)
    run.run(last=12)
    pending = list(run.source.snapshot()[0]["untrained"])
    again, finished = resumed(run, tmp_path / FILE, seconds)
    running = [index for index in pending if index not in finished]
    assert finished and running and not set(pending) & set(run.trained)
    again.run(first=13, version=12)
    assert sorted(begun) == sorted(set(range(48, 160)) - set(finished))
    assert set(begun[:2]) <= set(running)
    assert list(again.trained)[: len(pending)] == pending
    assert run.trained + again.trained == Counter(range(160))
    assert max(again.ages) <= 2


def test_lost_replicas_are_counted_over_resumes_and_restarts(tmp_path: Path) -> None:
    run = SimulatedRun(config_of(max_staleness=1), kills=random.Random(0))
    run.run(last=20)
    num_lost = run.source.summary()["replicas_lost"]
    again, _ = resumed(run, tmp_path / FILE, lambda prompt: 0.3)
    assert again.calls.num_lost_replicas == num_lost > 0
    again.calls.num_lost_replicas += 1  # after the checkpoint, which a restart of the program loads again
    again.source.restore(run.source.snapshot()[0], None)
    assert again.calls.num_lost_replicas == num_lost + 1


@pytest.mark.parametrize("seed", range(8))
def test_with_random_resumes_no_prompt_is_trained_twice_lost_or_too_stale(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    bounds: dict[str, Any] = {"max_staleness": chance.choice([1, 2, 3]), "overprovision": chance.choice([0, 2])}
    config = config_of(interrupt=chance.random() < 0.5, **bounds)
    run, total, dropped, done = (
        SimulatedRun(config, long_tailed, train_s=chance.choice([0.1, 0.4])),
        Counter[int](),
        0,
        0,
    )
    for last in (*sorted(chance.sample(range(1, 40), 4)), 40):
        run.run(first=done + 1, last=last, version=done)
        total, done = total + run.trained, last
        dropped = sum(run.source.summary()["groups"]["dropped"].values())  # since the start of the first run
        assert max(run.ages) <= bounds["max_staleness"]
        drawn, num_pending = run.prompts.drawn, len(left_over(run))
        assert drawn == 4 * done + dropped + num_pending
        run, _ = resumed(run, tmp_path / f"{last}-{FILE}", long_tailed)
    assert set(total.values()) == {1} and len(total) == 160
    assert dropped == 0 or bounds["overprovision"]


def test_a_loss_is_reported_and_its_prompts_are_generated_again() -> None:
    run = SimulatedRun(config_of(max_staleness=1), kills=None)
    kill = random.Random(0)

    def once() -> None:
        if run.clock.now_s > 2 and not run.messages:
            run.rollout.replicas[0].kill(kill)

    run.calls.before.append(once)
    run.run()
    assert run.trained == Counter(range(160))
    assert len(run.messages) == 1 and "rollout rank 0" in run.messages[0]


def test_without_interrupt_all_tokens_of_a_row_have_one_version() -> None:
    run = SimulatedRun(config_of(max_staleness=2, interrupt=False), long_tailed)
    run.run()
    assert run.mixed == 0
    SimulatedRun.run(interrupted := SimulatedRun(config_of(max_staleness=2), long_tailed))
    assert interrupted.mixed > 0


@pytest.mark.parametrize("interrupt", [True, False])
def test_before_an_evaluation_all_replicas_have_the_newest_weights(interrupt: bool) -> None:
    run = SimulatedRun(config_of(max_staleness=3, interrupt=interrupt))
    run.run(last=5)
    run.rollout.before_call["generate"]()
    assert {replica.version for replica in run.rollout.replicas} == {5}


@pytest.mark.parametrize("interrupt", [True, False])
@pytest.mark.parametrize("every", [1, 3, 4, 5])
@pytest.mark.parametrize("seed", one_of(*range(3)))
def test_an_evaluation_starts_after_dropped_groups(interrupt: bool, every: int, seed: int) -> None:
    seconds = lambda prompt: long_tailed(1000 * seed + prompt)  # noqa: E731 (same signature as the default)
    run = SimulatedRun(
        config_of(max_staleness=1, overprovision=2, interrupt=interrupt), seconds, num_replicas=3, train_s=0.1
    )
    run.run(evaluate_every=every)
    assert set(run.trained.values()) == {1} and len(run.trained) == 160
    assert run.source.summary()["groups"]["dropped"]["stale"] > 0


def test_weight_wait_is_the_time_blocked_by_the_staleness_bound() -> None:
    """A weight update takes 0.01 s, generation of a step 0.1 s, training 1 s."""
    run = SimulatedRun(config_of(max_staleness=1), lambda prompt: 0.1, train_s=1.0)
    run.run()
    ends_ns = [round(end * 1e9) for end in run.ends]
    assert run.source.weight_wait_s(20, (), ends_ns[9], ends_ns[19]) == pytest.approx(10 * (1 - 0.01 - 0.1), abs=0.02)
    # All prompts of the last step are dispatched before its weights are available.
    assert run.source.weight_wait_s(40, (), ends_ns[38], ends_ns[39]) == 0


def test_busy_replicas_do_not_wait_for_weights() -> None:
    run = SimulatedRun(config_of(max_staleness=2), lambda prompt: 0.9, train_s=0.3)
    run.run()
    assert run.source.weight_wait_s(40, (), 0, round(run.clock.now_s * 1e9)) == 0


def test_a_lost_trainer_is_not_counted_as_a_lost_replica() -> None:
    run = SimulatedRun(config_of(max_staleness=1))
    run.weight_sync.lost = ProcessLost("actor", 0, 0, "weights", "it was killed")
    with pytest.raises(ProcessLost, match=r"actor\.weights"):
        run.run()
    assert run.source.summary()["replicas_lost"] == 0 and run.messages == []


def test_a_refused_prompt_is_dropped_reported_and_counted() -> None:
    run = SimulatedRun(config_of(max_staleness=1, max_concurrent=3), refuses=lambda prompt: prompt % 10 in (3, 4))
    run.run()
    refused = {prompt for prompt in range(run.prompts.drawn) if prompt % 10 in (3, 4)}
    assert run.trained == Counter(set(range(run.prompts.drawn)) - refused) and len(run.trained) == 160
    groups = run.source.summary()["groups"]
    assert (
        groups["dropped"] == dict.fromkeys(DROP_REASONS, 0) | {"refused": len(refused)}
        and groups["admitted"] == run.prompts.drawn
    )
    assert any(message.startswith("prompts, line 3: ") for message in run.messages)
    assert len(run.messages) == MAX_REFUSAL_MESSAGES < len(refused)


def test_the_failed_fraction_includes_the_groups_that_are_dropped_because_of_failures() -> None:
    """Every fifth prompt fails. A step trains the other groups of the first four."""
    settings = config_of(steps=4, max_staleness=1).model_dump()
    settings["reward"]["on_failure"] = "drop"
    run = SimulatedRun(OnPolicyConfig.model_validate(settings), fails=lambda prompt: prompt % 5 == 4)
    measured: list[Any] = []

    def read() -> None:
        values = [each.get() for each in run.source.pop_metrics() if isinstance(each, LocalRef)]
        measured.extend(each["reward_failed_fraction"] for each in values if "reward_failed_fraction" in each)

    run.at_end = read
    run.run()
    num_dropped = run.source.summary()["groups"]["dropped"]["failed"]
    assert num_dropped >= 3
    assert sum(fraction.total for fraction in measured) == SAMPLES * num_dropped
    assert sum(fraction.count for fraction in measured) == SAMPLES * (run.trained.total() + num_dropped)


def test_a_run_ends_if_every_prompt_is_refused() -> None:
    run = SimulatedRun(config_of(max_staleness=1), refuses=lambda prompt: True)
    with pytest.raises(UserError, match=r"\b100\b"):
        run.run()


def test_detaching_removes_the_idle_callback() -> None:
    run = SimulatedRun(config_of(max_staleness=3))
    run.run(last=5)
    run.source.detach()
    assert run.calls.attended == []


def test_without_staleness_every_schedule_is_sync() -> None:
    run = SimulatedRun(config_of(max_staleness=1))
    context: Any = run.source._context
    kinds = {"sync": {"kind": "sync"}, "one": {"kind": "one_step_off"}, "async": {"kind": "async", "max_staleness": 0}}
    for schedule in kinds.values():
        config = run.config.model_validate(run.config.model_dump() | {"schedule": schedule})
        assert not make_rollout_source(replace(context, config=config)).is_streaming


def test_group_metrics_count_since_the_previous_step() -> None:
    before = GroupCounts(admitted=4, waiting=0, running=2, complete=1, trained=0, dropped={"stale": 0, "refused": 1})
    counts = GroupCounts(admitted=9, waiting=1, running=2, complete=3, trained=1, dropped={"stale": 2, "refused": 1})
    assert group_metrics(counts, before) == {
        "buffer_depth": 3.0,
        "running_groups": 2.0,
        "waiting_groups": 1.0,
        "admitted_groups": 5.0,
        "trained_groups": 1.0,
        "dropped_groups": 2.0,
        "dropped_stale": 2.0,
        "dropped_refused": 0.0,
    }
    first = group_metrics(counts)
    assert (first["admitted_groups"], first["dropped_groups"], first["dropped_refused"]) == (9.0, 3.0, 1.0)
