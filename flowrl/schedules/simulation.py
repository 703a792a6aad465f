"""A run under a virtual clock: what a schedule gives for stated stage times. The decisions are `Scheduler`'s."""

import heapq
import random
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from flowrl.schedules.rules import Action, Rules, Update
from flowrl.schedules.scheduler import Scheduler


@dataclass(frozen=True)
class Times:
    """Seconds that things take."""

    groups: Sequence[float]
    """Of a group on a slot of a maker, whatever runs beside it; the k-th admitted one takes groups[k % len(groups)]."""
    train: Sequence[float]
    """Of a step, by its number in the same way."""
    update_s: float = 0.0
    """For which new weights stop all that a maker works on."""


@dataclass(frozen=True)
class Outcome:
    """What came of it."""

    steps: int
    seconds: float
    """From the first group to the end of the last step."""
    staleness: Mapping[int, int]
    """Staleness -> trained groups."""
    idle_makers: float
    """Part of the time of all slots of the makers that was without a group."""
    idle_trainer: float
    """Part of the time in which nothing was trained; all of it is waiting for data."""
    wait_weights_s: float
    """For which a maker had nothing to do, because more groups would have been too old; the mean of the makers."""
    dropped: int
    """Groups that grew too old."""

    @property
    def steps_per_s(self) -> float:
        """Steps in a second of the whole time."""
        return self.steps / self.seconds

    @property
    def mean_staleness(self) -> float:
        """Over trained groups."""
        return sum(age * num for age, num in self.staleness.items()) / sum(self.staleness.values())


def simulate(rules: Rules, makers: int, times: Times) -> Outcome:
    """Lets makers and a trainer do what the rules say until `rules.total` groups are trained.

    A trainer takes a step's groups when they are there, and its weights can be taken at the end of the step.
    """
    assert rules.total is not None, "a run without an end has no outcome"
    return _Clock(rules, makers, times).run()


def long_tailed(num: int, mean_s: float, *, sigma: float, longest: float, seed: int) -> list[float]:
    """Seconds drawn from a log-normal distribution, as lengths of responses are, cut off and then scaled to the mean.

    Args:
        sigma: standard deviation of the logarithm; 0 is all the same.
        longest: where it is cut off, in multiples of the distribution's own mean, as `max_response_tokens` does.
    """
    draws = random.Random(seed)
    cut = [min(draws.lognormvariate(-sigma * sigma / 2, sigma), longest) for _ in range(num)]
    scale = mean_s * num / sum(cut)
    return [scale * seconds for seconds in cut]


def detached(rules: Rules, times: Times, *, makers: int, trainer_devices: int) -> Outcome:
    """A run with devices of their own for both.

    Args:
        times: `train` is the time of a step on one device, and the trainer's share it evenly.
    """
    return simulate(rules, makers, _shared(times, trainer_devices))


def in_turns(rules: Rules, times: Times, *, makers: int, trainer_devices: int) -> Outcome:
    """A synchronous run in which the same devices generate and train, so that each does one half of the time."""
    whole = replace(rules, max_staleness=0, overprovision=0, interrupt=False, whole_batches=True)
    return simulate(whole, makers, _shared(times, trainer_devices))


def _shared(times: Times, devices: int) -> Times:
    return replace(times, train=[seconds / devices for seconds in times.train])


@dataclass
class _Maker:
    queue: deque[int] = field(default_factory=deque)
    """Groups that it was given beyond its slots, as a whole batch may be."""
    active: dict[int, float] = field(default_factory=dict)
    """Groups in its slots, and when they began."""
    free_at: float = 0.0
    """When the weights that it was told to take are there."""
    paused_s: float = 0.0
    """For which updates stopped it so far."""


@dataclass(frozen=True, order=True)
class _Event:
    at: float
    order: int
    kind: str = field(compare=False)
    maker: int = field(default=0, compare=False)
    group: int = field(default=0, compare=False)
    paused_s: float = field(default=0.0, compare=False)
    """Of the maker, when the end of the group was foreseen."""


class _Clock:
    def __init__(self, rules: Rules, makers: int, times: Times) -> None:
        self._rules, self._times = rules, times
        self._scheduler = Scheduler(rules, makers)
        self._makers = [_Maker() for _ in range(makers)]
        self._events: list[_Event] = []
        self._order = count()
        self._now = self._worked_s = self._trained_s = self._starved_s = 0.0
        self._staleness: Counter[int] = Counter()
        self._steps = self._version = 0
        self._is_training = False

    def run(self) -> Outcome:
        self._act()
        while self._events:
            event = heapq.heappop(self._events)
            self._starved_s += (event.at - self._now) * len(self._scheduler.starved)
            self._now = event.at
            self._scheduler.tick(self._now)
            self._happens(event)
            self._act()
        num_slots, makers = self._rules.slots * len(self._makers), len(self._makers)
        return Outcome(
            steps=self._steps,
            seconds=self._now,
            staleness=dict(self._staleness),
            idle_makers=1 - self._worked_s / (self._now * num_slots),
            idle_trainer=1 - self._trained_s / self._now,
            wait_weights_s=self._starved_s / makers,
            dropped=sum(self._scheduler.counts.dropped.values()),
        )

    def _at(self, at: float, kind: str, maker: int = 0, group: int = 0, paused_s: float = 0.0) -> None:
        heapq.heappush(self._events, _Event(at, next(self._order), kind, maker, group, paused_s))

    def _happens(self, event: _Event) -> None:
        if event.kind == "trained":
            self._is_training = False
            self._version += 1
            self._scheduler.published(self._version)
        elif event.kind == "updated":
            self._scheduler.updated(event.maker, event.group)
        else:
            self._end(event)

    def _end(self, event: _Event) -> None:
        maker = self._makers[event.maker]
        if event.group not in maker.active:
            return  # it was aborted
        if later := maker.paused_s - event.paused_s:
            self._at(self._now + later, "end", event.maker, event.group, maker.paused_s)
            return
        self._worked_s += self._seconds(event.group)
        del maker.active[event.group]
        self._scheduler.finished(event.maker, event.group)
        self._begin(event.maker)

    def _act(self) -> None:
        self._train()
        for abort in self._scheduler.aborts():
            for group in abort.groups:
                self._worked_s += max(0.0, self._now - self._makers[abort.maker].active.pop(group))
        for action in self._scheduler.actions():
            self._do(self._makers[action.maker], action)

    def _do(self, maker: _Maker, action: Action) -> None:
        if isinstance(action, Update):
            maker.free_at = max(maker.free_at, self._now) + self._times.update_s
            maker.paused_s += self._times.update_s
            self._at(maker.free_at, "updated", action.maker, action.version)
        else:
            maker.queue.extend(action.groups)
            self._begin(action.maker)

    def _begin(self, rank: int) -> None:
        maker = self._makers[rank]
        while maker.queue and len(maker.active) < self._rules.slots:
            group = maker.queue.popleft()
            begins_at = maker.active[group] = max(self._now, maker.free_at)
            self._at(begins_at + self._seconds(group), "end", rank, group, maker.paused_s)

    def _seconds(self, group: int) -> float:
        return self._times.groups[group % len(self._times.groups)]

    def _train(self) -> None:
        if self._is_training or (taken := self._scheduler.take()) is None:
            return
        self._staleness.update(taken.staleness)
        seconds = self._times.train[self._steps % len(self._times.train)]
        self._trained_s += seconds
        self._steps += 1
        self._is_training = True
        self._at(self._now + seconds, "trained")
