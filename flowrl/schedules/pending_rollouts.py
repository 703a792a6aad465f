"""Groups that were admitted and not trained, from the checkpoint of one streaming run into the next."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flowrl.checkpoints.saved_rows import IDENTITY, SavedRows
from flowrl.data.batch.batch import Batch
from flowrl.schedules.rollout_source import RolloutContext
from flowrl.schedules.scheduler import Scheduler


@dataclass(frozen=True)
class PendingRollouts:
    """What a checkpoint keeps of them beside their draws."""

    groups: list[tuple[int, int | None]]
    """`Scheduler.standing`."""
    lanes: int
    """How many the scheduler had."""
    rows: SavedRows | None
    """Of the complete ones, in order."""

    @classmethod
    def read(cls, state: Mapping[str, Any], rows: SavedRows | None) -> "PendingRollouts":
        """Args: `state` has what `pending_state` gave."""
        return cls([(lane, version) for lane, version in state["groups"]], state["lanes"], rows)

    def admit(self, scheduler: Scheduler, setting: RolloutContext) -> tuple[dict[int, int], dict[int, Batch]]:
        """Has a scheduler take them back; group -> its draw, and group -> its rows of those that are complete."""
        draws, samples = setting.prompts, setting.config.samples_per_prompt
        groups = scheduler.take_back(self.groups, self.lanes)
        numbers = dict(zip(groups, draws.take(len(groups)), strict=True))
        if self.rows is None:
            return numbers, {}
        complete = [group for group, (_, version) in zip(groups, self.groups, strict=True) if version is not None]
        rows = self.rows.load(draws.batch(numbers[group] for group in complete), setting.rollout.tasks)
        places = {group: slice(at * samples, (at + 1) * samples) for at, group in enumerate(complete)}
        return numbers, {group: rows.rows(place) for group, place in places.items()}


def pending_state(scheduler: Scheduler) -> dict[str, Any]:
    """Plain values for a checkpoint."""
    return {"groups": scheduler.standing(), "lanes": scheduler.num_lanes}


def complete_rows(
    scheduler: Scheduler, setting: RolloutContext, draws: Mapping[int, int], finished: Mapping[int, Batch]
) -> Batch | None:
    """The rows that a checkpoint keeps, those of complete groups; what makers work on is generated again.

    Args:
        draws: group -> its draw.
        finished: complete group -> its rows.
    """
    complete = [group for group in scheduler.untrained if group in finished]
    if not complete:
        return None
    keys = setting.prompts.batch(draws[group] for group in complete).select(*IDENTITY)
    return keys.union(Batch.concat([finished[group] for group in complete]))
