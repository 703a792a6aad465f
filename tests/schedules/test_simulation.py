"""What schedules reach when nothing costs time but generating, training and updates."""

import pytest

from flowrl.schedules.rules import Rules
from flowrl.schedules.simulation import Outcome, Times, detached, in_turns, long_tailed, simulate

STEPS, GROUPS, MAKERS, SLOTS = 200, 16, 2, 2
SYNC = {"max_staleness": 0, "whole_batches": True, "interrupt": False}
ONE_STEP_OFF = {"max_staleness": 1, "whole_batches": True, "interrupt": False}
ASYNC = {"max_staleness": 4}

TAILS = long_tailed(STEPS * GROUPS, 1.0, sigma=1.0, longest=8.0, seed=1)
EVEN = [1.0]
RATIOS = [1.0, 3.0, 1 / 3]
"""Seconds of training for each second that a step's groups take when every slot works."""


def run(rules: dict, groups: list[float], ratio: float, **times: float) -> Outcome:
    train_s = ratio * sum(groups) / len(groups) * GROUPS / (MAKERS * SLOTS)
    rule = Rules(groups_per_step=GROUPS, slots=SLOTS, total=STEPS * GROUPS, **rules)
    return simulate(rule, MAKERS, Times(groups, [train_s], **times))


def batch_seconds(groups: list[float]) -> list[float]:
    """What the makers take for each step's groups if the step is all that they have."""
    rule = Rules(groups_per_step=GROUPS, slots=SLOTS, total=GROUPS, **SYNC)
    steps = [groups[k * GROUPS : (k + 1) * GROUPS] or groups for k in range(STEPS)]
    return [simulate(rule, MAKERS, Times(step, [0.0])).seconds for step in steps]


@pytest.mark.parametrize("groups", [EVEN, TAILS], ids=["even", "long-tailed"])
@pytest.mark.parametrize("ratio", RATIOS)
def test_async_is_as_fast_as_the_slower_side_at_staleness_1(ratio: float, groups: list[float]):
    train_s = ratio * sum(groups) / len(groups) * GROUPS / (MAKERS * SLOTS)
    generate_s = sum(batch_seconds(groups)) / STEPS
    assert run({"max_staleness": 1}, groups, ratio).steps_per_s >= 0.95 / max(generate_s, train_s)


@pytest.mark.parametrize("groups", [EVEN, TAILS], ids=["even", "long-tailed"])
@pytest.mark.parametrize("ratio", RATIOS)
def test_with_more_no_slot_waits_for_the_slowest_response_of_a_step(ratio: float, groups: list[float]):
    generate_s = sum(groups) / len(groups) * GROUPS / (MAKERS * SLOTS)
    found = run(ASYNC, groups, ratio)
    assert found.steps == STEPS
    assert 0.95 <= found.steps_per_s * generate_s * max(1.0, ratio) <= 1.001
    slower_idles = found.idle_trainer if ratio > 1 else found.idle_makers
    assert slower_idles < 0.05


@pytest.mark.parametrize("groups", [EVEN, TAILS], ids=["even", "long-tailed"])
@pytest.mark.parametrize("ratio", RATIOS)
def test_one_step_off_is_as_fast_as_the_slower_of_each_step(ratio: float, groups: list[float]):
    train_s = ratio * sum(groups) / len(groups) * GROUPS / (MAKERS * SLOTS)
    bound_s = sum(max(seconds, train_s) for seconds in batch_seconds(groups)) / STEPS
    found = run(ONE_STEP_OFF, groups, ratio)
    assert 0.95 <= found.steps_per_s * bound_s <= 1.001
    assert found.staleness == {0: GROUPS, 1: GROUPS * (STEPS - 1)}


@pytest.mark.parametrize("groups", [EVEN, TAILS], ids=["even", "long-tailed"])
@pytest.mark.parametrize("ratio", RATIOS)
def test_sync_takes_the_sum_of_both(ratio: float, groups: list[float]):
    train_s = ratio * sum(groups) / len(groups) * GROUPS / (MAKERS * SLOTS)
    found = run(SYNC, groups, ratio)
    assert found.seconds == pytest.approx(sum(batch_seconds(groups)) + STEPS * train_s)
    assert found.staleness == {0: GROUPS * STEPS}


def test_async_without_staleness_takes_as_long_as_sync():
    assert run({"max_staleness": 0}, EVEN, 1.0).seconds == pytest.approx(run(SYNC, EVEN, 1.0).seconds)


@pytest.mark.parametrize("limit", [1, 2, 4])
def test_staleness_grows_up_to_its_limit_where_makers_are_faster(limit: int):
    found = run({"max_staleness": limit}, EVEN, 3.0)
    assert max(found.staleness) == limit and found.mean_staleness > limit - 0.5
    assert found.wait_weights_s > 0.5 * found.seconds


def test_a_slow_update_costs_a_maker_its_length():
    quick, slow = (run(ASYNC, EVEN, 1 / 3, update_s=seconds) for seconds in (0.0, 0.4))
    assert slow.seconds == pytest.approx(quick.seconds + 0.4 * STEPS, rel=0.03)


def test_redundancy_leaves_long_tails_behind():
    groups = long_tailed(STEPS * GROUPS, 1.0, sigma=1.5, longest=30.0, seed=2)
    rules = {"max_staleness": 1}
    without, with_it = (run(rules | {"overprovision": extra}, groups, 1.0) for extra in (0, 4))
    assert with_it.steps_per_s > 1.05 * without.steps_per_s
    assert without.dropped == 0 < with_it.dropped and max(with_it.staleness) == 1


def test_devices_of_their_own_beat_devices_in_turns_where_tails_are_long():
    rules = Rules(GROUPS, max_staleness=2, slots=4, total=STEPS * GROUPS)
    times = Times(TAILS, [GROUPS * 2 / 4])  # each half of two devices has as much to do
    apart = detached(rules, times, makers=1, trainer_devices=1)
    turns = in_turns(rules, times, makers=2, trainer_devices=2)
    assert apart.steps_per_s > turns.steps_per_s and set(turns.staleness) == {0}


def test_long_tails_have_the_mean_that_is_asked_for():
    drawn = long_tailed(1000, 60.0, sigma=1.0, longest=4.0, seed=3)
    assert sum(drawn) / len(drawn) == pytest.approx(60.0)
    assert max(drawn) == pytest.approx(sorted(drawn)[-2])  # several are cut off
    assert long_tailed(3, 2.0, sigma=0, longest=1, seed=0) == [2.0] * 3
