"""Replicas and a trainer under a virtual clock, with kills and refusals, that hold a scheduler to its promises."""

import heapq
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from flowrl.schedules.rules import Abort, Give, Rules, Taken, Update
from flowrl.schedules.scheduler import Scheduler


@dataclass(frozen=True)
class Weather:
    """What goes wrong."""

    kill_every_s: float = float("inf")
    """Mean time between two losses of a maker."""
    kills: int = 10**6
    """After so many no more are lost: what takes longer than the time between two losses would never end."""
    refused: float = 0.0
    """Part of the groups that are refused, running or complete."""
    slow_maker: float = 1.0
    """How many times as long as the others the first maker takes."""
    train_s: float = 2.0


@dataclass
class Maker:
    version: int | None
    life: int = 0
    """How often its process was lost: events of an earlier life find nobody."""
    running: set[int] = field(default_factory=set)


class World:
    """Runs until everything is trained. Every promise is checked when it could be broken."""

    def __init__(self, rules: Rules, makers: int, weather: Weather, seed: int, *, version: int = 0, steps: int = 0):
        self.rules, self.weather, self.random = rules, weather, random.Random(seed)
        self.scheduler = Scheduler(rules, makers, version=version, steps_taken=steps)
        self.makers = [Maker(version) for _ in range(makers)]
        self.version = self.published = version
        self.given_of_version = [0]
        """Groups that were given between two publications."""
        self.now, self.events = 0.0, []
        self.order = 0
        self.version_of: dict[int, int] = {}
        self.trained: set[int] = set()
        self.dropped: Counter[str] = Counter()
        self.steps: list[Taken] = []
        self.is_training = False
        self.lost = 0

    def run(self, limit: int = 10**5) -> "World":
        self._next_kill()
        self._act()
        while not self._is_over:
            assert self.events, f"nothing will happen any more: {self.scheduler.counts}"
            self.now, _, event = heapq.heappop(self.events)
            event()
            self._act()
            limit -= 1
            assert limit, f"no end: {self.scheduler.counts}"
        return self

    @property
    def _is_over(self) -> bool:
        counts = self.scheduler.counts
        left = counts.waiting + counts.running + counts.complete
        return not self.is_training and not left and len(self.trained) == self._num_due

    @property
    def _num_due(self) -> int:
        assert self.rules.total is not None
        return self.rules.total

    def _at(self, seconds: float, event: Callable[[], None]) -> None:
        self.order += 1
        heapq.heappush(self.events, (self.now + seconds, self.order, event))

    # What the scheduler says is done.

    def _act(self) -> None:
        for abort in self.scheduler.aborts():
            self._abort(abort)
        for action in self.scheduler.actions():
            if isinstance(action, Update):
                self._update(action)
            else:
                self._give(action)
        assert not self.scheduler.actions() and not self.scheduler.aborts(), "what was said is not said again"
        self._train()
        self._check_counts()

    def _update(self, action: Update) -> None:
        maker = self.makers[action.maker]
        assert action.version == self.published != maker.version
        assert self.rules.interrupt or not maker.running, "weights in the middle of a group"
        life, is_new = maker.life, maker.version is None
        if not is_new:
            maker.version = action.version

        def done() -> None:
            if maker.life == life:
                maker.version = max(action.version, maker.version or 0)
                self.scheduler.updated(action.maker, action.version)

        self._at(self.random.uniform(0, 0.5) + 3 * is_new, done)

    def _give(self, action: Give) -> None:
        maker = self.makers[action.maker]
        assert maker.version is not None, "a new process has no weights yet"
        for group in action.groups:
            assert group not in self.trained and all(group not in other.running for other in self.makers)
            self.version_of[group] = maker.version
            maker.running.add(group)
            self._at(self._seconds(action.maker), self._finisher(action.maker, maker.life, group))
        self.given_of_version[-1] += len(action.groups)
        if not self.rules.whole_batches:
            assert len(maker.running) <= self.rules.slots
            limit = self.rules.max_concurrent
            assert limit is None or sum(len(other.running) for other in self.makers) <= limit

    def _seconds(self, maker: int) -> float:
        return self.random.paretovariate(1.5) * (self.weather.slow_maker if maker == 0 else 1)

    def _finisher(self, rank: int, life: int, group: int) -> Callable[[], None]:
        def finish() -> None:
            maker = self.makers[rank]
            is_its = group in maker.running
            if maker.life != life and is_its:
                return  # it was lost with it, and given to it again
            refused = is_its and self.random.random() < self.weather.refused
            if refused and self.random.random() < 0.5:
                self._drop(group)  # while it runs: an Abort follows
                return
            assert self.scheduler.finished(rank, group) == is_its
            maker.running.discard(group)
            if refused:
                self._drop(group)

        return finish

    def _drop(self, group: int) -> None:
        assert self.scheduler.drop(group, "refused")
        assert not self.scheduler.drop(group, "refused")
        self.dropped["refused"] += 1

    def _abort(self, action: Abort) -> None:
        maker = self.makers[action.maker]
        assert maker.running.issuperset(action.groups)
        maker.running.difference_update(action.groups)

    # What happens by itself.

    def _next_kill(self) -> None:
        if self.weather.kill_every_s < float("inf") and self.lost < self.weather.kills:
            self._at(self.random.expovariate(1 / self.weather.kill_every_s), self._kill)

    def _kill(self) -> None:
        rank = self.random.randrange(len(self.makers))
        maker = self.makers[rank]
        self.scheduler.lost(rank)
        self.makers[rank] = Maker(None, maker.life + 1)
        maker.life += 1
        self.lost += 1
        self._next_kill()

    def _train(self) -> None:
        if self.is_training or (taken := self.scheduler.take()) is None:
            return
        assert taken.version == self.version
        self._check_step(taken)
        assert self.trained.isdisjoint(taken.groups)
        self.trained.update(taken.groups)
        self.steps.append(taken)
        self.is_training = True
        self._at(self.weather.train_s * self.random.uniform(0.5, 1.5), self._publish)
        self._act()

    def _publish(self) -> None:
        self.is_training = False
        self.version += 1
        self.published = self.version
        self.scheduler.published(self.version)
        self.given_of_version.append(0)

    # What must be so.

    def _check_step(self, taken: Taken) -> None:
        rules = self.rules
        staleness = tuple(taken.version - self.version_of[group] for group in taken.groups)
        assert staleness == taken.staleness and max(staleness) <= rules.max_staleness
        assert min(staleness) >= 0
        if rules.lanes is None:
            assert list(taken.groups) == sorted(taken.groups)
        is_last = len(self.trained) + len(taken.groups) == self._num_due
        assert len(taken.groups) == rules.groups_per_step or (is_last and len(taken.groups) < rules.groups_per_step)

    def _check_counts(self) -> None:
        counts = self.scheduler.counts
        dropped = sum(counts.dropped.values())
        left = counts.waiting + counts.running + counts.complete
        assert counts.admitted == left + counts.trained + dropped
        assert counts.trained == len(self.trained)
        assert counts.dropped.get("refused", 0) == self.dropped["refused"]
        untrained = set(self.scheduler.untrained)
        assert len(untrained) == left
        for rank, maker in enumerate(self.makers):
            assert set(self.scheduler.running(rank)) == maker.running & untrained
        if not self.rules.overprovision:
            assert not counts.dropped["stale"]
