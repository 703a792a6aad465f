"""How stale a batch is, and who did nothing."""

from dataclasses import replace

import pytest
import torch

from flowrl.data.batch.batch import Batch
from flowrl.data.events import CallEvent
from flowrl.schedules.rules import Counts
from flowrl.schedules.schedule_metrics import (
    Idleness,
    Level,
    group_metrics,
    measured_staleness,
    staleness,
    waited_for_weights,
)
from tests.report.call_events import call, timed


def batch(versions: list[list[int]]) -> Batch:
    """Rows of a prompt token and these response tokens."""
    tokens = [token for row in versions for token in (-1, *row)]
    masks = [sampled for row in versions for sampled in (False, *[True] * len(row))]
    return Batch.from_columns(
        tokens={"weight_version": tokens, "response_mask": masks}, lengths=[1 + len(row) for row in versions]
    )


def told(versions: list[list[int]], version: int, bound: int) -> dict[str, float]:
    return {name: metric.result() for name, metric in staleness(batch(versions), version, bound).get().items()}


def test_a_row_is_as_old_as_its_oldest_token() -> None:
    found = told([[5, 5], [3, 4, 5], [4]], version=5, bound=2)
    assert found == {
        "staleness": 1.0,
        "staleness_max": 2.0,
        "staleness_0": pytest.approx(1 / 3),
        "staleness_1": pytest.approx(1 / 3),
        "staleness_2": pytest.approx(1 / 3),
    }


def test_a_row_without_a_response_has_no_age() -> None:
    assert told([[], [7]], version=8, bound=1)["staleness"] == 1.0
    table = batch([[]]).table()
    assert "staleness_max" not in measured_staleness(table, version=3, bound=1)
    assert torch.isnan(torch.tensor(measured_staleness(table, version=3, bound=1)["staleness"].result()))


def test_groups_are_told_since_the_step_before_and_dropped_ones_by_reason() -> None:
    before = Counts(admitted=4, waiting=0, running=2, complete=1, trained=0, dropped={"stale": 0, "refused": 1})
    counts = Counts(admitted=9, waiting=1, running=2, complete=3, trained=1, dropped={"stale": 2, "refused": 1})
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


S = 10**9


def rollout(method: str, start_s: int, end_s: int, rank: int = 0) -> CallEvent:
    start, end = start_s * S, end_s * S
    return replace(timed(start_s, f"rollout.{method}", "cpu:0", (start, start, start, end, end)), rank=rank)


def test_waiting_for_weights_is_from_the_last_answer_until_they_come() -> None:
    events = [
        rollout("generate", 0, 4),
        rollout("load_weights", 9, 10),
        rollout("generate", 12, 14),  # nothing was asked of it for two seconds, which is no waiting for weights
        rollout("generate", 0, 8, rank=1),
        rollout("load_weights", 9, 10, rank=1),
    ]
    assert waited_for_weights(events, "rollout", 0, 20 * S) == (5 + 1) / 2
    assert waited_for_weights(events, "rollout", 6 * S, 20 * S) == (3 + 1) / 2
    assert waited_for_weights(events, "rollout", 0, 7 * S) == 3 / 2
    assert waited_for_weights(events, "actor", 0, 20 * S) == 0


def test_a_level_is_summed_over_the_seconds_that_it_stood() -> None:
    level = Level()
    assert level.integral_s(0, S) == 0
    for at, value in ((1, 0.5), (3, 0.5), (5, 0.0), (6, 1.0)):
        level.set(at * S, value)
    assert level.integral_s(0, 2 * S) == 0.5
    assert level.integral_s(2 * S, 7 * S) == 0.5 * 3 + 1
    assert level.integral_s(7 * S, 9 * S) == 2 and len(level._since) == 1


def test_a_role_is_idle_while_none_of_its_calls_runs_and_ranks_count_alike() -> None:
    events = [call("actor", 0, 60), call("rollout", 10, 100, rank=0), call("rollout", 50, 60, rank=1)]
    idle = Idleness()
    found = idle.of(events, ["actor", "rollout", "critic"], 0, 100)
    assert found == {"idle_actor": pytest.approx(0.4), "idle_rollout": pytest.approx(0.5)}


def test_a_rank_that_did_nothing_in_a_step_is_counted_if_it_was_ever_called() -> None:
    idle = Idleness()
    idle.of([call("rollout", 0, 10, rank=0), call("rollout", 0, 10, rank=1)], ["rollout"], 0, 10)
    assert idle.of([call("rollout", 10, 20)], ["rollout"], 10, 20) == {"idle_rollout": pytest.approx(0.5)}
    assert idle.of([], ["rollout"], 20, 30) == {"idle_rollout": 1.0}
