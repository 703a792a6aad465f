"""The scheduler: hand-computed decisions, and properties under random losses and refusals."""

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.schedules.scheduler import (
    DROP_REASONS,
    AbortGroups,
    Action,
    DispatchGroups,
    ScheduleLimits,
    Scheduler,
    TrainerRoutes,
    UpdateWeights,
)
from flowrl.schedules.simulation import Faults, Workload
from tests.schedules.checked_simulation import CheckedSimulation


def complete_all(scheduler: Scheduler, num_replicas: int) -> None:
    """Completes all running groups."""
    for replica in range(num_replicas):
        for group in scheduler.pending_groups:
            scheduler.complete_group(replica, group)
    assert scheduler.counts.running == 0


def confirm_updates(scheduler: Scheduler, actions: list[Action]) -> None:
    """Confirms all weight updates immediately."""
    for action in actions:
        if isinstance(action, UpdateWeights):
            scheduler.confirm_update(action.replica)


def step(scheduler: Scheduler, num_replicas: int) -> tuple[int, ...]:
    """Returns the groups of the next step."""
    for _ in range(100):
        if (batch := scheduler.pop_step_batch()) is not None:
            return batch.groups
        confirm_updates(scheduler, scheduler.pop_actions())
        complete_all(scheduler, num_replicas)
    raise AssertionError("no step is complete")


def dispatched(actions: list[Action]) -> dict[int, tuple[int, ...]]:
    return {action.replica: action.groups for action in actions if isinstance(action, DispatchGroups)}


# Hand-computed decisions.


def test_groups_go_to_the_least_busy_replica_within_the_staleness_bound():
    scheduler = Scheduler(ScheduleLimits(groups_per_step=2, max_staleness=1, slots=8), num_replicas=2)
    assert scheduler.pop_actions() == [DispatchGroups(0, (0, 2)), DispatchGroups(1, (1, 3))]
    assert scheduler.starved_replicas == ()
    complete_all(scheduler, 2)
    assert scheduler.pop_actions() == [] and scheduler.starved_replicas == (0, 1)


def test_a_replica_without_remaining_work_is_not_starved():
    last_step = Scheduler(ScheduleLimits(groups_per_step=2, max_staleness=1, slots=8, total_groups=4), num_replicas=2)
    last_step.pop_actions()
    complete_all(last_step, 2)
    assert last_step.pop_actions() == [] and last_step.starved_replicas == ()
    limited = Scheduler(ScheduleLimits(groups_per_step=1, max_staleness=0, max_concurrent=1, slots=8), num_replicas=3)
    assert limited.pop_actions() == [DispatchGroups(0, (0,))] and limited.starved_replicas == ()
    limited.mark_replica_lost(1)
    complete_all(limited, 3)
    assert limited.pop_actions() == [] and limited.starved_replicas == (0, 2)  # a new process loads its model first
    assert limited.idle_replicas == (0, 2)


def test_a_replica_gets_at_most_one_group_per_slot():
    scheduler = Scheduler(ScheduleLimits(groups_per_step=8, max_staleness=0, slots=2), num_replicas=2)
    assert scheduler.pop_actions() == [DispatchGroups(0, (0, 2)), DispatchGroups(1, (1, 3))]
    scheduler.complete_group(1, 3)
    assert scheduler.pop_actions() == [DispatchGroups(1, (4,))]


def test_max_concurrent_bounds_the_running_groups():
    scheduler = Scheduler(ScheduleLimits(groups_per_step=8, max_staleness=2, max_concurrent=3, slots=8), num_replicas=2)
    assert scheduler.pop_actions() == [DispatchGroups(0, (0, 2)), DispatchGroups(1, (1,))]


def test_training_follows_the_order_of_admission():
    scheduler = Scheduler(ScheduleLimits(groups_per_step=2, max_staleness=1, slots=4), num_replicas=1)
    scheduler.pop_actions()
    for group in (1, 3, 2):
        scheduler.complete_group(0, group)
    assert scheduler.pop_step_batch() is None
    scheduler.complete_group(0, 0)
    batch = scheduler.pop_step_batch()
    assert batch is not None and (batch.version, batch.groups, batch.staleness) == (0, (0, 1), (0, 0))
    assert scheduler.pending_groups == (2, 3)


def test_batched_with_staleness_zero_dispatches_one_batch_per_version():
    scheduler = Scheduler(ScheduleLimits(groups_per_step=3, max_staleness=0, is_batched=True), num_replicas=2)
    for version in range(4):
        actions = scheduler.pop_actions()
        assert sum(map(len, dispatched(actions).values())) == 3
        confirm_updates(scheduler, actions)
        complete_all(scheduler, 2)
        assert scheduler.pop_actions() == []
        batch = scheduler.pop_step_batch()
        assert batch is not None and set(batch.staleness) == {0} and scheduler.pop_actions() == []
        scheduler.add_version(version + 1)


def test_a_round_has_the_groups_that_the_step_lacks_times_oversample():
    limits = ScheduleLimits(4, max_staleness=0, is_batched=True, oversample=1.5, total_groups=8)
    scheduler = Scheduler(limits, num_replicas=1)
    assert dispatched(scheduler.pop_actions()) == {0: (0, 1, 2, 3, 4, 5)}
    for group in range(6):
        assert scheduler.pop_actions() == [] and scheduler.complete_group(0, group)
        if group != 3:
            scheduler.drop_group(group, "equal_scores")
    assert dispatched(scheduler.pop_actions()) == {0: (6, 7, 8, 9, 10)}  # 3 are missing
    complete_all(scheduler, 1)
    for group in (9, 10):
        scheduler.drop_group(group, "surplus")
    assert scheduler.pop_actions() == []
    batch = scheduler.pop_step_batch()
    assert batch is not None and batch.groups == (3, 6, 7, 8) and scheduler.pop_actions() == []
    scheduler.add_version(1)
    assert dispatched(scheduler.pop_actions()) == {0: (11, 12, 13, 14, 15, 16)}  # the last step


def test_one_step_off_dispatches_the_next_batch_when_the_previous_one_is_complete():
    scheduler = Scheduler(ScheduleLimits(2, max_staleness=1, interrupt=False, is_batched=True), num_replicas=1)
    assert scheduler.pop_actions() == [DispatchGroups(0, (0, 1))]
    complete_all(scheduler, 1)
    assert scheduler.pop_actions() == [DispatchGroups(0, (2, 3))]
    assert scheduler.pop_step_batch() is not None
    complete_all(scheduler, 1)
    assert scheduler.pop_actions() == []
    scheduler.add_version(1)
    assert scheduler.pop_actions() == [UpdateWeights(0, 1), DispatchGroups(0, (4, 5))]


def test_with_interrupt_a_replica_updates_immediately_and_one_version_at_a_time():
    scheduler = Scheduler(ScheduleLimits(1, max_staleness=4, slots=1), num_replicas=1)
    assert scheduler.pop_actions() == [DispatchGroups(0, (0,))]
    scheduler.add_version(1)
    assert scheduler.pop_actions() == [UpdateWeights(0, 1)]
    scheduler.add_version(2)
    scheduler.add_version(3)
    assert scheduler.pop_actions() == []
    scheduler.confirm_update(0)
    assert scheduler.pop_actions() == [UpdateWeights(0, 3)]


def test_without_interrupt_a_replica_updates_when_it_is_idle():
    scheduler = Scheduler(ScheduleLimits(1, max_staleness=1, slots=2, interrupt=False), num_replicas=1)
    assert scheduler.pop_actions() == [DispatchGroups(0, (0, 1))]
    scheduler.complete_group(0, 0)
    assert scheduler.pop_step_batch() is not None
    scheduler.add_version(1)
    assert scheduler.pop_actions() == []  # the next group would be too stale, and group 1 is running
    scheduler.complete_group(0, 1)
    assert scheduler.pop_actions() == [UpdateWeights(0, 1), DispatchGroups(0, (2,))]


def half_done(routes: TrainerRoutes | None = None) -> Scheduler:
    """Returns a scheduler after one step, with complete, running and waiting groups."""
    scheduler = Scheduler(ScheduleLimits(2, max_staleness=2, slots=3, trainer_routes=routes), num_replicas=2)
    scheduler.pop_actions()
    for replica, group in ((0, 0), (1, 1), (1, 3)):
        assert scheduler.complete_group(replica, group)
    assert scheduler.pop_step_batch() is not None
    scheduler.add_version(1)
    confirm_updates(scheduler, scheduler.pop_actions())
    scheduler.mark_replica_lost(0)
    return scheduler


def test_restored_groups_are_complete_or_wait():
    before = half_done()
    states = before.snapshot()
    assert states == [(0, None), (0, 0), *[(0, None)] * (len(before.pending_groups) - 2)]
    scheduler = Scheduler(ScheduleLimits(2, max_staleness=2, slots=3), num_replicas=2, version=1, num_steps_done=1)
    assert scheduler.restore(states, 1) == list(range(len(states)))
    assert (scheduler.counts.complete, scheduler.counts.waiting) == (1, len(states) - 1)
    assert scheduler.snapshot() == states
    assert 1 not in [group for groups in dispatched(scheduler.pop_actions()).values() for group in groups]
    complete_all(scheduler, 2)
    batch = scheduler.pop_step_batch()
    assert batch is not None and (batch.version, batch.groups, batch.staleness) == (1, (0, 1), (0, 1))


@pytest.mark.parametrize("routes", [((0,), (1,)), None])
def test_restored_groups_are_redistributed_over_another_number_of_queues(routes: TrainerRoutes | None):
    before = half_done(None if routes else ((0,), (1,)))
    scheduler = Scheduler(
        ScheduleLimits(2, max_staleness=2, slots=3, trainer_routes=routes), num_replicas=2, version=1, num_steps_done=1
    )
    count = len(scheduler.restore(before.snapshot(), before.num_queues))
    queues = [queue for queue, _ in scheduler.snapshot()]
    assert count == len(before.pending_groups)
    assert abs(2 * queues.count(0) - count) <= 1 if routes else set(queues) == {0}
    trained = [group for version in range(1, 5) for group in stepped(scheduler, version)]
    assert set(range(count)) <= set(trained) and len(set(trained)) == len(trained) == 8


def stepped(scheduler: Scheduler, version: int) -> tuple[int, ...]:
    groups = step(scheduler, 2)
    scheduler.add_version(version + 1)
    return groups


def test_groups_of_a_lost_replica_are_dispatched_first():
    scheduler = Scheduler(ScheduleLimits(4, max_staleness=0, slots=2), num_replicas=2)
    assert scheduler.pop_actions() == [DispatchGroups(0, (0, 2)), DispatchGroups(1, (1, 3))]
    scheduler.mark_replica_lost(0)
    assert not scheduler.complete_group(0, 0)
    assert scheduler.pop_actions() == []
    complete_all(scheduler, 2)
    assert scheduler.pop_actions() == [DispatchGroups(1, (0, 2))]
    scheduler.restore_replica(0)
    complete_all(scheduler, 2)
    batch = scheduler.pop_step_batch()
    assert batch is not None and batch.groups == (0, 1, 2, 3)


def test_groups_of_two_lost_replicas_keep_their_order():
    scheduler = Scheduler(ScheduleLimits(4, max_staleness=0, slots=2), num_replicas=3)
    assert dispatched(scheduler.pop_actions()) == {0: (0, 3), 1: (1,), 2: (2,)}
    scheduler.mark_replica_lost(1)
    scheduler.mark_replica_lost(0)
    assert dispatched(scheduler.pop_actions()) == {2: (0,)}


def test_a_new_process_gets_groups_and_updates_when_it_is_ready():
    scheduler = Scheduler(ScheduleLimits(2, max_staleness=1, slots=2), num_replicas=1)
    scheduler.pop_actions()
    scheduler.mark_replica_lost(0)
    scheduler.add_version(1)
    assert scheduler.is_lost(0) and scheduler.pop_actions() == []
    scheduler.restore_replica(0)
    assert scheduler.pop_actions() == [UpdateWeights(0, 1), DispatchGroups(0, (0, 1))]


def test_the_replacement_of_a_lost_process_has_the_weights_of_the_update_in_flight():
    """The controller repeats the calls of the update in the new process."""
    scheduler = Scheduler(ScheduleLimits(2, max_staleness=0, slots=1), num_replicas=1)
    scheduler.add_version(1)
    assert scheduler.pop_updates() == [UpdateWeights(0, 1)]
    scheduler.mark_replica_lost(0)
    scheduler.add_version(2)
    assert scheduler.replica_version(0) == 1
    scheduler.restore_replica(0)
    assert scheduler.pop_updates() == []
    scheduler.confirm_update(0)
    assert scheduler.pop_updates() == [UpdateWeights(0, 2)]


def test_a_dropped_group_is_replaced():
    scheduler = Scheduler(ScheduleLimits(2, max_staleness=0, slots=4), num_replicas=1)
    assert scheduler.pop_actions() == [DispatchGroups(0, (0, 1))]
    scheduler.complete_group(0, 0)
    assert scheduler.drop_group(0, "refused") and scheduler.drop_group(1, "too long")
    assert scheduler.pop_aborts() == [AbortGroups(0, (1,))] and scheduler.pop_aborts() == []
    assert scheduler.pop_actions() == [DispatchGroups(0, (2, 3))]
    complete_all(scheduler, 1)
    batch = scheduler.pop_step_batch()
    assert batch is not None and batch.groups == (2, 3)
    dropped = dict.fromkeys(DROP_REASONS, 0) | {"refused": 1, "too long": 1}
    assert scheduler.counts.dropped == dropped and not scheduler.complete_group(0, 1)


def test_overprovisioning_leaves_the_slowest_group_behind_and_drops_it_when_stale():
    scheduler = Scheduler(ScheduleLimits(2, max_staleness=1, overprovision=1, slots=8), num_replicas=1)
    assert scheduler.pop_actions() == [DispatchGroups(0, (0, 1, 2, 3, 4))]
    for group in (1, 2, 3, 4):
        scheduler.complete_group(0, group)
    batch = scheduler.pop_step_batch()
    assert batch is not None and batch.groups == (1, 2)
    batch = scheduler.pop_step_batch()
    assert batch is not None and (batch.groups, batch.staleness) == ((3, 4), (1, 1))
    assert scheduler.counts.dropped == dict.fromkeys(DROP_REASONS, 0) | {"stale": 1}
    assert scheduler.pop_aborts() == [AbortGroups(0, (0,))] and scheduler.pop_actions() == []


def test_the_last_step_is_short():
    scheduler = Scheduler(ScheduleLimits(2, max_staleness=1, slots=8, total_groups=3), num_replicas=1)
    sizes = [len(step(scheduler, 1))]
    scheduler.add_version(1)
    sizes.append(len(step(scheduler, 1)))
    assert sizes == [2, 1] and scheduler.pop_step_batch() is None and scheduler.pending_groups == ()


def test_staleness_counts_from_the_version_of_a_resumed_run():
    scheduler = Scheduler(
        ScheduleLimits(2, max_staleness=1, slots=8, total_groups=20), num_replicas=1, version=9, num_steps_done=9
    )
    assert scheduler.pop_actions() == [DispatchGroups(0, (0, 1))]  # the run has one step left
    complete_all(scheduler, 1)
    batch = scheduler.pop_step_batch()
    assert batch is not None and (batch.version, batch.staleness) == (9, (0, 0))


def test_a_trainer_gets_groups_from_its_own_replicas():
    rules = ScheduleLimits(4, max_staleness=1, slots=8, trainer_routes=((0,), (0, 1)))
    scheduler = Scheduler(rules, num_replicas=2)
    assert dispatched(scheduler.pop_actions()) == {0: (0, 2, 4, 6), 1: (1, 3, 5, 7)}
    complete_all(scheduler, 2)
    batch = scheduler.pop_step_batch()
    assert batch is not None and batch.groups == (0, 2, 1, 3)


def test_a_trainer_waits_for_its_own_replicas():
    scheduler = Scheduler(ScheduleLimits(2, max_staleness=0, slots=8, trainer_routes=((0,), (1,))), num_replicas=2)
    scheduler.pop_actions()
    scheduler.mark_replica_lost(1)
    scheduler.complete_group(0, 0)
    assert scheduler.pop_actions() == [] and scheduler.pop_step_batch() is None


# Properties under faults.

TAILS = [random.Random(i).paretovariate(1.5) for i in range(997)]
FAULTY = Faults(mean_s_between_losses=7.0, refused_fraction=0.1, slowdown=5.0)
ROUTES = ((0, 1), (1, 2))


@pytest.mark.parametrize(
    "changes",
    [
        {"max_staleness": 1},
        {"max_staleness": 1, "interrupt": False},
        {"max_staleness": 4, "max_concurrent": 5},
        {"max_staleness": 2, "overprovision": 3},
        {"max_staleness": 1, "overprovision": 1, "interrupt": False},
        {"max_staleness": 0},
        {"max_staleness": 0, "is_batched": True},
        {"max_staleness": 1, "is_batched": True, "interrupt": False},
        {"max_staleness": 2, "trainer_routes": ROUTES},
    ],
)
def test_over_500_steps_every_group_is_trained_once_or_dropped_with_a_reason(changes: dict[str, Any]):
    total = 500 * 4 + 2
    limits = ScheduleLimits(groups_per_step=4, slots=3, total_groups=total, **changes)
    faults = replace(FAULTY, seed=sum(map(ord, str(changes))))
    run = CheckedSimulation(limits, 3, Workload(TAILS, [1.0, 2.0, 3.0], update_s=0.25), faults)
    run.run()
    counts = run.scheduler.counts
    assert (len(run.batches), counts.trained, run.num_losses > 100) == (501, total, True)
    assert counts.admitted == total + sum(counts.dropped.values()) and counts.dropped["refused"] > 100
    assert run.trained <= set(range(counts.admitted))


@st.composite
def simulations(draw: Any) -> CheckedSimulation:
    max_staleness = draw(st.integers(0, 4))
    is_batched = draw(st.booleans())
    num_replicas, groups = draw(st.integers(1, 5)), draw(st.integers(1, 7))
    limits = ScheduleLimits(
        groups_per_step=groups,
        max_staleness=max_staleness,
        max_concurrent=draw(st.none() | st.integers(1, 20)),
        overprovision=draw(st.integers(0, 4)) if max_staleness and not is_batched else 0,
        interrupt=draw(st.booleans()) and not is_batched,
        slots=draw(st.integers(1, 6)),
        is_batched=is_batched,
        total_groups=draw(st.integers(1, 12 * groups)),
    )
    faults = Faults(
        mean_s_between_losses=draw(st.sampled_from([2.0, 10.0, float("inf")])),
        max_losses=30,
        refused_fraction=draw(st.sampled_from([0.0, 0.3])),
        slowdown=draw(st.sampled_from([1.0, 20.0])),
        seed=draw(st.integers(0, 10**6)),
    )
    workload = Workload(TAILS[draw(st.integers(0, 900)) :], [draw(st.sampled_from([0.0, 2.0, 10.0]))], update_s=0.25)
    return CheckedSimulation(limits, num_replicas, workload, faults)


@settings(max_examples=150, deadline=None)
@given(simulations())
def test_invariants_hold_and_every_run_ends(run: CheckedSimulation):
    run.run()
    assert run.scheduler.counts.trained == run.limits.total_groups


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 900), st.integers(1, 6), st.booleans())
def test_with_staleness_zero_each_version_generates_one_batch(first: int, groups: int, is_batched: bool):
    limits = ScheduleLimits(groups, max_staleness=0, slots=2, is_batched=is_batched, total_groups=8 * groups)
    run = CheckedSimulation(limits, 3, Workload(TAILS[first:], [2.0], update_s=0.25))
    run.run()
    assert run.dispatched_per_version == [groups] * 8 + [0]


def test_a_straggler_gets_only_groups_that_no_step_waits_for():
    limits = ScheduleLimits(groups_per_step=4, max_staleness=1, slots=2, total_groups=400)
    run = CheckedSimulation(limits, 3, Workload([1.0], [0.1]), Faults(slowdown=20.0))
    run.run()
    assert run.replicas_of[0] < 0.05 * 400 and min(run.replicas_of[1], run.replicas_of[2]) > 100


def test_groups_that_wait_for_scores_occupy_no_slot() -> None:
    scheduler = Scheduler(ScheduleLimits(groups_per_step=8, max_staleness=1, slots=2), num_replicas=1)
    assert dispatched(scheduler.pop_actions()) == {0: (0, 1)}
    assert dispatched(scheduler.pop_actions()) == {}
    scheduler.set_unscored(0, 1)
    assert dispatched(scheduler.pop_actions()) == {0: (2,)}
    scheduler.complete_group(0, 0)
    scheduler.set_unscored(0, 0)
    assert dispatched(scheduler.pop_actions()) == {}
    scheduler.complete_group(0, 1)
    assert dispatched(scheduler.pop_actions()) == {0: (3,)}


def test_a_partial_step_trains_the_complete_groups() -> None:
    scheduler = Scheduler(ScheduleLimits(groups_per_step=4, max_staleness=0, slots=8, total_groups=8), num_replicas=1)
    assert dispatched(scheduler.pop_actions()) == {0: (0, 1, 2, 3)}
    for group in (0, 2):
        scheduler.complete_group(0, group)
    scheduler.drop_group(0, "equal_scores")
    assert scheduler.pop_step_batch() is None
    partial = scheduler.pop_step_batch(is_partial=True)
    assert partial is not None and partial.groups == (2,)
    assert scheduler.counts.trained == 1 and scheduler.counts.dropped["equal_scores"] == 1
