"""BatchRollouts: submitted batches and checkpoints. Staleness and weight-wait metrics."""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flowrl.checkpoints.saved_rows import FILE, IDENTITY, SavedRows, save_rows
from flowrl.config import OnPolicyConfig
from flowrl.data.batch.batch import Batch
from flowrl.data.events import CallEvent
from flowrl.schedules.rollout_source import (
    BatchRollouts,
    PromptQueue,
    RolloutContext,
    measure_staleness,
    measure_weight_wait_s,
    staleness_metrics,
)
from flowrl.schedules.scheduler import DispatchGroups, ScheduleLimits, Scheduler, UpdateWeights
from tests.report.call_events import timed
from tests.schedules.simulated_workers import Method, NumberedPrompts
from tests.schedules.test_streaming_rollouts import SAMPLES, config_of

STEPS, GROUPS = 5, 3


@dataclass(eq=False)
class Rollout:
    """Generates immediately, with the newest weights."""

    version: int = 0
    calls_made: list[tuple[list[int], int]] = field(default_factory=list)
    """Prompts and weight version of each call."""
    tasks: None = None
    num_announced: int = 0
    """Number of weight updates that were announced, each after the generation of its step."""

    @property
    def expect_update(self) -> Method:
        return Method(self._expect_update)

    def _expect_update(self) -> None:
        assert self.calls_made[-1][1] == self.version, "the step has been generated, and not yet synced"
        self.num_announced += 1

    @property
    def generate(self) -> Method:
        return Method(self._generate)

    def _generate(self, batch: Batch) -> Batch:
        self.calls_made.append((batch.get("prompt_id").tolist()[::SAMPLES], self.version))
        tokens = {
            "response_mask": np.ones(len(batch), dtype=bool),
            "weight_version": np.full(len(batch), self.version, dtype=np.int32),
        }
        return Batch.from_columns(
            rows={"call": [len(self.calls_made)] * len(batch)}, tokens=tokens, lengths=[1] * len(batch)
        )


@dataclass
class WeightSync:
    rollout: Rollout

    def send(self, actor: Any, rollout: Any, version: int) -> None:
        self.rollout.version = version


def make_source(config: OnPolicyConfig, version: int = 0) -> tuple[BatchRollouts, Any]:
    rollout: Any = Rollout(version)
    weight_sync: Any = WeightSync(rollout)
    calls: Any = None
    numbers: Any = NumberedPrompts()
    context = RolloutContext(config, rollout, PromptQueue(numbers, SAMPLES), weight_sync, calls, print)
    return BatchRollouts(context, num_ahead=config.schedule.staleness), rollout


def trained(source: BatchRollouts, rollout: Any, steps: range) -> list[Batch]:
    """Returns the batches of the steps."""
    source.begin(None, steps[0] - 1, steps[0] - 1)
    batches = []
    for step in steps:
        batches.append(source.next_batch(step, step - 1))
        source.sync_weights(rollout, rollout, step)
    return batches


def test_a_restored_queue_has_pending_and_requeued_prompts() -> None:
    numbers: Any = NumberedPrompts()
    queue = PromptQueue(numbers, SAMPLES)
    _, second, third, fourth = queue.pop(4)
    queue.requeue([second, fourth])
    state = json.loads(json.dumps(queue.state([third])))
    following: Any = NumberedPrompts()
    restored = PromptQueue(following, SAMPLES)
    restored.restore(state)
    assert restored.pop(4) == [third, second, fourth, *queue.pop(3)[2:]]


def config_for(kind: str, **changes: Any) -> OnPolicyConfig:
    settings = config_of(steps=STEPS, prompts=GROUPS).model_dump() | {"schedule": {"kind": kind}} | changes
    return OnPolicyConfig.model_validate(settings)


@pytest.mark.parametrize(("drops", "num_announced"), [(True, STEPS), (False, 0)])
def test_an_update_is_announced_after_the_generation_of_each_step(drops: bool, num_announced: int) -> None:
    config = config_for("sync")
    transfer = config.rollout.transfer.model_copy(update={"drop_weights": drops})
    config = config.model_copy(update={"rollout": config.rollout.model_copy(update={"transfer": transfer})})
    source, rollout = make_source(config)
    trained(source, rollout, range(1, STEPS + 1))
    assert rollout.num_announced == num_announced


def scheduled(max_staleness: int) -> list[tuple[list[int], int]]:
    """Returns the scheduler's (groups, version) per dispatch, for a replica that completes groups immediately."""
    limits = ScheduleLimits(GROUPS, max_staleness, interrupt=False, is_batched=True, total_groups=STEPS * GROUPS)
    scheduler = Scheduler(limits, num_replicas=1)
    batches, version = [], 0
    for step in range(1, STEPS + 1):
        while actions := scheduler.pop_actions():
            for action in actions:
                if isinstance(action, UpdateWeights):
                    version = action.version
                    scheduler.confirm_update(0, version)
                elif isinstance(action, DispatchGroups):
                    batches.append((list(action.groups), version))
                    assert all(scheduler.complete_group(0, group) for group in action.groups)
        assert scheduler.pop_step_batch() is not None
        scheduler.add_version(step)
    return batches


@pytest.mark.parametrize("kind", ["sync", "one_step_off"])
def test_submitted_batches_match_the_scheduler(kind: str) -> None:
    config = config_for(kind)
    source, rollout = make_source(config)
    trained(source, rollout, range(1, STEPS + 1))
    assert rollout.calls_made == scheduled(config.schedule.staleness)


def checkpoint_of(source: BatchRollouts, path: Path) -> tuple[dict[str, Any], SavedRows | None]:
    """Returns the state and rows of a checkpoint."""
    state, rows = source.snapshot()
    state = json.loads(json.dumps(state))
    if rows is None:
        return state, None
    save_rows(rows, path).get()
    return state, SavedRows(path, tuple(name for name in rows.columns if name not in IDENTITY))


@pytest.mark.parametrize("kind", ["sync", "one_step_off"])
@pytest.mark.parametrize("last", [1, 3, 4])
def test_a_resumed_run_trains_the_same_batches(kind: str, last: int, tmp_path: Path) -> None:
    config = config_for(kind)
    straight = trained(*make_source(config), range(1, STEPS + 1))
    first, _ = source_and_rollout = make_source(config)
    trained(*source_and_rollout, range(1, last + 1))
    again, rollout = source_and_rollout = make_source(config, version=last)
    again.restore(*checkpoint_of(first, tmp_path / FILE))
    batches = trained(*source_and_rollout, range(last + 1, STEPS + 1))
    for batch, expected in zip(batches, straight[last:], strict=True):
        assert set(batch.columns) == set(expected.columns)
        for name in ("prompt_id", "sample", "weight_version"):
            assert batch.get(name).tolist() == expected.get(name).tolist()
    assert len(rollout.calls_made) == STEPS - last - config.schedule.staleness


def test_the_last_step_submits_nothing_ahead(tmp_path: Path) -> None:
    first, _ = source_and_rollout = make_source(config_for("one_step_off"))
    trained(*source_and_rollout, range(1, STEPS + 1))
    state, rows = checkpoint_of(first, tmp_path / FILE)
    assert state["untrained"] == [] and rows is None


def test_the_last_step_of_a_run_with_checkpoints_submits_the_batch_of_a_longer_run() -> None:
    longer, rollout = source_and_rollout = make_source(config_for("one_step_off", steps=STEPS + 1))
    trained(*source_and_rollout, range(1, STEPS + 1))
    saving, own_rollout = source_and_rollout = make_source(config_for("one_step_off", checkpoint={"every": 100}))
    trained(*source_and_rollout, range(1, STEPS + 1))
    assert own_rollout.calls_made == rollout.calls_made and saving.snapshot()[0] == longer.snapshot()[0]


def batch_of(versions: list[list[int]]) -> Batch:
    """Returns rows of one prompt token and the response tokens."""
    tokens = [token for row in versions for token in (-1, *row)]
    masks = [sampled for row in versions for sampled in (False, *[True] * len(row))]
    return Batch.from_columns(
        tokens={"weight_version": tokens, "response_mask": masks}, lengths=[1 + len(row) for row in versions]
    )


def staleness_of(versions: list[list[int]], version: int, bound: int) -> dict[str, float]:
    return {
        name: metric.result() for name, metric in staleness_metrics(batch_of(versions), version, bound).get().items()
    }


def test_a_row_is_as_stale_as_its_oldest_token() -> None:
    metrics = staleness_of([[5, 5], [3, 4, 5], [4]], version=5, bound=2)
    assert metrics == {
        "staleness": 1.0,
        "staleness_max": 2.0,
        "staleness_0": pytest.approx(1 / 3),
        "staleness_1": pytest.approx(1 / 3),
        "staleness_2": pytest.approx(1 / 3),
    }


def test_a_row_without_response_tokens_is_skipped() -> None:
    assert staleness_of([[], [7]], version=8, bound=1)["staleness"] == 1.0
    table = batch_of([[]]).tensordict()
    assert "staleness_max" not in measure_staleness(table, version=3, bound=1)
    assert torch.isnan(torch.tensor(measure_staleness(table, version=3, bound=1)["staleness"].result()))


NS_PER_S = 10**9


def rollout(method: str, start_s: int, end_s: int, rank: int = 0) -> CallEvent:
    start, end = start_s * NS_PER_S, end_s * NS_PER_S
    return replace(timed(start_s, f"rollout.{method}", "cpu:0", (start, start, start, end, end)), rank=rank)


def test_weight_wait_is_the_idle_time_before_a_weight_update() -> None:
    events = [
        rollout("generate", 0, 4),
        rollout("load_weights", 9, 10),
        rollout("generate", 12, 14),  # idle for two seconds, but not for weights
        rollout("generate", 0, 8, rank=1),
        rollout("load_weights", 9, 10, rank=1),
    ]
    assert measure_weight_wait_s(events, "rollout", 0, 20 * NS_PER_S) == (5 + 1) / 2
    assert measure_weight_wait_s(events, "rollout", 6 * NS_PER_S, 20 * NS_PER_S) == (3 + 1) / 2
    assert measure_weight_wait_s(events, "rollout", 0, 7 * NS_PER_S) == 3 / 2
    assert measure_weight_wait_s(events, "actor", 0, 20 * NS_PER_S) == 0
