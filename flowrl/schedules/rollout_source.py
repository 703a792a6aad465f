"""Defines RolloutSource, which produces each step's batch, and BatchRollouts, which runs `sync` and `one_step_off`."""

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from tensordict import TensorDict

from flowrl.checkpoints.saved_rows import IDENTITY, SavedRows
from flowrl.checkpoints.saver import Buffer
from flowrl.config import RolloutRunConfig
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
    trainer_routes: TrainerRoutes | None = None
    """Replicas per data-parallel rank of the actor; None if any replica serves any rank."""
    now_ns: Callable[[], int] = time.time_ns
    """Returns the current time in nanoseconds since the epoch."""


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

    def make_batch(self, indices: Iterable[int]) -> Batch:
        """Returns a batch with one row per sample of each prompt."""
        return Batch.from_rows(self._prompts.rows(indices)).with_samples(self._samples)

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


@dataclass(frozen=True)
class _SubmittedBatch:
    indices: Sequence[int]
    prompts: Batch
    responses: Batch
    """Result of `generate`, possibly in flight."""


class BatchRollouts:
    """Generates all responses of a step with one `generate` call, `num_ahead` steps before the step trains.

    The call for a later step is submitted before the calls of the current step. It therefore runs while the current
    step trains, with the weights of the previous step.
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
        self._batches: deque[_SubmittedBatch] = deque()
        self._metrics: tuple[Logged, ...] = ()

    def begin(self, policy: WorkerGroup | None, step: int, version: int) -> None:
        self._last_submitted = step + len(self._batches)

    def next_batch(self, step: int, version: int) -> Batch:
        config, queue = self._context.config, self._context.prompts
        while self._last_submitted < min(step + self._num_ahead, self._last_step):
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

    def summary(self) -> dict[str, Any]:
        return {}

    def snapshot(self) -> tuple[Mapping[str, Any], Batch | None]:
        """Returns the state, and the responses for later steps, so that a resumed run trains on the same responses."""
        state = self._context.prompts.state(index for batch in self._batches for index in batch.indices)
        ahead = [batch.prompts.select(*IDENTITY).union(batch.responses) for batch in self._batches]
        return state, Batch.concat(ahead) if ahead else None

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
