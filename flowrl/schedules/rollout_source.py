"""RolloutSource: produces the batch of each step. BatchRollouts: the schedules `sync` and `one_step_off`."""

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from tensordict import TensorDict

from flowrl.checkpoints.saved_rows import IDENTITY, SavedRows
from flowrl.checkpoints.saver import Buffer
from flowrl.config import OnPolicyConfig
from flowrl.controller.calls.calls import Calls
from flowrl.controller.dispatch import Future
from flowrl.controller.group import WorkerGroup
from flowrl.data.batch.batch import Batch
from flowrl.data.batch.block import LocalRef
from flowrl.data.batch.tensordicts import lengths
from flowrl.data.events import CallEvent, Counted
from flowrl.data.metric import Logged, Max, Mean, Metric
from flowrl.data.prompts import PromptStream
from flowrl.schedules.scheduler import TrainerRoutes
from flowrl.weight_sync.transfer import WeightSync
from flowrl.weight_sync.verification import ComparedWeights

WEIGHT_CALLS = frozenset({"load_weights", "load_broadcast", "load_ipc", "set_version"})
"""Rollout methods that change the weight version."""


class RolloutSource(Buffer, Protocol):
    """Produces the batch of each step. Can be checkpointed.

    `state` holds the state of the prompt stream and the indices of untrained prompts. `rows` holds their responses, if
    they are complete.
    """

    is_streaming: bool
    """Whether rollout calls run independently of steps."""

    def begin(self, policy: WorkerGroup | None, step: int, version: int) -> None:
        """Starts generation.

        Args:
            policy: the actor, if the recipe has one.
            step: number of steps that are already trained.
            version: weight version of all replicas.
        """
        ...

    def next_batch(self, step: int, version: int) -> Batch:
        """Returns the prompts and responses of a step. Blocks until they are complete if the source is streaming.

        Args:
            step: step that trains the batch.
            version: weight version that the step trains.
        """
        ...

    def sync_weights(self, actor: WorkerGroup, rollout: WorkerGroup, version: int) -> ComparedWeights | None:
        """Sends the actor's current weights to the replicas. Does not block. Returns the weight comparison, if any."""
        ...

    def wait_for_newest_weights(self) -> None:
        """Blocks until every replica would generate with the newest weights."""
        ...

    def pop_metrics(self) -> tuple[Logged, ...]:
        """Returns the metrics to log for the current step."""
        ...

    def weight_wait_s(self, step: int, events: Sequence[CallEvent], start_ns: int, end_ns: int) -> float:
        """Returns the seconds of a step in which replicas idled until newer weights arrived, mean over replicas.

        Steps must be queried in order, each once.

        Args:
            step: the step.
            events: calls that ended after `start_ns`.
            start_ns: start of the step.
            end_ns: end of the step.
        """
        ...

    def finish(self) -> None:
        """Stops generation and blocks until the replicas have aborted their prompts."""
        ...

    def detach(self) -> None:
        """Stops processing results. Is idempotent."""
        ...

    def summary(self) -> dict[str, Any]:
        """Returns entries for `summary.json`."""
        ...

    @property
    def counted(self) -> Iterable[Counted]:
        """Samples of the number of groups per state, for `trace.json`."""
        ...


@dataclass(frozen=True)
class RolloutContext:
    """Everything that a rollout source needs from the run."""

    config: OnPolicyConfig
    rollout: WorkerGroup
    prompts: "PromptQueue"
    weight_sync: WeightSync
    calls: Calls
    notify: Callable[[str], None]
    """Prints a message to the user."""
    trainer_routes: TrainerRoutes | None = None
    """Replicas per data-parallel rank of the actor; None: any replica serves any rank."""
    now_ns: Callable[[], int] = time.time_ns
    """Returns the current time in nanoseconds since the epoch."""


class PromptQueue:
    """Queue of prompt indices: first the untrained prompts of a resumed run, then new prompts of the stream.

    A prompt index counts the prompts that the stream has produced. It is the `prompt_id` of the prompt's rows.

    Args:
        prompts: the prompt stream.
        samples: responses per prompt.
    """

    def __init__(self, prompts: PromptStream, samples: int) -> None:
        self._prompts, self._samples = prompts, samples
        self._requeued: deque[int] = deque()

    def pop(self, count: int) -> list[int]:
        """Returns the next prompt indices."""
        requeued = [self._requeued.popleft() for _ in range(min(count, len(self._requeued)))]
        return requeued + [row["prompt_id"] for row in self._prompts.take(count - len(requeued))]

    def make_batch(self, indices: Iterable[int]) -> Batch:
        """Returns one row per sample of each prompt."""
        rows = self._prompts.rows(indices)
        batch = Batch.from_rows(rows).repeat(self._samples)
        batch["sample"] = Batch.from_rows([{"sample": i} for _ in rows for i in range(self._samples)])
        return batch

    def location(self, index: int) -> str:
        """Returns the file and line of a prompt."""
        return self._prompts.location(index)

    def __len__(self) -> int:
        """Returns the number of prompts in the dataset."""
        return len(self._prompts)

    def state(self, untrained: Iterable[int]) -> dict[str, Any]:
        """Returns the state for a checkpoint.

        Args:
            untrained: indices that were popped and that no step has trained.
        """
        return self._prompts.state() | {"untrained": [*untrained, *self._requeued]}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores `state`; untrained indices come first."""
        self._prompts.restore(state)
        self._requeued = deque(state["untrained"])


@dataclass(frozen=True)
class _SubmittedBatch:
    indices: Sequence[int]
    """Prompt indices."""
    prompts: Batch
    responses: Batch
    """Result of `generate`, possibly in flight."""


class BatchRollouts:
    """Generates the responses of each step with one call of `generate`, optionally some steps ahead.

    A call for a later step is submitted before the current step's calls. It therefore runs while the current step
    trains, with the weights of the step before.

    Args:
        context: the run's components.
        num_ahead: number of steps that generation runs ahead of training.
    """

    is_streaming = False
    counted = ()

    def __init__(self, context: RolloutContext, *, num_ahead: int = 0) -> None:
        self._context, self._num_ahead = context, num_ahead
        self._last_submitted = 0
        self._batches: deque[_SubmittedBatch] = deque()
        self._metrics: tuple[Logged, ...] = ()

    def begin(self, policy: WorkerGroup | None, step: int, version: int) -> None:
        self._last_submitted = step + len(self._batches)

    def next_batch(self, step: int, version: int) -> Batch:
        config, queue = self._context.config, self._context.prompts
        while self._last_submitted < min(step + self._num_ahead, config.steps):
            self._last_submitted += 1
            indices = queue.pop(config.prompts_per_step)
            prompts = queue.make_batch(indices)
            responses = self._context.rollout.generate.submit(prompts)
            self._batches.append(_SubmittedBatch(indices, prompts, responses))
        submitted = self._batches.popleft()
        batch = submitted.prompts.union(submitted.responses)
        if self._num_ahead:
            self._metrics = (staleness_metrics(batch, version, self._num_ahead),)
        return batch

    def sync_weights(self, actor: WorkerGroup, rollout: WorkerGroup, version: int) -> ComparedWeights | None:
        return self._context.weight_sync.send(actor, rollout, version)

    def wait_for_newest_weights(self) -> None:
        """Returns immediately: calls run in the order of submission, so later calls use the newest weights."""

    def pop_metrics(self) -> tuple[Logged, ...]:
        metrics, self._metrics = self._metrics, ()
        return metrics

    def weight_wait_s(self, step: int, events: Sequence[CallEvent], start_ns: int, end_ns: int) -> float:
        if step + self._num_ahead >= self._context.config.steps:
            return 0.0  # all responses of the run were generated before the step's weights
        return measure_weight_wait_s(events, self._context.rollout.role, start_ns, end_ns)

    def finish(self) -> None:
        """Does nothing: results of batches ahead are discarded."""

    def detach(self) -> None:
        """Does nothing: no callback is registered."""

    def summary(self) -> dict[str, Any]:
        return {}

    def state(self) -> Mapping[str, Any]:
        return self._context.prompts.state(index for batch in self._batches for index in batch.indices)

    def rows(self) -> Batch | None:
        """Returns the responses of all batches ahead, so that a resumed run trains on the same responses."""
        ahead = [batch.prompts.select(*IDENTITY).union(batch.responses) for batch in self._batches]
        return Batch.concat(ahead) if ahead else None

    def restore(self, state: Mapping[str, Any], rows: SavedRows | None) -> None:
        config, queue = self._context.config, self._context.prompts
        queue.restore(state)
        if rows is None:
            return
        num_prompts, num_rows = config.prompts_per_step, config.batch_size
        indices = queue.pop(len(state["untrained"]))
        prompts = queue.make_batch(indices)
        responses = rows.load(prompts, self._context.rollout.tasks)
        for i in range(len(indices) // num_prompts):
            own_rows = slice(i * num_rows, (i + 1) * num_rows)
            own_indices = indices[i * num_prompts : (i + 1) * num_prompts]
            self._batches.append(_SubmittedBatch(own_indices, prompts.rows(own_rows), responses.rows(own_rows)))


def staleness_metrics(batch: Batch, version: int, bound: int) -> Future | LocalRef:
    """Submits the staleness metrics of a batch. Does not block.

    The staleness of a token is `version` minus the version that sampled it. A row is as stale as its oldest token. The
    metrics are `staleness` (mean over rows), `staleness_max`, and `staleness_<k>` (fraction of rows) for k = 0 to
    `bound`.

    Args:
        batch: columns `weight_version` and `response_mask`.
        version: weight version that trains the batch.
        bound: largest possible staleness.
    """
    return batch.reduce(measure_staleness, ["weight_version", "response_mask"], version=version, bound=bound)


def measure_staleness(table: TensorDict, version: int, bound: int) -> dict[str, Metric]:
    """Computes the metrics of `staleness_metrics` on the task worker. Rows without response tokens are skipped."""
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
    """Returns the seconds of [start_ns, end_ns] in which a rank idled until a weight update, mean over ranks.

    Args:
        events: calls of any roles, including each rank's last call before the window.
        role: the rollout role.
        start_ns: start of the window.
        end_ns: end of the window.
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
