"""Streaming, with makers under a virtual clock: what is trained, when, and that nothing is lost or trained twice."""

import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flowrl.checkpoints.saved_rows import FILE, IDENTITY, SavedRows, save_rows
from flowrl.config import OnPolicyConfig, UserError
from flowrl.controller.errors import ProcessLost
from flowrl.data.batch.batch import Batch
from flowrl.schedules.rollout_source import BatchRollouts, PromptQueue, RolloutContext
from flowrl.schedules.streaming_rollouts import SAID_REFUSED, StreamingRollouts, rollout_source_of
from flowrl.weight_sync.verification import ComparedWeights
from tests.configs import grpo_settings
from tests.report.call_events import timed
from tests.schedules.virtual_replicas import Calls, Clock, Maker, Numbers, Rollout, WeightSync, moments

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


class World:
    """A trainer that takes so long for a step, and makers that take so long for a prompt."""

    def __init__(
        self,
        config: OnPolicyConfig,
        seconds: Callable[[int], float] = lambda prompt: 0.3,
        *,
        makers: int = 2,
        train_s: float = 0.5,
        kills: Any = None,
        refuses: Callable[[int], bool] = lambda prompt: False,
        slower: Sequence[float] = (),
    ) -> None:
        self.config, self.train_s, self.clock = config, train_s, Clock()
        slots = config.rollout.max_num_seqs // SAMPLES
        takes = [lambda prompt, times=times: times * seconds(prompt) for times in [*slower, *[1.0] * makers][:makers]]
        self.rollout: Any = Rollout([Maker(rank, self.clock, takes[rank], slots, refuses) for rank in range(makers)])
        self.weight_sync: Any = WeightSync(self.clock)
        self.calls: Any = Calls(self.clock)
        self.numbers: Any = Numbers()
        self.said: list[str] = []
        draws = PromptQueue(self.numbers, SAMPLES)
        now_ns = lambda: round(self.clock.now * 1e9)  # noqa: E731 (it is what the others are)
        setting = RolloutContext(
            config, self.rollout, draws, self.weight_sync, self.calls, self.said.append, now_ns=now_ns
        )
        self.makers = StreamingRollouts(setting)
        self.trained: Counter[int] = Counter()
        self.ages: list[int] = []
        self.mixed = 0
        """Rows whose tokens are of several versions."""
        self.at_end: Callable[[], None] = lambda: None
        """Is called at the end of each step."""
        if kills is not None:
            self._kill_at(kills)

    def _kill_at(self, chance: random.Random) -> None:
        times = moments(chance, 4.0)
        due = [next(times)]

        def kill() -> None:
            while self.clock.now >= due[0]:
                chance.choice(self.rollout.makers).kill(chance)
                due[0] = self.clock.at(next(times))

        self.clock.at(due[0])
        self.calls.before.append(kill)

    def run(self, first: int = 1, last: int | None = None, version: int = 0, evaluate_every: int = 0) -> None:
        """Trains the steps, the trainer as far behind the driver as a run allows: one step."""
        for maker in self.rollout.makers:
            maker.version = version
        self.makers.begin(None, first - 1, version)
        ends = [0.0]
        for step in range(first, (last or self.config.steps) + 1):
            self.calls.wait_until(lambda: self.clock.now >= ends[-1 if len(ends) < 2 else -2])
            batch = self.makers.batch(step, version)
            self._check(batch, version)
            ends.append(self.clock.at(max(self.clock.now, ends[-1]) + self.train_s))
            self.weight_sync.trained_at = ends[-1]
            version += 1
            self.makers.sync_weights(self.rollout, self.rollout, version)
            self.at_end()
            if evaluate_every and step % evaluate_every == 0:
                self.makers.catch_up()
                assert {maker.version for maker in self.rollout.makers} == {version}
        self.ends = ends[1:]

    def _check(self, batch: Batch, version: int) -> None:
        ids, versions = batch.get("prompt_id").tolist(), batch.get("weight_version").tolist()
        assert batch.get("sample").tolist() == list(range(SAMPLES)) * (len(ids) // SAMPLES)
        assert ids == np.repeat(ids[::SAMPLES], SAMPLES).tolist() and len(ids) == self.config.batch_size
        self.trained.update(ids[::SAMPLES])
        pairs = list(zip(versions[::2], versions[1::2], strict=True))
        self.ages += [version - min(pair) for pair in pairs]
        self.mixed += sum(first != last for first, last in pairs)


def test_every_prompt_is_trained_once_in_order_and_none_is_too_old() -> None:
    world = World(config_of(max_staleness=1))
    world.run()
    assert world.trained == Counter(range(160))
    assert max(world.ages) == 1
    groups = {"admitted": 160, "waiting": 0, "running": 0, "complete": 0, "trained": 160}
    groups |= {"dropped": {"stale": 0, "refused": 0}}
    assert world.makers.summary() == {"groups": groups, "makers_lost": 0}


def test_a_comparison_of_weights_that_is_late_holds_up_nobody() -> None:
    world, found = World(config_of(max_staleness=1, steps=6)), list[float]()

    def read() -> None:
        for each in world.makers.logged():
            if isinstance(each, ComparedWeights):
                found.append(each.get()["weights_compared"])

    world.weight_sync.compared_s = 1.2  # a step is 0.5
    world.at_end = read
    world.run()
    assert world.trained == Counter(range(24)) and found == [1.0] * len(found)
    in_steps = len(found)
    world.calls.wait_until(lambda: world.clock.now > world.ends[-1])
    read()
    assert in_steps >= 4 and len(found) > in_steps


@pytest.mark.parametrize(("mean_s", "train_s"), [(0.3, 0.3), (0.1, 0.3), (0.9, 0.3)])
def test_the_slower_side_never_waits(mean_s: float, train_s: float) -> None:
    """Two makers of two slots do a step's four prompts in the time of one."""
    world = World(config_of(max_staleness=2), lambda prompt: mean_s, train_s=train_s)
    world.run()
    assert 35 * max(mean_s, train_s) / (world.ends[-1] - world.ends[4]) > 0.95


def long_tailed(prompt: int) -> float:
    return 0.2 * random.Random(prompt).lognormvariate(-0.5, 1.0)


@pytest.mark.parametrize(("seed", "steps"), [(0, 500), (1, 60), (2, 60), (3, 60), (4, 60)])
def test_with_makers_killed_at_random_every_prompt_is_trained_once_or_dropped_with_a_reason(
    seed: int, steps: int
) -> None:
    chance = random.Random(seed)
    bounds: dict[str, Any] = {"max_staleness": chance.choice([1, 2, 3]), "overprovision": chance.choice([0, 2])}
    config = config_of(steps=steps, max_concurrent=chance.choice([None, 6]), interrupt=chance.random() < 0.5, **bounds)
    world = World(config, long_tailed, makers=3, train_s=chance.choice([0.1, 0.4]), kills=chance)
    world.run()
    told = world.makers.summary()
    assert told["makers_lost"] > steps / 100
    assert set(world.trained.values()) == {1} and len(world.trained) == 4 * steps == told["groups"]["trained"]
    dropped = sum(told["groups"]["dropped"].values())
    assert world.numbers.drawn == told["groups"]["admitted"] == 4 * steps + dropped + len(left_over(world))
    assert max(world.ages) <= bounds["max_staleness"]
    assert dropped == 0 or bounds["overprovision"]


@pytest.mark.parametrize("max_staleness", [1, 4])
def test_a_maker_ten_times_slower_costs_the_others_nothing_once_it_is_known(max_staleness: int) -> None:
    def steps_per_s(slower: Sequence[float], makers: int) -> float:
        world = World(config_of(steps=60, max_staleness=max_staleness), makers=makers, train_s=0.02, slower=slower)
        world.run()
        return 39 / (world.ends[-1] - world.ends[20])

    assert steps_per_s((10.0,), 3) >= 0.95 * steps_per_s((), 2)


def left_over(world: World) -> list[int]:
    return world.makers.state()["untrained"]


def gone_on(world: World, path: Path, seconds: Callable[[int], float]) -> tuple[World, list[int]]:
    """The run that goes on after a checkpoint of a step, not begun; and the prompts whose rows are in that."""
    state, rows = json.loads(json.dumps(world.makers.state())), world.makers.rows()
    again = World(world.config, seconds, train_s=world.train_s)
    if rows is None:
        again.makers.restore(state, None)
        return again, []
    save_rows(rows, path).get()
    again.makers.restore(state, SavedRows(path, tuple(name for name in rows.columns if name not in IDENTITY)))
    return again, rows.get("prompt_id").tolist()[::SAMPLES]


def test_a_checkpoint_keeps_finished_rows_and_what_is_not_is_generated_first(tmp_path: Path) -> None:
    begun: list[int] = []

    def seconds(prompt: int) -> float:
        begun.append(prompt)
        return long_tailed(prompt)

    world = World(config_of(max_staleness=2), long_tailed, train_s=0.1)
    world.run(last=12)
    untrained = world.makers.state()["untrained"]
    again, finished = gone_on(world, tmp_path / FILE, seconds)
    running = [draw for draw in untrained if draw not in finished]
    assert finished and running and not set(untrained) & set(world.trained)
    again.run(first=13, version=12)
    assert sorted(begun) == sorted(set(range(48, 160)) - set(finished))
    assert set(begun[:2]) <= set(running)
    assert list(again.trained)[: len(untrained)] == untrained
    assert world.trained + again.trained == Counter(range(160))
    assert max(again.ages) <= 2


@pytest.mark.parametrize("seed", range(8))
def test_gone_on_with_at_random_nothing_is_trained_twice_lost_or_too_old(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    bounds: dict[str, Any] = {"max_staleness": chance.choice([1, 2, 3]), "overprovision": chance.choice([0, 2])}
    config = config_of(interrupt=chance.random() < 0.5, **bounds)
    world, total, dropped, done = World(config, long_tailed, train_s=chance.choice([0.1, 0.4])), Counter[int](), 0, 0
    for last in (*sorted(chance.sample(range(1, 40), 4)), 40):
        world.run(first=done + 1, last=last, version=done)
        total, done = total + world.trained, last
        dropped += sum(world.makers.summary()["groups"]["dropped"].values())
        assert max(world.ages) <= bounds["max_staleness"]
        drawn, left = world.numbers.drawn, len(left_over(world))
        assert drawn == 4 * done + dropped + left
        world, _ = gone_on(world, tmp_path / f"{last}-{FILE}", long_tailed)
    assert set(total.values()) == {1} and len(total) == 160
    assert dropped == 0 or bounds["overprovision"]


def test_a_lost_maker_is_told_of_and_what_it_had_is_given_to_others_first() -> None:
    world = World(config_of(max_staleness=1), kills=None)
    kill = random.Random(0)

    def once() -> None:
        if world.clock.now > 2 and not world.said:
            world.rollout.makers[0].kill(kill)

    world.calls.before.append(once)
    world.run()
    assert world.trained == Counter(range(160))
    assert world.said[0].startswith("rollout on rank 0 is lost with ")


def test_a_maker_that_may_not_be_interrupted_has_one_version_for_all_tokens_of_a_row() -> None:
    world = World(config_of(max_staleness=2, interrupt=False), long_tailed)
    world.run()
    assert world.mixed == 0
    World.run(interrupted := World(config_of(max_staleness=2), long_tailed))
    assert interrupted.mixed > 0


def test_a_recipe_that_publishes_nothing_is_told() -> None:
    world = World(config_of(max_staleness=1))
    world.makers.begin(None, 0, 0)
    world.makers.batch(1, 0)
    with pytest.raises(UserError, match=r"step 2 begins with 0 of them, not 1: call run\.sync_weights once at the end"):
        world.makers.batch(2, 0)


@pytest.mark.parametrize("held", [True, False])
def test_before_an_evaluation_all_makers_are_given_the_newest_weights(held: bool) -> None:
    world = World(config_of(max_staleness=3, interrupt=held))
    world.run(last=5)
    world.makers.catch_up()
    assert {maker.version for maker in world.rollout.makers} == {5}


@pytest.mark.parametrize("interrupt", [True, False])
@pytest.mark.parametrize("every", [1, 3, 4, 5])
@pytest.mark.parametrize("seed", range(3))
def test_an_evaluation_begins_whatever_was_dropped_before_it(interrupt: bool, every: int, seed: int) -> None:
    seconds = lambda prompt: long_tailed(1000 * seed + prompt)  # noqa: E731 (it is what the others are)
    world = World(config_of(max_staleness=1, overprovision=2, interrupt=interrupt), seconds, makers=3, train_s=0.1)
    world.run(evaluate_every=every)
    assert set(world.trained.values()) == {1} and len(world.trained) == 160
    assert world.makers.summary()["groups"]["dropped"]["stale"] > 0


def test_waiting_for_weights_is_the_time_in_which_no_more_prompts_may_be_begun() -> None:
    """Two makers take 0.01 s for new weights and 0.1 s for their two prompts of a step, which trains for 1 s."""
    world = World(config_of(max_staleness=1), lambda prompt: 0.1, train_s=1.0)
    world.run()
    ends_ns = [round(end * 1e9) for end in world.ends]
    assert world.makers.waited_s(20, (), ends_ns[9], ends_ns[19]) == pytest.approx(10 * (1 - 0.01 - 0.1), abs=0.02)
    # For the last step all prompts are given out when the weights of the one before the last are there.
    assert world.makers.waited_s(40, (), ends_ns[38], ends_ns[39]) == 0


def test_makers_that_always_have_work_wait_for_no_weights() -> None:
    world = World(config_of(max_staleness=2), lambda prompt: 0.9, train_s=0.3)
    world.run()
    assert world.makers.waited_s(40, (), 0, round(world.clock.now * 1e9)) == 0


def test_what_a_trainer_loses_costs_no_maker() -> None:
    world = World(config_of(max_staleness=1))
    world.weight_sync.lost = ProcessLost("actor", 0, 0, "weights", "it was killed")
    with pytest.raises(ProcessLost, match=r"actor\.weights failed on rank 0"):
        world.run()
    assert world.makers.summary()["makers_lost"] == 0 and world.said == []


def test_a_prompt_that_the_engine_refuses_is_dropped_with_a_line_and_counted() -> None:
    world = World(config_of(max_staleness=1, max_concurrent=3), refuses=lambda prompt: prompt % 10 in (3, 4))
    world.run()
    refused = {prompt for prompt in range(world.numbers.drawn) if prompt % 10 in (3, 4)}
    assert world.trained == Counter(set(range(world.numbers.drawn)) - refused) and len(world.trained) == 160
    groups = world.makers.summary()["groups"]
    assert groups["dropped"] == {"stale": 0, "refused": len(refused)} and groups["admitted"] == world.numbers.drawn
    assert "prompts, line 3: the prompt is refused here; it is dropped, as rollout refuses it" in world.said
    assert len(world.said) == SAID_REFUSED < len(refused)


def test_where_every_prompt_is_refused_the_run_ends_with_the_sentence() -> None:
    world = World(config_of(max_staleness=1), refuses=lambda prompt: True)
    with pytest.raises(UserError, match="the prompt is refused here; rollout has refused 100 prompts one after"):
        world.run()


def test_at_the_end_makers_have_nothing_left_and_nobody_looks_after_them() -> None:
    world = World(config_of(max_staleness=3))
    world.run(last=5)
    world.makers.leave()
    assert world.calls.attended == []


def test_without_staleness_every_schedule_is_sync() -> None:
    world = World(config_of(max_staleness=1))
    setting: Any = world.makers._setting
    kinds = {"sync": {"kind": "sync"}, "one": {"kind": "one_step_off"}, "async": {"kind": "async", "max_staleness": 0}}
    for schedule in kinds.values():
        config = world.config.model_validate(world.config.model_dump() | {"schedule": schedule})
        found = rollout_source_of(
            RolloutContext(config, setting.rollout, setting.prompts, setting.weight_sync, setting.calls, print)
        )
        assert isinstance(found, BatchRollouts)


@pytest.mark.parametrize(("ahead", "last_waits"), [(0, 39), (1, 38)])
def test_whole_batches_wait_for_weights_as_long_as_more_is_to_be_generated(ahead: int, last_waits: int) -> None:
    world = World(config_of(max_staleness=1))
    found = BatchRollouts(world.makers._setting, ahead=ahead)
    events = [
        timed(1, "rollout.generate", "cpu:0", (0, 0, 0, 2 * 10**9, 2 * 10**9)),
        timed(2, "rollout.load_weights", "cpu:0", (0, 0, 5 * 10**9, 6 * 10**9, 6 * 10**9)),
    ]
    waited = [found.waited_s(step, events, 0, 6 * 10**9) for step in (1, last_waits, last_waits + 1, 40)]
    assert waited == [3.0, 3.0, 0.0, 0.0]
