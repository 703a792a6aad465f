"""Discrete-event simulation of a schedule under a virtual clock. The real `Scheduler` makes all decisions.

`simulate` returns throughput, staleness and idle time for given durations. `Simulation` also injects faults. Tests
subclass `Simulation` to check the scheduler's invariants.
"""

import heapq
import random
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from math import isfinite

from flowrl.schedules.scheduler import AbortGroups, Action, ScheduleLimits, Scheduler, StepBatch, UpdateWeights


class VirtualClock:
    """Virtual time with a queue of events. Simultaneous events run in the order of their registration."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None] | None]] = []
        self._order = count()

    def call_at(self, time_s: float, callback: Callable[[], None] | None = None) -> float:
        """Registers an event and returns its time. An event without a callback only advances the clock."""
        heapq.heappush(self._events, (time_s, next(self._order), callback))
        return time_s

    def advance(self) -> None:
        """Advances the time to the next event and runs its callback."""
        assert self._events, "no event is pending: the schedule is deadlocked"
        time_s, _, callback = heapq.heappop(self._events)
        self.now_s = max(self.now_s, time_s)
        if callback is not None:
            callback()


@dataclass(frozen=True)
class Workload:
    """Durations in seconds. If a sequence is shorter than the run, it is repeated."""

    group_s: Sequence[float]
    """Generation time of each group, in the order of admission. It does not depend on other groups."""
    train_s: Sequence[float]
    """Training time of each step."""
    update_s: float = 0.0
    """Duration of a weight update, which pauses generation on the replica."""
    startup_s: float = 3.0
    """Duration of the start of a replacement process."""


@dataclass(frozen=True)
class Faults:
    """Faults that occur at random times."""

    mean_s_between_losses: float = float("inf")
    """Mean time between two process losses. The lost replica is random."""
    max_losses: int = 10**6
    refused_fraction: float = 0.0
    """Fraction of groups that are refused, either while they run or when they complete."""
    slowdown: float = 1.0
    """Factor by which replica 0 is slower than the other replicas."""
    seed: int = 0


@dataclass(frozen=True)
class Outcome:
    steps: int
    seconds: float
    """Time from the first dispatch to the end of the last step."""
    staleness: Mapping[int, int]
    """Number of trained groups per staleness."""
    idle_replicas: float
    """Fraction of the time in which a slot has no group, mean over slots."""
    idle_trainer: float
    """Fraction of the time in which no step trains."""
    wait_weights_s: float
    """Seconds in which a replica was idle because of the staleness bound, mean over replicas."""
    num_dropped: int
    """Number of dropped groups."""

    @property
    def steps_per_s(self) -> float:
        return self.steps / self.seconds


def simulate(limits: ScheduleLimits, num_replicas: int, workload: Workload, faults: Faults | None = None) -> Outcome:
    """Simulates a run of `limits.total_groups` groups with one trainer.

    The trainer starts a step when its groups are complete. The new weights are available at the end of the step.
    """
    return Simulation(limits, num_replicas, workload, faults).run()


def simulate_detached(
    limits: ScheduleLimits, workload: Workload, *, num_replicas: int, num_trainer_devices: int
) -> Outcome:
    """Simulates a run with separate devices for generation and training. `train_s` is the time on a single device."""
    return simulate(limits, num_replicas, _share_training(workload, num_trainer_devices))


def simulate_colocated(
    limits: ScheduleLimits, workload: Workload, *, num_replicas: int, num_trainer_devices: int
) -> Outcome:
    """Simulates a synchronous run whose devices alternate between generation and training."""
    sync = replace(limits, max_staleness=0, overprovision=0, interrupt=False, is_batched=True)
    return simulate(sync, num_replicas, _share_training(workload, num_trainer_devices))


def _share_training(workload: Workload, num_devices: int) -> Workload:
    return replace(workload, train_s=[seconds / num_devices for seconds in workload.train_s])


def sample_long_tailed_s(num: int, mean_s: float, *, sigma: float, max_ratio: float, seed: int) -> list[float]:
    """Samples durations from a truncated log-normal distribution, which resembles response lengths.

    `sigma` is the standard deviation of the logarithm. `max_ratio` is the truncation as a multiple of the mean before
    truncation, like a limit of `max_response_tokens`.
    """
    rng = random.Random(seed)
    samples = [min(rng.lognormvariate(-sigma * sigma / 2, sigma), max_ratio) for _ in range(num)]
    scale = mean_s * num / sum(samples)
    return [scale * sample for sample in samples]


@dataclass
class _Replica:
    process: int = 0
    """Number of process losses so far."""
    queue: deque[int] = field(default_factory=deque)
    """Dispatched groups without a slot. Only batched schedules exceed the slots."""
    active: dict[int, float] = field(default_factory=dict)
    """Start time of each group in a slot."""
    free_at_s: float = 0.0
    """End of the last weight update."""
    paused_s: float = 0.0
    """Total duration of weight updates."""


class Simulation:
    """Runs replicas and a trainer under a virtual clock until all `limits.total_groups` groups are trained."""

    def __init__(
        self, limits: ScheduleLimits, num_replicas: int, workload: Workload, faults: Faults | None = None
    ) -> None:
        assert limits.total_groups is not None, "an unlimited run has no outcome"
        self.limits, self.workload, self.faults = limits, workload, faults or Faults()
        self.clock = VirtualClock()
        self.scheduler = Scheduler(limits, num_replicas)
        self.version = 0
        """Version that the trainer trains next."""
        self.num_steps = self.num_losses = 0
        self.is_training = False
        self._replicas = [_Replica() for _ in range(num_replicas)]
        self._rng = random.Random(self.faults.seed)
        self._worked_s = self._trained_s = self._starved_s = 0.0
        self._staleness: Counter[int] = Counter()

    def run(self) -> Outcome:
        clock, scheduler, num_replicas = self.clock, self.scheduler, len(self._replicas)
        self._schedule_loss()
        self.process_decisions()
        while self.is_training or scheduler.counts.trained < (self.limits.total_groups or 0):
            num_starved, start_s = len(scheduler.starved_replicas), clock.now_s
            clock.advance()
            self._starved_s += (clock.now_s - start_s) * num_starved
            self.process_decisions()
        return Outcome(
            steps=self.num_steps,
            seconds=clock.now_s,
            staleness=dict(self._staleness),
            idle_replicas=1 - self._worked_s / (clock.now_s * self.limits.slots * num_replicas),
            idle_trainer=1 - self._trained_s / clock.now_s,
            wait_weights_s=self._starved_s / num_replicas,
            num_dropped=sum(scheduler.counts.dropped.values()),
        )

    def _call_at(self, time_s: float, callback: Callable[[], None]) -> None:
        def handle() -> None:
            self.scheduler.advance_clock(self.clock.now_s)
            callback()

        self.clock.call_at(time_s, handle)

    # Decisions of the scheduler. Tests override these methods to check them.

    def process_decisions(self) -> None:
        """Executes all actions that the scheduler returns."""
        if not self.is_training and (batch := self.scheduler.pop_step_batch()) is not None:
            self.train(batch)
        for abort in self.scheduler.pop_aborts():
            self.abort(abort)
        for action in self.scheduler.pop_actions():
            self.perform(action)

    def train(self, batch: StepBatch) -> None:
        self._staleness.update(batch.staleness)
        seconds = self.workload.train_s[self.num_steps % len(self.workload.train_s)]
        self._trained_s += seconds
        self.num_steps += 1
        self.is_training = True
        self._call_at(self.clock.now_s + seconds, self.finish_step)

    def finish_step(self) -> None:
        """Ends a training step and makes the new weights available."""
        self.is_training = False
        self.version += 1
        self.scheduler.add_version(self.version)

    def abort(self, abort: AbortGroups) -> None:
        replica = self._replicas[abort.replica]
        for group in abort.groups:
            if group in replica.active:
                self._worked_s += max(0.0, self.clock.now_s - replica.active.pop(group))
            else:
                replica.queue.remove(group)
        self._fill_slots(abort.replica)

    def perform(self, action: Action) -> None:
        """Starts a weight update or the generation of groups on a replica."""
        rank, replica = action.replica, self._replicas[action.replica]
        if not isinstance(action, UpdateWeights):
            replica.queue.extend(action.groups)
            return self._fill_slots(rank)
        seconds = self.workload.update_s
        replica.free_at_s = max(replica.free_at_s, self.clock.now_s) + seconds
        replica.paused_s += seconds
        process = replica.process

        def confirm() -> None:
            if self._replicas[rank].process == process:
                self.scheduler.confirm_update(rank)

        self._call_at(replica.free_at_s, confirm)

    # Replicas.

    def _fill_slots(self, rank: int) -> None:
        replica = self._replicas[rank]
        while replica.queue and len(replica.active) < self.limits.slots:
            group = replica.queue.popleft()
            start_s = replica.active[group] = max(self.clock.now_s, replica.free_at_s)
            self._schedule_end(start_s + self._seconds(rank, group), rank, group)

    def _schedule_end(self, time_s: float, rank: int, group: int) -> None:
        process, paused_s = self._replicas[rank].process, self._replicas[rank].paused_s
        self._call_at(time_s, lambda: self._end_group(rank, group, process, paused_s))

    def _seconds(self, rank: int, group: int) -> float:
        factor = self.faults.slowdown if rank == 0 else 1.0
        return factor * self.workload.group_s[group % len(self.workload.group_s)]

    def _end_group(self, rank: int, group: int, process: int, paused_s: float) -> None:
        replica = self._replicas[rank]
        if replica.process != process:
            if group not in replica.active and group not in replica.queue:
                assert not self.scheduler.complete_group(rank, group), "a lost process completed a group"
            return
        if group not in replica.active:
            return  # aborted
        if delay_s := replica.paused_s - paused_s:  # a weight update paused the generation of the group
            return self._schedule_end(self.clock.now_s + delay_s, rank, group)
        is_refused = self.faults.refused_fraction > 0 and self._rng.random() < self.faults.refused_fraction
        if is_refused and self._rng.random() < 0.5:
            return self.refuse(group)
        del replica.active[group]
        self._worked_s += self._seconds(rank, group)
        self.complete_group(rank, group)
        if is_refused:
            self.refuse(group)
        self._fill_slots(rank)

    def complete_group(self, rank: int, group: int) -> None:
        assert self.scheduler.complete_group(rank, group), "the scheduler lost track of a running group"

    def refuse(self, group: int) -> None:
        """Drops a running or complete group as if the engine refused its prompt."""
        assert self.scheduler.drop_group(group, "refused"), "a live group is already dropped"

    # Losses.

    def _schedule_loss(self) -> None:
        mean_s = self.faults.mean_s_between_losses
        if isfinite(mean_s) and self.num_losses < self.faults.max_losses:
            delay_s = self._rng.expovariate(1 / mean_s)
            self._call_at(
                self.clock.now_s + delay_s, lambda: self.lose_replica(self._rng.randrange(len(self._replicas)))
            )

    def lose_replica(self, rank: int) -> None:
        """Replaces the process of a replica with a new process, which loads the same weights and has no groups."""
        lost = self._replicas[rank]
        self._worked_s += sum(max(0.0, self.clock.now_s - start_s) for start_s in lost.active.values())
        self._replicas[rank] = _Replica(lost.process + 1)
        self.scheduler.mark_replica_lost(rank)
        self.num_losses += 1
        self._schedule_loss()

        def restore() -> None:
            if self._replicas[rank].process == lost.process + 1:
                self.restore_replica(rank)

        self._call_at(self.clock.now_s + self.workload.startup_s + self.workload.update_s, restore)

    def restore_replica(self, rank: int) -> None:
        """Ends the start of a new process, which has repeated the weight update in flight."""
        self.scheduler.confirm_update(rank)
        self.scheduler.restore_replica(rank)
