"""ReplicaStream: replicas generate continuously while the trainer trains, for `async`.

The lock rule of rollout_source.py applies.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field

import numpy as np

from flowrl.config import AsyncSchedule, UserError
from flowrl.controller.calls.calls import Calls, IdleCallback
from flowrl.controller.dispatch import Future
from flowrl.controller.errors import ProcessLost
from flowrl.controller.group import WorkerGroup
from flowrl.data.batch.batch import Batch
from flowrl.schedules.rewards import HeldOutResponses
from flowrl.schedules.rollout_source import (
    GeneratedGroup,
    Group,
    RolloutContext,
    RolloutSource,
    Rows,
    add_model_scores,
    join_rows,
)
from flowrl.schedules.scheduler import ScheduleLimits, Scheduler
from flowrl.schedules.throughput import IdleTime, StepFunction
from flowrl.weight_sync.transfer import WeightSnapshot
from flowrl.weight_sync.verification import ComparedWeights

MAX_POLLS = 2
"""Number of polls in flight per replica. The replica runs the second poll while the driver reads the first result."""

POLL_S = 0.1
"""Largest duration of a poll in seconds. A replica receives new calls after at most two polls."""

POLL_S_PER_REPLICA = 0.01
"""Smallest duration of a poll, in seconds per replica. It limits the driver to about 100 polls per second in total."""

OVERSUBSCRIPTION = 4
"""Number of slots per extra group. Extra groups (over-subscription) keep a replica busy between polls."""

MAX_REFUSED_IN_A_ROW = 100
"""Number of consecutive refused prompts that ends the run, because then all prompts are probably invalid."""

MAX_REFUSAL_MESSAGES = 20
"""Largest number of refused prompts that are printed."""


@dataclass(eq=False)
class _Replica:
    """The driver's state of a rollout replica."""

    group: WorkerGroup
    calls: deque[Future | Batch] = field(default_factory=deque)
    """Calls whose results the driver has not read yet, in the order of submission. The result of a poll is a Batch."""
    running: dict[int, Group] = field(default_factory=dict)
    """Groups that the replica generates, by prompt index."""
    update: tuple[int, Sequence[Future]] | None = None
    """Weight version of the update in flight, and the calls that load this version."""
    recovery: Future | None = None
    """First call after the loss of a process. It is done when the new process is ready."""
    unscored: Future | None = None
    """Call in flight that counts the groups that wait for scores only."""
    num_replacements: int = 0
    """Number of process replacements that the driver has handled."""

    def reset(self) -> None:
        """Removes all groups and discards the results of earlier calls, except weight updates."""
        self.recovery = abort = self.group.abort_all.submit()
        self.calls = deque([abort])
        self.running.clear()
        self.unscored = None

    @property
    def num_polls(self) -> int:
        return sum(isinstance(call, Batch) for call in self.calls)


class ReplicaStream:
    """Sends groups and weights to each replica as the scheduler decides, and collects the complete groups.

    The driver runs the idle callback of the source while a call waits, and on a thread while it computes. The
    controller restores the process and the weights of a lost replica. Its unfinished groups return to the scheduler.
    """

    def __init__(self, context: RolloutContext) -> None:
        self._context, self._lock = context, context.calls.lock
        group_filter = context.make_filter()
        self._columns = group_filter.columns if group_filter.is_active else ()
        """Columns that the filter reads."""
        self.num_replicas = context.rollout.mesh.dp
        self._replicas = [_Replica(context.rollout.replica(rank)) for rank in range(self.num_replicas)]
        self._poll_s = max(POLL_S, POLL_S_PER_REPLICA * self.num_replicas)
        self._scored: list[tuple[int, Group, Batch]] = []
        """Replica, group and rows of each generated group that models score."""
        rewards = context.rewards
        self._score = {} if rewards is None else rewards.generate_arguments
        """Arguments of calls that generate, which name the columns that replicas receive from reward workers."""
        self._exports: deque[WeightSnapshot] = deque()
        """Exports of weight versions that are not complete yet, oldest first."""
        self._newest: WeightSnapshot | None = None
        """Newest exported version; None while all replicas have the initial version."""
        self._newest_version = 0
        self._comparisons: list[ComparedWeights] = []
        self.is_paused = False
        """Whether dispatch is paused until all replicas have the newest weights."""
        self._step = 0
        """Step of the last batch."""
        self.starved = StepFunction()
        """Fraction of replicas that wait for newer weights, over time."""
        self._idle = IdleTime()
        self._alongside: tuple[int, bool] = (-1, False)
        """Weight version of the last evaluation, and whether it runs alongside training."""
        self._refused_locations: set[str] = set()
        self._num_refused_in_a_row = 0
        self._callbacks: ExitStack | None = None
        """Removes the callbacks of this object. None before `begin` and after `detach`."""

    @property
    def _schedule(self) -> AsyncSchedule:
        schedule = self._context.config.schedule
        assert isinstance(schedule, AsyncSchedule)
        return schedule

    def limits(self) -> ScheduleLimits:
        """Returns the limits of the scheduler."""
        config, schedule = self._context.config, self._schedule
        slots = max(1, config.rollout.num_seqs // config.samples_per_prompt)
        return ScheduleLimits(
            groups_per_step=config.prompts_per_step,
            max_staleness=schedule.staleness,
            max_concurrent=schedule.max_concurrent,
            overprovision=schedule.overprovision,
            interrupt=schedule.interrupt,
            slots=slots + -(-slots // OVERSUBSCRIPTION),
            total_groups=config.steps * config.prompts_per_step,
            # The inline backend always has one replica.
            trainer_routes=self._context.trainer_routes if self.num_replicas > 1 else None,
        )

    def begin(self, scheduler: Scheduler, policy: WorkerGroup | None, advance: IdleCallback) -> None:
        """Starts generation. `advance` is the idle callback, which calls `read`, `dispatch` and `poll`."""
        context = self._context
        self._scheduler, self._policy = scheduler, policy
        self._newest_version = scheduler.replica_version(0)
        groups = [replica.group for replica in self._replicas]
        self._evaluation = PinnedEvaluation(context.calls, scheduler, groups, self._poll_s)
        if context.rewards is not None:
            context.rewards.alongside = self._evaluate_alongside
        if policy is not None:
            context.weight_sync.connect(policy, context.rollout)
        for replica in self._replicas:
            replica.reset()
        self._callbacks = ExitStack()
        self._callbacks.callback(context.calls.add_idle_callback(advance))
        # The schedule calls other methods. `generate` is a call of the recipe, such as an evaluation.
        self._callbacks.callback(context.rollout.set_before_call("generate", self._wait_for_newest_weights))

    def wait_for_step(self, step: int, is_complete: Callable[[], bool]) -> None:
        """Waits until the groups of a step are complete, which `is_complete` returns."""
        with self._lock:
            self._step = step
            self._idle.resume(self._context.now_ns() / 1e9)
        self._context.calls.wait_until(is_complete)

    # Results.

    def read(self) -> list[GeneratedGroup]:
        """Returns the groups that are complete since the last call. Reports all other events to the scheduler."""
        generated = [one for rank, replica in enumerate(self._replicas) for one in self._read_results(rank, replica)]
        scored, self._scored = self._scored, []
        for rank, group, rows in scored:
            if rows.select("scores").done():
                values = rows.payload(*self._columns).rows if self._columns else {}
                generated.append(GeneratedGroup(rank, group, Rows(rows, np.arange(len(rows))), values))
            else:
                self._scored.append((rank, group, rows))
        self._idle.add_rows(len(generated) * self._context.config.samples_per_prompt)
        while self._exports and self._exports[0].is_ready():
            self._newest = self._exports.popleft()
            self._evaluation.add_snapshot(self._newest)
            self._scheduler.add_version(self._newest.version)
        return generated

    def _read_results(self, rank: int, replica: _Replica) -> list[GeneratedGroup]:
        """Reads the results of all calls of a replica that are done. Returns the groups that are complete."""
        generated: list[GeneratedGroup] = []
        num_replacements = self._context.calls.get_num_replacements(replica.group.slots[0])
        try:
            is_updated = replica.update is None or all(call.done() for call in replica.update[1])
            if replica.recovery is not None and replica.recovery.done() and is_updated:
                replica.recovery, replica.num_replacements = None, num_replacements
                self._scheduler.restore_replica(rank)
            elif replica.recovery is None and num_replacements > replica.num_replacements:
                self._handle_loss(rank, replica)
                return generated
            while replica.calls and replica.calls[0].done():
                result = replica.calls.popleft()
                if isinstance(result, Batch):
                    generated += self._collect(rank, replica, result)
                else:
                    self._drop_refused(replica, result.get())
            if replica.unscored is not None and replica.unscored.done():
                num_scored_by_models = sum(scoring_rank == rank for scoring_rank, *_ in self._scored)
                self._scheduler.set_unscored(rank, max(replica.unscored.get()) + num_scored_by_models)
                replica.unscored = None
            if replica.update is not None and is_updated:
                (_, calls), replica.update = replica.update, None
                for call in calls:
                    call.get()
                self._scheduler.confirm_update(rank)
        except ProcessLost as error:
            if error.role != self._context.rollout.role:
                raise  # the lost process is the source of the weights, not the replica
            self._handle_loss(rank, replica)
        return generated

    def _handle_loss(self, rank: int, replica: _Replica) -> None:
        if error := self._context.calls.get_error(replica.group.slots[0]):
            raise error  # the process is not replaced
        self._context.calls.num_lost_replicas += 1
        self._evaluation.restart(rank)
        role, count = self._context.rollout.role, len(replica.running)
        self._context.notify(f"{role} rank {rank} lost: {count} unfinished prompts are regenerated by other replicas")
        self._scored = [one for one in self._scored if one[0] != rank]
        self._scheduler.mark_replica_lost(rank)
        replica.reset()

    def _collect(self, rank: int, replica: _Replica, rows: Batch) -> list[GeneratedGroup]:
        """Returns the complete groups of a poll. Submits the calls of models that score them."""
        if not rows.num_rows:
            return []
        rewards, generated = self._context.rewards, []
        has_models = rewards is not None and rewards.has_models
        keys = rows.payload("prompt_id", "sample", *(() if has_models else self._columns)).rows
        prompt_ids, samples = np.asarray(keys["prompt_id"]), np.asarray(keys["sample"])
        responses = rows.drop("prompt_id", "sample")
        for prompt_id in dict.fromkeys(prompt_ids.tolist()):
            group = replica.running.pop(prompt_id, None)
            if group is None:
                continue
            positions = np.flatnonzero(prompt_ids == prompt_id)
            own = Rows(responses, positions[np.argsort(samples[positions])])
            if rewards is not None and has_models:
                scored = add_model_scores(rewards, join_rows([group.prompts]), join_rows([own]))
                self._scored.append((rank, group, scored))
            else:
                generated.append(GeneratedGroup(rank, group, own, keys))
        return generated

    def _drop_refused(self, replica: _Replica, results: Sequence[Mapping[int, str | None] | None]) -> None:
        """Drops groups whose prompts `add` refused.

        A result maps each prompt index to the reason, or to None if accepted.
        """
        for index, reason in ((index, reason) for result in results for index, reason in (result or {}).items()):
            if reason is None:
                self._num_refused_in_a_row = 0
            elif index in replica.running and self._scheduler.drop_group(replica.running[index].number, "refused"):
                self._report_refused(self._context.prompts.location(index), reason)

    def _report_refused(self, location: str, reason: str) -> None:
        """Notifies the user of a prompt that the rollout engine refused for `reason`.

        Prints at most one message per location in the data. Raises `UserError` if too many consecutive prompts were
        refused.
        """
        prompts, role = self._context.prompts, self._context.rollout.role
        self._num_refused_in_a_row += 1
        count = self._num_refused_in_a_row
        if count >= min(MAX_REFUSED_IN_A_ROW, 2 * len(prompts)):
            raise UserError(f"{location}: the prompt {reason}; {role} refused {count} prompts in a row")
        if location not in self._refused_locations and len(self._refused_locations) < MAX_REFUSAL_MESSAGES:
            self._context.notify(f"{location}: the prompt {reason}; {role} refuses it, and it is dropped")
        self._refused_locations.add(location)

    # Actions.

    def dispatch(self, rank: int, groups: Sequence[Group]) -> None:
        """Submits the generation of groups."""
        replica, rows = self._replicas[rank], join_rows(group.prompts for group in groups)
        replica.running |= {group.index: group for group in groups}
        replica.calls.append(replica.group.add.submit(rows, self._context.config.samples_per_prompt, **self._score))

    def abort(self, rank: int, groups: Sequence[Group]) -> None:
        """Submits the end of the generation of groups."""
        replica = self._replicas[rank]
        for group in groups:
            replica.running.pop(group.index, None)
        replica.calls.append(replica.group.abort.submit([group.index for group in groups]))

    def poll(self) -> Iterable[Future | Batch]:
        """Submits the calls that return complete groups. Returns results that trigger the next callback."""
        starved = () if self.is_paused else self._scheduler.starved_replicas
        self.starved.set(self._context.now_ns(), len(starved) / self.num_replicas)
        self._record_idleness()
        rewards = self._context.rewards
        for replica in self._replicas:
            while replica.num_polls < min(MAX_POLLS, len(replica.running)):
                replica.calls.append(replica.group.poll.submit(self._poll_s, **self._score))
                if rewards is not None and replica.unscored is None:
                    replica.unscored = replica.group.count_waiting.submit(self._context.config.samples_per_prompt)
        polls = self._poll_evaluation()
        exports = (part for snapshot in self._exports for part in snapshot.futures())
        scored = (rows.select("scores") for *_, rows in self._scored)
        return [*self._next_results(), *exports, *scored, *polls]

    def _next_results(self) -> Iterable[Future | Batch]:
        """Yields at most one result per replica. When one of these results is done, the callback runs again.

        Prefers the result of the oldest `poll` call. A replica runs its calls in the order of submission, so calls
        before a finished `poll` are also finished.
        """
        for replica in self._replicas:
            polls = (call for call in replica.calls if isinstance(call, Batch))
            others = replica.update[1][-1:] if replica.update else replica.calls
            yield from [poll] if (poll := next(polls, None)) is not None else list(others)[:1]

    def _poll_evaluation(self) -> Iterable[Batch]:
        try:
            return self._evaluation.run_once()
        except ProcessLost as error:
            rank = self._evaluation.rank
            if error.role != self._context.rollout.role or rank is None:
                raise
            self._handle_loss(rank, self._replicas[rank])
            return ()

    # Weights.

    def update_weights(self, rank: int, version: int) -> None:
        """Submits the calls that load a weight version into a replica."""
        replica = self._replicas[rank]
        snapshot = self._evaluation.find_snapshot(rank, version) or self._newest
        assert snapshot is not None and snapshot.version == version, "the scheduler only knows exported versions"
        context, policy = self._context, self._policy
        if policy is None or not context.weight_sync.updates_all_replicas(policy, context.rollout):
            replica.update = version, self._load_weights(snapshot, replica.group)
            return
        shared = [other.update for other in self._replicas if other.update is not None and other.update[0] == version]
        replica.update = shared[0] if shared else (version, self._load_weights(snapshot, context.rollout))

    def _load_weights(self, snapshot: WeightSnapshot, rollout: WorkerGroup) -> Sequence[Future]:
        loads, comparison = snapshot.send(rollout)
        if comparison is not None:
            self._comparisons.append(comparison)
        return loads

    def export_weights(self, actor: WorkerGroup, version: int) -> None:
        """Submits the export of the actor's current weights."""
        self._policy = actor
        self._exports.append(self._context.weight_sync.export(actor, self._context.rollout, version))
        self._newest_version = version

    def pop_comparisons(self) -> list[ComparedWeights]:
        """Returns the comparisons that are done. That of a slow or lost replica is logged in a later step."""
        done = [comparison for comparison in self._comparisons if comparison.done()]
        self._comparisons = [comparison for comparison in self._comparisons if comparison not in done]
        return done

    def _wait_for_newest_weights(self) -> None:
        """Blocks until every replica has the newest weights. With `interrupt: false`, dispatch pauses."""
        with self._lock:
            self.is_paused = not self._schedule.interrupt
            self._idle.pause()
        try:
            self._context.calls.wait_until(self._have_newest_weights)
        finally:
            with self._lock:
                self.is_paused = False

    def _have_newest_weights(self) -> bool:
        return all(self._scheduler.replica_version(rank) == self._newest_version for rank in range(self.num_replicas))

    # Evaluations.

    def _evaluate_alongside(
        self, prompts: Batch, temperature: float, score: Sequence[str], finish: Callable[[Batch], Batch]
    ) -> HeldOutResponses | None:
        """Starts an evaluation of the newest weights on a pinned replica. See `GenerateAlongside`.

        Returns None if training waits for the evaluation, which all replicas then generate.
        """
        with self._lock:
            version = self._newest_version
            if version != self._alongside[0]:  # all sets of a step are one evaluation
                self._alongside = version, self._is_alongside(prompts.num_rows)
                self._idle.reset()
        return self._evaluation.submit(prompts, temperature, score, finish, version) if self._alongside[1] else None

    def _is_alongside(self, num_rows: int) -> bool:
        """Whether an evaluation of `num_rows` rows runs alongside training.

        It does not after the last step, because all replicas are then free. Neither for a transfer that updates all
        replicas at once, because no replica can then keep older weights.
        """
        policy, choice = self._policy, self._schedule.concurrent_evaluation
        if not choice or self._step == self._context.config.steps or policy is None or self._callbacks is None:
            return False
        if self._context.weight_sync.updates_all_replicas(policy, self._context.rollout):
            return False
        self._record_idleness()
        return choice is True or self._idle.covers(num_rows)

    def _record_idleness(self) -> None:
        self._idle.set(self._context.now_ns() / 1e9, len(self._scheduler.idle_replicas) / self.num_replicas)

    # End.

    def finish(self) -> None:
        """Blocks until the replicas have aborted all running prompts."""
        for abort in [replica.group.abort_all.submit() for replica in self._replicas]:
            with suppress(ProcessLost):
                abort.get()

    def detach(self) -> None:
        """Removes the callbacks. Is idempotent."""
        if self._context.rewards is not None:
            self._context.rewards.alongside = None
        if self._callbacks is not None:
            self._callbacks.close()
            self._callbacks = None


class PinnedEvaluation:
    """Generates the held-out responses of one weight version on one replica.

    The replica is pinned to the version from the first request until all responses are generated. Meanwhile, it also
    generates training groups, unless they would exceed the staleness bound. Other replicas load newer versions. If the
    process of the replica is lost, its replacement loads the pinned version and generates the unfinished requests
    again.

    All methods except `submit` run under the driver lock.
    """

    def __init__(self, calls: Calls, scheduler: Scheduler, replicas: Sequence[WorkerGroup], poll_s: float) -> None:
        self._calls, self._scheduler, self._replicas, self._poll_s = calls, scheduler, replicas, poll_s
        self._requests: deque[HeldOutResponses] = deque()
        """Requests without responses, oldest first. The replica generates the first one."""
        self.version: int | None = None
        """Weight version of the requests; None without requests."""
        self._rank = 0
        """Rank of the pinned replica, if there are requests."""
        self._newest: WeightSnapshot | None = None
        """Newest exported snapshot, or None before the first weight sync."""
        self._snapshot: WeightSnapshot | None = None
        """Snapshot of the pinned version. None if it is not exported yet, or if the version has the initial weights."""
        self._start: Future | None = None
        """Call that starts the first request on the replica; None if it is not submitted."""
        self._polls: deque[Batch] = deque()

    def submit(
        self,
        prompts: Batch,
        temperature: float,
        score: Sequence[str],
        finish: Callable[[Batch], Batch],
        version: int,
    ) -> HeldOutResponses:
        """Queues held-out prompts for a weight version, the newest one. Returns their pending responses.

        First waits until the requests of an earlier version are generated. `HeldOutResponses` describes the arguments.
        """
        request = HeldOutResponses(prompts, temperature, score, finish, self._calls)
        self._calls.wait_until(lambda: self.version in (None, version))
        with self._calls.lock:
            if self.version is None:
                self.version, self._rank = version, self._scheduler.pin_replica(version)
                newest = self._newest
                self._snapshot = newest if newest is not None and newest.version == version else None
            self._requests.append(request)
        return request

    def add_snapshot(self, snapshot: WeightSnapshot) -> None:
        """Replaces the newest exported snapshot. Keeps the snapshot for the replica if its version is pinned."""
        self._newest = snapshot
        if snapshot.version == self.version:
            self._snapshot = snapshot

    def find_snapshot(self, rank: int, version: int) -> WeightSnapshot | None:
        """Returns the snapshot of `version` if the replica `rank` is pinned to it, or None."""
        return self._snapshot if rank == self._rank and version == self.version else None

    def restart(self, rank: int) -> None:
        """Discards the calls of a lost process, so that its replacement generates the first request again."""
        if self.version is not None and rank == self._rank:
            self._start = None
            self._polls.clear()

    @property
    def rank(self) -> int | None:
        """Rank of the pinned replica, or None."""
        return None if self.version is None else self._rank

    def run_once(self) -> Iterable[Batch]:
        """Reads finished responses, and submits the next calls. Raises the error of a failed call.

        Returns the pending results after which the method must run again.
        """
        if self.version is None:
            return ()
        self._read_results()
        scheduler, rank = self._scheduler, self._rank
        while self._requests and scheduler.replica_version(rank) == self.version and not scheduler.is_lost(rank):
            replica, request = self._replicas[rank], self._requests[0]
            score = {"score": request.score} if request.score else {}
            if self._start is None:
                self._start = replica.start_evaluation.submit(request.prompts, request.temperature, **score)
            if len(self._polls) == MAX_POLLS:
                break
            self._polls.append(replica.poll_evaluation.submit(self._poll_s, **score))
        return list(self._polls)[:1]

    def _read_results(self) -> None:
        while self._polls and self._polls[0].done() and self._start is not None and self._start.done():
            self._start.get()  # raises the error of invalid prompts
            responses = self._polls.popleft()
            if responses.num_rows:
                self._requests.popleft().set_responses(responses)
                # Later polls of this request return no rows, so their results are not needed.
                self._start = None
                self._polls.clear()
        if not self._requests:
            self._scheduler.unpin_replica(self._rank)
            self.version = self._snapshot = None


def make_rollout_source(context: RolloutContext) -> RolloutSource:
    """Returns the rollout source of the config's schedule. With a staleness bound of 0, every schedule is `sync`."""
    return RolloutSource(context, ReplicaStream(context) if context.config.schedule.is_streaming else None)
