"""Evaluations alongside training under a virtual clock: pinned versions, staleness, losses, and the time of a run."""

import random
from collections import Counter
from typing import Any

import pytest

from flowrl.config import OnPolicyConfig, UserError
from flowrl.data.batch.batch import Batch
from flowrl.schedules.rewards import HeldOutResponses
from flowrl.schedules.scheduler import ScheduleLimits, Scheduler, UpdateWeights
from tests.schedules.test_replica_stream import SimulatedRun, long_tailed
from tests.schedules.test_replica_stream import config_of as streaming_config

PROMPTS = (5, 3, 8)


def config_of(concurrent_evaluation: bool | str = True, **settings: Any) -> OnPolicyConfig:
    return streaming_config(concurrent_evaluation=concurrent_evaluation, **settings)


def stream_of(run: SimulatedRun) -> Any:
    return run.source._stream


def start_evaluation(run: SimulatedRun, num_prompts: int = len(PROMPTS)) -> HeldOutResponses | None:
    """Starts an evaluation of the newest weights. Its score is the index of the prompt."""
    prompts = Batch.from_rows([{"prompt_id": PROMPTS[i % len(PROMPTS)] + i} for i in range(num_prompts)])

    def score(batch: Batch) -> Batch:
        return batch.union(batch["prompt_id"].rename({"prompt_id": "scores"}))

    return stream_of(run)._evaluate_alongside(prompts.with_samples(2), 0.0, (), score)


def evaluate_every(run: SimulatedRun, every: int, num_prompts: int = len(PROMPTS)) -> dict[int, HeldOutResponses]:
    """Evaluates after every `every` steps of the run. Returns the responses by step, which `run.run` fills."""
    started: dict[int, HeldOutResponses] = {}
    step = 0

    def at_end() -> None:
        nonlocal step
        step += 1
        if step % every == 0 and (responses := start_evaluation(run, num_prompts)) is not None:
            started[step] = responses

    run.at_end = at_end
    return started


def assert_measures_the_step(run: SimulatedRun, step: int, responses: HeldOutResponses) -> None:
    run.calls.wait_until(responses.done)
    batch = responses.get()
    assert set(batch.get("weight_version").tolist()) == {step}
    assert batch.get("scores").tolist() == responses.prompts.get("prompt_id").tolist()
    assert batch.get("sample").tolist() == [0, 1] * (len(batch) // 2)


@pytest.mark.parametrize("interrupt", [True, False])
@pytest.mark.parametrize("num_replicas", [1, 3])
def test_an_evaluation_has_one_version_while_training_keeps_its_bound(interrupt: bool, num_replicas: int) -> None:
    run = SimulatedRun(config_of(max_staleness=2, interrupt=interrupt), long_tailed, num_replicas=num_replicas)
    started = evaluate_every(run, 3)
    run.run()
    assert list(started) == list(range(3, 40, 3))  # the last step is evaluated by all replicas
    for step, responses in started.items():
        assert_measures_the_step(run, step, responses)
    assert run.trained == Counter(range(160)) and max(run.ages) <= 2


@pytest.mark.parametrize("seed", range(6))
def test_lost_replicas_lose_no_evaluation(seed: int) -> None:
    chance = random.Random(seed)
    config = config_of(steps=60, max_staleness=chance.choice([1, 2]), interrupt=chance.random() < 0.5)
    run = SimulatedRun(config, long_tailed, num_replicas=chance.choice([1, 2, 3]), train_s=0.3, kills=chance)
    started = evaluate_every(run, chance.choice([1, 4]), num_prompts=6)
    run.run()
    assert run.source.summary()["replicas_lost"] > 1 and len(started) >= 14
    for step, responses in started.items():
        assert_measures_the_step(run, step, responses)
    assert run.trained == Counter(range(240)) and max(run.ages) <= config.schedule.staleness


def test_training_does_not_wait_for_an_evaluation() -> None:
    """A step trains for 0.5 s and an evaluation takes 2 s. Both replicas generate a step in 0.3 s."""

    def seconds(every: int, is_alongside: bool) -> float:
        schedule = {"max_staleness": 2, "concurrent_evaluation": is_alongside}
        run = SimulatedRun(config_of(**schedule), num_replicas=2)
        if is_alongside:
            started = evaluate_every(run, every, num_prompts=10)
            run.run()
            assert len(started) == 40 // every - 1
        else:
            run.run(evaluate_every=every)  # waits for the newest weights, and not for the responses
        return run.ends[-1]

    without = seconds(100, False)
    assert seconds(8, True) <= 1.02 * without


def test_the_second_evaluation_waits_for_the_first() -> None:
    run = SimulatedRun(config_of(max_staleness=2), num_replicas=2)
    started = evaluate_every(run, 1, num_prompts=20)
    run.run(last=8)
    assert [responses.done() for step, responses in started.items() if step < 8] == [True] * 7
    for step, responses in started.items():
        assert_measures_the_step(run, step, responses)


def test_two_sets_of_a_step_have_the_same_version() -> None:
    run = SimulatedRun(config_of(max_staleness=2), num_replicas=2)
    run.run(last=4)
    started = [start_evaluation(run, num_prompts) for num_prompts in (2, 5)]
    for responses, num_prompts in zip(started, (2, 5), strict=True):
        assert responses is not None and len(responses.prompts) == 2 * num_prompts
        assert_measures_the_step(run, 4, responses)


def test_a_blocking_generation_waits_for_the_pinned_replica() -> None:
    run = SimulatedRun(config_of(max_staleness=3))
    started = evaluate_every(run, 3, num_prompts=20)
    run.run(last=4)
    run.rollout.before_call["generate"]()
    assert {replica.version for replica in run.rollout.replicas} == {4}
    assert_measures_the_step(run, 3, started[3])


@pytest.mark.parametrize("changes", [{"concurrent_evaluation": False}, {}])
def test_without_a_later_step_or_by_setting_all_replicas_evaluate(changes: dict[str, Any]) -> None:
    run = SimulatedRun(config_of(steps=4, max_staleness=1, **changes))
    run.run(last=3 if changes else 4)
    assert start_evaluation(run) is None


@pytest.mark.parametrize(("generate_s", "train_s", "is_alongside"), [(0.1, 1.0, True), (0.9, 0.3, False)])
def test_by_default_idle_replicas_evaluate_alongside_training(
    generate_s: float, train_s: float, is_alongside: bool
) -> None:
    """Two replicas with two slots generate a step in `generate_s`. If training is slower, they wait for weights."""
    run = SimulatedRun(config_of("auto", max_staleness=2), lambda prompt: generate_s, train_s=train_s)
    started = evaluate_every(run, 4)
    run.run()
    assert list(started) == (list(range(4, 40, 4)) if is_alongside else [])
    for step, responses in started.items():
        assert_measures_the_step(run, step, responses)
    assert run.trained == Counter(range(160))


def test_the_sets_of_a_step_have_the_same_choice() -> None:
    """The second set alone has too many rows for the idle time."""
    run = SimulatedRun(config_of("auto", max_staleness=2), lambda prompt: 0.1, train_s=0.3)
    run.run(last=4)
    started = [start_evaluation(run, num_prompts) for num_prompts in (2, 500)]
    assert None not in started
    for responses in started:
        assert responses is not None
        assert_measures_the_step(run, 4, responses)


def test_a_transfer_to_all_replicas_at_once_cannot_pin(monkeypatch: pytest.MonkeyPatch) -> None:
    run = SimulatedRun(config_of(max_staleness=1))
    run.run(last=2)
    monkeypatch.setattr(type(run.weight_sync), "updates_all_replicas", lambda *_: True)
    assert start_evaluation(run) is None


def test_an_error_of_the_scores_is_raised() -> None:
    run = SimulatedRun(config_of(max_staleness=1))
    run.run(last=2)
    prompts = Batch.from_rows([{"prompt_id": 0}]).with_samples(1)

    def score(batch: Batch) -> Batch:
        raise UserError("no reward")

    responses = stream_of(run)._evaluate_alongside(prompts, 0.0, (), score)
    assert responses is not None
    with pytest.raises(UserError, match="no reward"):
        responses.get()


def test_a_pinned_replica_loads_no_newer_version() -> None:
    scheduler = Scheduler(ScheduleLimits(groups_per_step=1, max_staleness=1, slots=2), num_replicas=2)
    scheduler.add_version(1)
    assert [action for action in scheduler.pop_actions() if isinstance(action, UpdateWeights)] == [
        UpdateWeights(0, 1),
        UpdateWeights(1, 1),
    ]
    for replica in (0, 1):
        scheduler.confirm_update(replica)
    pinned = scheduler.pin_replica(2)
    assert pinned in (0, 1) and scheduler.pop_updates() == []
    scheduler.add_version(2)
    scheduler.add_version(3)
    updates = [action for action in scheduler.pop_actions() if isinstance(action, UpdateWeights)]
    assert {update.replica: update.version for update in updates} == {pinned: 2, 1 - pinned: 3}
    scheduler.confirm_update(pinned)
    assert [action for action in scheduler.pop_actions() if isinstance(action, UpdateWeights)] == []
    scheduler.unpin_replica(pinned)
    assert UpdateWeights(pinned, 3) in scheduler.pop_actions()
