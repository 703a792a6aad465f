"""PendingRollouts: the groups of a checkpoint that no step has trained."""

from dataclasses import dataclass

from flowrl.checkpoints.saved_rows import SavedRows
from flowrl.data.batch.batch import Batch
from flowrl.schedules.rollout_source import RolloutContext
from flowrl.schedules.scheduler import Scheduler


@dataclass(frozen=True)
class PendingRollouts:
    """Pending groups from a checkpoint."""

    groups: list[tuple[int, int | None]]
    num_queues: int
    """Number of queues of the scheduler that created the checkpoint."""
    rows: SavedRows | None
    """Rows of the complete groups, in the order of `groups`."""

    def admit(self, scheduler: Scheduler, context: RolloutContext) -> tuple[dict[int, int], dict[int, Batch]]:
        """Admits the groups in a new scheduler.

        Returns the prompt index of every group and the rows of complete groups.
        """
        queue, samples = context.prompts, context.config.samples_per_prompt
        groups = scheduler.restore(self.groups, self.num_queues)
        indices = dict(zip(groups, queue.pop(len(groups)), strict=True))
        if self.rows is None:
            return indices, {}
        complete = [group for group, (_, version) in zip(groups, self.groups, strict=True) if version is not None]
        rows = self.rows.load(queue.make_batch(indices[group] for group in complete), context.rollout.tasks)
        return indices, {group: rows.rows(slice(i * samples, (i + 1) * samples)) for i, group in enumerate(complete)}
