"""Rollout workers, weight sync and calls under a virtual clock, with the methods that `ReplicaStream` uses.

A simulated replica executes one call at a time. It generates only during `poll`, a few groups concurrently. If its
process is lost, its groups are gone. The new process repeats unresolved calls that load weights or abort all groups.
Each other unresolved call fails or is executed by the new process.
"""

import random
import threading
from collections import Counter
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
from flowrl.rewards.row_scorer import CALLS, FAILED, RewardCall
from flowrl.schedules.simulation import VirtualClock
from flowrl.weight_sync.verification import ComparedWeights

MAX_EVENTS = 10_000
"""Largest number of clock events per wait."""

EVALUATION_S = 0.1
"""Duration of a held-out row, without concurrency."""

COLUMNS = ("prompt_id", "sample", "replica", "response_mask", "weight_version")
REWARD_COLUMNS = ("scores", FAILED, CALLS)
ALL: Gather = lambda mesh, results: list(results)  # noqa: E731 (a constant)


@dataclass(eq=False)
class Late:
    """A value or an error that becomes available at a time."""

    clock: VirtualClock
    at: float
    value: Any = None
    error: Exception | None = None

    @property
    def carrier(self) -> "Late":
        return self

    def done(self) -> bool:
        return self.clock.now_s >= self.at

    def get(self) -> Any:
        assert self.done(), "the driver must not block on a replica"
        if self.error is not None:
            raise self.error
        return self.value

    def get_with(self, others: Sequence[Ref]) -> list[Any]:
        return [self.get(), *(other.get() for other in others)]


class SubmittedCall:
    """A submitted call: its effect is already applied, its result arrives later."""

    def __init__(self, clock: VirtualClock, run: Callable[[], Any], begin: float, resend: bool) -> None:
        self.run, self.begin, self.resend = run, begin, resend
        self.value, self.described = Late(clock, begin), Late(clock, begin)

    def resolve(self, value: Any, end: float) -> None:
        for late in (self.value, self.described):
            late.at = late.clock.call_at(end)
        self.value.value = value
        self.described.value = Description.of(value) if isinstance(value, Payload) else None

    def fail(self, error: Exception, now: float) -> None:
        for late in (self.value, self.described):
            late.at, late.error = now, error


class Method:
    """A worker method that only supports `submit`."""

    def __init__(self, submit: Callable[..., Any]) -> None:
        self.submit = submit


@dataclass(eq=False)
class SimulatedReplica:
    """A rollout replica.

    Args:
        seconds: prompt -> duration of its generation.
        num_slots: prompts that are generated concurrently.
        refuses: prompt -> whether the engine refuses it.
        fails: prompt -> whether the rewards of its responses fail. None: the responses have no rewards.
    """

    rank: int
    clock: VirtualClock
    seconds: Callable[[int], float]
    num_slots: int
    refuses: Callable[[int], bool] = lambda prompt: False
    fails: Callable[[int], bool] | None = None
    update_s: float = 0.01
    version: int = 0
    free_at: float = 0.0
    todo: list[tuple[int, int]] = field(default_factory=list)
    """(prompt, samples) without a slot."""
    working: dict[int, tuple[int, float, int]] = field(default_factory=dict)
    """Prompt -> (samples, seconds left, version at its start)."""
    submitted: list[SubmittedCall] = field(default_factory=list)
    evaluation: tuple[list[tuple[int, int]], float, int] | None = None
    """(prompt, sample) of the held-out rows, seconds left, and the version at the start."""
    is_new: bool = False
    first: list[Late] = field(default_factory=list)
    """First result of each replacement process."""

    @property
    def slots(self) -> list["SimulatedReplica"]:
        return [self]

    def _submit(self, run: Callable[[], tuple[Any, float]], resend: bool) -> SubmittedCall:
        submitted = SubmittedCall(self.clock, run, 0.0, resend)
        self.submitted.append(submitted)
        self._run(submitted)
        return submitted

    def _run(self, submitted: SubmittedCall) -> None:
        submitted.begin = max(self.free_at, self.clock.now_s)
        if self.is_new:
            self.is_new = False
            self.first.append(submitted.value)
        value, seconds = submitted.run()
        self.free_at = submitted.begin + seconds + 1e-4
        submitted.resolve(value, self.free_at)

    def _future(self, run: Callable[[], tuple[Any, float]], *, resend: bool = False) -> Future:
        submitted = self._submit(run, resend)
        return Future([submitted.value], ALL, Mesh(1, 1, 1, 1), lambda refs, timeout_s: [ref.get() for ref in refs])

    def kill(self, chance: random.Random) -> None:
        """Replaces the process."""
        self._reset()
        if self.first and not self.first[-1].done():
            self.first.pop()
        self.is_new = True
        self.free_at = self.clock.now_s + 0.3
        lost = ProcessLost("rollout", self.rank, 0, "poll", "it was killed")
        for submitted in [submitted for submitted in self.submitted if not submitted.value.done()]:
            if not submitted.resend and chance.random() < 0.6:
                submitted.fail(lost, self.clock.call_at(self.clock.now_s + 0.01))
            else:
                self._run(submitted)

    def _reset(self) -> None:
        self.todo.clear()
        self.working.clear()
        self.evaluation = None

    @property
    def add(self) -> Method:
        return Method(lambda batch, samples, **score: self._future(lambda: self._add(batch, samples)))

    def _add(self, batch: Batch, samples: int) -> tuple[dict[int, str | None], float]:
        keys = batch.payload("prompt_id", "sample").rows
        ids = list(dict.fromkeys(np.asarray(keys["prompt_id"]).tolist()))
        assert np.asarray(keys["sample"]).tolist() == list(range(samples)) * len(ids), "a group is incomplete"
        present = {prompt for prompt, _ in self.todo} | self.working.keys()
        assert not present & set(ids), "the prompt is already running"
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
        return Method(lambda: self._future(lambda: (self._reset(), 0.0), resend=True))

    def load(self, version: int) -> Future:
        def run() -> tuple[None, float]:
            self.version = version
            return None, self.update_s

        return self._future(run, resend=True)

    @property
    def poll(self) -> Method:
        return Method(lambda slice_s, **score: self._batch_of(lambda: self._poll(slice_s)))

    def _batch_of(self, run: Callable[[], tuple[Payload, float]]) -> Batch:
        submitted = self._submit(run, resend=False)
        columns = COLUMNS if self.fails is None else (*COLUMNS, *REWARD_COLUMNS)
        return Batch.of_block(Block([Shard(submitted.value, submitted.described, None)]), columns)

    @property
    def count_waiting(self) -> Method:
        return Method(lambda samples: self._future(lambda: (0, 0.0)))

    def _poll(self, slice_s: float) -> tuple[Payload, float]:
        left, finished = slice_s, []
        while not finished and left > 0 and (self.todo or self.working):
            while self.todo and len(self.working) < self.num_slots:
                prompt, samples = self.todo.pop(0)
                self.working[prompt] = (samples, self.seconds(prompt), self.version)
            passed = min(left, min(state[1] for state in self.working.values()))
            left -= passed
            self.working = {p: (n, s - passed, v) for p, (n, s, v) in self.working.items()}
            finished = [(p, *state) for p, state in self.working.items() if state[1] <= 1e-9]
            self.working = {p: state for p, state in self.working.items() if state[1] > 1e-9}
        return self._rows([(p, i, v) for p, n, _, v in finished for i in reversed(range(n))]), slice_s - left

    @property
    def start_evaluation(self) -> Method:
        return Method(lambda batch, temperature: self._future(lambda: self._start_evaluation(batch)))

    def _start_evaluation(self, batch: Batch) -> tuple[None, float]:
        keys = batch.payload("prompt_id", "sample").rows
        rows = list(zip(np.asarray(keys["prompt_id"]).tolist(), np.asarray(keys["sample"]).tolist(), strict=True))
        self.evaluation = (rows, EVALUATION_S * len(rows), self.version)
        return None, 0.0

    @property
    def poll_evaluation(self) -> Method:
        return Method(lambda slice_s: self._batch_of(lambda: self._poll_evaluation(slice_s)))

    def _poll_evaluation(self, slice_s: float) -> tuple[Payload, float]:
        if self.evaluation is None:
            return self._rows([]), 0.0
        rows, left_s, version = self.evaluation
        self.evaluation = (rows, left_s - slice_s, version)
        if left_s > slice_s:
            return self._rows([]), slice_s
        self.evaluation = None
        return self._rows([(prompt, sample, version) for prompt, sample in rows]), left_s

    def _rows(self, rows: Sequence[tuple[int, int, int]]) -> Payload:
        """Returns rows of two tokens, sampled by the versions at the start and at the end of the prompt."""
        ids, samples, versions = (np.array([row[i] for row in rows], dtype=np.int64) for i in range(3))
        both = np.stack([versions, np.full(len(rows), self.version)], axis=1).reshape(-1).astype(np.int32)
        columns: dict[str, Any] = {"prompt_id": ids, "sample": samples, "replica": np.full(len(rows), self.rank)}
        if self.fails is not None:
            failed = np.array([self.fails(prompt) for prompt in ids.tolist()], dtype=bool)
            calls = [RewardCall(None, failure="error") if is_failed else RewardCall(1.0) for is_failed in failed]
            records = [{"reward": call.to_dict()} for call in calls]
            columns |= {"scores": np.where(failed, 0.0, 1.0), FAILED: failed, CALLS: records}
        tokens = {"response_mask": np.ones(2 * len(rows), dtype=bool), "weight_version": both}
        return Payload(len(rows), columns, tokens, np.full(len(rows), 2))


@dataclass(eq=False)
class SimulatedRollout:
    """The worker group of all replicas."""

    replicas: list[SimulatedReplica]
    role: str = "rollout"
    tasks: None = None
    before_call: dict[str, Callable[[], None]] = field(default_factory=dict)

    def set_before_call(self, method: str, function: Callable[[], None]) -> Callable[[], None]:
        self.before_call[method] = function

        def remove() -> None:
            del self.before_call[method]

        return remove

    @property
    def mesh(self) -> Mesh:
        return Mesh(dp=len(self.replicas), tp=1, sp=1, pp=1)

    def replica(self, rank: int) -> SimulatedReplica:
        return self.replicas[rank]


@dataclass(eq=False)
class SimulatedRewards:
    """The `Scoring` of a run whose replicas receive the scores of each response."""

    has_models: bool = False
    generate_arguments: dict[str, Any] = field(default_factory=lambda: {"score": REWARD_COLUMNS})
    alongside: Any = None

    def connect(self, rollout: SimulatedRollout) -> None:
        pass


@dataclass(eq=False)
class SimulatedSnapshot:
    """A weight version that becomes available at a time."""

    version: int
    part: Late
    lost: Exception | None = None
    """Error of the calls that load the weights."""
    compared_s: float | None = None
    """Duration of the weight comparison; None: no comparison."""

    def is_ready(self) -> bool:
        return self.part.done()

    def futures(self) -> Sequence[Any]:
        return ()

    def send(self, replica: SimulatedReplica) -> tuple[Sequence[Future], ComparedWeights | None]:
        assert self.is_ready(), "a load would block the replica until the weights are exported"
        clock = self.part.clock
        if self.lost is not None:
            return [_future(Late(clock, self.part.at, error=self.lost))], None
        loaded = replica.load(self.version)
        if self.compared_s is None:
            return [loaded], None
        compared = Late(clock, clock.call_at(clock.now_s + self.compared_s), Compared(1))
        return [loaded], ComparedWeights(self.version, [_future(compared)])


def _future(late: Late) -> Future:
    return Future([late], ALL, Mesh(1, 1, 1, 1), lambda refs, timeout_s: [ref.get() for ref in refs])


@dataclass(eq=False)
class WeightSync:
    clock: VirtualClock
    trained_at: float = 0.0
    """End of all submitted training."""
    lost: Exception | None = None
    """Error of all weight loads."""
    compared_s: float | None = None
    """Duration of a weight comparison."""

    def connect(self, actor: Any, rollout: SimulatedRollout) -> None:
        pass

    def updates_all_replicas(self, actor: Any, rollout: SimulatedRollout) -> bool:
        return False

    def export(self, actor: Any, rollout: SimulatedRollout, version: int) -> SimulatedSnapshot:
        return SimulatedSnapshot(
            version, Late(self.clock, self.clock.call_at(self.trained_at)), self.lost, self.compared_s
        )


class Calls:
    """The controller's `Calls`, with the methods that wait."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock
        self.lock = threading.RLock()
        self.attended: list[Callable[[], Iterable[Any]]] = []
        self.before: list[Callable[[], None]] = []
        """Callbacks that run before the idle callbacks."""
        self.num_lost_replicas = 0

    def get_error(self, slot: SimulatedReplica) -> None:
        """Returns None, because lost processes are replaced."""

    def get_num_replacements(self, replica: SimulatedReplica) -> int:
        return sum(late.done() and late.error is None for late in replica.first)

    def add_idle_callback(self, fn: Callable[[], Iterable[Any]]) -> Callable[[], None]:
        self.attended.append(fn)
        return lambda: self.attended.remove(fn)

    def wait(self, records: Sequence[Any], timeout_s: float | None) -> None:
        assert not records, "local rows are computed by no call"

    def wait_until(self, condition: Callable[[], bool]) -> None:
        for _ in range(MAX_EVENTS):
            for fn in [*self.before, *self.attended]:
                list(fn() or ())
            if condition():
                return
            now_s = self.clock.now_s
            while self.clock.now_s == now_s:
                self.clock.advance()
        raise AssertionError("the condition never becomes true")


class NumberedPrompts:
    """A prompt stream whose prompts are their indices."""

    needs_success = False

    def __init__(self) -> None:
        self.drawn = 0
        self.requeued: list[int] = []
        self.built: Counter[int] = Counter()
        """Number of times the row of each prompt was built."""

    def record_success(self, indices: Sequence[int], rates: Sequence[float]) -> None:
        pass

    def take(self, count: int) -> list[dict[str, Any]]:
        taken, self.requeued = self.requeued[:count], self.requeued[count:]
        taken += range(self.drawn, self.drawn + count - len(taken))
        self.drawn = max([self.drawn - 1, *taken]) + 1
        self.built.update(taken)
        return [{"prompt_id": index, "group": index} for index in taken]

    def requeue(self, indices: Sequence[int]) -> None:
        self.requeued = [*indices, *self.requeued]

    def location(self, index: int) -> str:
        return f"prompts, line {index % len(self)}"

    def __len__(self) -> int:
        return 1000

    def state(self, untrained: Iterable[int] = ()) -> dict[str, Any]:
        return {"drawn": self.drawn, "untrained": [*untrained, *self.requeued]}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.drawn, self.requeued = state["drawn"], list(state["untrained"])


def moments(chance: random.Random, mean_s: float) -> Iterator[float]:
    """Yields random times with the given mean distance."""
    now = 0.0
    while True:
        now += chance.expovariate(1 / mean_s)
        yield now
