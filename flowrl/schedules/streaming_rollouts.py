"""StreamingRollouts: `schedule: async`, in which replicas generate continuously while the trainer trains."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from flowrl.checkpoints.saved_rows import IDENTITY, SavedRows
from flowrl.config import AsyncSchedule, UserError
from flowrl.controller.dispatch import Future
from flowrl.controller.errors import ProcessLost
from flowrl.controller.group import WorkerGroup
from flowrl.data.batch.batch import Batch
from flowrl.data.events import MAX_COUNTS, CallEvent, Counted
from flowrl.data.metric import Logged
from flowrl.schedules.group_filter import no_groups_message
from flowrl.schedules.pending_rollouts import PendingRollouts
from flowrl.schedules.pinned_evaluation import PinnedEvaluation
from flowrl.schedules.rewards import HeldOutResponses, reward_metrics
from flowrl.schedules.rollout_source import (
    BatchRollouts,
    RolloutContext,
    RolloutSource,
    staleness_metrics,
)
from flowrl.schedules.scheduler import (
    AbortGroups,
    DispatchGroups,
    GroupCounts,
    ScheduleLimits,
    Scheduler,
    StepBatch,
    UpdateWeights,
)
from flowrl.schedules.streaming_metrics import StepFunction, group_metrics
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
    groups: set[int] = field(default_factory=set)
    update: tuple[int, Sequence[Future]] | None = None
    """Weight version of the update in flight, and the calls that load this version."""
    recovery: Future | None = None
    """First call after the loss of a process. It is done when the new process is ready."""
    unscored: Future | None = None
    """Call in flight that counts the groups that wait for scores only."""
    num_replacements: int = 0
    """Number of process replacements that the driver has handled."""

    def reset(self) -> None:
        """Removes all groups and discards the results of earlier calls."""
        self.recovery = abort = self.group.abort_all.submit()
        self.calls = deque([abort])
        self.groups.clear()
        self.update = self.unscored = None

    @property
    def num_polls(self) -> int:
        return sum(isinstance(call, Batch) for call in self.calls)


class StreamingRollouts:
    """Dispatches prompts and weights to replicas as the `Scheduler` decides, and collects responses.

    All work happens in an idle callback. The driver runs it while a call waits, and on a thread while the driver
    computes. The driver lock protects all state.
    """

    is_streaming = True

    def __init__(self, context: RolloutContext) -> None:
        self._context = context
        self._lock = context.calls.lock
        num_replicas = context.rollout.mesh.dp
        self._replicas = [_Replica(context.rollout.replica(rank)) for rank in range(num_replicas)]
        self._poll_s = max(POLL_S, POLL_S_PER_REPLICA * num_replicas)
        self._prompts: dict[int, int] = {}
        """Prompt index of each untrained group."""
        self._complete: dict[int, Batch] = {}
        """Rows of each complete group, which stay in the replica's process."""
        self._scored: dict[int, tuple[int, Batch]] = {}
        """Replica and rows of each generated group that models score."""
        self._kept: dict[int, tuple[int, ...]] = {}
        """Rows of each complete group that are trained, if the filter is active."""
        rewards = context.rewards
        self._score = {} if rewards is None else rewards.generate_arguments
        """Arguments of calls that generate, which name the columns that replicas receive from reward workers."""
        self._filter = context.make_filter()
        self._filtered: list[Batch] = []
        """Rows of the groups that the filter has dropped since the last step."""
        self._pending: PendingRollouts | None = None
        """Groups of the checkpoint, between `restore` and `begin`."""
        self._exports: deque[WeightSnapshot] = deque()
        """Exports of weight versions that are not complete yet, oldest first."""
        self._newest: WeightSnapshot | None = None
        """Newest exported version; None while all replicas have the initial version."""
        self._comparisons: list[ComparedWeights] = []
        self._is_paused = False
        """Whether dispatch is paused until all replicas have the newest weights."""
        self._newest_version = 0
        self._step = 0
        """Step of the last batch."""
        self._metrics: tuple[Logged, ...] = ()
        self._counts: GroupCounts | None = None
        """Group counts at the end of the last `next_batch`."""
        self._earlier: GroupCounts | None = None
        """Group counts of the checkpoint from which the run was resumed."""
        self._starved = StepFunction()
        """Fraction of replicas that wait for newer weights, over time."""
        self._refused_locations: set[str] = set()
        self._num_refused_in_a_row = 0
        self._callbacks: ExitStack | None = None
        """Removes the callbacks of this object. None before `begin` and after `detach`."""
        self.counted: deque[Counted] = deque(maxlen=MAX_COUNTS)

    def begin(self, policy: WorkerGroup | None, step: int, version: int) -> None:
        context = self._context
        self._newest_version = version
        self._scheduler = Scheduler(self._limits(), len(self._replicas), version=version, num_steps_done=step)
        if self._pending is not None:
            self._prompts, self._complete = self._pending.admit(self._scheduler, context)
            self._pending = None
            if self._filter.is_active:
                self._kept = {group: self._filter.select(rows)[0].rows for group, rows in self._complete.items()}
        groups = [replica.group for replica in self._replicas]
        self._evaluation = PinnedEvaluation(context.calls, self._scheduler, groups, self._poll_s)
        if context.rewards is not None:
            context.rewards.connect(context.rollout)
            context.rewards.alongside = self._evaluate_alongside
        self._policy = policy
        if policy is not None:
            context.weight_sync.connect(policy, context.rollout)
        for replica in self._replicas:
            replica.reset()
        self._callbacks = ExitStack()
        self._callbacks.callback(context.calls.add_idle_callback(self._run_once))
        # The schedule calls other methods. `generate` is a call of the recipe, such as an evaluation.
        self._callbacks.callback(context.rollout.set_before_call("generate", self._wait_for_newest_weights))

    def _limits(self) -> ScheduleLimits:
        config, schedule = self._context.config, self._context.config.schedule
        assert isinstance(schedule, AsyncSchedule)
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
            trainer_routes=self._context.trainer_routes if len(self._replicas) > 1 else None,
        )

    # Idle callback.

    def _run_once(self) -> Iterable[Future | Batch]:
        """Reads new results and submits the scheduler's actions. Returns results that trigger the next run."""
        self._scheduler.advance_clock(self._context.now_ns() / 1e9)
        for rank, replica in enumerate(self._replicas):
            self._read_results(rank, replica)
        while self._exports and self._exports[0].is_ready():
            self._newest = self._exports.popleft()
            self._evaluation.add_snapshot(self._newest)
            self._scheduler.add_version(self._newest.version)
        self._submit_aborts(self._scheduler.pop_aborts())
        if self._is_paused:
            self._update_idle_replicas()
        else:
            self._submit_actions()
        starved = () if self._is_paused else self._scheduler.starved_replicas
        self._starved.set(self._context.now_ns(), len(starved) / len(self._replicas))
        rewards = self._context.rewards
        for replica in self._replicas:
            while replica.num_polls < min(MAX_POLLS, len(replica.groups)):
                replica.calls.append(replica.group.poll.submit(self._poll_s, **self._score))
                if rewards is not None and replica.unscored is None:
                    replica.unscored = replica.group.count_waiting.submit(self._context.config.samples_per_prompt)
        self._complete_scored()
        polls = self._poll_evaluation()
        exports = (part for snapshot in self._exports for part in snapshot.futures())
        scored = (rows.select("scores") for _, rows in self._scored.values())
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

    def _read_results(self, rank: int, replica: _Replica) -> None:
        num_replacements = self._context.calls.get_num_replacements(replica.group.slots[0])
        if replica.recovery is not None and replica.recovery.done():
            replica.recovery, replica.num_replacements = None, num_replacements
        elif replica.recovery is None and num_replacements > replica.num_replacements:
            return self._handle_loss(rank, replica)
        try:
            while replica.calls and replica.calls[0].done():
                result = replica.calls.popleft()
                if isinstance(result, Batch):
                    self._collect(rank, replica, result)
                else:
                    self._drop_refused(replica, result.get())
            if replica.unscored is not None and replica.unscored.done():
                num_scored_by_models = sum(scoring_rank == rank for scoring_rank, _ in self._scored.values())
                self._scheduler.set_unscored(rank, max(replica.unscored.get()) + num_scored_by_models)
                replica.unscored = None
            if replica.update is not None and all(call.done() for call in replica.update[1]):
                version, calls = replica.update
                for call in calls:
                    call.get()
                replica.update = None
                self._scheduler.confirm_update(rank, version)
        except ProcessLost as error:
            if error.role != self._context.rollout.role:
                raise  # the lost process is the source of the weights, not the replica
            self._handle_loss(rank, replica)

    def _poll_evaluation(self) -> Iterable[Batch]:
        try:
            return self._evaluation.run_once()
        except ProcessLost as error:
            rank = self._evaluation.rank
            if error.role != self._context.rollout.role or rank is None:
                raise
            self._handle_loss(rank, self._replicas[rank])
            return ()

    def _handle_loss(self, rank: int, replica: _Replica) -> None:
        if error := self._context.calls.get_error(replica.group.slots[0]):
            raise error  # the process is not replaced
        self._context.calls.num_lost_replicas += 1
        self._evaluation.restart(rank)
        role, count = self._context.rollout.role, len(replica.groups)
        self._context.notify(f"{role} rank {rank} lost: {count} unfinished prompts are regenerated by other replicas")
        self._scheduler.mark_replica_lost(rank)
        replica.reset()

    def _collect(self, rank: int, replica: _Replica, rows: Batch) -> None:
        """Stores the complete groups of a poll."""
        if not rows.num_rows:
            return
        group_of = self._groups_by_prompt()
        is_filtered = self._filter.is_active and not self._is_scored_by_models
        keys = rows.payload("prompt_id", "sample", *(self._filter.columns if is_filtered else ())).rows
        prompt_ids, samples = np.asarray(keys["prompt_id"]), np.asarray(keys["sample"])
        for prompt_id in dict.fromkeys(prompt_ids.tolist()):
            group = group_of.get(prompt_id)
            if group is None:
                continue
            replica.groups.discard(group)
            own_rows = np.flatnonzero(prompt_ids == prompt_id)
            in_order = own_rows[np.argsort(samples[own_rows])]
            group_rows = rows.drop("prompt_id", "sample").rows(in_order)
            if self._is_scored_by_models:
                self._scored[group] = (rank, self._add_model_scores(prompt_id, group_rows))
            else:
                self._complete_group(rank, group, group_rows, {name: keys[name][in_order] for name in keys})
        self._record_counts()

    @property
    def _is_scored_by_models(self) -> bool:
        rewards = self._context.rewards
        return rewards is not None and rewards.has_models

    def _add_model_scores(self, index: int, rows: Batch) -> Batch:
        """Returns the rows of a group with the scores of models. Does not block."""
        rewards, prompts = self._context.rewards, self._context.prompts.make_batch([index])
        assert rewards is not None
        scored = rewards.add_model_scores(prompts.union(rows))
        return scored.select(*(name for name in scored.columns if name not in prompts.columns))

    def _complete_scored(self) -> None:
        """Completes the groups that models have scored."""
        for group, (rank, rows) in list(self._scored.items()):
            if rows.select("scores").done():
                del self._scored[group]
                columns = self._filter.columns if self._filter.is_active else ()
                self._complete_group(rank, group, rows, rows.payload(*columns).rows if columns else {})

    def _complete_group(self, rank: int, group: int, rows: Batch, values: Mapping[str, Any]) -> None:
        """Stores the rows of a scored group, or drops the group. `values` has the columns of the filter."""
        index = self._prompts[group]
        if not self._scheduler.complete_group(rank, group):
            return
        self._complete[group] = rows
        if not self._filter.is_active:
            return
        selected = self._filter.select_values(values)[0]
        self._context.prompts.record_success([index], [selected])
        self._kept[group] = selected.rows
        if selected.reason is not None:
            self._filtered.append(rows)
            self._filter.num_dropped[selected.reason] += 1
            self._scheduler.drop_group(group, selected.reason)
            del self._complete[group], self._kept[group], self._prompts[group]

    def _groups_by_prompt(self) -> dict[int, int]:
        return {index: group for group, index in self._prompts.items()}

    def _drop_refused(self, replica: _Replica, results: Sequence[Mapping[int, str | None] | None]) -> None:
        """Drops groups whose prompts `add` refused.

        A result maps each prompt index to the reason, or to None if accepted.
        """
        for index, reason in ((index, reason) for result in results for index, reason in (result or {}).items()):
            if reason is None:
                self._num_refused_in_a_row = 0
                continue
            group = self._groups_by_prompt().get(index)
            if group in replica.groups and self._scheduler.drop_group(group, "refused"):
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

    def _submit_aborts(self, aborts: Sequence[AbortGroups]) -> None:
        for abort in aborts:
            replica = self._replicas[abort.replica]
            replica.groups.difference_update(abort.groups)
            indices = [self._prompts.pop(group) for group in abort.groups]
            replica.calls.append(replica.group.abort.submit(indices))

    def _submit_actions(self) -> None:
        actions = self._scheduler.pop_actions()
        groups = sorted(group for action in actions if isinstance(action, DispatchGroups) for group in action.groups)
        new = [group for group in groups if group not in self._prompts]
        self._prompts |= zip(new, self._context.prompts.pop(len(new)), strict=True)
        for action in actions:
            match action:
                case DispatchGroups(replica=rank, groups=groups):
                    self._dispatch(self._replicas[rank], groups)
                case UpdateWeights(replica=rank, version=version):
                    self._update_weights(rank, version)

    def _dispatch(self, replica: _Replica, groups: Sequence[int]) -> None:
        rows = self._context.prompts.make_batch(self._prompts[group] for group in groups)
        replica.groups.update(groups)
        replica.calls.append(replica.group.add.submit(rows, self._context.config.samples_per_prompt, **self._score))

    # Weights.

    def _update_weights(self, rank: int, version: int) -> None:
        replica = self._replicas[rank]
        pinned = self._evaluation.find_snapshot(rank, version)
        newest = self._newest if pinned is None else pinned
        if newest is None or (newest.version != version and rank == self._evaluation.rank):
            # A replacement process has already loaded the initial weights.
            replica.update = version, [replica.group.abort_all.submit()]
            return
        assert newest.version == version, "the scheduler only knows exported versions"
        context, policy = self._context, self._policy
        if policy is None or not context.weight_sync.updates_all_replicas(policy, context.rollout):
            replica.update = version, self._load_weights(newest, replica.group)
            return
        shared = [other.update for other in self._replicas if other.update is not None and other.update[0] == version]
        replica.update = shared[0] if shared else (version, self._load_weights(newest, context.rollout))

    def _load_weights(self, snapshot: WeightSnapshot, rollout: WorkerGroup) -> Sequence[Future]:
        loads, comparison = snapshot.send(rollout)
        if comparison is not None:
            self._comparisons.append(comparison)
        return loads

    def sync_weights(self, actor: WorkerGroup, rollout: WorkerGroup, version: int) -> ComparedWeights | None:
        assert rollout is self._context.rollout, "weights must be sent to the rollout that generates the responses"
        with self._lock:
            self._policy = actor
            self._exports.append(self._context.weight_sync.export(actor, self._context.rollout, version))
            self._newest_version = version
        return None

    def _evaluate_alongside(
        self, prompts: Batch, temperature: float, score: Sequence[str], finish: Callable[[Batch], Batch]
    ) -> HeldOutResponses | None:
        """Starts an evaluation of the newest weights on a pinned replica. See `GenerateAlongside`.

        Returns None after the last step, because all replicas are then free. Also returns None for a transfer that
        updates all replicas at once, because no replica can then keep older weights.
        """
        config, policy = self._context.config, self._policy
        schedule, sync = config.schedule, self._context.weight_sync
        assert isinstance(schedule, AsyncSchedule)
        is_last = self._step == config.steps
        if not schedule.concurrent_evaluation or is_last or policy is None or self._callbacks is None:
            return None
        if sync.updates_all_replicas(policy, self._context.rollout):
            return None
        return self._evaluation.submit(prompts, temperature, score, finish, self._newest_version)

    def _wait_for_newest_weights(self) -> None:
        """Blocks until every replica has the newest weights. With `interrupt: false`, dispatch pauses."""
        schedule = self._context.config.schedule
        with self._lock:
            self._is_paused = isinstance(schedule, AsyncSchedule) and not schedule.interrupt
        try:
            self._context.calls.wait_until(self._have_newest_weights)
        finally:
            self._is_paused = False

    def _have_newest_weights(self) -> bool:
        ranks = range(len(self._replicas))
        return all(self._scheduler.replica_version(rank) == self._newest_version for rank in ranks)

    def _update_idle_replicas(self) -> None:
        """Sends the newest weights to idle replicas while dispatch is paused (`interrupt: false`)."""
        for rank, replica in enumerate(self._replicas):
            version, target = self._scheduler.replica_version(rank), self._scheduler.target_version(rank)
            if self._newest is not None and not replica.groups and replica.update is None and version != target:
                self._update_weights(rank, target)

    # Steps.

    def next_batch(self, step: int, version: int) -> Batch:
        self._step = step
        step_batch: StepBatch | None = None

        def is_complete() -> bool:
            nonlocal step_batch
            # The condition may be evaluated again after it is true.
            is_partial = self._has_generated_enough()
            step_batch = step_batch or self._scheduler.pop_step_batch(is_partial=is_partial)
            return step_batch is not None or (is_partial and not self._complete)

        self._context.calls.wait_until(is_complete)
        if step_batch is None:
            raise UserError(no_groups_message(step, self._filter))
        with self._lock:
            return self._make_batch(step_batch, version)

    def _make_batch(self, step_batch: StepBatch, version: int) -> Batch:
        """Returns the rows of a step, and prepares the metrics of the step."""
        groups, samples = step_batch.groups, self._context.config.samples_per_prompt
        batch = self._context.prompts.make_batch([self._prompts.pop(group) for group in groups])
        responses = Batch.concat([self._complete.pop(group) for group in groups])
        batch = batch.union(responses)
        if self._filter.is_active:
            kept = [self._kept.pop(group) for group in groups]
            batch = batch.rows([i * samples + row for i, rows in enumerate(kept) for row in rows])
        measured = reward_metrics([Batch.concat([responses, *self._filtered])])
        self._filtered.clear()
        batch = batch.with_sections(len(self._context.trainer_routes or [()]))
        self._forget_dropped()
        counts = self._count_groups()
        values, self._counts = group_metrics(counts, self._counts), counts
        self._metrics = (values, staleness_metrics(batch, version, self._context.config.schedule.staleness), *measured)
        self._record_counts()
        return batch

    def _count_groups(self) -> GroupCounts:
        """Returns the number of groups per state since the start of the run, including the time before a resume."""
        counts = self._scheduler.counts
        return counts if self._earlier is None else counts.add_finished(self._earlier)

    def _has_generated_enough(self) -> bool:
        """Returns whether dropped and complete groups together reach `dynamic_sampling.max_rounds` times the prompts of
        a step. The next step then trains on the groups that are complete.
        """
        num_generated = len(self._filtered) + len(self._complete)
        is_limited = self._filter.is_active and bool(self._filtered)
        return is_limited and num_generated >= self._filter.max_rounds * self._context.config.prompts_per_step

    def _forget_dropped(self) -> None:
        """Frees the rows and prompt indices of dropped groups."""
        live = set(self._scheduler.pending_groups)
        # An abort names groups by prompt index, so the index is needed until the abort is submitted.
        running = {group for replica in self._replicas for group in replica.groups}
        self._prompts = {group: index for group, index in self._prompts.items() if group in live | running}
        self._complete = {group: rows for group, rows in self._complete.items() if group in live}
        self._kept = {group: rows for group, rows in self._kept.items() if group in live}
        self._scored = {group: scored for group, scored in self._scored.items() if group in live}

    def _record_counts(self) -> None:
        counts = self._scheduler.counts
        values = {"running": counts.running, "complete": counts.complete, "waiting": counts.waiting}
        self.counted.append(Counted(self._context.now_ns(), values))

    def pop_metrics(self) -> tuple[Logged, ...]:
        # Does not wait for comparisons. The comparison of a slow or lost replica is logged in a later step.
        with self._lock:
            done = [comparison for comparison in self._comparisons if comparison.done()]
            self._comparisons = [comparison for comparison in self._comparisons if comparison not in done]
        metrics, self._metrics = (*self._metrics, *done), ()
        return metrics

    def weight_wait_s(self, step: int, events: Sequence[CallEvent], start_ns: int, end_ns: int) -> float:
        with self._lock:
            return self._starved.integral_s(start_ns, end_ns)

    def summary(self) -> dict[str, Any]:
        with self._lock:
            return {"groups": asdict(self._count_groups()), "replicas_lost": self._context.calls.num_lost_replicas}

    def finish(self) -> None:
        self.detach()
        for abort in [replica.group.abort_all.submit() for replica in self._replicas]:
            with suppress(ProcessLost):
                abort.get()

    def detach(self) -> None:
        if self._context.rewards is not None:
            self._context.rewards.alongside = None
        if self._callbacks is not None:
            self._callbacks.close()
            self._callbacks = None

    def requeue_prompts(self) -> None:
        """Does nothing: `snapshot` requeues the prompts of incomplete groups."""

    # Checkpoints.

    def snapshot(self) -> tuple[Mapping[str, Any], Batch | None]:
        """Returns the state, and the rows of complete groups. A resumed run generates all other groups again."""
        with self._lock:
            pending = self._scheduler.pending_groups
            state = self._context.prompts.state([self._prompts[group] for group in pending])
            state |= {"groups": self._scheduler.snapshot(), "num_queues": self._scheduler.num_queues}
            state["filter"] = self._filter.state()
            state["replicas_lost"] = self._context.calls.num_lost_replicas
            state["counts"] = asdict(self._count_groups())
            state["last_counts"] = None if self._counts is None else asdict(self._counts)
            complete = [group for group in pending if group in self._complete]
            if not complete:
                return state, None
            keys = self._context.prompts.make_batch(self._prompts[group] for group in complete).select(*IDENTITY)
            return state, keys.union(Batch.concat([self._complete[group] for group in complete]))

    def restore(self, state: Mapping[str, Any], rows: SavedRows | None) -> None:
        self._context.prompts.restore(state)
        self._filter.restore(state["filter"])
        # Checkpoints of earlier versions lack the count. A program that restarts may have lost others since.
        calls, num_lost = self._context.calls, state.get("replicas_lost", 0)
        calls.num_lost_replicas = max(calls.num_lost_replicas, num_lost)
        self._earlier = GroupCounts(**state["counts"])
        self._counts = None if state["last_counts"] is None else GroupCounts(**state["last_counts"])
        groups = [(queue, version) for queue, version in state["groups"]]
        self._pending = PendingRollouts(groups, state["num_queues"], rows)


def make_rollout_source(context: RolloutContext) -> RolloutSource:
    """Returns the rollout source of the config's schedule. With a staleness bound of 0, every schedule is `sync`."""
    schedule = context.config.schedule
    return StreamingRollouts(context) if schedule.is_streaming else BatchRollouts(context, num_ahead=schedule.staleness)
