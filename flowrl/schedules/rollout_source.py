"""RolloutSource: produces the batch of each step under every schedule, as the `Scheduler` decides.

A *group* is a prompt with all its samples. With `sync` and `one_step_off`, all ranks of the rollout generate the groups
of a step together, in rounds. A round is one `generate` call. For the scheduler, all ranks are one replica. With
`async`, each replica generates groups continuously (`ReplicaStream`, replica_stream.py).

Lock rule: the driver lock guards the state of a source and of its replicas. The idle callback and the conditions of
`Calls.wait_until` run under it. Methods that the driver calls take it while they use the state, and release it before
they wait. Rounds need no lock, because without an idle callback only the driver's own thread uses the state.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict

from flowrl.checkpoints.saved_rows import IDENTITY, SavedRows
from flowrl.config import RolloutRunConfig, UserError
from flowrl.controller.calls.calls import Calls, find_records
from flowrl.controller.dispatch import Future
from flowrl.controller.group import WorkerGroup
from flowrl.data.batch.batch import Batch
from flowrl.data.batch.block import LocalRef
from flowrl.data.batch.tensordicts import lengths
from flowrl.data.events import MAX_COUNTS, CallEvent, Counted
from flowrl.data.metric import Logged, Max, Mean, Metric, Min, Sum, merge_metrics
from flowrl.data.prompts import PromptStream
from flowrl.schedules.group_filter import ROUND_DROP_REASONS, GroupFilter, no_groups_message
from flowrl.schedules.rewards import FailedFraction, Scoring, reward_metrics
from flowrl.schedules.scheduler import (
    DispatchGroups,
    GroupCounts,
    ScheduleLimits,
    Scheduler,
    StepBatch,
    TrainerRoutes,
    dropped_metrics,
    group_metrics,
)
from flowrl.schedules.throughput import measure_weight_wait_s
from flowrl.weight_sync.transfer import WeightSync
from flowrl.weight_sync.verification import ComparedWeights

if TYPE_CHECKING:
    from flowrl.schedules.replica_stream import ReplicaStream


@dataclass(frozen=True)
class RolloutContext:
    """Config and components of the run that a rollout source uses."""

    config: RolloutRunConfig
    rollout: WorkerGroup
    prompts: PromptStream
    weight_sync: WeightSync
    calls: Calls
    notify: Callable[[str], None]
    """Prints a message to the user."""
    rewards: Scoring | None = None
    """Scores the responses; None if the recipe scores them or needs no scores."""
    trainer_routes: TrainerRoutes | None = None
    """Replicas per data-parallel rank of the actor; None if any replica serves any rank."""
    now_ns: Callable[[], int] = time.time_ns
    """Returns the current time in nanoseconds since the epoch."""

    @property
    def ends_at_failure(self) -> bool:
        """Whether a failed reward ends the run before the training calls of its step.

        The driver does not wait for the scores of a single reward model, so that other models compute at the same time.
        Its failure ends the run in the calls that read the scores.
        """
        reward = self.config.reward_settings
        return (
            self.rewards is not None and self.config.on_failure == "stop" and (reward is None or reward.model is None)
        )

    def make_filter(self) -> GroupFilter:
        """Returns the filter of groups and rows by their scores, which is not active without them."""
        config, is_scored = self.config, self.rewards is not None
        return GroupFilter(
            config.dynamic_sampling if is_scored else None,
            samples=config.samples_per_prompt,
            drops_failed=is_scored and config.on_failure == "drop",
            needs_success=is_scored and self.prompts.needs_success,
        )


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of a batch. Copies no values."""

    batch: Batch
    positions: np.ndarray


def rows_of_groups(batch: Batch, samples: int) -> list[Rows]:
    """Returns the rows of each group of a batch that contains complete groups of `samples` rows."""
    return [Rows(batch, np.arange(first, first + samples)) for first in range(0, len(batch), samples)]


def join_rows(parts: Iterable[Rows]) -> Batch:
    """Returns the rows of all parts. The shards of a batch occur once for consecutive parts of the batch."""
    batches = []
    for _, own in groupby(parts, key=lambda rows: id(rows.batch)):
        same = list(own)
        batch, positions = same[0].batch, np.concatenate([rows.positions for rows in same])
        is_complete = np.array_equal(positions, np.arange(len(batch)))
        batches.append(batch if is_complete else batch.rows(positions))
    return batches[0] if len(batches) == 1 else Batch.concat(batches)


@dataclass(eq=False)
class Group:
    """A prompt with all its samples, from its first dispatch until it is trained or dropped."""

    number: int
    """Identifies the group in the scheduler."""
    index: int
    """Index of the prompt in the stream, which is `prompt_id` in all rows."""
    prompts: Rows
    """Columns of the prompt, one row per sample."""
    responses: Rows | None = None
    """Columns of the rollout and of the rewards; None until the group is complete."""
    kept: Sequence[int] = ()
    """Rows of the group that are trained, if the filter is active."""


class GeneratedGroup(NamedTuple):
    """A group whose responses are complete."""

    replica: int
    group: Group
    responses: Rows
    values: Mapping[str, Any]
    """Values of the columns that the filter reads, for all rows of the batch of `responses`. Empty if the filter is not
    active.
    """


def add_model_scores(rewards: Scoring, prompts: Batch, responses: Batch) -> Batch:
    """Returns responses with the scores of models. Does not block."""
    scored = rewards.add_model_scores(prompts.union(responses))
    return scored.select(*(name for name in scored.columns if name not in prompts.columns))


@dataclass
class NextStep:
    """Rounds and dropped groups since the last step."""

    num_rounds: int = 0
    """Number of complete rounds, if the schedule does not stream."""
    rewards: list[Any] = field(default_factory=list)
    """Metrics of the rewards of these rounds."""
    filtered: list[Rows] = field(default_factory=list)
    """Responses of the groups that the filter has dropped, if the schedule streams."""

    def state(self) -> dict[str, Any]:
        """Returns the metrics for a checkpoint. Waits for those of the rewards."""
        merged: dict[str, Any] = merge_metrics([future.get() for future in self.rewards])
        values = {name: (type(metric).__name__, *astuple(metric)) for name, metric in merged.items()}
        return {"metrics": {"sampling_rounds": float(self.num_rounds)}, "reward_metrics": values}

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> "NextStep":
        """Returns the restored result of `state`."""
        kinds = {kind.__name__: kind for kind in (FailedFraction, Max, Mean, Min, Sum)}
        metrics = {name: kinds[kind](*values) for name, (kind, *values) in state.get("reward_metrics", {}).items()}
        return cls(int(state["metrics"].get("sampling_rounds", 1)), [metrics] if metrics else [])


class RolloutSource:
    """Produces the batch of each step. Can be saved in a checkpoint.

    The scheduler decides which groups the replicas generate, and which groups a step trains.
    """

    def __init__(self, context: RolloutContext, stream: "ReplicaStream | None" = None) -> None:
        """`stream` sends groups to each replica, if the schedule streams."""
        self._context, self._stream = context, stream
        self._lock = context.calls.lock
        self._filter = context.make_filter()
        config = context.config
        self._num_prompts, self._samples = config.prompts_per_step, config.samples_per_prompt
        self._staleness = config.schedule.staleness
        # A run with checkpoints may continue with more steps. The last checkpoint therefore contains the
        # responses of the next step, as in a longer run.
        self._last_step = config.steps + (self._staleness if config.checkpoint.every else 0)
        """Last step for which rounds are generated."""
        self._round: tuple[Sequence[Group], Batch] | None = None
        """Groups and responses of the round in flight."""
        self._groups: dict[int, Group] = {}
        """Groups that are neither trained nor dropped, by number."""
        self._next = NextStep()
        self._saved: tuple[Mapping[str, Any], SavedRows | None] | None = None
        """State and rows of the checkpoint, between `restore` and `begin`."""
        self._is_requeued = False
        """Whether `requeue_prompts` has discarded the responses for later steps."""
        self._shares_processes = False
        """Whether rollout and policy have a process in common."""
        self._metrics: tuple[Logged, ...] = ()
        self._counts: GroupCounts | None = None
        """Group counts when the last step was complete."""
        self._earlier: GroupCounts | None = None
        """Group counts of the checkpoint from which the run was resumed."""
        self.counted: deque[Counted] = deque(maxlen=MAX_COUNTS)
        """Time series of the number of groups per state, for `trace.json`. Empty unless the schedule streams."""

    @property
    def is_streaming(self) -> bool:
        """Whether replicas generate continuously, independently of steps."""
        return self._stream is not None

    def begin(self, policy: WorkerGroup | None, step: int, version: int) -> None:
        """Starts generation after `step` trained steps, with replicas that have weight version `version`.

        From now until `detach`, a `generate` call of the recipe runs with the newest weights on every replica.
        """
        context, stream = self._context, self._stream
        limits, num_replicas = (self._round_limits(), 1) if stream is None else (stream.limits(), stream.num_replicas)
        self._scheduler = Scheduler(limits, num_replicas, version=version, num_steps_done=step)
        if self._saved is not None:
            self._admit(*self._saved)
            self._saved = None
        self._shares_processes = policy is not None and not set(policy.slots).isdisjoint(context.rollout.slots)
        if context.rewards is not None:
            context.rewards.connect(context.rollout)
        if stream is not None:
            stream.begin(self._scheduler, policy, self._advance)

    def _round_limits(self) -> ScheduleLimits:
        return ScheduleLimits(
            self._num_prompts,
            self._staleness,
            interrupt=False,
            is_batched=True,
            oversample=self._filter.oversample,
            total_groups=self._last_step * self._num_prompts,
        )

    # Generation.

    def _advance(self) -> Iterable[Future | Batch]:
        """Reads complete groups and submits the scheduler's actions. Returns results that trigger the next call."""
        self._scheduler.advance_clock(self._context.now_ns() / 1e9)
        generated = self._read_round() if self._stream is None else self._stream.read()
        for one in generated:
            self._complete(one)
        if self._stream is not None:
            self._submit_actions()
            if generated:
                self._record_counts()
            return self._stream.poll()
        if not self._is_exhausted:  # otherwise, the next round is that of a later step, and follows in `next_batch`
            self._submit_actions()
        return ()

    def _submit_round(self, groups: Sequence[Group]) -> None:
        prompts, rewards = join_rows(group.prompts for group in groups), self._context.rewards
        arguments = {} if rewards is None else rewards.generate_arguments
        responses = self._context.rollout.generate.submit(prompts, **arguments)
        self._round = groups, responses if rewards is None else add_model_scores(rewards, prompts, responses)

    def _read_round(self) -> list[GeneratedGroup]:
        """Returns the groups of the round in flight.

        Their rows exist as references, and the controller retries the call if a process is lost. Waits only for the
        columns that the filter reads.
        """
        if self._round is None:
            return []
        groups, responses = self._round
        values = responses.payload(*self._filter.columns).rows if self._filter.is_active else {}
        self._round = None
        self._next.num_rounds += 1
        self._next.rewards += reward_metrics([responses])
        rows = rows_of_groups(responses, self._samples)
        return [GeneratedGroup(0, group, own, values) for group, own in zip(groups, rows, strict=True)]

    def _complete(self, generated: GeneratedGroup) -> None:
        """Stores the rows of a group whose responses have their scores, or drops the group."""
        replica, group, responses, values = generated
        if not self._scheduler.complete_group(replica, group.number):
            return
        group.responses = responses
        if not self._filter.is_active:
            return
        own = {name: values[name][responses.positions] for name in self._filter.columns}
        selected = self._filter.select_values(own)[0]
        if selected.has_success:
            self._context.prompts.record_success([group.index], [selected.success])
        group.kept, reason = selected.rows, selected.reason
        if reason is None and not self.is_streaming and self._scheduler.counts.complete > self._num_prompts:
            reason = "surplus"
        if reason is not None:
            self._scheduler.drop_group(group.number, reason)
            del self._groups[group.number]
            if self.is_streaming:
                self._next.filtered.append(responses)

    def _submit_actions(self) -> None:
        scheduler, stream = self._scheduler, self._stream
        for abort in scheduler.pop_aborts():
            assert stream is not None, "a round is not aborted"
            stream.abort(abort.replica, [self._groups.pop(number) for number in abort.groups])
        actions = scheduler.pop_updates() if stream is not None and stream.is_paused else scheduler.pop_actions()
        dispatches = [action for action in actions if isinstance(action, DispatchGroups)]
        numbers = sorted(number for action in dispatches for number in action.groups)
        self._add_groups([number for number in numbers if number not in self._groups])
        for action in actions:
            if isinstance(action, DispatchGroups):
                groups = [self._groups[number] for number in action.groups]
                self._submit_round(groups) if stream is None else stream.dispatch(action.replica, groups)
            elif stream is not None:
                stream.update_weights(action.replica, action.version)

    def _add_groups(self, numbers: Sequence[int]) -> list[Group]:
        """Adds groups of the next prompts, whose rows are built here only."""
        rows = self._context.prompts.take(len(numbers)) if numbers else []
        parts = rows_of_groups(Batch.from_rows(rows).with_samples(self._samples), self._samples) if rows else []
        ids = [row["prompt_id"] for row in rows]
        groups = [Group(number, index, own) for number, index, own in zip(numbers, ids, parts, strict=True)]
        self._groups |= {group.number: group for group in groups}
        return groups

    @property
    def _is_exhausted(self) -> bool:
        """Whether no further round follows, so that the next step trains the groups that are complete.

        With a streaming schedule, dropped and complete groups together then reach `dynamic_sampling.max_rounds` times
        the prompts of a step.
        """
        max_rounds, num_dropped = self._filter.max_rounds, len(self._next.filtered)
        num_generated = num_dropped + self._scheduler.counts.complete
        is_enough = num_dropped > 0 and num_generated >= max_rounds * self._num_prompts
        return is_enough or self._next.num_rounds >= max_rounds

    def _finish_rounds(self) -> None:
        """Generates all rounds of the step that has begun, if any. Waits for scores if the filter is active."""
        while self._scheduler.pending_groups:
            if self._scheduler.counts.complete >= self._num_prompts or self._is_exhausted:
                break
            self._advance()

    # Steps.

    def next_batch(self, step: int, version: int) -> Batch:
        """Returns the prompts and responses of a step. A streaming schedule blocks until the responses are complete."""
        step_batch: StepBatch | None = None

        def is_complete() -> bool:
            nonlocal step_batch
            # The condition may be evaluated again after it is true.
            is_partial = self._is_exhausted
            step_batch = step_batch or self._scheduler.pop_step_batch(is_partial=is_partial)
            return step_batch is not None or (is_partial and not self._scheduler.counts.complete)

        if self._stream is not None:
            self._stream.wait_for_step(step, is_complete)
        else:
            while not is_complete():
                self._advance()
        if step_batch is None:
            raise UserError(no_groups_message(step, self._filter.max_rounds, self._count_filtered()))
        with self._lock:
            trained, self._next, counts = self._next, NextStep(), self._count_groups()
            self._submit_actions()  # a later step is generated while this step trains
            for number in step_batch.dropped:
                self._groups.pop(number, None)
            groups = [self._groups[number] for number in step_batch.groups]
        if not self.is_streaming:
            self._wait_for_errors(groups)
        with self._lock:
            for group in groups:  # after an error above, the prompts of the step are still pending
                del self._groups[group.number]
            return self._make_batch(groups, trained, counts, version)

    def _wait_for_errors(self, groups: Sequence[Group]) -> None:
        """Waits for calls that must not fail after the training calls of a step are submitted."""
        context, rewards = self._context, self._context.rewards
        if context.ends_at_failure and rewards is not None:
            # Training on failed responses must not be submitted, because the state before this step is saved.
            responses = join_rows(_responses(groups))
            if rewards.has_models:
                responses.payload("scores")  # after the call of the rollout, models compute the scores
            else:
                context.calls.wait(find_records(responses), None)
        if self._shares_processes:
            # The rollout may use the weights of the policy in its process, which training is about to change.
            self._finish_rounds()

    def _make_batch(self, groups: Sequence[Group], trained: NextStep, counts: GroupCounts, version: int) -> Batch:
        """Returns the rows of a step, and prepares the metrics of the step."""
        batch = join_rows(group.prompts for group in groups).union(join_rows(_responses(groups)))
        if self._filter.is_active:
            batch = batch.rows([i * self._samples + row for i, group in enumerate(groups) for row in group.kept])
        stale = [staleness_metrics(batch, version, self._staleness)] if self._staleness else []
        if self.is_streaming:
            batch = batch.with_sections(len(self._context.trainer_routes or [()]))
            rewards = reward_metrics([join_rows([*_responses(groups), *trained.filtered])])
            self._metrics = (group_metrics(counts, self._counts), *stale, *rewards)
            self._record_counts()
        else:
            dropped = dropped_metrics(counts, self._counts, ROUND_DROP_REASONS)
            rounds = [dropped | {"sampling_rounds": float(trained.num_rounds)}] if self._filter.is_active else []
            self._metrics = (*rounds, *trained.rewards, *stale)
        self._counts = counts
        if not self._staleness and self._context.config.rollout.transfer.drop_weights:
            self._context.rollout.expect_update.submit()
        return batch

    def sync_weights(self, actor: WorkerGroup, rollout: WorkerGroup, version: int) -> ComparedWeights | None:
        """Sends the actor's current weights to the replicas. Returns the weight comparison, if any.

        Waits for the rounds of the next step, so that results do not depend on timing. Otherwise, does not block.
        """
        assert rollout is self._context.rollout, "weights must be sent to the rollout that generates the responses"
        if self._stream is not None:
            with self._lock:
                self._stream.export_weights(actor, version)
            return None
        self._finish_rounds()
        self._scheduler.add_version(version)
        for update in self._scheduler.pop_updates():  # of the only replica, which generates nothing
            self._scheduler.confirm_update(update.replica)
        return self._context.weight_sync.send(actor, rollout, version)

    # Metrics.

    def _count_groups(self) -> GroupCounts:
        """Returns the number of groups per state since the start of the run, including the time before a resume."""
        counts = self._scheduler.counts
        return counts if self._earlier is None else counts.add_finished(self._earlier)

    def _count_filtered(self) -> dict[str, int]:
        """Returns the number of groups that the filter has dropped since the start of the run, per reason."""
        dropped = self._count_groups().dropped
        return {reason: dropped.get(reason, 0) for reason in ROUND_DROP_REASONS}

    def _record_counts(self) -> None:
        counts = self._scheduler.counts
        values = {"running": counts.running, "complete": counts.complete, "waiting": counts.waiting}
        self.counted.append(Counted(self._context.now_ns(), values))

    def pop_metrics(self) -> tuple[Logged, ...]:
        """Returns the metrics to log for the current step."""
        with self._lock:
            comparisons = () if self._stream is None else self._stream.pop_comparisons()
            metrics, self._metrics = (*self._metrics, *comparisons), ()
            return metrics

    def weight_wait_s(self, step: int, events: Sequence[CallEvent], start_ns: int, end_ns: int) -> float:
        """Returns how many seconds of [start_ns, end_ns] replicas waited for newer weights, mean over replicas.

        Call it once per step, in the order of steps. `events` are the calls that ended after `start_ns`.
        """
        if self._stream is not None:
            with self._lock:
                return self._stream.starved.integral_s(start_ns, end_ns)
        if step + self._staleness >= self._last_step:
            return 0.0  # no later `generate` call, so no rollout waits for the weights of this step
        return measure_weight_wait_s(events, self._context.rollout.role, start_ns, end_ns)

    def summary(self) -> dict[str, Any]:
        """Returns entries for `summary.json`."""
        with self._lock:
            if self.is_streaming:
                return {"groups": asdict(self._count_groups()), "replicas_lost": self._context.calls.num_lost_replicas}
            return {"groups": {"dropped": self._count_filtered()}} if self._filter.is_active else {}

    # End.

    def finish(self) -> None:
        """Stops generation. Blocks until the replicas have aborted all running prompts."""
        self.detach()
        if self._stream is not None:
            self._stream.finish()

    def detach(self) -> None:
        """Stops processing results. Is idempotent."""
        if self._stream is not None:
            self._stream.detach()

    def requeue_prompts(self) -> None:
        """Returns prompts whose responses may have failed to the queue, so that `snapshot` works after an error of
        `next_batch`. Call it after `detach`.

        Does nothing if the schedule streams, because then `snapshot` requeues the prompts of incomplete groups.
        """
        if not self.is_streaming:
            self._context.prompts.requeue([group.index for _, group in sorted(self._groups.items())])
            self._groups.clear()
            self._is_requeued = True

    # Checkpoints.

    def snapshot(self) -> tuple[Mapping[str, Any], Batch | None]:
        """Returns the state, and the responses of complete groups, on which a resumed run trains.

        The state has the prompt stream, with the indices of untrained prompts. A resumed run generates the groups that
        are not complete.
        """
        if not (self.is_streaming or self._is_requeued):
            self._finish_rounds()
        with self._lock:
            saved = zip(self._scheduler.pending_groups, self._scheduler.snapshot(), strict=True)
            pending = [(self._groups[number], state) for number, state in saved if number in self._groups]
            state = self._context.prompts.state(group.index for group, _ in pending)
            has_begun = self._next.num_rounds > 0 and not self._is_requeued
            state |= {
                "groups": [state for _, state in pending],
                "num_queues": self._scheduler.num_queues,
                "steps": [self._next.state()] if has_begun and self._filter.is_active else [],
                "is_requeued": self._is_requeued,
                "replicas_lost": self._context.calls.num_lost_replicas,
                "counts": asdict(self._count_groups()),
                "last_counts": None if self._counts is None else asdict(self._counts),
            }
            complete = [group for group, (_, version) in pending if version is not None]
            if not complete:
                return state, None
            keys = join_rows(group.prompts for group in complete).select(*IDENTITY)
            return state, keys.union(join_rows(_responses(complete)))

    def restore(self, state: Mapping[str, Any], rows: SavedRows | None) -> None:
        self._context.prompts.restore(state)
        # Checkpoints of earlier versions lack the count. A program that restarts may have lost others since.
        calls, num_lost = self._context.calls, state.get("replicas_lost", 0)
        calls.num_lost_replicas = max(calls.num_lost_replicas, num_lost)
        self._earlier, self._counts = (
            None if state.get(name) is None else GroupCounts(**state[name]) for name in ("counts", "last_counts")
        )
        for saved in state.get("steps", ()):
            self._next = NextStep.of_state(saved)
        self._saved = state, rows

    def _admit(self, state: Mapping[str, Any], rows: SavedRows | None) -> None:
        """Admits the groups of a checkpoint in a new scheduler, and loads the rows of those that are complete."""
        # Earlier versions of flowrl saved only the number of groups of `one_step_off`, whose weights are one step old.
        num_saved = sum(step.get("num_groups", 0) for step in state.get("steps", ()))
        earlier = [(0, self._scheduler.replica_version(0) - 1)] * num_saved
        states = [(queue, version) for queue, version in state.get("groups", earlier)]
        groups = self._add_groups(self._scheduler.restore(states, state.get("num_queues", 1)))
        if rows is None:
            return
        complete = [group for group, (_, version) in zip(groups, states, strict=True) if version is not None]
        responses = rows.load(join_rows(group.prompts for group in complete), self._context.rollout.tasks)
        for group, own in zip(complete, rows_of_groups(responses, self._samples), strict=True):
            group.responses = own
        if self._filter.is_active:
            for group, selected in zip(complete, self._filter.select(responses), strict=True):
                group.kept = selected.rows
        elif not self.is_streaming:
            self._next = NextStep(1, list(reward_metrics([responses])))


def _responses(groups: Iterable[Group]) -> list[Rows]:
    return [group.responses for group in groups if group.responses is not None]


def staleness_metrics(batch: Batch, version: int, bound: int) -> Future | LocalRef:
    """Submits the computation of the staleness metrics. Does not block.

    The staleness of a token is `version` minus the version that sampled the token. The staleness of a row is that of
    its oldest token. Metrics: `staleness` (mean over rows), `staleness_max`, and `staleness_<k>` (fraction of rows) for
    k from 0 to `bound`.
    """
    return batch.reduce(measure_staleness, ["weight_version", "response_mask"], version=version, bound=bound)


def measure_staleness(table: TensorDict, version: int, bound: int) -> dict[str, Metric]:
    """Computes the metrics of `staleness_metrics` on the task worker. Skips rows without response tokens."""
    lengths_B, mask_T = lengths(table), table["tokens", "response_mask"]
    row_T = torch.repeat_interleave(torch.arange(len(lengths_B)), lengths_B)[mask_T]
    age_T = version - table["tokens", "weight_version"][mask_T].to(torch.int64)
    age_B = torch.full((len(lengths_B),), -1, dtype=torch.int64).scatter_reduce_(0, row_T, age_T, "amax")
    age_B = age_B[age_B >= 0]
    num_rows = len(age_B)
    metrics: dict[str, Metric] = {"staleness": Mean(float(age_B.sum()), num_rows)}
    if num_rows:
        metrics["staleness_max"] = Max(float(age_B.max()))
    for age in range(bound + 1):
        metrics[f"staleness_{age}"] = Mean(float((age_B == age).sum()), num_rows)
    return metrics
