"""Who generates what when: the decisions of a schedule, without models, processes or a clock.

A *group* is a prompt with all its samples, numbered in the order of admission. A *maker* is a replica of the rollout. A
group is waiting (its maker was lost), running, complete, and then trained once or dropped with a reason. It is admitted
when it is first given to a maker, as late as it can be, so that it is as fresh as it can be.

Staleness is prevented and not repaired, as in AReaL (Fu et al. 2025, https://arxiv.org/abs/2505.24298): a group that r
others stand before trains at version V + r // groups_per_step, where V is the version that the next step trains, and is
given to a maker only if that is at most `max_staleness` above the maker's version. Where one before it is dropped it
trains earlier. A group that a step with overprovision leaves behind may train later, and is dropped once that is too late.
"""

from bisect import insort
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from flowrl.schedules.rules import REASONS, Abort, Action, Counts, Give, Rules, Taken, Update
from flowrl.schedules.throughput import Throughput


@dataclass
class _Group:
    maker: int | None = None
    """Where it runs."""
    version: int | None = None
    """That its maker had when it was given; None while it waits."""

    @property
    def is_complete(self) -> bool:
        return self.maker is None and self.version is not None


@dataclass
class _Maker:
    version: int | None
    """At the end of what it has been told so far; None for a new process, until it has weights."""
    taking: int | None = None
    """The version that it was told to take and has not yet."""
    running: set[int] = field(default_factory=set)


@dataclass
class TrainerQueue:
    makers: tuple[int, ...]
    quota: int
    """Groups of a step."""
    left: int | None
    """Groups that are to be trained still; None is no end."""
    live: dict[int, _Group] = field(default_factory=dict)
    """Neither trained nor dropped, in the order of admission."""
    waiting: list[int] = field(default_factory=list)
    """Those without a maker, in the same order."""
    running: int = 0
    """How many have one."""

    @property
    def is_full(self) -> bool:
        """Whether all that will be trained has been admitted."""
        return self.left is not None and len(self.live) >= self.left

    @property
    def num_complete(self) -> int:
        return len(self.live) - self.running - len(self.waiting)

    def rank(self) -> int:
        """Of the group that would be given next: how many live ones were admitted before it."""
        return list(self.live).index(self.waiting[0]) if self.waiting else len(self.live)


class Scheduler:
    """Says what makers are to do, and which groups the next step trains.

    Tell it what happened (`finished`, `published`, `updated`, `lost`, `drop`), then do what `aborts` and `actions` say,
    and ask for the next step's groups with `take`. Every call is cheap and returns at once.

    Args:
        rules: what it is held to.
        makers: how many there are, at least 1.
        version: of the weights that all makers and the trainer begin with.
        steps_taken: steps of the run that are done, after a resume.
    """

    def __init__(self, rules: Rules, makers: int, *, version: int = 0, steps_taken: int = 0) -> None:
        self._rules = rules
        self._makers = [_Maker(version) for _ in range(makers)]
        self._pace = Throughput(makers)
        self._newest = version
        self._next_version = version
        """That the next step trains."""
        lanes = rules.lanes or (tuple(range(makers)),)
        assert rules.groups_per_step % len(lanes) == 0, "a step's groups are shared equally by the trainers"
        left = None if rules.total is None else rules.total - steps_taken * rules.groups_per_step
        self._lanes = [TrainerQueue(lane, rules.groups_per_step // len(lanes), None) for lane in lanes]
        for i, lane in enumerate(self._lanes):
            lane.left = None if left is None else (left + len(lanes) - 1 - i) // len(lanes)
        self._lane_of: dict[int, TrainerQueue] = {}
        self._aborts: defaultdict[int, list[int]] = defaultdict(list)
        self._admitted = 0
        self._trained = 0
        self._dropped: Counter[str] = Counter(dict.fromkeys(REASONS, 0))

    def take_back(self, groups: list[tuple[int, int | None]], num_lanes: int) -> list[int]:
        """Admits what a run before had not trained: what was complete is, all else waits. Before any other call.

        Args:
            groups: its `standing`.
            num_lanes: how many it had. With another number each goes to the lane with the fewest, and of what is then
                trained later than was foreseen, what has grown too old is dropped.
        Returns: their numbers here.
        """
        found = []
        for number, version in groups:
            same = num_lanes == self.num_lanes
            lane = self._lanes[number] if same else min(self._lanes, key=lambda lane: len(lane.live))
            group = self._admit(lane)
            lane.live[group].version = version
            if version is None:
                lane.waiting.append(group)
            found.append(group)
        return found

    # What happened.

    def tick(self, now_s: float) -> None:
        """It is so late, in seconds since any moment: it learns how fast makers are by it. Without, all are alike."""
        self._pace.tick(now_s)

    def finished(self, maker: int, group: int) -> bool:
        """Takes note that a maker has all rows of a group. False: it is not that maker's any more, drop the rows."""
        lane = self._lane_of.get(group)
        if lane is None or lane.live[group].maker != maker:
            return False
        lane.live[group].maker = None
        lane.running -= 1
        self._makers[maker].running.remove(group)
        self._pace.finished(maker, group)
        return True

    def published(self, version: int) -> None:
        """Weights of this version are there to be taken."""
        self._newest = max(self._newest, version)

    def updated(self, maker: int, version: int) -> None:
        """A maker has the weights of this version, because of an `Update` or of something else. Until an `Update` is
        done the maker is told of no other, and a new process is given no groups."""
        found = self._makers[maker]
        if found.taking is None or version >= found.taking:  # else it is word of a process that was lost since
            found.taking, found.version = None, version

    def lost(self, maker: int) -> None:
        """A maker's process is gone: what it had waits for others, before everything new."""
        gone = self._makers[maker]
        for group in gone.running:
            lane = self._lane_of[group]
            lane.live[group] = _Group()
            lane.running -= 1
            insort(lane.waiting, group)
        self._makers[maker] = _Maker(version=None)
        self._pace.lost(maker)
        self._aborts.pop(maker, None)

    def drop(self, group: int, reason: str) -> bool:
        """Gives up a group, whose place is free then. False: it was trained or dropped before."""
        lane = self._lane_of.pop(group, None)
        if lane is None:
            return False
        dropped = lane.live.pop(group)
        if dropped.maker is not None:
            lane.running -= 1
            self._makers[dropped.maker].running.remove(group)
            self._aborts[dropped.maker].append(group)
            self._pace.left(dropped.maker, group)
        elif not dropped.is_complete:
            lane.waiting.remove(group)
        self._dropped[reason] += 1
        return True

    # What to do.

    def aborts(self) -> list[Abort]:
        """What makers are to leave now, before they do anything else; counts as done when it is returned."""
        aborts = [Abort(maker, tuple(groups)) for maker, groups in self._aborts.items()]
        self._aborts.clear()
        return aborts

    def actions(self) -> list[Action]:
        """What makers are to do now, in this order, after `aborts`; counts as done when it is returned."""
        return [*self._updates(), *self._gives()]

    def _updates(self) -> Iterator[Update]:
        for rank, maker in enumerate(self._makers):
            is_free = self._rules.interrupt or not maker.running
            if maker.version != self._newest and maker.taking is None and is_free:
                maker.taking = self._newest
                if maker.version is not None:  # a new process is ready when it says so: it has a model to load first
                    maker.version = self._newest
                yield Update(rank, self._newest)

    def _gives(self) -> Iterator[Give]:
        given: defaultdict[int, list[int]] = defaultdict(list)
        while (choice := self._choice()) is not None:
            lane, rank = choice
            maker = self._makers[rank]
            group = lane.waiting.pop(0) if lane.waiting else self._admit(lane)
            lane.live[group].maker, lane.live[group].version = rank, maker.version
            lane.running += 1
            maker.running.add(group)
            self._pace.given(rank, group)
            given[rank].append(group)
        return (Give(rank, tuple(groups)) for rank, groups in given.items())

    def _admit(self, lane: TrainerQueue) -> int:
        group = self._admitted
        self._admitted += 1
        lane.live[group] = _Group()
        self._lane_of[group] = lane
        return group

    def _choice(self) -> tuple[TrainerQueue, int] | None:
        """The lane and the maker of the group that is given next: what trains first, to who has least to do and is not
        too slow for it."""
        running = sum(lane.running for lane in self._lanes)
        if self._is_at_limit(running):
            return None
        for lane in sorted(self._lanes, key=lambda lane: lane.rank()):
            trains_at = self._trains_at(lane, running)
            if trains_at is None:
                continue
            rank = self._least_busy(lane, trains_at)
            if rank is not None:
                return lane, rank
        return None

    def _is_at_limit(self, running: int) -> bool:
        limit = self._rules.max_concurrent
        return limit is not None and running >= limit and not self._rules.whole_batches

    def _least_busy(self, lane: TrainerQueue, trains_at: int) -> int | None:
        """The maker with the fewest groups, of those that may take one that is trained at a version."""
        able = [rank for rank in lane.makers if self._may_take(self._makers[rank], trains_at)]
        able.sort(key=lambda rank: len(self._makers[rank].running))
        found = next((rank for rank in able if not self._is_too_slow(lane, rank)), None)
        if found is None and able and not any(self._makers[rank].running for rank in lane.makers):
            return able[0]  # nobody else will do anything
        return found

    def _is_too_slow(self, lane: TrainerQueue, rank: int) -> bool:
        """Whether the others of the lane would have to wait for what a maker is given."""
        rules = self._rules
        if rules.whole_batches:
            return False
        others = [other for other in lane.makers if other != rank and self._makers[other].version is not None]
        most = (rules.max_staleness + 1) * lane.quota + rules.overprovision
        most = most if lane.left is None else min(most, lane.left)
        return self._pace.is_too_slow(rank, others, (most - lane.num_complete) / rules.slots)

    def _trains_at(self, lane: TrainerQueue, running: int) -> int | None:
        """The version at which the lane's next group will be trained; None if it has none to give now."""
        rank = lane.rank()
        if not lane.waiting:
            begins_batch = rank % lane.quota == 0
            if lane.is_full or (self._rules.whole_batches and begins_batch and running):
                return None
        return self._next_version + max(0, rank - self._rules.overprovision) // lane.quota

    def _may_take(self, maker: _Maker, trains_at: int) -> bool:
        has_room = self._rules.whole_batches or len(maker.running) < self._rules.slots
        return has_room and maker.version is not None and trains_at - maker.version <= self._rules.max_staleness

    # What to train.

    def take(self) -> Taken | None:
        """The next step's groups; None while they are not complete. Those that are too old for any later step are
        dropped then, as `stale`."""
        chosen = [self._complete(lane) for lane in self._lanes]
        ready = [groups for groups in chosen if groups is not None]
        if len(ready) < len(chosen) or not any(ready):
            return None
        version = self._next_version
        staleness = {group: self._train(group) for groups in ready for group in groups}
        assert max(staleness.values()) <= self._rules.max_staleness
        self._next_version += 1
        self._drop_stale()
        return Taken(version, tuple(staleness), tuple(staleness.values()))

    def _train(self, group: int) -> int:
        """Counts a group as trained; its staleness."""
        lane = self._lane_of.pop(group)
        given = lane.live.pop(group).version
        assert given is not None
        if lane.left is not None:
            lane.left -= 1
        self._trained += 1
        return self._next_version - given

    def _complete(self, lane: TrainerQueue) -> list[int] | None:
        """The lane's part of the next step: the first of its complete groups, and of all that are left at the end."""
        if lane.is_full and len(lane.live) < lane.quota:
            return list(lane.live) if lane.num_complete == len(lane.live) else None
        if lane.num_complete < lane.quota:
            return None
        found: list[int] = []
        for seen, (group, state) in enumerate(lane.live.items(), start=1):
            if state.is_complete:
                found.append(group)
            if len(found) == lane.quota or seen - len(found) > self._rules.overprovision:
                break
        return found if len(found) == lane.quota else None

    def _drop_stale(self) -> None:
        oldest = self._next_version - self._rules.max_staleness
        for lane in self._lanes:
            for group, state in list(lane.live.items()):
                if state.version is not None and state.version < oldest:
                    self.drop(group, "stale")

    # Where everything is.

    @property
    def counts(self) -> Counts:
        """Where all groups are now."""
        running = sum(lane.running for lane in self._lanes)
        waiting = sum(len(lane.waiting) for lane in self._lanes)
        complete = sum(lane.num_complete for lane in self._lanes)
        return Counts(self._admitted, waiting, running, complete, self._trained, dict(self._dropped))

    @property
    def untrained(self) -> tuple[int, ...]:
        """Groups that were admitted and neither trained nor dropped, in order: what a checkpoint must keep."""
        return tuple(sorted(self._lane_of))

    def standing(self) -> list[tuple[int, int | None]]:
        """Of each of the `untrained` its lane and, where it is complete, the version that its maker had when it was
        given: what `take_back` needs."""
        numbers = {id(lane): number for number, lane in enumerate(self._lanes)}
        found = [(self._lane_of[group], group) for group in self.untrained]
        states = [(numbers[id(lane)], lane.live[group]) for lane, group in found]
        return [(number, state.version if state.is_complete else None) for number, state in states]

    @property
    def num_lanes(self) -> int:
        return len(self._lanes)

    @property
    def starved(self) -> tuple[int, ...]:
        """Replicas that have nothing to do until newer weights are there, because more groups would be too old. Those
        that would get none with newer weights either, at the end of the run say, are not among them."""
        if self._is_at_limit(sum(lane.running for lane in self._lanes)):
            return ()
        return tuple(rank for rank, maker in enumerate(self._makers) if not maker.running and self._is_held(rank))

    def _is_held(self, rank: int) -> bool:
        version, limit = self._makers[rank].version, self._rules.max_staleness
        next_ones = [self._trains_at(lane, running=0) for lane in self._lanes if rank in lane.makers]
        return version is not None and any(at is not None and at - version > limit for at in next_ones)

    def running(self, maker: int) -> tuple[int, ...]:
        """The groups that a maker works on, in order."""
        return tuple(sorted(self._makers[maker].running))

    def version(self, maker: int) -> int | None:
        """Of the weights that a maker has when it has done what it was told; None for a new process without."""
        return self._makers[maker].version
