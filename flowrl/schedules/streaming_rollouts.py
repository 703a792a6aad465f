"""Streaming: makers that generate all the time, each group as soon as the schedule admits it."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from flowrl.checkpoints.saved_rows import SavedRows
from flowrl.config import UserError
from flowrl.controller.calls.calls import MAX_EVENTS
from flowrl.controller.dispatch import Future
from flowrl.controller.errors import ProcessLost
from flowrl.controller.group import WorkerGroup
from flowrl.data.batch.batch import Batch
from flowrl.data.events import CallEvent, Counted
from flowrl.data.metric import Logged
from flowrl.schedules.pending_rollouts import PendingRollouts, complete_rows, pending_state
from flowrl.schedules.rollout_source import BatchRollouts, RolloutContext, RolloutSource
from flowrl.schedules.rules import Abort, Counts, Give, Taken, Update, rules_of
from flowrl.schedules.schedule_metrics import Level, group_metrics, staleness
from flowrl.schedules.scheduler import Scheduler
from flowrl.weight_sync.sync import WeightSnapshot
from flowrl.weight_sync.verification import ComparedWeights

POLLS = 2
"""Calls of `poll` that a maker has: while the driver reads the one, the maker works on the next."""

SLICE_S = 0.1
"""The longest that a poll takes, and twice that what a maker may take to hear of anything, with few makers."""

SLICE_PER_MAKER_S = 0.01
"""With many makers polls are longer, so that the driver has about a hundred a second of them whatever their number."""

SPARE = 4
"""A maker is given one group more for so many that it works on at once, which it begins with when another is finished
and the driver does not know yet. While it has such it goes on with a poll, as every end of one costs it time."""

MOST_REFUSED = 100
"""Prompts that may be refused one after another before the run ends: that is no matter of some prompts any more."""

SAID_REFUSED = 20
"""Prompts of which a line says that they are refused; all are counted."""


@dataclass(eq=False)
class _Maker:
    """What the driver knows of a replica."""

    replica: WorkerGroup
    asked: deque[Future | Batch] = field(default_factory=deque)
    """Its calls that were not read yet, in order; a poll is a batch."""
    groups: set[int] = field(default_factory=set)
    """That it works on."""
    taking: tuple[int, Sequence[Future]] | None = None
    """A version of the weights, and the calls that bring it."""
    back: Future | None = None
    """After a loss: what tells that another process is there, and has nothing to do."""
    replaced: int = 0
    """How often its process was replaced, as far as it has been taken note of."""

    def clear(self) -> None:
        """Has it forget all that it was given. What was asked of it before may be answered still; nobody listens."""
        self.back = cleared = self.replica.abort_all.submit()
        self.asked = deque([cleared])
        self.groups.clear()
        self.taking = None

    @property
    def polls(self) -> int:
        return sum(isinstance(each, Batch) for each in self.asked)


class StreamingRollouts:
    """Carries out what a `Scheduler` decides, whenever the driver waits for anything."""

    streams = True

    def __init__(self, setting: RolloutContext) -> None:
        self._setting = setting
        ranks = range(setting.rollout.mesh.dp)
        self._makers = [_Maker(setting.rollout.replica(rank)) for rank in ranks]
        self._slice_s = max(SLICE_S, SLICE_PER_MAKER_S * len(ranks))
        self._draws: dict[int, int] = {}
        """Group -> the number of its draw, of those that were admitted and not trained."""
        self._finished: dict[int, Batch] = {}
        """Group -> its rows, where a maker left them."""
        self._kept: PendingRollouts | None = None
        """What `restore` gave, until `begin`."""
        self._exports: deque[WeightSnapshot] = deque()
        """Not there to be taken yet."""
        self._newest: WeightSnapshot | None = None
        """The last that is; None is what makers begin with."""
        self._compared: list[ComparedWeights] = []
        self._is_held = False
        self._lost = 0
        self._first_step = self._first_version = self._published = 0
        self._logged: tuple[Logged, ...] = ()
        self._counts: Counts | None = None
        """When the step before had taken its groups."""
        self._starved = Level()
        """Replicas that wait for newer weights."""
        self._refused: set[str] = set()
        """Places of prompts that an engine has refused."""
        self._refused_in_a_row = 0
        self._leave: Callable[[], None] | None = None
        self.counted: deque[Counted] = deque(maxlen=MAX_EVENTS)

    def begin(self, policy: WorkerGroup | None, step: int, version: int) -> None:
        setting = self._setting
        self._first_step, self._first_version, self._published = step, version, version
        # The inline backend has one maker, whatever the placement says.
        lanes = setting.lanes if len(self._makers) > 1 else None
        rules = rules_of(setting.config, lanes)
        rules = replace(rules, slots=rules.slots + -(-rules.slots // SPARE))
        self._scheduler = Scheduler(rules, len(self._makers), version=version, steps_taken=step)
        if self._kept is not None:
            self._draws, self._finished = self._kept.admit(self._scheduler, setting)
            self._kept = None
        self._policy = policy
        if policy is not None:
            setting.weight_sync.open(policy, setting.rollout)
        for maker in self._makers:
            maker.clear()
        self._leave = setting.calls.add_idle_callback(self._attend)

    # While the driver waits.

    def _attend(self) -> Iterable[Future | Batch]:
        """Reads what makers have done, and has them do what comes next; what to look at when it is done."""
        self._scheduler.tick(self._setting.now_ns() / 1e9)
        for rank, maker in enumerate(self._makers):
            self._read(rank, maker)
        while self._exports and self._exports[0].ready():
            self._newest = self._exports.popleft()
            self._scheduler.published(self._newest.number)
        self._abort(self._scheduler.aborts())
        if self._is_held:
            self._update_idle()
        else:
            self._act()
        starved = () if self._is_held else self._scheduler.starved
        self._starved.set(self._setting.now_ns(), len(starved) / len(self._makers))
        for maker in self._makers:
            while maker.polls < min(POLLS, len(maker.groups)):
                maker.asked.append(maker.replica.poll.submit(self._slice_s))
        return [*self._next_results(), *(part for version in self._exports for part in version.awaited())]

    def _next_results(self) -> Iterable[Future | Batch]:
        """Of each maker what tells most: a poll comes after what was asked before it."""
        for maker in self._makers:
            polls = (each for each in maker.asked if isinstance(each, Batch))
            taking = maker.taking[1][-1:] if maker.taking else maker.asked
            yield from [poll] if (poll := next(polls, None)) is not None else list(taking)[:1]

    def _read(self, rank: int, maker: _Maker) -> None:
        replaced = self._setting.calls.get_num_replacements(maker.replica.slots[0])
        if maker.back is not None and maker.back.done():
            maker.back, maker.replaced = None, replaced
        elif maker.back is None and replaced > maker.replaced:
            return self._tell_lost(rank, maker)
        try:
            while maker.asked and maker.asked[0].done():
                result = maker.asked.popleft()
                if isinstance(result, Batch):
                    self._take(rank, maker, result)
                else:
                    self._hear(maker, result.get())
            if maker.taking is not None and all(call.done() for call in maker.taking[1]):
                version, calls = maker.taking
                for call in calls:
                    call.get()
                maker.taking = None
                self._scheduler.updated(rank, version)
        except ProcessLost as error:
            if error.role != self._setting.rollout.role:
                raise  # what the maker was to read is gone, and the maker is sound
            self._tell_lost(rank, maker)

    def _tell_lost(self, rank: int, maker: _Maker) -> None:
        self._lost += 1
        role, count = self._setting.rollout.role, len(maker.groups)
        self._setting.say(f"{role} on rank {rank} is lost with {count} unfinished prompts, which others are given")
        self._scheduler.lost(rank)
        maker.clear()

    def _take(self, rank: int, maker: _Maker, rows: Batch) -> None:
        """Takes up the groups that a poll gave."""
        if not rows.num_rows:
            return
        numbers = self._groups()
        keys = rows.payload("prompt_id", "sample").rows
        draws, samples = np.asarray(keys["prompt_id"]), np.asarray(keys["sample"])
        for draw in dict.fromkeys(draws.tolist()):
            group = numbers.get(draw)
            if group is None:
                continue
            maker.groups.discard(group)
            if not self._scheduler.finished(rank, group):
                continue
            places = np.flatnonzero(draws == draw)
            ordered = places[np.argsort(samples[places])]
            self._finished[group] = rows.drop("prompt_id", "sample").rows(ordered)
        self._count()

    def _groups(self) -> dict[int, int]:
        """Draw -> its group."""
        return {draw: group for group, draw in self._draws.items()}

    def _hear(self, maker: _Maker, answers: Sequence[Mapping[int, str | None] | None]) -> None:
        """Drops the groups whose prompts an `add` was refused for."""
        for draw, why in ((draw, why) for answer in answers for draw, why in (answer or {}).items()):
            if why is None:
                self._refused_in_a_row = 0
            elif (group := self._groups().get(draw)) in maker.groups and self._scheduler.drop(group, "refused"):
                self._tell_refused(self._setting.prompts.location(draw), why)

    def _tell_refused(self, place: str, why: str) -> None:
        """Raises `UserError` where no prompt seems to be taken."""
        prompts, role = self._setting.prompts, self._setting.rollout.role
        self._refused_in_a_row += 1
        if self._refused_in_a_row >= min(MOST_REFUSED, 2 * len(prompts)):
            count = f"{self._refused_in_a_row} prompts one after another"
            raise UserError(f"{place}: the prompt {why}; {role} has refused {count}, so that nothing is trained")
        if place not in self._refused and len(self._refused) < SAID_REFUSED:
            self._setting.say(f"{place}: the prompt {why}; it is dropped, as {role} refuses it")
        self._refused.add(place)

    def _abort(self, aborts: Sequence[Abort]) -> None:
        for abort in aborts:
            maker = self._makers[abort.maker]
            maker.groups.difference_update(abort.groups)
            dropped = [self._draws.pop(group) for group in abort.groups]
            maker.asked.append(maker.replica.abort.submit(dropped))

    def _act(self) -> None:
        actions = self._scheduler.actions()
        given = sorted(group for action in actions if isinstance(action, Give) for group in action.groups)
        new = [group for group in given if group not in self._draws]
        self._draws |= zip(new, self._setting.prompts.take(len(new)), strict=True)
        for action in actions:
            maker = self._makers[action.maker]
            match action:
                case Give(groups=groups):
                    self._give(maker, groups)
                case Update(maker=rank, version=version):
                    self._update(rank, version)

    def _give(self, maker: _Maker, groups: Sequence[int]) -> None:
        rows = self._setting.prompts.batch(self._draws[group] for group in groups)
        maker.groups.update(groups)
        maker.asked.append(maker.replica.add.submit(rows, self._setting.config.samples_per_prompt))

    # Weights.

    def _update(self, rank: int, version: int) -> None:
        maker, newest = self._makers[rank], self._newest
        if newest is None:
            # A process that has taken a lost one's place has been given what that one began with.
            maker.taking = version, [maker.replica.abort_all.submit()]
            return
        assert newest.number == version, "makers are told of versions that are there"
        setting, policy = self._setting, self._policy
        if policy is None or not setting.weight_sync.goes_to_all(policy, setting.rollout):
            maker.taking = version, self._deliver(newest, maker.replica)
            return
        others = [each.taking for each in self._makers if each.taking is not None and each.taking[0] == version]
        maker.taking = others[0] if others else (version, self._deliver(newest, setting.rollout))

    def _deliver(self, version: WeightSnapshot, to: WorkerGroup) -> Sequence[Future]:
        loads, compared = version.deliver(to)
        if compared is not None:
            self._compared.append(compared)
        return loads

    def sync_weights(self, actor: WorkerGroup, rollout: WorkerGroup, version: int) -> ComparedWeights | None:
        assert rollout is self._setting.rollout, "a schedule gives weights to the rollout whose responses it gives"
        self._policy = actor
        self._exports.append(self._setting.weight_sync.export(actor, self._setting.rollout, version))
        self._published = version
        return None

    def catch_up(self) -> None:
        if self._leave is None:
            return  # all have what they begin with, or nobody is to work any more
        self._is_held = not self._setting.config.schedule.interrupt
        try:
            self._setting.calls.wait_until(self._have_newest)
        finally:
            self._is_held = False

    def _have_newest(self) -> bool:
        makers = range(len(self._makers))
        return all(self._scheduler.version(maker) == self._published for maker in makers)

    def _update_idle(self) -> None:
        """Gives the newest weights to makers that have finished, where none is to take them while it works."""
        newest = self._newest
        for rank, maker in enumerate(self._makers):
            version = self._scheduler.version(rank)
            if newest is not None and not maker.groups and maker.taking is None and version != newest.number:
                self._update(rank, newest.number)

    # Steps.

    def batch(self, step: int, version: int) -> Batch:
        self._check_version(step, version)
        taken: Taken | None = None

        def is_there() -> bool:
            nonlocal taken
            taken = taken or self._scheduler.take()  # may be asked again when it is
            return taken is not None

        self._setting.calls.wait_until(is_there)
        assert taken is not None
        groups = taken.groups
        batch = self._setting.prompts.batch([self._draws.pop(group) for group in groups])
        batch = batch.union(Batch.concat([self._finished.pop(group) for group in groups]))
        batch = batch.in_sections(len(self._setting.lanes or [()]))
        self._forget_dropped()
        self._tell(batch, version)
        return batch

    def _check_version(self, step: int, version: int) -> None:
        """A version counts a step's update: what bounds how stale a response may be."""
        expected = self._first_version + step - self._first_step - 1
        if version != expected:
            raise UserError(
                f"schedule async bounds how many updates a response may be behind, and step {step} begins with "
                f"{version - self._first_version} of them, not {expected - self._first_version}: call run.sync_weights "
                f"once at the end of every step"
            )

    def _forget_dropped(self) -> None:
        """Lets go of the rows of groups that were finished and not taken in time."""
        live = set(self._scheduler.untrained)
        # A maker is told of those that it works on by their draws.
        working = {group for maker in self._makers for group in maker.groups}
        self._draws = {group: draw for group, draw in self._draws.items() if group in live | working}
        self._finished = {group: rows for group, rows in self._finished.items() if group in live}

    def _tell(self, batch: Batch, version: int) -> None:
        """Notes what is to be told of the step."""
        counts = self._scheduler.counts
        values = group_metrics(counts, self._counts)
        self._counts = counts
        bound = self._setting.config.schedule.staleness
        self._logged = (values, staleness(batch, version, bound))
        self._count()

    def _count(self) -> None:
        counts = self._scheduler.counts
        values = {"running": counts.running, "complete": counts.complete, "waiting": counts.waiting}
        self.counted.append(Counted(self._setting.now_ns(), values))

    def logged(self) -> tuple[Logged, ...]:
        # A maker that is late, or was lost, answers in a later step's line: nobody waits for it.
        done = [each for each in self._compared if each.done()]
        self._compared = [each for each in self._compared if each not in done]
        told, self._logged = (*self._logged, *done), ()
        return told

    def waited_s(self, step: int, events: Sequence[CallEvent], start_ns: int, end_ns: int) -> float:
        return self._starved.integral_s(start_ns, end_ns)

    def summary(self) -> dict[str, Any]:
        return {"groups": asdict(self._scheduler.counts), "makers_lost": self._lost}

    def end(self) -> None:
        self.leave()
        for last in [maker.replica.abort_all.submit() for maker in self._makers]:
            with suppress(ProcessLost):
                last.get()

    def leave(self) -> None:
        if self._leave is not None:
            self._leave()
            self._leave = None

    def state(self) -> Mapping[str, Any]:
        draws = [self._draws[group] for group in self._scheduler.untrained]
        return self._setting.prompts.state(draws) | pending_state(self._scheduler)

    def rows(self) -> Batch | None:
        return complete_rows(self._scheduler, self._setting, self._draws, self._finished)

    def restore(self, state: Mapping[str, Any], rows: SavedRows | None) -> None:
        self._setting.prompts.restore(state)
        self._kept = PendingRollouts.read(state, rows)


def rollout_source_of(setting: RolloutContext) -> RolloutSource:
    """What gives a run its batches, as its schedule says; without staleness every schedule is `sync`."""
    schedule = setting.config.schedule
    return StreamingRollouts(setting) if schedule.streams else BatchRollouts(setting, ahead=schedule.staleness)
