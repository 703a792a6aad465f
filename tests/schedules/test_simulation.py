"""Simulated schedules: throughput, staleness and idle time against closed-form bounds."""

import pytest

from flowrl.schedules.scheduler import ScheduleLimits
from flowrl.schedules.simulation import (
    Outcome,
    VirtualClock,
    Workload,
    sample_long_tailed_s,
    simulate,
    simulate_colocated,
    simulate_detached,
)

STEPS, GROUPS, REPLICAS, SLOTS = 200, 16, 2, 2
SYNC = {"max_staleness": 0, "is_batched": True, "interrupt": False}
ONE_STEP_OFF = {"max_staleness": 1, "is_batched": True, "interrupt": False}
ASYNC = {"max_staleness": 4}

TAILS = sample_long_tailed_s(STEPS * GROUPS, 1.0, sigma=1.0, max_ratio=8.0, seed=1)
EVEN = [1.0]
RATIOS = [1.0, 3.0, 1 / 3]
"""Training seconds per generation second of a step, if every slot is busy."""


def run(settings: dict, groups: list[float], ratio: float, **times: float) -> Outcome:
    train_s = ratio * sum(groups) / len(groups) * GROUPS / (REPLICAS * SLOTS)
    limits = ScheduleLimits(groups_per_step=GROUPS, slots=SLOTS, total_groups=STEPS * GROUPS, **settings)
    return simulate(limits, REPLICAS, Workload(groups, [train_s], **times))


def batch_seconds(groups: list[float]) -> list[float]:
    """Returns the seconds to generate each step alone."""
    limits = ScheduleLimits(groups_per_step=GROUPS, slots=SLOTS, total_groups=GROUPS, **SYNC)
    steps = [groups[k * GROUPS : (k + 1) * GROUPS] or groups for k in range(STEPS)]
    return [simulate(limits, REPLICAS, Workload(step, [0.0])).seconds for step in steps]


@pytest.mark.parametrize("groups", [EVEN, TAILS], ids=["even", "long-tailed"])
@pytest.mark.parametrize("ratio", RATIOS)
def test_async_is_as_fast_as_the_slower_side_at_staleness_1(ratio: float, groups: list[float]):
    train_s = ratio * sum(groups) / len(groups) * GROUPS / (REPLICAS * SLOTS)
    generate_s = sum(batch_seconds(groups)) / STEPS
    assert run({"max_staleness": 1}, groups, ratio).steps_per_s >= 0.95 / max(generate_s, train_s)


@pytest.mark.parametrize("groups", [EVEN, TAILS], ids=["even", "long-tailed"])
@pytest.mark.parametrize("ratio", RATIOS)
def test_with_more_staleness_no_slot_waits_for_the_slowest_response_of_a_step(ratio: float, groups: list[float]):
    generate_s = sum(groups) / len(groups) * GROUPS / (REPLICAS * SLOTS)
    outcome = run(ASYNC, groups, ratio)
    assert outcome.steps == STEPS
    assert 0.95 <= outcome.steps_per_s * generate_s * max(1.0, ratio) <= 1.001
    slower_idles = outcome.idle_trainer if ratio > 1 else outcome.idle_replicas
    assert slower_idles < 0.05


@pytest.mark.parametrize("groups", [EVEN, TAILS], ids=["even", "long-tailed"])
@pytest.mark.parametrize("ratio", RATIOS)
def test_one_step_off_is_as_fast_as_the_slower_of_each_step(ratio: float, groups: list[float]):
    train_s = ratio * sum(groups) / len(groups) * GROUPS / (REPLICAS * SLOTS)
    bound_s = sum(max(seconds, train_s) for seconds in batch_seconds(groups)) / STEPS
    outcome = run(ONE_STEP_OFF, groups, ratio)
    assert 0.95 <= outcome.steps_per_s * bound_s <= 1.001
    assert outcome.staleness == {0: GROUPS, 1: GROUPS * (STEPS - 1)}


@pytest.mark.parametrize("groups", [EVEN, TAILS], ids=["even", "long-tailed"])
@pytest.mark.parametrize("ratio", RATIOS)
def test_sync_takes_the_sum_of_generation_and_training(ratio: float, groups: list[float]):
    train_s = ratio * sum(groups) / len(groups) * GROUPS / (REPLICAS * SLOTS)
    outcome = run(SYNC, groups, ratio)
    assert outcome.seconds == pytest.approx(sum(batch_seconds(groups)) + STEPS * train_s)
    assert outcome.staleness == {0: GROUPS * STEPS}


def test_async_without_staleness_takes_as_long_as_sync():
    assert run({"max_staleness": 0}, EVEN, 1.0).seconds == pytest.approx(run(SYNC, EVEN, 1.0).seconds)


@pytest.mark.parametrize("limit", [1, 2, 4])
def test_staleness_reaches_its_bound_if_generation_is_faster(limit: int):
    outcome = run({"max_staleness": limit}, EVEN, 3.0)
    mean_staleness = sum(age * num for age, num in outcome.staleness.items()) / sum(outcome.staleness.values())
    assert max(outcome.staleness) == limit and mean_staleness > limit - 0.5
    assert outcome.wait_weights_s > 0.5 * outcome.seconds


def test_a_weight_update_costs_its_duration():
    quick, slow = (run(ASYNC, EVEN, 1 / 3, update_s=seconds) for seconds in (0.0, 0.4))
    assert slow.seconds == pytest.approx(quick.seconds + 0.4 * STEPS, rel=0.03)


def test_overprovisioning_skips_long_tails():
    groups = sample_long_tailed_s(STEPS * GROUPS, 1.0, sigma=1.5, max_ratio=30.0, seed=2)
    rules = {"max_staleness": 1}
    without, with_it = (run(rules | {"overprovision": extra}, groups, 1.0) for extra in (0, 4))
    assert with_it.steps_per_s > 1.05 * without.steps_per_s
    assert without.num_dropped == 0 < with_it.num_dropped and max(with_it.staleness) == 1


def test_detached_beats_colocated_with_long_tails():
    rules = ScheduleLimits(GROUPS, max_staleness=2, slots=4, total_groups=STEPS * GROUPS)
    times = Workload(TAILS, [GROUPS * 2 / 4])  # both halves have the same load
    detached = simulate_detached(rules, times, num_replicas=1, num_trainer_devices=1)
    colocated = simulate_colocated(rules, times, num_replicas=2, num_trainer_devices=2)
    assert detached.steps_per_s > colocated.steps_per_s and set(colocated.staleness) == {0}


def test_long_tailed_samples_have_the_requested_mean():
    samples = sample_long_tailed_s(1000, 60.0, sigma=1.0, max_ratio=4.0, seed=3)
    assert sum(samples) / len(samples) == pytest.approx(60.0)
    assert max(samples) == pytest.approx(sorted(samples)[-2])  # several are truncated
    assert sample_long_tailed_s(3, 2.0, sigma=0, max_ratio=1, seed=0) == [2.0] * 3


def test_the_clock_runs_events_in_order_of_time_then_registration():
    clock, order = VirtualClock(), []
    clock.call_at(2.0, lambda: order.append("c"))
    clock.call_at(1.0, lambda: order.append("a"))
    clock.call_at(1.0, lambda: order.append("b"))
    for now_s in (1.0, 1.0, 2.0):
        clock.advance()
        assert clock.now_s == now_s
    assert order == ["a", "b", "c"]
    with pytest.raises(AssertionError):
        clock.advance()
