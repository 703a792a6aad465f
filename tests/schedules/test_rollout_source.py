"""Replicas of whole batches: what is asked for when, and that a checkpoint loses none of it."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flowrl.checkpoints.saved_rows import FILE, IDENTITY, SavedRows, save_rows
from flowrl.config import OnPolicyConfig
from flowrl.data.batch.batch import Batch
from flowrl.schedules.rollout_source import BatchRollouts, PromptQueue, RolloutContext
from flowrl.schedules.rules import Give, Rules, Update
from flowrl.schedules.scheduler import Scheduler
from tests.schedules.test_streaming_rollouts import SAMPLES, config_of
from tests.schedules.virtual_replicas import Method, Numbers

STEPS, GROUPS = 5, 3


@dataclass(eq=False)
class Rollout:
    """Answers at once, with the weights that it was given last."""

    version: int = 0
    asked: list[tuple[list[int], int]] = field(default_factory=list)
    """Prompts of a call, and the version that answered it."""
    tasks: None = None

    @property
    def generate(self) -> Method:
        return Method(self._generate)

    def _generate(self, batch: Batch) -> Batch:
        self.asked.append((batch.get("prompt_id").tolist()[::SAMPLES], self.version))
        tokens = {
            "response_mask": np.ones(len(batch), dtype=bool),
            "weight_version": np.full(len(batch), self.version, dtype=np.int32),
        }
        return Batch.from_columns(
            rows={"call": [len(self.asked)] * len(batch)}, tokens=tokens, lengths=[1] * len(batch)
        )


@dataclass
class WeightSync:
    rollout: Rollout

    def send(self, actor: Any, rollout: Any, version: int) -> None:
        self.rollout.version = version


def rollout_source_of(config: OnPolicyConfig, version: int = 0) -> tuple[BatchRollouts, Any]:
    rollout: Any = Rollout(version)
    weight_sync: Any = WeightSync(rollout)
    calls: Any = None
    numbers: Any = Numbers()
    setting = RolloutContext(config, rollout, PromptQueue(numbers, SAMPLES), weight_sync, calls, print)
    return BatchRollouts(setting, ahead=config.schedule.staleness), rollout


def trained(makers: BatchRollouts, rollout: Any, steps: range) -> list[Batch]:
    """The batches of these steps."""
    makers.begin(None, steps[0] - 1, steps[0] - 1)
    found = []
    for step in steps:
        found.append(makers.batch(step, step - 1))
        makers.sync_weights(rollout, rollout, step)
    return found


def config_for(kind: str, **changes: Any) -> OnPolicyConfig:
    settings = config_of(steps=STEPS, prompts=GROUPS).model_dump() | {"schedule": {"kind": kind}} | changes
    return OnPolicyConfig.model_validate(settings)


def decided(max_staleness: int) -> list[tuple[list[int], int]]:
    """What the scheduler gives out as a step's prompts, and at which version, to a maker that is always done."""
    rules = Rules(GROUPS, max_staleness, interrupt=False, whole_batches=True, total=STEPS * GROUPS)
    scheduler = Scheduler(rules, makers=1)
    found, version = [], 0
    for step in range(1, STEPS + 1):
        while actions := scheduler.actions():
            for action in actions:
                if isinstance(action, Update):
                    version = action.version
                    scheduler.updated(0, version)
                elif isinstance(action, Give):
                    found.append((list(action.groups), version))
                    assert all(scheduler.finished(0, group) for group in action.groups)
        assert scheduler.take() is not None
        scheduler.published(step)
    return found


@pytest.mark.parametrize("kind", ["sync", "one_step_off"])
def test_a_run_asks_for_the_batches_that_the_scheduler_gives_a_simulation(kind: str) -> None:
    config = config_for(kind)
    makers, rollout = rollout_source_of(config)
    trained(makers, rollout, range(1, STEPS + 1))
    assert rollout.asked == decided(config.schedule.staleness)


def kept(makers: BatchRollouts, path: Path) -> tuple[dict[str, Any], SavedRows | None]:
    """What a checkpoint keeps of them."""
    state, rows = json.loads(json.dumps(makers.state())), makers.rows()
    if rows is None:
        return state, None
    save_rows(rows, path).get()
    return state, SavedRows(path, tuple(name for name in rows.columns if name not in IDENTITY))


@pytest.mark.parametrize("kind", ["sync", "one_step_off"])
@pytest.mark.parametrize("last", [1, 3, 4])
def test_a_run_that_goes_on_trains_what_one_at_once_trains(kind: str, last: int, tmp_path: Path) -> None:
    config = config_for(kind)
    straight = trained(*rollout_source_of(config), range(1, STEPS + 1))
    first, _ = made = rollout_source_of(config)
    trained(*made, range(1, last + 1))
    again, rollout = made = rollout_source_of(config, version=last)
    again.restore(*kept(first, tmp_path / FILE))
    found = trained(*made, range(last + 1, STEPS + 1))
    for batch, expected in zip(found, straight[last:], strict=True):
        assert set(batch.columns) == set(expected.columns)
        for name in ("prompt_id", "sample", "weight_version"):
            assert batch.get(name).tolist() == expected.get(name).tolist()
    assert len(rollout.asked) == STEPS - last - config.schedule.staleness


def test_a_run_that_has_come_to_its_last_step_has_asked_for_nothing_more(tmp_path: Path) -> None:
    first, _ = made = rollout_source_of(config_for("one_step_off"))
    trained(*made, range(1, STEPS + 1))
    state, rows = kept(first, tmp_path / FILE)
    assert state["untrained"] == [] and rows is None
