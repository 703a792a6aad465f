"""RolloutSource, a trainer and a driver under a virtual clock: objects with the methods that `StreamingRollouts` calls.

A maker is a process that does one call after another. It works on what it was given only while it is polled, on a few
groups at once. When it is lost, what it holds is gone, and each call that it has not answered fails, or is answered by
the process that takes its place.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flowrl.controller.dispatch import Future, Gather
from flowrl.controller.errors import ProcessLost
from flowrl.controller.placement.plan import Mesh
from flowrl.data.batch.batch import Batch
from flowrl.data.batch.block import Block, Description, Ref, Shard
from flowrl.data.batch.payload import Payload
from flowrl.engines.rollout.weight_check import Compared
from flowrl.weight_sync.verification import ComparedWeights

MOST_MOMENTS = 10_000
"""At which something happens before anything that is waited for."""

COLUMNS = ("prompt_id", "sample", "maker", "response_mask", "weight_version")
ALL: Gather = lambda mesh, results: list(results)  # noqa: E731 (a constant)


class Clock:
    """Virtual time, and what is due."""

    def __init__(self) -> None:
        self.now = 0.0
        self.due: set[float] = set()

    def at(self, time: float) -> float:
        self.due.add(time)
        return time

    def advance(self) -> None:
        self.due = {time for time in self.due if time > self.now}
        assert self.due, "nothing is under way: the schedule stands still"
        self.now = min(self.due)


@dataclass(eq=False)
class Late:
    """A value that is there from some time on, or an error."""

    clock: Clock
    at: float
    value: Any = None
    error: Exception | None = None

    @property
    def carrier(self) -> "Late":
        return self

    def done(self) -> bool:
        return self.clock.now >= self.at

    def get(self) -> Any:
        assert self.done(), "a schedule that waits for a maker makes the others wait too"
        if self.error is not None:
            raise self.error
        return self.value

    def get_with(self, others: Sequence[Ref]) -> list[Any]:
        return [self.get(), *(other.get() for other in others)]


class Asked:
    """A call of a maker that was submitted: its method has run in the model of the process, its end is to come."""

    def __init__(self, clock: Clock, run: Callable[[], Any], begin: float) -> None:
        self.run, self.begin = run, begin
        self.value, self.described = Late(clock, begin), Late(clock, begin)

    def answer(self, value: Any, end: float) -> None:
        for late in (self.value, self.described):
            late.at = late.clock.at(end)
        self.value.value = value
        self.described.value = Description.of(value) if isinstance(value, Payload) else None

    def fail(self, error: Exception, now: float) -> None:
        for late in (self.value, self.described):
            late.at, late.error = now, error


class Method:
    """`group.method`, of which only `submit` is there."""

    def __init__(self, submit: Callable[..., Any]) -> None:
        self.submit = submit


@dataclass(eq=False)
class Maker:
    """A replica of the rollout.

    Args:
        seconds: prompt -> how long its responses take.
        at_once: prompts that it works on together.
        refuses: prompt -> whether its engine does not take it.
    """

    rank: int
    clock: Clock
    seconds: Callable[[int], float]
    at_once: int
    refuses: Callable[[int], bool] = lambda prompt: False
    update_s: float = 0.01
    version: int = 0
    free_at: float = 0.0
    todo: list[tuple[int, int]] = field(default_factory=list)
    """(prompt, samples) not begun."""
    working: dict[int, tuple[int, float, int]] = field(default_factory=dict)
    """Prompt -> (samples, seconds left, version at its beginning)."""
    asked: list[Asked] = field(default_factory=list)
    is_new: bool = False
    first: list[Late] = field(default_factory=list)
    """The first answer of each process that took a lost one's place."""

    @property
    def slots(self) -> list["Maker"]:
        return [self]

    def _submit(self, run: Callable[[], tuple[Any, float]]) -> Asked:
        asked = Asked(self.clock, run, 0.0)
        self.asked.append(asked)
        self._run(asked)
        return asked

    def _run(self, asked: Asked) -> None:
        asked.begin = max(self.free_at, self.clock.now)
        if self.is_new:
            self.is_new = False
            self.first.append(asked.value)
        value, seconds = asked.run()
        self.free_at = asked.begin + seconds + 1e-4
        asked.answer(value, self.free_at)

    def _future(self, run: Callable[[], tuple[Any, float]]) -> Future:
        asked = self._submit(run)
        return Future([asked.value], ALL, Mesh(1, 1, 1, 1), lambda refs, timeout_s: [ref.get() for ref in refs])

    def kill(self, chance: random.Random) -> None:
        """Ends its process."""
        self._reset()
        if self.first and not self.first[-1].done():
            self.first.pop()
        self.is_new = True
        self.free_at = self.clock.now + 0.3
        lost = ProcessLost("rollout", self.rank, 0, "poll", "it was killed")
        for asked in [asked for asked in self.asked if not asked.value.done()]:
            if chance.random() < 0.6:
                asked.fail(lost, self.clock.at(self.clock.now + 0.01))
            else:
                self._run(asked)

    def _reset(self) -> None:
        self.todo.clear()
        self.working.clear()

    @property
    def add(self) -> Method:
        return Method(lambda batch, samples: self._future(lambda: self._add(batch, samples)))

    def _add(self, batch: Batch, samples: int) -> tuple[dict[int, str | None], float]:
        keys = batch.payload("prompt_id", "sample").rows
        ids = list(dict.fromkeys(np.asarray(keys["prompt_id"]).tolist()))
        assert np.asarray(keys["sample"]).tolist() == list(range(samples)) * len(ids), "groups are whole"
        present = {prompt for prompt, _ in self.todo} | self.working.keys()
        assert not present & set(ids), "it works on that already"
        self.todo += [(prompt, samples) for prompt in ids if not self.refuses(prompt)]
        return {prompt: "is refused here" if self.refuses(prompt) else None for prompt in ids}, 0.0

    @property
    def abort(self) -> Method:
        return Method(lambda prompt_ids: self._future(lambda: self._abort(prompt_ids)))

    def _abort(self, prompt_ids: Sequence[int]) -> tuple[None, float]:
        self.todo = [each for each in self.todo if each[0] not in prompt_ids]
        self.working = {prompt: state for prompt, state in self.working.items() if prompt not in prompt_ids}
        return None, 0.0

    @property
    def abort_all(self) -> Method:
        return Method(lambda: self._future(lambda: (self._reset(), 0.0)))

    def load(self, version: int) -> Future:
        def run() -> tuple[None, float]:
            self.version = version
            return None, self.update_s

        return self._future(run)

    @property
    def poll(self) -> Method:
        return Method(self._submit_poll)

    def _submit_poll(self, slice_s: float) -> Batch:
        asked = self._submit(lambda: self._poll(slice_s))
        return Batch.of_block(Block([Shard(asked.value, asked.described, None)]), COLUMNS)

    def _poll(self, slice_s: float) -> tuple[Payload, float]:
        left, finished = slice_s, []
        while not finished and left > 0 and (self.todo or self.working):
            while self.todo and len(self.working) < self.at_once:
                prompt, samples = self.todo.pop(0)
                self.working[prompt] = (samples, self.seconds(prompt), self.version)
            passed = min(left, min(state[1] for state in self.working.values()))
            left -= passed
            self.working = {p: (n, s - passed, v) for p, (n, s, v) in self.working.items()}
            finished = [(p, *state) for p, state in self.working.items() if state[1] <= 1e-9]
            self.working = {p: state for p, state in self.working.items() if state[1] > 1e-9}
        return self._rows([(p, i, v) for p, n, _, v in finished for i in reversed(range(n))]), slice_s - left

    def _rows(self, rows: Sequence[tuple[int, int, int]]) -> Payload:
        """Each of two tokens: of the version at its beginning, and of that at its end."""
        ids, samples, versions = (np.array([row[i] for row in rows], dtype=np.int64) for i in range(3))
        both = np.stack([versions, np.full(len(rows), self.version)], axis=1).reshape(-1).astype(np.int32)
        columns = {"prompt_id": ids, "sample": samples, "maker": np.full(len(rows), self.rank)}
        tokens = {"response_mask": np.ones(2 * len(rows), dtype=bool), "weight_version": both}
        return Payload(len(rows), columns, tokens, np.full(len(rows), 2))


@dataclass(eq=False)
class Rollout:
    """The group of all makers."""

    makers: list[Maker]
    role: str = "rollout"
    tasks: None = None

    @property
    def mesh(self) -> Mesh:
        return Mesh(dp=len(self.makers), tp=1, sp=1, pp=1)

    def replica(self, rank: int) -> Maker:
        return self.makers[rank]


@dataclass(eq=False)
class Weights:
    """A version of the weights, there from some time on."""

    number: int
    part: Late
    lost: Exception | None = None
    """With which calls fail that were to read them."""
    compared_s: float | None = None
    """That a maker takes to compare them; None: it does not."""

    def ready(self) -> bool:
        return self.part.done()

    def awaited(self) -> Sequence[Any]:
        return ()

    def deliver(self, maker: Maker) -> tuple[Sequence[Future], ComparedWeights | None]:
        assert self.ready(), "a call whose weights are not there makes its maker wait"
        clock = self.part.clock
        if self.lost is not None:
            return [_future(Late(clock, self.part.at, error=self.lost))], None
        loaded = maker.load(self.number)
        if self.compared_s is None:
            return [loaded], None
        compared = Late(clock, clock.at(clock.now + self.compared_s), Compared(1))
        return [loaded], ComparedWeights(self.number, [_future(compared)])


def _future(late: Late) -> Future:
    return Future([late], ALL, Mesh(1, 1, 1, 1), lambda refs, timeout_s: [ref.get() for ref in refs])


@dataclass(eq=False)
class WeightSync:
    clock: Clock
    trained_at: float = 0.0
    """When the trainer has done all that it was asked for."""
    lost: Exception | None = None
    """What comes in the place of all weights."""
    compared_s: float | None = None
    """That a maker takes to compare weights with the trainer's."""

    def open(self, actor: Any, rollout: Rollout) -> None:
        pass

    def goes_to_all(self, actor: Any, rollout: Rollout) -> bool:
        return False

    def export(self, actor: Any, rollout: Rollout, version: int) -> Weights:
        return Weights(version, Late(self.clock, self.clock.at(self.trained_at)), self.lost, self.compared_s)


class Calls:
    """What waits."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.attended: list[Callable[[], Iterable[Any]]] = []
        self.before: list[Callable[[], None]] = []
        """Called at every moment at which something happens."""

    def get_num_replacements(self, maker: Maker) -> int:
        return sum(late.done() and late.error is None for late in maker.first)

    def add_idle_callback(self, fn: Callable[[], Iterable[Any]]) -> Callable[[], None]:
        self.attended.append(fn)
        return lambda: self.attended.remove(fn)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        for _ in range(MOST_MOMENTS):
            for fn in [*self.before, *self.attended]:
                list(fn() or ())
            if condition():
                return
            self.clock.advance()
        raise AssertionError("what is waited for never comes")


class Numbers:
    """Prompts that are numbers."""

    def __init__(self) -> None:
        self.drawn = 0

    def take(self, count: int) -> list[dict[str, Any]]:
        self.drawn += count
        return self.rows(range(self.drawn - count, self.drawn))

    def rows(self, draws: Iterable[int]) -> list[dict[str, Any]]:
        return [{"prompt_id": draw, "group": draw} for draw in draws]

    def place(self, draw: int) -> str:
        return f"prompts, line {draw % len(self)}"

    def __len__(self) -> int:
        return 1000

    def state(self) -> dict[str, int]:
        return {"drawn": self.drawn}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.drawn = state["drawn"]


def moments(chance: random.Random, mean_s: float) -> Iterator[float]:
    """Random times, so far apart on average."""
    now = 0.0
    while True:
        now += chance.expovariate(1 / mean_s)
        yield now
