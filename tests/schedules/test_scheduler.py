"""The decisions of a schedule, by hand and under a virtual clock in which everything goes wrong."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.schedules.rules import Abort, Action, Give, Rules, Update
from flowrl.schedules.scheduler import Scheduler
from tests.schedules.schedule_world import Weather, World


def run_all(scheduler: Scheduler, makers: int) -> None:
    """Every maker finishes what it has."""
    for maker in range(makers):
        for group in scheduler.running(maker):
            assert scheduler.finished(maker, group)


def confirm(scheduler: Scheduler, actions: list[Action]) -> None:
    """Weights are there as soon as they are told of."""
    for action in actions:
        if isinstance(action, Update):
            scheduler.updated(action.maker, action.version)


def step(scheduler: Scheduler, makers: int) -> tuple[int, ...]:
    """The groups of the next step, when makers work until it is complete."""
    for _ in range(100):
        if (taken := scheduler.take()) is not None:
            return taken.groups
        confirm(scheduler, scheduler.actions())
        run_all(scheduler, makers)
    raise AssertionError("no step is ever complete")


def given_to(actions: list[Action]) -> dict[int, tuple[int, ...]]:
    return {action.maker: action.groups for action in actions if isinstance(action, Give)}


# By hand.


def test_groups_go_to_who_has_least_to_do_and_no_further_than_staleness_admits():
    scheduler = Scheduler(Rules(groups_per_step=2, max_staleness=1, slots=8), makers=2)
    assert scheduler.actions() == [Give(0, (0, 2)), Give(1, (1, 3))]
    assert scheduler.starved == ()
    run_all(scheduler, 2)
    assert scheduler.actions() == [] and scheduler.starved == (0, 1)


def test_a_maker_that_would_get_nothing_with_newer_weights_either_does_not_wait_for_them():
    at_its_end = Scheduler(Rules(groups_per_step=2, max_staleness=1, slots=8, total=4), makers=2)
    at_its_end.actions()
    run_all(at_its_end, 2)
    assert at_its_end.actions() == [] and at_its_end.starved == ()
    limited = Scheduler(Rules(groups_per_step=1, max_staleness=0, max_concurrent=1, slots=8), makers=3)
    assert limited.actions() == [Give(0, (0,))] and limited.starved == ()
    limited.lost(1)
    run_all(limited, 3)
    assert limited.actions() == [Update(1, 0)] and limited.starved == (0, 2)  # a new process waits for its model


def test_a_maker_gets_what_it_works_on_and_hoards_nothing():
    scheduler = Scheduler(Rules(groups_per_step=8, max_staleness=0, slots=2), makers=2)
    assert scheduler.actions() == [Give(0, (0, 2)), Give(1, (1, 3))]
    scheduler.finished(1, 3)
    assert scheduler.actions() == [Give(1, (4,))]


def test_no_more_run_at_once_than_is_set():
    scheduler = Scheduler(Rules(groups_per_step=8, max_staleness=2, max_concurrent=3, slots=8), makers=2)
    assert scheduler.actions() == [Give(0, (0, 2)), Give(1, (1,))]


def test_training_follows_the_order_of_admission():
    scheduler = Scheduler(Rules(groups_per_step=2, max_staleness=1, slots=4), makers=1)
    scheduler.actions()
    for group in (1, 3, 2):
        scheduler.finished(0, group)
    assert scheduler.take() is None
    scheduler.finished(0, 0)
    taken = scheduler.take()
    assert taken is not None and (taken.version, taken.groups, taken.staleness) == (0, (0, 1), (0, 0))
    assert scheduler.untrained == (2, 3)


def test_with_staleness_zero_whole_batches_follow_each_publication():
    scheduler = Scheduler(Rules(groups_per_step=3, max_staleness=0, whole_batches=True), makers=2)
    for version in range(4):
        actions = scheduler.actions()
        assert sum(map(len, given_to(actions).values())) == 3
        confirm(scheduler, actions)
        run_all(scheduler, 2)
        assert scheduler.actions() == []
        taken = scheduler.take()
        assert taken is not None and set(taken.staleness) == {0} and scheduler.actions() == []
        scheduler.published(version + 1)


def test_one_step_off_begins_the_next_batch_when_the_one_before_is_done():
    scheduler = Scheduler(Rules(2, max_staleness=1, interrupt=False, whole_batches=True), makers=1)
    assert scheduler.actions() == [Give(0, (0, 1))]
    run_all(scheduler, 1)
    assert scheduler.actions() == [Give(0, (2, 3))]
    assert scheduler.take() is not None
    run_all(scheduler, 1)
    assert scheduler.actions() == []
    scheduler.published(1)
    assert scheduler.actions() == [Update(0, 1), Give(0, (4, 5))]


def test_a_maker_that_is_interrupted_takes_new_weights_at_once_and_one_version_at_a_time():
    scheduler = Scheduler(Rules(1, max_staleness=4, slots=1), makers=1)
    assert scheduler.actions() == [Give(0, (0,))]
    scheduler.published(1)
    assert scheduler.actions() == [Update(0, 1)]
    scheduler.published(2)
    scheduler.published(3)
    assert scheduler.actions() == []
    scheduler.updated(0, 1)
    assert scheduler.actions() == [Update(0, 3)]


def test_one_that_is_not_goes_on_with_the_old_weights_as_long_as_it_may():
    scheduler = Scheduler(Rules(1, max_staleness=1, slots=2, interrupt=False), makers=1)
    assert scheduler.actions() == [Give(0, (0, 1))]
    scheduler.finished(0, 0)
    assert scheduler.take() is not None
    scheduler.published(1)
    assert scheduler.actions() == []  # the next one would be too old, and group 1 runs still
    scheduler.finished(0, 1)
    assert scheduler.actions() == [Update(0, 1), Give(0, (2,))]


def half_done(lanes: tuple[tuple[int, ...], ...] | None = None) -> Scheduler:
    """After a step, with groups that are complete, run, and wait."""
    scheduler = Scheduler(Rules(2, max_staleness=2, slots=3, lanes=lanes), makers=2)
    scheduler.actions()
    for maker, group in ((0, 0), (1, 1), (1, 3)):
        assert scheduler.finished(maker, group)
    assert scheduler.take() is not None
    scheduler.published(1)
    confirm(scheduler, scheduler.actions())
    scheduler.lost(0)
    return scheduler


def test_what_a_run_before_had_not_trained_is_complete_or_waits():
    before = half_done()
    states = before.standing()
    assert states == [(0, None), (0, 0), *[(0, None)] * (len(before.untrained) - 2)]
    scheduler = Scheduler(Rules(2, max_staleness=2, slots=3), makers=2, version=1, steps_taken=1)
    assert scheduler.take_back(states, 1) == list(range(len(states)))
    assert (scheduler.counts.complete, scheduler.counts.waiting) == (1, len(states) - 1)
    assert scheduler.standing() == states
    assert 1 not in [group for groups in given_to(scheduler.actions()).values() for group in groups]
    run_all(scheduler, 2)
    taken = scheduler.take()
    assert taken is not None and (taken.version, taken.groups, taken.staleness) == (1, (0, 1), (0, 1))


@pytest.mark.parametrize("lanes", [((0,), (1,)), None])
def test_with_another_number_of_lanes_what_was_not_trained_is_dealt_out(lanes: tuple[tuple[int, ...], ...] | None):
    before = half_done(None if lanes else ((0,), (1,)))
    scheduler = Scheduler(Rules(2, max_staleness=2, slots=3, lanes=lanes), makers=2, version=1, steps_taken=1)
    count = len(scheduler.take_back(before.standing(), before.num_lanes))
    numbers = [lane for lane, _ in scheduler.standing()]
    assert count == len(before.untrained)
    assert abs(2 * numbers.count(0) - count) <= 1 if lanes else set(numbers) == {0}
    trained = [group for version in range(1, 5) for group in stepped(scheduler, version)]
    assert set(range(count)) <= set(trained) and len(set(trained)) == len(trained) == 8


def stepped(scheduler: Scheduler, version: int) -> tuple[int, ...]:
    groups = step(scheduler, 2)
    scheduler.published(version + 1)
    return groups


def test_groups_of_a_lost_maker_go_to_others_first():
    scheduler = Scheduler(Rules(4, max_staleness=0, slots=2), makers=2)
    assert scheduler.actions() == [Give(0, (0, 2)), Give(1, (1, 3))]
    scheduler.lost(0)
    assert not scheduler.finished(0, 0)
    assert scheduler.actions() == [Update(0, 0)]
    run_all(scheduler, 2)
    assert scheduler.actions() == [Give(1, (0, 2))]
    scheduler.updated(0, 0)
    run_all(scheduler, 2)
    taken = scheduler.take()
    assert taken is not None and taken.groups == (0, 1, 2, 3)


def test_a_new_process_is_given_groups_when_it_has_weights():
    scheduler = Scheduler(Rules(2, max_staleness=0, slots=2), makers=1)
    scheduler.actions()
    scheduler.lost(0)
    assert scheduler.actions() == [Update(0, 0)]
    assert scheduler.actions() == []
    scheduler.updated(0, 0)
    assert scheduler.actions() == [Give(0, (0, 1))]


def test_word_of_an_update_before_the_loss_is_not_taken_for_the_one_after():
    scheduler = Scheduler(Rules(2, max_staleness=1, slots=1), makers=1)
    scheduler.published(1)
    scheduler.actions()
    scheduler.lost(0)
    scheduler.published(2)
    assert scheduler.actions() == [Update(0, 2)]
    scheduler.updated(0, 1)
    assert scheduler.version(0) is None and scheduler.actions() == []


def test_a_dropped_group_frees_its_place():
    scheduler = Scheduler(Rules(2, max_staleness=0, slots=4), makers=1)
    assert scheduler.actions() == [Give(0, (0, 1))]
    scheduler.finished(0, 0)
    assert scheduler.drop(0, "refused") and scheduler.drop(1, "too long")
    assert scheduler.aborts() == [Abort(0, (1,))] and scheduler.aborts() == []
    assert scheduler.actions() == [Give(0, (2, 3))]
    run_all(scheduler, 1)
    taken = scheduler.take()
    assert taken is not None and taken.groups == (2, 3)
    assert scheduler.counts.dropped == {"stale": 0, "refused": 1, "too long": 1} and not scheduler.finished(0, 1)


def test_redundancy_leaves_the_slowest_behind_and_drops_it_when_it_is_too_old():
    scheduler = Scheduler(Rules(2, max_staleness=1, overprovision=1, slots=8), makers=1)
    assert scheduler.actions() == [Give(0, (0, 1, 2, 3, 4))]
    for group in (1, 2, 3, 4):
        scheduler.finished(0, group)
    taken = scheduler.take()
    assert taken is not None and taken.groups == (1, 2)
    taken = scheduler.take()
    assert taken is not None and (taken.groups, taken.staleness) == ((3, 4), (1, 1))
    assert scheduler.counts.dropped == {"stale": 1, "refused": 0}
    assert scheduler.aborts() == [Abort(0, (0,))] and scheduler.actions() == []


def test_the_last_step_is_short():
    scheduler = Scheduler(Rules(2, max_staleness=1, slots=8, total=3), makers=1)
    sizes = [len(step(scheduler, 1))]
    scheduler.published(1)
    sizes.append(len(step(scheduler, 1)))
    assert sizes == [2, 1] and scheduler.take() is None and scheduler.untrained == ()


def test_staleness_is_counted_from_where_a_run_goes_on():
    scheduler = Scheduler(Rules(2, max_staleness=1, slots=8, total=20), makers=1, version=9, steps_taken=9)
    assert scheduler.actions() == [Give(0, (0, 1))]  # the run has but one step left
    run_all(scheduler, 1)
    taken = scheduler.take()
    assert taken is not None and (taken.version, taken.staleness) == (9, (0, 0))


def test_a_lane_is_fed_by_its_makers_alone():
    rules = Rules(4, max_staleness=1, slots=8, lanes=((0,), (0, 1)))
    scheduler = Scheduler(rules, makers=2)
    assert given_to(scheduler.actions()) == {0: (0, 2, 4, 6), 1: (1, 3, 5, 7)}
    run_all(scheduler, 2)
    taken = scheduler.take()
    assert taken is not None and taken.groups == (0, 2, 1, 3)


def test_a_lane_waits_for_its_own():
    scheduler = Scheduler(Rules(2, max_staleness=0, slots=8, lanes=((0,), (1,))), makers=2)
    scheduler.actions()
    scheduler.lost(1)
    scheduler.finished(0, 0)
    assert scheduler.actions() == [Update(1, 0)] and scheduler.take() is None


# In a world where everything goes wrong.

ROUGH = Weather(kill_every_s=7.0, refused=0.1, slow_maker=5.0)
LANES = ((0, 1), (1, 2))


@pytest.mark.parametrize(
    "rules",
    [
        {"max_staleness": 1},
        {"max_staleness": 1, "interrupt": False},
        {"max_staleness": 4, "max_concurrent": 5},
        {"max_staleness": 2, "overprovision": 3},
        {"max_staleness": 1, "overprovision": 1, "interrupt": False},
        {"max_staleness": 0},
        {"max_staleness": 0, "whole_batches": True},
        {"max_staleness": 1, "whole_batches": True, "interrupt": False},
        {"max_staleness": 2, "lanes": LANES},
    ],
)
def test_over_500_steps_every_group_is_trained_once_or_dropped_with_a_reason(rules: dict[str, Any]):
    total = 500 * 4 + 2
    world = World(Rules(groups_per_step=4, slots=3, total=total, **rules), 3, ROUGH, seed=sum(map(ord, str(rules))))
    world.run()
    counts = world.scheduler.counts
    assert (len(world.steps), counts.trained, world.lost > 100) == (501, total, True)
    assert counts.admitted == total + sum(counts.dropped.values()) and counts.dropped["refused"] > 100
    assert world.trained <= set(range(counts.admitted))


@st.composite
def worlds(draw: Any) -> World:
    max_staleness = draw(st.integers(0, 4))
    whole = draw(st.booleans())
    makers, groups = draw(st.integers(1, 5)), draw(st.integers(1, 7))
    rules = Rules(
        groups_per_step=groups,
        max_staleness=max_staleness,
        max_concurrent=draw(st.none() | st.integers(1, 20)),
        overprovision=draw(st.integers(0, 4)) if max_staleness and not whole else 0,
        interrupt=draw(st.booleans()) and not whole,
        slots=draw(st.integers(1, 6)),
        whole_batches=whole,
        total=draw(st.integers(1, 12 * groups)),
    )
    weather = Weather(
        kill_every_s=draw(st.sampled_from([2.0, 10.0, float("inf")])),
        kills=30,
        refused=draw(st.sampled_from([0.0, 0.3])),
        slow_maker=draw(st.sampled_from([1.0, 20.0])),
        train_s=draw(st.sampled_from([0.0, 2.0, 10.0])),
    )
    return World(rules, makers, weather, seed=draw(st.integers(0, 10**6)))


@settings(max_examples=150, deadline=None)
@given(worlds())
def test_whatever_happens_the_promises_hold_and_the_run_ends(world: World):
    world.run()
    assert world.scheduler.counts.trained == world.rules.total


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 6), st.booleans())
def test_with_staleness_zero_each_publication_gives_out_one_batch(seed: int, groups: int, whole: bool):
    rules = Rules(groups, max_staleness=0, slots=2, whole_batches=whole, total=8 * groups)
    world = World(rules, 3, Weather(), seed).run()
    assert world.given_of_version == [groups] * 8 + [0]
