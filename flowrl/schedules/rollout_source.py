"""Defines RolloutSource, which produces each step's batch, and BatchRollouts, which runs `sync` and `one_step_off`."""

import math
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from tensordict import TensorDict

from flowrl.checkpoints.saved_rows import IDENTITY, SavedRows
from flowrl.checkpoints.saver import Buffer
from flowrl.config import RolloutRunConfig, UserError
from flowrl.controller.calls.calls import Calls, find_records
from flowrl.controller.dispatch import Future
from flowrl.controller.group import WorkerGroup
from flowrl.data.batch.batch import Batch
from flowrl.data.batch.block import LocalRef
from flowrl.data.batch.tensordicts import lengths
from flowrl.data.events import CallEvent, Counted
from flowrl.data.metric import Logged, Max, Mean, Metric, Min, Sum, merge_metrics
from flowrl.data.prompts import PromptStream
from flowrl.schedules.group_filter import DROP_REASONS, GroupFilter, SelectedGroup, no_groups_message
from flowrl.schedules.rewards import FailedFraction, Scoring, reward_metrics
from flowrl.schedules.scheduler import TrainerRoutes
from flowrl.weight_sync.transfer import WeightSync
from flowrl.weight_sync.verification import ComparedWeights

WEIGHT_CALLS = frozenset({"load_weights", "load_adapter", "load_broadcast", "load_ipc", "set_version"})
"""Rollout methods that change the weight version of a replica."""


class RolloutSource(Buffer, Protocol):
    """Produces the batch of each step. Can be saved in a checkpoint.

    `snapshot` returns the state of the prompt stream with the indices of untrained prompts, and complete responses to
    these prompts.
    """

    is_streaming: bool
    """Whether replicas generate continuously, independently of steps."""

    def begin(self, policy: WorkerGroup | None, step: int, version: int) -> None:
        """Starts generation after `step` trained steps, with replicas that have weight version `version`.

        From now until `detach`, a `generate` call of the recipe runs with the newest weights on every replica.
        """
        ...

    def next_batch(self, step: int, version: int) -> Batch:
        """Returns the prompts and responses of a step. A streaming source blocks until the responses are complete."""
        ...

    def sync_weights(self, actor: WorkerGroup, rollout: WorkerGroup, version: int) -> ComparedWeights | None:
        """Sends the actor's current weights to the replicas. Does not block. Returns the weight comparison, if any."""
        ...

    def pop_metrics(self) -> tuple[Logged, ...]:
        """Returns the metrics to log for the current step."""
        ...

    def weight_wait_s(self, step: int, events: Sequence[CallEvent], start_ns: int, end_ns: int) -> float:
        """Returns how many seconds of [start_ns, end_ns] replicas waited for newer weights, mean over replicas.

        Call it once per step, in the order of steps. `events` are the calls that ended after `start_ns`.
        """
        ...

    def finish(self) -> None:
        """Stops generation. Blocks until the replicas have aborted all running prompts."""
        ...

    def detach(self) -> None:
        """Stops processing results. Is idempotent."""
        ...

    def requeue_prompts(self) -> None:
        """Returns prompts whose responses may have failed to the queue, so that `snapshot` works after an error of
        `next_batch`. Call it after `detach`.
        """
        ...

    def summary(self) -> dict[str, Any]:
        """Returns entries for `summary.json`."""
        ...

    @property
    def counted(self) -> Iterable[Counted]:
        """Time series of the number of groups per state, for `trace.json`."""
        ...


@dataclass(frozen=True)
class RolloutContext:
    """Config and components of the run that a rollout source uses."""

    config: RolloutRunConfig
    rollout: WorkerGroup
    prompts: "PromptQueue"
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
        """Returns the filter of groups and rows by their scores."""
        is_scored, needs_success = self.rewards is not None, self.prompts.needs_success
        return GroupFilter.of_run(self.config, is_scored=is_scored, needs_success=needs_success)


class PromptQueue:
    """Queue of prompt indices: first the untrained prompts of a resumed run, then new prompts of the stream.

    A prompt index counts the prompts of the stream from 0. The rows of a prompt have its index as `prompt_id`.
    """

    def __init__(self, prompts: PromptStream, samples: int) -> None:
        self._prompts, self._samples = prompts, samples
        self._requeued: deque[int] = deque()

    def pop(self, count: int) -> list[int]:
        """Returns the next `count` prompt indices and removes them from the queue."""
        requeued = [self._requeued.popleft() for _ in range(min(count, len(self._requeued)))]
        return requeued + [row["prompt_id"] for row in self._prompts.take(count - len(requeued))]

    def requeue(self, indices: Sequence[int]) -> None:
        """Returns prompt indices to the head of the queue."""
        self._requeued.extendleft(reversed(indices))

    def make_batch(self, indices: Iterable[int]) -> Batch:
        """Returns a batch with one row per sample of each prompt."""
        return Batch.from_rows(self._prompts.rows(indices)).with_samples(self._samples)

    @property
    def needs_success(self) -> bool:
        """Whether the order of the prompts depends on their scores."""
        return self._prompts.needs_success

    def record_success(self, indices: Sequence[int], groups: Sequence[SelectedGroup]) -> None:
        """Records the mean score of each prompt whose reward did not fail for all responses."""
        known = [(index, group.success) for index, group in zip(indices, groups, strict=True) if group.has_success]
        self._prompts.record_success([index for index, _ in known], [success for _, success in known])

    def location(self, index: int) -> str:
        return self._prompts.location(index)

    def __len__(self) -> int:
        return len(self._prompts)

    def state(self, pending: Iterable[int]) -> dict[str, Any]:
        """Returns the state for a checkpoint. `pending` are indices that were popped but not trained."""
        return self._prompts.state() | {"untrained": [*pending, *self._requeued]}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores the result of `state`. The untrained indices are popped first."""
        self._prompts.restore(state)
        self._requeued = deque(state["untrained"])


@dataclass
class _PendingStep:
    """Groups of a step, which are generated in one or more rounds."""

    indices: list[int] = field(default_factory=list)
    """Prompt index of each group. Excludes dropped groups."""
    parts: list[tuple[Batch, Batch]] = field(default_factory=list)
    """Prompts and responses of these groups, possibly in flight."""
    row_masks: list[np.ndarray] = field(default_factory=list)
    """Rows of each part that are trained, as a mask. Empty if the filter is not active."""
    num_rounds: int = 0
    is_complete: bool = False
    metrics: dict[str, float] = field(default_factory=dict)
    reward_metrics: list[Any] = field(default_factory=list)
    """Metrics of the rewards of all rounds."""


class BatchRollouts:
    """Generates the responses of a step with `generate` calls, `num_ahead` steps before the step trains.

    Without a filter, a step has one call. The call for a later step is submitted before the calls of the current step.
    It therefore runs while the current step trains, with the weights of the previous step. With dynamic sampling, all
    rounds of a later step end before the next weight sync, so that results do not depend on timing.
    """

    is_streaming = False
    counted = ()

    def __init__(self, context: RolloutContext, *, num_ahead: int = 0) -> None:
        self._context, self._num_ahead = context, num_ahead
        config = context.config
        # A run with checkpoints may continue with more steps. The last checkpoint therefore contains the
        # responses of the next step, as in a longer run.
        self._last_step = config.steps + (num_ahead if config.checkpoint.every else 0)
        """Last step for which responses are generated."""
        self._last_submitted = 0
        self._shares_processes = False
        """Whether rollout and policy have a process in common."""
        self._steps: deque[_PendingStep] = deque()
        self._is_requeued = False
        """Whether `requeue_prompts` has discarded the responses for later steps."""
        self._metrics: tuple[Logged, ...] = ()
        self._filter = context.make_filter()

    def begin(self, policy: WorkerGroup | None, step: int, version: int) -> None:
        self._last_submitted = step + len(self._steps)
        self._shares_processes = policy is not None and not set(policy.slots).isdisjoint(self._context.rollout.slots)
        if self._context.rewards is not None:
            self._context.rewards.connect(self._context.rollout)

    def next_batch(self, step: int, version: int) -> Batch:
        while self._last_submitted < min(step + self._num_ahead, self._last_step):
            self._last_submitted += 1
            self._steps.append(_PendingStep())
            self._submit_round(self._steps[-1])
        pending, *later_steps = self._steps
        self._complete(pending)
        if self._context.ends_at_failure:
            # Training on failed responses must not be submitted, because the state before this step is saved.
            for _, responses in pending.parts:
                self._wait_for_scores(responses)
        for later in later_steps if self._shares_processes else ():
            # The rollout may use the weights of the policy in its process, which training is about to change.
            self._complete(later)
        if not pending.parts:
            raise UserError(no_groups_message(step, self._filter))
        self._steps.popleft()  # after an error above, the prompts of the step are still pending
        batch = Batch.concat([prompts.union(responses) for prompts, responses in pending.parts])
        if self._filter.is_active:
            batch = batch.rows(np.concatenate(pending.row_masks))
        self._metrics = (*([pending.metrics] if pending.metrics else []), *pending.reward_metrics)
        if self._num_ahead:
            self._metrics = (*self._metrics, staleness_metrics(batch, version, self._num_ahead))
        elif self._context.config.rollout.transfer.drop_weights:
            self._context.rollout.expect_update.submit()
        return batch

    # Rounds.

    def _submit_round(self, pending: _PendingStep) -> None:
        """Submits the generation of the missing groups of a step."""
        context, queue = self._context, self._context.prompts
        num_missing = context.config.prompts_per_step - len(pending.indices)
        indices = queue.pop(math.ceil(num_missing * self._filter.oversample))
        pending.indices += indices
        prompts = queue.make_batch(indices)
        rewards = context.rewards
        responses = context.rollout.generate.submit(prompts, **({} if rewards is None else rewards.generate_arguments))
        if rewards is not None:
            scored = rewards.add_model_scores(prompts.union(responses))
            responses = scored.select(*(name for name in scored.columns if name not in prompts.columns))
            pending.reward_metrics += reward_metrics([responses])
        pending.parts.append((prompts, responses))
        pending.num_rounds += 1

    def _complete(self, pending: _PendingStep) -> None:
        """Generates further rounds until the step has all its groups, or until `max_rounds`. Waits for scores."""
        if pending.is_complete:
            return
        if not self._filter.is_active:
            pending.is_complete = True
            return
        num_prompts, dropped = self._context.config.prompts_per_step, Counter[str](dict.fromkeys(DROP_REASONS, 0))
        while True:
            dropped.update(self._filter_newest(pending, num_prompts))
            if len(pending.indices) >= num_prompts or pending.num_rounds >= self._filter.max_rounds:
                break
            self._submit_round(pending)
        pending.is_complete = True
        pending.metrics = drop_metrics(dropped) | {"sampling_rounds": float(pending.num_rounds)}

    def _wait_for_scores(self, responses: Batch) -> None:
        """Raises the error of a reward. Reads the scores only if models compute them, after the call of the rollout."""
        rewards = self._context.rewards
        if rewards is not None and rewards.has_models:
            responses.payload("scores")
        else:
            self._context.calls.wait(find_records(responses), None)

    def _filter_newest(self, pending: _PendingStep, num_prompts: int) -> Counter[str]:
        """Removes groups of the newest round that are not trained. Returns the number of dropped groups per reason."""
        (prompts, responses), samples = pending.parts.pop(), self._context.config.samples_per_prompt
        groups = self._filter.select(responses)
        first = len(pending.indices) - len(groups)
        indices, pending.indices = pending.indices[first:], pending.indices[:first]
        self._context.prompts.record_success(indices, groups)
        dropped = Counter(group.reason for group in groups if group.reason is not None)
        kept = [i for i, group in enumerate(groups) if group.reason is None]
        num_surplus = max(0, len(pending.indices) + len(kept) - num_prompts)
        dropped["surplus"] += num_surplus
        kept = kept[: len(kept) - num_surplus]
        self._filter.num_dropped.update(dropped)
        if not kept:
            return dropped
        rows = [i * samples + sample for i in kept for sample in range(samples)]
        pending.parts.append((prompts.rows(rows), responses.rows(rows)))
        pending.row_masks.append(np.array([sample in groups[i].rows for i in kept for sample in range(samples)]))
        pending.indices += [indices[i] for i in kept]
        return dropped

    def sync_weights(self, actor: WorkerGroup, rollout: WorkerGroup, version: int) -> ComparedWeights | None:
        for pending in self._steps:
            self._complete(pending)
        return self._context.weight_sync.send(actor, rollout, version)

    def pop_metrics(self) -> tuple[Logged, ...]:
        metrics, self._metrics = self._metrics, ()
        return metrics

    def weight_wait_s(self, step: int, events: Sequence[CallEvent], start_ns: int, end_ns: int) -> float:
        if step + self._num_ahead >= self._last_step:
            return 0.0  # no later `generate` call, so no rollout waits for the weights of this step
        return measure_weight_wait_s(events, self._context.rollout.role, start_ns, end_ns)

    def finish(self) -> None:
        """Does nothing: responses for later steps are discarded."""

    def detach(self) -> None:
        """Does nothing, because no callback is registered."""

    def requeue_prompts(self) -> None:
        self._context.prompts.requeue([index for pending in self._steps for index in pending.indices])
        self._steps.clear()
        self._is_requeued = True

    def summary(self) -> dict[str, Any]:
        return {"groups": {"dropped": dict(self._filter.num_dropped)}} if self._filter.is_active else {}

    def snapshot(self) -> tuple[Mapping[str, Any], Batch | None]:
        """Returns the state, and the responses for later steps, so that a resumed run trains on the same responses."""
        for pending in self._steps:
            self._complete(pending)
        queue, steps = self._context.prompts, self._steps
        state = queue.state(index for pending in steps for index in pending.indices)
        state |= {
            "steps": [self._state_of(pending) for pending in steps],
            "kept": [mask.tolist() for pending in steps for mask in pending.row_masks],
            "filter": self._filter.state(),
            "is_requeued": self._is_requeued,
        }
        parts = [part for pending in steps for part in pending.parts]
        ahead = [prompts.select(*IDENTITY).union(responses) for prompts, responses in parts]
        return state, Batch.concat(ahead) if ahead else None

    def _state_of(self, pending: _PendingStep) -> dict[str, Any]:
        state = {"num_groups": len(pending.indices), "metrics": pending.metrics}
        if not self._filter.is_active:
            return state  # the metrics of rewards are computed again from the saved rows
        rewards: dict[str, Any] = merge_metrics([future.get() for future in pending.reward_metrics])
        values = {name: (type(metric).__name__, *astuple(metric)) for name, metric in rewards.items()}
        return state | {"reward_metrics": values}

    def restore(self, state: Mapping[str, Any], rows: SavedRows | None) -> None:
        queue, samples = self._context.prompts, self._context.config.samples_per_prompt
        queue.restore(state)
        self._filter.restore(state["filter"])
        if rows is None:  # no step has a group
            for step in state["steps"]:
                self._steps.append(_PendingStep([], [], [], 0, True, step["metrics"], self._saved_metrics(step)))
            return
        indices = queue.pop(sum(step["num_groups"] for step in state["steps"]))
        prompts = queue.make_batch(indices)
        responses = rows.load(prompts, self._context.rollout.tasks)
        kept, first = np.array([is_kept for mask in state["kept"] for is_kept in mask], dtype=bool), 0
        for step in state["steps"]:
            groups = slice(first, first + step["num_groups"])
            own_rows = slice(groups.start * samples, groups.stop * samples)
            parts = [(prompts.rows(own_rows), responses.rows(own_rows))] if step["num_groups"] else []
            masks = [kept[own_rows]] if len(kept) and parts else []
            is_saved = self._filter.is_active
            rewards = self._saved_metrics(step) if is_saved else reward_metrics([part[1] for part in parts])
            self._steps.append(_PendingStep(indices[groups], parts, masks, 0, True, step["metrics"], rewards))
            first = groups.stop

    def _saved_metrics(self, state: Mapping[str, Any]) -> list[Any]:
        """Returns the metrics of the rewards of a step, as of `_state_of`."""
        kinds = {kind.__name__: kind for kind in (FailedFraction, Max, Mean, Min, Sum)}
        metrics = {name: kinds[kind](*values) for name, (kind, *values) in state.get("reward_metrics", {}).items()}
        return [metrics] if metrics else []


def drop_metrics(dropped: Mapping[str, int]) -> dict[str, float]:
    """Returns the number of dropped groups of a step, in total and per reason."""
    metrics = {"dropped_groups": sum(dropped.values())} | {f"dropped_{name}": n for name, n in dropped.items()}
    return {name: float(value) for name, value in metrics.items()}


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


def measure_weight_wait_s(events: Iterable[CallEvent], role: str, start_ns: int, end_ns: int) -> float:
    """Returns how many seconds of [start_ns, end_ns] ranks were idle before weight updates, mean over ranks.

    `events` must include each rank's last call before `start_ns`.
    """
    calls_of: defaultdict[int, list[CallEvent]] = defaultdict(list)
    for event in events:
        if event.role == role:
            calls_of[event.rank].append(event)
    wait_ns = 0
    for calls in calls_of.values():
        calls.sort(key=lambda event: event.started_ns)
        idle_since_ns = start_ns
        for event in calls:
            if event.method in WEIGHT_CALLS:
                wait_ns += max(0, min(event.started_ns, end_ns) - max(idle_since_ns, start_ns))
            idle_since_ns = max(idle_since_ns, event.ended_ns)
    return wait_ns / 1e9 / max(1, len(calls_of))
