"""Scheduler of all schedules. Decides which replica generates which prompt, and which responses a step trains.

The scheduler has no models, processes or clock. A *group* is a prompt with all its samples. A *replica* is a
data-parallel replica of the rollout. A group is admitted when it is first dispatched to a replica. Its state changes
from running to complete, and finally to trained or dropped. If its replica is lost, the group waits for another
replica.

Staleness is bounded at dispatch, as in AReaL (Fu et al. 2025, https://arxiv.org/abs/2505.24298). If r groups train
before a group, the group trains at version V + r // groups_per_step, where V is the version that the next step trains.
A replica gets the group only if this version is at most `max_staleness` above the replica's own version.

`sync` and `one_step_off` are the batched limit: a *round* dispatches all groups that the next step lacks, and the next
round begins when the groups of the last one are complete or dropped.
"""

import math
from bisect import insort
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from flowrl.schedules.throughput import ThroughputTracker

TrainerRoutes = tuple[tuple[int, ...], ...]
"""Type of the routes: for each data-parallel rank of the actor, the replicas that generate its share of a step."""

DROP_REASONS = ("stale", "refused", "equal_scores", "failed")
"""Reasons why a group is not trained:

- `stale`: its responses are older than the staleness bound.
- `refused`: the engine rejected its prompt.
- `equal_scores` and `failed`: see flowrl/schedules/group_filter.py.
"""


@dataclass(frozen=True)
class ScheduleLimits:
    """Limits that the scheduler enforces. All counts are in groups."""

    groups_per_step: int
    max_staleness: int
    max_concurrent: int | None = None
    """Largest number of running groups over all replicas; None means unlimited."""
    overprovision: int = 0
    """Number of groups that are admitted beyond the staleness bound. A step may skip this many incomplete groups."""
    interrupt: bool = True
    """Whether a replica loads new weights while it generates."""
    slots: int = 1
    """Largest number of running groups per replica."""
    is_batched: bool = False
    """Whether the groups of a step are dispatched in rounds, as in `sync`. This disables `slots` and `max_concurrent`.
    """
    oversample: float = 1.0
    """Number of groups of a round, as a multiple of those that the step lacks. The caller drops the surplus."""
    total_groups: int | None = None
    """Total number of groups that the run trains, including groups before a resume; None means unlimited."""
    trainer_routes: TrainerRoutes | None = None
    """Replicas of each trainer rank. Each rank trains an equal share of a step. None: any replica serves any rank."""


@dataclass(frozen=True)
class DispatchGroups:
    """Action: the replica starts to generate the groups."""

    replica: int
    groups: tuple[int, ...]


@dataclass(frozen=True)
class UpdateWeights:
    """Action: the replica loads a weight version, before it generates the groups of later `DispatchGroups` actions."""

    replica: int
    version: int


@dataclass(frozen=True)
class AbortGroups:
    """Action: the replica stops generating the groups, because they were dropped."""

    replica: int
    groups: tuple[int, ...]


Action = DispatchGroups | UpdateWeights


@dataclass(frozen=True)
class StepBatch:
    version: int
    """Version of the weights that the step trains."""
    groups: tuple[int, ...]
    """Groups in the order of admission. With `trainer_routes` they are sorted by trainer first."""
    staleness: tuple[int, ...]
    """Staleness per group: `version` minus the replica's version when the group was dispatched."""
    dropped: tuple[int, ...] = ()
    """Groups that were dropped after this step, because they would be too stale for the next one."""


@dataclass(frozen=True)
class GroupCounts:
    """Number of groups per state. `admitted` is the sum of waiting, running, complete, trained and dropped groups."""

    admitted: int
    waiting: int
    running: int
    complete: int
    """Complete groups that no step has trained yet."""
    trained: int
    dropped: Mapping[str, int]
    """Number of dropped groups per reason, for all `DROP_REASONS`."""

    def add_finished(self, earlier: "GroupCounts") -> "GroupCounts":
        """Returns the sum of these counts and the trained and dropped groups of an earlier scheduler.

        The other groups of the earlier scheduler were admitted again.
        """
        dropped = {reason: self.dropped.get(reason, 0) + n for reason, n in earlier.dropped.items()}
        dropped = dict(self.dropped) | dropped
        admitted = self.admitted + earlier.trained + sum(earlier.dropped.values())
        return replace(self, admitted=admitted, trained=self.trained + earlier.trained, dropped=dropped)


def dropped_metrics(counts: GroupCounts, previous: GroupCounts | None, reasons: Iterable[str]) -> dict[str, float]:
    """Returns the number of groups that were dropped since the previous step, in total and per reason."""
    before = previous.dropped if previous else {}
    dropped = {reason: float(counts.dropped.get(reason, 0) - before.get(reason, 0)) for reason in reasons}
    return {"dropped_groups": sum(dropped.values())} | {f"dropped_{reason}": n for reason, n in dropped.items()}


def group_metrics(counts: GroupCounts, previous: GroupCounts | None = None) -> dict[str, float]:
    """Returns the number of groups per state, and of groups admitted, trained and dropped since the previous step."""
    metrics = {
        "buffer_depth": counts.complete,
        "running_groups": counts.running,
        "waiting_groups": counts.waiting,
        "admitted_groups": counts.admitted - (previous.admitted if previous else 0),
        "trained_groups": counts.trained - (previous.trained if previous else 0),
    }
    values = {name: float(value) for name, value in metrics.items()}
    return values | dropped_metrics(counts, previous, counts.dropped)


@dataclass
class _Group:
    replica: int | None = None
    version: int | None = None
    """Version of the replica when the group was dispatched; None while the group waits."""

    @property
    def is_complete(self) -> bool:
        return self.replica is None and self.version is not None


@dataclass
class _Replica:
    version: int
    """Weight version after all submitted updates."""
    is_updating: bool = False
    """Whether an update is in flight."""
    is_lost: bool = False
    """Whether the process was lost, and its replacement is not ready."""
    running: set[int] = field(default_factory=set)
    num_unscored: int = 0
    """Number of running groups that wait for scores only, and therefore occupy no slot."""
    pinned: int | None = None
    """Newest version that the replica may load, during an evaluation."""

    @property
    def num_slots_used(self) -> int:
        return len(self.running) - min(self.num_unscored, len(self.running))


@dataclass
class TrainerQueue:
    """Queue of the groups of one trainer rank, or of all trainer ranks without routes."""

    replicas: tuple[int, ...]
    quota: int
    num_untrained: int | None
    """Number of groups that the queue still has to train; None means unlimited."""
    live: dict[int, _Group] = field(default_factory=dict)
    """Groups that are neither trained nor dropped, in the order of admission."""
    waiting: list[int] = field(default_factory=list)
    """Admitted groups without a replica, in the order of admission."""
    num_running: int = 0
    num_admitted: int = 0
    round_end: int = 0
    """`num_admitted` at the end of the last round, if the schedule is batched."""
    round_version: int = 0
    """Version that trains the groups of this round."""

    @property
    def is_full(self) -> bool:
        """Whether all groups of the queue are admitted."""
        return self.num_untrained is not None and len(self.live) >= self.num_untrained

    @property
    def num_complete(self) -> int:
        return len(self.live) - self.num_running - len(self.waiting)

    def num_ahead(self) -> int:
        """Returns the number of live groups that train before the next dispatched group."""
        return list(self.live).index(self.waiting[0]) if self.waiting else len(self.live)


class Scheduler:
    """Decides which groups each replica generates and which groups the next step trains. No method blocks.

    The caller reports events with `complete_group`, `add_version`, `confirm_update`, `mark_replica_lost`,
    `restore_replica` and `drop_group`. It then executes the results of `pop_aborts` and `pop_actions`, and gets the
    groups of the next step from `pop_step_batch`.

    Args:
        limits: limits to enforce.
        num_replicas: number of replicas, at least 1.
        version: weight version of the trainer and of all replicas at the start.
        num_steps_done: number of trained steps before a resume.
    """

    def __init__(self, limits: ScheduleLimits, num_replicas: int, *, version: int = 0, num_steps_done: int = 0) -> None:
        self._limits = limits
        self._replicas = [_Replica(version) for _ in range(num_replicas)]
        self._throughput = ThroughputTracker(num_replicas)
        self._newest_version = version
        self._next_version = version
        """Version that the next step trains."""
        routes = limits.trainer_routes or (tuple(range(num_replicas)),)
        num_queues, per_step = len(routes), limits.groups_per_step
        assert per_step % num_queues == 0, "a step's groups are shared equally by the trainers"
        num_left = None if limits.total_groups is None else limits.total_groups - num_steps_done * per_step
        # Queue i gets the remaining groups i, i + num_queues, ...
        shares = [
            None if num_left is None else (num_left + num_queues - 1 - i) // num_queues for i in range(num_queues)
        ]
        self._queues = [
            TrainerQueue(replicas, per_step // num_queues, share)
            for replicas, share in zip(routes, shares, strict=True)
        ]
        self._queue_of: dict[int, TrainerQueue] = {}
        self._aborts: defaultdict[int, list[int]] = defaultdict(list)
        self._num_admitted = 0
        self._num_trained = 0
        self._dropped: Counter[str] = Counter(dict.fromkeys(DROP_REASONS, 0))

    # Checkpoints.

    def snapshot(self) -> list[tuple[int, int | None]]:
        """Returns (queue index, version at dispatch) of each untrained group.

        The version of incomplete groups is None.
        """
        indices = {id(queue): index for index, queue in enumerate(self._queues)}
        queues = [(self._queue_of[group], group) for group in self.pending_groups]
        states = [(indices[id(queue)], queue.live[group]) for queue, group in queues]
        return [(index, state.version if state.is_complete else None) for index, state in states]

    def restore(self, groups: list[tuple[int, int | None]], num_queues: int) -> list[int]:
        """Admits the untrained groups of a checkpoint and returns their new ids. Call it before any other method.

        Complete groups stay complete. All other groups wait for a replica. If the number of queues has changed, each
        group is added to the shortest queue. Groups that are too stale for their new position are dropped later.

        Args:
            groups: result of `snapshot`.
            num_queues: `num_queues` of the earlier scheduler.
        """
        ids = []
        for index, version in groups:
            is_same = num_queues == self.num_queues
            queue = self._queues[index] if is_same else min(self._queues, key=lambda queue: len(queue.live))
            group = self._admit(queue)
            queue.live[group].version = version
            if version is None:
                queue.waiting.append(group)
            ids.append(group)
        return ids

    @property
    def num_queues(self) -> int:
        return len(self._queues)

    @property
    def pending_groups(self) -> tuple[int, ...]:
        """Admitted groups that are neither trained nor dropped, in the order of admission."""
        return tuple(sorted(self._queue_of))

    # Events.

    def advance_clock(self, now_s: float) -> None:
        """Sets the current time (monotonic seconds), from which each replica's throughput is estimated."""
        self._throughput.advance_clock(now_s)

    def complete_group(self, replica: int, group: int) -> bool:
        """Marks a group as complete.

        Returns False if it is not running on this replica; the caller then discards its rows.
        """
        queue = self._queue_of.get(group)
        if queue is None or queue.live[group].replica != replica:
            return False
        queue.live[group].replica = None
        queue.num_running -= 1
        self._replicas[replica].running.remove(group)
        self._throughput.complete_group(replica, group)
        return True

    def add_version(self, version: int) -> None:
        """Makes a weight version available to replicas."""
        self._newest_version = max(self._newest_version, version)

    def confirm_update(self, replica: int) -> None:
        """Records that a replica has loaded the version of its last update. It has at most one update in flight."""
        self._replicas[replica].is_updating = False

    def pin_replica(self, version: int) -> int:
        """Keeps a replica at a version until `unpin_replica`, although newer versions follow. Returns the replica.

        No replica may have a newer version. Selects the replica with the newest weights and the fewest running groups.
        The staleness bound limits which groups it gets.
        """
        indices = range(len(self._replicas))
        replicas = self._replicas
        chosen = max(indices, key=lambda index: (replicas[index].version, -len(replicas[index].running)))
        replicas[chosen].pinned = version
        return chosen

    def unpin_replica(self, replica: int) -> None:
        self._replicas[replica].pinned = None

    def set_unscored(self, replica: int, count: int) -> None:
        """Sets how many running groups of a replica wait for scores only. Other groups get their slots."""
        self._replicas[replica].num_unscored = count

    def mark_replica_lost(self, replica: int) -> None:
        """Requeues the groups of a lost process. The replica gets neither groups nor updates until `restore_replica`.

        Its replacement has the same weight version, because the controller repeats the calls that load weights.
        """
        state = self._replicas[replica]
        for group in state.running:
            queue = self._queue_of[group]
            queue.live[group] = _Group()
            queue.num_running -= 1
            insort(queue.waiting, group)
        state.running.clear()
        state.num_unscored, state.is_lost = 0, True
        self._throughput.reset_replica(replica)
        self._aborts.pop(replica, None)

    def restore_replica(self, replica: int) -> None:
        """Records that the replacement of a lost process is ready, with the weights of the lost process."""
        self._replicas[replica].is_lost = False

    def drop_group(self, group: int, reason: str) -> bool:
        """Drops a group and aborts it if it is running. Returns False if it was already trained or dropped."""
        queue = self._queue_of.pop(group, None)
        if queue is None:
            return False
        state = queue.live.pop(group)
        if state.replica is not None:
            queue.num_running -= 1
            self._replicas[state.replica].running.remove(group)
            self._aborts[state.replica].append(group)
            self._throughput.cancel_group(state.replica, group)
        elif not state.is_complete:
            queue.waiting.remove(group)
        self._dropped[reason] += 1
        return True

    # Actions.

    def pop_aborts(self) -> list[AbortGroups]:
        """Returns each abort once. Replicas must receive aborts before other actions."""
        aborts = [AbortGroups(replica, tuple(groups)) for replica, groups in self._aborts.items()]
        self._aborts.clear()
        return aborts

    def pop_actions(self) -> list[Action]:
        """Returns each weight update and dispatch once, in the order in which the caller must submit them."""
        return [*self.pop_updates(), *self._pop_dispatches()]

    def pop_updates(self) -> list[UpdateWeights]:
        """Returns each weight update once."""
        updates = []
        for index, replica in enumerate(self._replicas):
            is_ready = not (replica.is_updating or replica.is_lost) and (self._limits.interrupt or not replica.running)
            target = self._target_version(replica)
            if is_ready and replica.version != target:
                replica.is_updating, replica.version = True, target
                updates.append(UpdateWeights(index, target))
        return updates

    def _pop_dispatches(self) -> Iterator[DispatchGroups]:
        dispatched: defaultdict[int, list[int]] = defaultdict(list)
        while (choice := self._choose_next()) is not None:
            queue, index, train_version = choice
            replica = self._replicas[index]
            if self._limits.is_batched and not queue.waiting and queue.num_admitted >= queue.round_end:
                queue.round_end = queue.num_admitted + math.ceil(self._num_missing(queue) * self._limits.oversample)
                queue.round_version = train_version
            group = queue.waiting.pop(0) if queue.waiting else self._admit(queue)
            queue.live[group].replica, queue.live[group].version = index, replica.version
            queue.num_running += 1
            replica.running.add(group)
            self._throughput.start_group(index, group)
            dispatched[index].append(group)
        return (DispatchGroups(index, tuple(groups)) for index, groups in dispatched.items())

    def _admit(self, queue: TrainerQueue) -> int:
        group = self._num_admitted
        self._num_admitted += 1
        queue.num_admitted += 1
        queue.live[group] = _Group()
        self._queue_of[group] = queue
        return group

    def _choose_next(self) -> tuple[TrainerQueue, int, int] | None:
        """Returns the queue whose next group trains first, the least busy replica that may generate this group, and the
        version that trains it.
        """
        num_running = sum(queue.num_running for queue in self._queues)
        if self._is_at_limit(num_running):
            return None
        for queue in sorted(self._queues, key=lambda queue: queue.num_ahead()):
            train_version = self._next_train_version(queue, num_running)
            if train_version is None:
                continue
            replica = self._find_replica(queue, train_version)
            if replica is not None:
                return queue, replica, train_version
        return None

    def _is_at_limit(self, num_running: int) -> bool:
        limit = self._limits.max_concurrent
        return limit is not None and num_running >= limit and not self._limits.is_batched

    def _find_replica(self, queue: TrainerQueue, train_version: int) -> int | None:
        """Returns the replica with the fewest running groups that may generate a group for this version."""
        eligible = [index for index in queue.replicas if self._is_eligible(self._replicas[index], train_version)]
        eligible.sort(key=lambda index: len(self._replicas[index].running))
        best = next((index for index in eligible if not self._is_straggler(queue, index)), None)
        if best is None and eligible and not any(self._replicas[index].running for index in queue.replicas):
            return eligible[0]  # without this group the queue would make no progress
        return best

    def _is_eligible(self, replica: _Replica, train_version: int) -> bool:
        has_slot = self._limits.is_batched or replica.num_slots_used < self._limits.slots
        is_outdated = replica.pinned is not None and replica.version != replica.pinned <= self._newest_version
        if is_outdated and not self._limits.interrupt:
            return False  # the replica becomes idle, so that it can load the pinned version
        return has_slot and not replica.is_lost and train_version - replica.version <= self._limits.max_staleness

    def _is_straggler(self, queue: TrainerQueue, replica: int) -> bool:
        """Whether training would wait for a group of this replica while the other replicas of the queue are done."""
        limits = self._limits
        if limits.is_batched:
            return False
        others = [other for other in queue.replicas if other != replica and not self._replicas[other].is_lost]
        max_live = (limits.max_staleness + 1) * queue.quota + limits.overprovision
        max_live = max_live if queue.num_untrained is None else min(max_live, queue.num_untrained)
        return self._throughput.is_straggler(replica, others, (max_live - queue.num_complete) / limits.slots)

    def _next_train_version(self, queue: TrainerQueue, num_running: int) -> int | None:
        """Returns the version that will train the queue's next group, or None if no group may be dispatched now."""
        if self._limits.is_batched and not queue.waiting:
            if queue.num_admitted < queue.round_end:
                return queue.round_version
            is_complete = num_running == 0 and not queue.is_full
            return self._next_version + len(queue.live) // queue.quota if is_complete else None
        if queue.is_full and not queue.waiting:
            return None
        return self._next_version + max(0, queue.num_ahead() - self._limits.overprovision) // queue.quota

    @staticmethod
    def _num_missing(queue: TrainerQueue) -> int:
        """Returns the number of groups that the last step of the queue lacks."""
        missing = queue.quota - len(queue.live) % queue.quota
        return missing if queue.num_untrained is None else min(missing, queue.num_untrained - len(queue.live))

    # Training.

    def pop_step_batch(self, *, is_partial: bool = False) -> StepBatch | None:
        """Returns the groups of the next step, or None if they are incomplete. Then drops groups that are too stale.

        With `is_partial`, a step may have fewer groups than `groups_per_step`: those that are complete.
        """
        shares = [self._complete_share(queue) for queue in self._queues]
        if is_partial and None in shares:
            shares = [self._partial_share(queue) for queue in self._queues]
        ready = [groups for groups in shares if groups is not None]
        if len(ready) < len(shares) or not any(ready):
            return None
        version = self._next_version
        staleness = {group: self._mark_trained(group) for groups in ready for group in groups}
        assert max(staleness.values()) <= self._limits.max_staleness
        self._next_version += 1
        return StepBatch(version, tuple(staleness), tuple(staleness.values()), tuple(self._drop_stale()))

    def _mark_trained(self, group: int) -> int:
        queue = self._queue_of.pop(group)
        version = queue.live.pop(group).version
        assert version is not None
        if queue.num_untrained is not None:
            queue.num_untrained -= 1
        self._num_trained += 1
        return self._next_version - version

    def _complete_share(self, queue: TrainerQueue) -> list[int] | None:
        """Returns the queue's share of the next step, or None if it is incomplete. The last share may be smaller.

        The share is the first `quota` complete groups. At most `overprovision` incomplete groups are skipped.
        """
        if queue.is_full and len(queue.live) < queue.quota:
            return list(queue.live) if queue.num_complete == len(queue.live) else None
        if queue.num_complete < queue.quota:
            return None
        share: list[int] = []
        for num_seen, (group, state) in enumerate(queue.live.items(), start=1):
            if state.is_complete:
                share.append(group)
            if len(share) == queue.quota or num_seen - len(share) > self._limits.overprovision:
                break
        return share if len(share) == queue.quota else None

    def _partial_share(self, queue: TrainerQueue) -> list[int]:
        """Returns the first complete groups of a queue, at most `quota`. The missing groups count as trained."""
        share = [group for group, state in queue.live.items() if state.is_complete][: queue.quota]
        if queue.num_untrained is not None and share:
            queue.num_untrained = max(len(queue.live), queue.num_untrained - (queue.quota - len(share)))
        return share

    def _drop_stale(self) -> list[int]:
        oldest = self._next_version - self._limits.max_staleness
        live = (item for queue in self._queues for item in queue.live.items())
        stale = [group for group, state in live if state.version is not None and state.version < oldest]
        for group in stale:
            self.drop_group(group, "stale")
        return stale

    # State.

    @property
    def counts(self) -> GroupCounts:
        """Current number of groups per state."""
        running = sum(queue.num_running for queue in self._queues)
        waiting = sum(len(queue.waiting) for queue in self._queues)
        complete = sum(queue.num_complete for queue in self._queues)
        return GroupCounts(self._num_admitted, waiting, running, complete, self._num_trained, dict(self._dropped))

    @property
    def starved_replicas(self) -> tuple[int, ...]:
        """Idle replicas that get no group until they load newer weights, because of the staleness bound.

        Excludes pinned replicas, and those that would get no group with newer weights either, as at the end of the run.
        """
        if self._is_at_limit(sum(queue.num_running for queue in self._queues)):
            return ()
        idle = [index for index in self.idle_replicas if self._replicas[index].pinned is None]
        return tuple(index for index in idle if self._is_blocked_by_staleness(index))

    def _is_blocked_by_staleness(self, index: int) -> bool:
        version, limit = self._replicas[index].version, self._limits.max_staleness
        queues = [queue for queue in self._queues if index in queue.replicas]
        train_versions = [self._next_train_version(queue, num_running=0) for queue in queues]
        return any(train is not None and train - version > limit for train in train_versions)

    @property
    def idle_replicas(self) -> tuple[int, ...]:
        """Replicas without running groups. Excludes lost replicas."""
        replicas = enumerate(self._replicas)
        return tuple(index for index, replica in replicas if not (replica.running or replica.is_lost))

    def _target_version(self, replica: _Replica) -> int:
        """Returns the version that a replica should load: the newest one, or the pinned one until that is newer."""
        newest = self._newest_version
        return newest if replica.pinned is None else min(replica.pinned, newest)

    def replica_version(self, replica: int) -> int:
        """Returns a replica's weight version after all submitted updates."""
        return self._replicas[replica].version

    def is_lost(self, replica: int) -> bool:
        """Whether the process of a replica was lost, and its replacement is not ready."""
        return self._replicas[replica].is_lost
