"""Batched sources: submitted batches, rounds and checkpoints. Staleness and weight-wait metrics."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flowrl.checkpoints.saved_rows import FILE, IDENTITY, SavedRows, save_rows
from flowrl.config import OnPolicyConfig, UserError
from flowrl.data.batch.batch import Batch
from flowrl.data.batch.block import LocalRef
from flowrl.data.events import CallEvent
from flowrl.data.metric import merge_metrics
from flowrl.rewards.row_scorer import CALLS, FAILED, RewardCall
from flowrl.schedules.replica_stream import make_rollout_source
from flowrl.schedules.rollout_source import (
    RolloutContext,
    RolloutSource,
    measure_staleness,
    staleness_metrics,
)
from flowrl.schedules.scheduler import DispatchGroups, ScheduleLimits, Scheduler, UpdateWeights
from flowrl.schedules.simulation import VirtualClock
from flowrl.schedules.throughput import measure_weight_wait_s
from tests.report.call_events import timed
from tests.schedules.simulated_workers import Calls, Method, NumberedPrompts, SimulatedRewards
from tests.schedules.test_replica_stream import SAMPLES, config_of

STEPS, GROUPS = 5, 3


@dataclass(eq=False)
class Rollout:
    """Generates immediately, with the newest weights.

    Args:
        scores: prompt -> score of each response. None: the responses have no scores.
    """

    version: int = 0
    scores: Callable[[int], Sequence[float]] | None = None
    calls_made: list[tuple[list[int], int]] = field(default_factory=list)
    """Prompts and weight version of each call."""
    role: str = "rollout"
    tasks: None = None
    slots: tuple[()] = ()
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

    def _generate(self, batch: Batch, **score: Any) -> Batch:
        prompts = batch.get("prompt_id").tolist()[::SAMPLES]
        self.calls_made.append((prompts, self.version))
        tokens = {
            "response_mask": np.ones(len(batch), dtype=bool),
            "weight_version": np.full(len(batch), self.version, dtype=np.int32),
        }
        rows: dict[str, Any] = {"call": [len(self.calls_made)] * len(batch)}
        if self.scores is not None:
            scores = [score for prompt in prompts for score in self.scores(prompt)]
            rows |= {"scores": np.array(scores), FAILED: np.zeros(len(batch), dtype=bool)}
            rows[CALLS] = [{"reward": RewardCall(score).to_dict()} for score in scores]
        return Batch.from_columns(rows=rows, tokens=tokens, lengths=[1] * len(batch))


@dataclass
class WeightSync:
    rollout: Rollout

    def send(self, actor: Any, rollout: Any, version: int) -> None:
        self.rollout.version = version


class ScoredByRollout(SimulatedRewards):
    """The scores are columns of the responses."""

    def add_model_scores(self, batch: Batch) -> Batch:
        return batch


def make_source(
    config: OnPolicyConfig, version: int = 0, scores: Callable[[int], Sequence[float]] | None = None
) -> tuple[RolloutSource, Any]:
    rollout: Any = Rollout(version, scores)
    weight_sync: Any = WeightSync(rollout)
    calls: Any = Calls(VirtualClock())
    prompts: Any = NumberedPrompts()
    rewards: Any = None if scores is None else ScoredByRollout()
    return make_rollout_source(RolloutContext(config, rollout, prompts, weight_sync, calls, print, rewards)), rollout


def trained(source: RolloutSource, rollout: Any, steps: range) -> list[Batch]:
    """Returns the batches of the steps."""
    source.begin(None, steps[0] - 1, steps[0] - 1)
    batches = []
    for step in steps:
        batches.append(source.next_batch(step, step - 1))
        source.sync_weights(rollout, rollout, step)
    return batches


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
                    scheduler.confirm_update(0)
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


def test_the_row_of_a_prompt_is_built_once() -> None:
    for kind in ("sync", "one_step_off"):
        source, rollout = make_source(config_for(kind))
        trained(source, rollout, range(1, STEPS + 1))
        prompts: Any = source._context.prompts
        assert set(prompts.built.values()) == {1} and len(prompts.built) == STEPS * GROUPS


def scores_of(prompt: int) -> tuple[float, float]:
    """Returns different scores for four of the first ten prompts, and for all later ones."""
    return 1.0, float(prompt not in (0, 4, 5, 6) and prompt < 10)


DYNAMIC: dict[str, Any] = {"dynamic_sampling": {"max_rounds": 3, "oversample": 1.5}}


@pytest.mark.parametrize("kind", ["sync", "one_step_off"])
def test_rounds_replace_groups_with_equal_scores(kind: str) -> None:
    """A round has 1.5 times the missing groups. The next step of one_step_off begins when the step is complete."""
    source, rollout = make_source(config_for(kind, **DYNAMIC), scores=scores_of)
    source.begin(None, 0, 0)
    batch = source.next_batch(1, 0)
    next_round = [] if kind == "sync" else [([7, 8, 9, 10, 11], 0)]
    assert rollout.calls_made == [([0, 1, 2, 3, 4], 0), ([5, 6], 0), *next_round]
    assert batch.get("prompt_id").tolist()[::SAMPLES] == [0, 4, 5]
    metrics, *_ = source.pop_metrics()
    assert metrics == {
        "dropped_groups": 4.0,
        "dropped_equal_scores": 3.0,
        "dropped_failed": 0.0,
        "dropped_surplus": 1.0,
        "sampling_rounds": 2.0,
    }
    source.sync_weights(rollout, rollout, 1)
    # 1 group is missing, and 1.5 are generated with the same weights.
    assert rollout.calls_made[3:] == ([] if kind == "sync" else [([12, 13], 0)])
    assert source.next_batch(2, 1).get("prompt_id").tolist()[::SAMPLES] == [10, 11, 12]


def test_a_step_without_enough_groups_after_max_rounds_trains_fewer(tmp_path: Path) -> None:
    """Of the prompts 0 to 8, which three rounds generate, 0 and 4 have different scores."""
    scores = lambda prompt: (1.0, float(prompt not in (0, 4)))  # noqa: E731 (same signature as the argument)
    source, rollout = source_and_rollout = make_source(config_for("sync", **DYNAMIC), scores=scores)
    (batch,) = trained(*source_and_rollout, range(1, 2))
    assert [len(prompts) for prompts, _ in rollout.calls_made] == [5, 2, 2]
    assert batch.get("prompt_id").tolist()[::SAMPLES] == [0, 4]
    with pytest.raises(UserError, match="max_rounds"):
        source.next_batch(2, 1)


def test_prompts_of_a_failed_step_are_generated_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, _ = source_and_rollout = make_source(config_for("one_step_off"), scores=scores_of)
    trained(*source_and_rollout, range(1, 3))

    def fail(*_: Any) -> None:
        raise UserError("the reward failed")

    monkeypatch.setattr(source._context.calls, "wait", fail)
    with pytest.raises(UserError, match="the reward failed"):
        source.next_batch(3, 2)
    source.requeue_prompts()
    state, rows = checkpoint_of(source, tmp_path / FILE)
    assert state["untrained"] == list(range(2 * GROUPS, 4 * GROUPS)) and rows is None and state["groups"] == []
    again, _ = make_source(config_for("one_step_off"), version=2, scores=scores_of)
    again.restore(state, None)
    again.begin(None, 2, 2)
    assert again.next_batch(3, 2).get("prompt_id").tolist()[::SAMPLES] == [6, 7, 8]


@pytest.mark.parametrize("kind", ["sync", "one_step_off"])
def test_dropped_groups_and_rounds_are_counted_across_a_checkpoint(kind: str, tmp_path: Path) -> None:
    config = config_for(kind, **DYNAMIC)
    metrics: list[Any] = []
    straight, first = (make_source(config, scores=scores_of) for _ in range(2))
    again = make_source(config, version=1, scores=scores_of)
    trained(*straight, range(1, 2))
    trained(*first, range(1, 2))
    again[0].restore(*checkpoint_of(first[0], tmp_path / FILE))
    again[0].begin(None, 1, 1)
    for source, _ in (straight, again):
        source.pop_metrics()
        prompts = source.next_batch(2, 1).get("prompt_id").tolist()
        counts, *others = source.pop_metrics()
        own: Any = [each.get() if isinstance(each, LocalRef) else each for each in others]
        metrics.append((prompts, counts, merge_metrics(own)))
    assert metrics[0] == metrics[1] and metrics[0][1]["sampling_rounds"] >= 1
    assert straight[0].summary() == again[0].summary() and again[0].summary()["groups"]["dropped"]["surplus"] >= 1


def test_one_step_off_resumes_from_a_checkpoint_of_an_earlier_version(tmp_path: Path) -> None:
    """It has the number of the groups of the next step, whose responses have the weights of the step before."""
    first, _ = source_and_rollout = make_source(config_for("one_step_off"))
    trained(*source_and_rollout, range(1, 3))
    state, rows = checkpoint_of(first, tmp_path / FILE)
    earlier = {name: state[name] for name in ("drawn", "untrained", "is_requeued")} | {
        "filter": {},
        "steps": [{"num_groups": GROUPS, "metrics": {}}],
        "kept": [],
    }
    again, rollout = make_source(config_for("one_step_off"), version=2)
    again.restore(earlier, rows)
    again.begin(None, 2, 2)
    batch = again.next_batch(3, 2)
    assert batch.get("prompt_id").tolist()[::SAMPLES] == [6, 7, 8]
    assert set(batch.get("weight_version").tolist()) == {1} and rollout.calls_made == [([9, 10, 11], 2)]


def checkpoint_of(source: RolloutSource, path: Path) -> tuple[dict[str, Any], SavedRows | None]:
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


@pytest.mark.parametrize(("kind", "last_waits"), [("sync", STEPS - 1), ("one_step_off", STEPS - 2)])
def test_replicas_wait_for_weights_until_everything_is_generated(kind: str, last_waits: int) -> None:
    source, _ = make_source(config_for(kind))
    events = [rollout("generate", 0, 2), rollout("load_weights", 5, 6)]
    waited = [source.weight_wait_s(step, events, 0, 6 * NS_PER_S) for step in (1, last_waits, last_waits + 1, STEPS)]
    assert waited == [3.0, 3.0, 0.0, 0.0]
