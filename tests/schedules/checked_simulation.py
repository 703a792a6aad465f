"""A simulation that checks the scheduler's invariants after every event."""

from collections import Counter

from flowrl.schedules.scheduler import AbortGroups, Action, ScheduleLimits, StepBatch, UpdateWeights
from flowrl.schedules.simulation import Faults, Outcome, Simulation, Workload


class CheckedSimulation(Simulation):
    def __init__(
        self, limits: ScheduleLimits, num_replicas: int, workload: Workload, faults: Faults | None = None
    ) -> None:
        super().__init__(limits, num_replicas, workload, faults)
        self.versions = [0] * num_replicas
        self.lost: set[int] = set()
        """Replicas whose replacement process is not ready."""
        self.running: list[set[int]] = [set() for _ in range(num_replicas)]
        self.dispatch_version: dict[int, int] = {}
        self.trained: set[int] = set()
        self.batches: list[StepBatch] = []
        self.num_refused = 0
        self.dispatched_per_version = [0]
        """Groups dispatched between two weight versions."""
        self.replicas_of: Counter[int] = Counter()

    def run(self) -> Outcome:
        outcome = super().run()
        counts = self.scheduler.counts
        assert counts.waiting == counts.running == counts.complete == 0
        assert len(self.trained) == self.limits.total_groups
        return outcome

    def process_decisions(self) -> None:
        super().process_decisions()
        assert not self.scheduler.pop_actions() and not self.scheduler.pop_aborts(), "an action was returned twice"
        self._check_counts()

    def perform(self, action: Action) -> None:
        rank = action.replica
        if isinstance(action, UpdateWeights):
            assert action.version == self.version != self.versions[rank]
            assert self.limits.interrupt or not self.running[rank], "an update interrupts a group"
            assert rank not in self.lost
            self.versions[rank] = action.version
        else:
            self._check_dispatch(rank, action.groups)
        super().perform(action)

    def _check_dispatch(self, rank: int, groups: tuple[int, ...]) -> None:
        assert rank not in self.lost, "a new process is not ready yet"
        for group in groups:
            assert group not in self.trained and all(group not in running for running in self.running)
            self.dispatch_version[group] = self.versions[rank]
            self.running[rank].add(group)
        self.dispatched_per_version[-1] += len(groups)
        self.replicas_of[rank] += len(groups)
        if not self.limits.is_batched:
            assert len(self.running[rank]) <= self.limits.slots
            limit = self.limits.max_concurrent
            assert limit is None or sum(map(len, self.running)) <= limit

    def complete_group(self, rank: int, group: int) -> None:
        super().complete_group(rank, group)
        self.running[rank].remove(group)

    def refuse(self, group: int) -> None:
        super().refuse(group)
        assert not self.scheduler.drop_group(group, "refused"), "a group was dropped twice"
        self.num_refused += 1

    def abort(self, abort: AbortGroups) -> None:
        assert self.running[abort.replica].issuperset(abort.groups)
        self.running[abort.replica].difference_update(abort.groups)
        super().abort(abort)

    def lose_replica(self, rank: int) -> None:
        super().lose_replica(rank)
        self.lost.add(rank)
        self.running[rank].clear()

    def restore_replica(self, rank: int) -> None:
        super().restore_replica(rank)
        self.lost.discard(rank)

    def train(self, batch: StepBatch) -> None:
        limits = self.limits
        assert batch.version == self.version
        staleness = tuple(batch.version - self.dispatch_version[group] for group in batch.groups)
        assert staleness == batch.staleness and 0 <= min(staleness) <= max(staleness) <= limits.max_staleness
        if limits.trainer_routes is None:
            assert list(batch.groups) == sorted(batch.groups)
        is_last = len(self.trained) + len(batch.groups) == limits.total_groups
        size = len(batch.groups)
        assert size == limits.groups_per_step or (is_last and size < limits.groups_per_step)
        assert self.trained.isdisjoint(batch.groups)
        self.trained.update(batch.groups)
        self.batches.append(batch)
        super().train(batch)

    def finish_step(self) -> None:
        super().finish_step()
        self.dispatched_per_version.append(0)

    def _check_counts(self) -> None:
        counts = self.scheduler.counts
        num_live = counts.waiting + counts.running + counts.complete
        assert counts.admitted == num_live + counts.trained + sum(counts.dropped.values())
        assert counts.trained == len(self.trained) and counts.dropped["refused"] == self.num_refused
        pending = set(self.scheduler.pending_groups)
        assert len(pending) == num_live
        for rank, running in enumerate(self.running):
            assert self.scheduler._replicas[rank].running == running & pending
        if not self.limits.overprovision:
            assert not counts.dropped["stale"]
