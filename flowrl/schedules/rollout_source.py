"""RolloutSource: the replicas of a rollout, and which of a run's steps their responses come for."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from flowrl.checkpoints.saved_rows import IDENTITY, SavedRows
from flowrl.checkpoints.saver import Buffer
from flowrl.config import OnPolicyConfig
from flowrl.controller.calls.calls import Calls
from flowrl.controller.group import WorkerGroup
from flowrl.data.batch.batch import Batch
from flowrl.data.events import CallEvent, Counted
from flowrl.data.metric import Logged
from flowrl.data.prompts import PromptStream
from flowrl.schedules.schedule_metrics import staleness, waited_for_weights
from flowrl.weight_sync.sync import WeightSync
from flowrl.weight_sync.verification import ComparedWeights


class RolloutSource(Buffer, Protocol):
    """Gives a loop the batch of each step, whenever its responses were generated. A checkpoint keeps it: `state` is
    that of the prompts, and the draws that were taken and not trained; `rows` are the responses to some of these."""

    streams: bool
    """Whether their calls are no part of any step."""

    def begin(self, policy: WorkerGroup | None, step: int, version: int) -> None:
        """Before the first step of this process: so many steps are done, and the makers have weights of a version."""
        ...

    def batch(self, step: int, version: int) -> Batch:
        """The prompts of a step and their responses, for a trainer whose weights have this version."""
        ...

    def sync_weights(self, actor: WorkerGroup, rollout: WorkerGroup, version: int) -> ComparedWeights | None:
        """Gives the actor's present weights to the makers. Does not wait. What is compared at once, if anything is."""
        ...

    def catch_up(self) -> None:
        """Waits until a call of the whole rollout would be answered with the weights that were published last."""
        ...

    def logged(self) -> tuple[Logged, ...]:
        """Metrics of the step that is open."""
        ...

    def waited_s(self, step: int, events: Sequence[CallEvent], start_ns: int, end_ns: int) -> float:
        """Seconds of a step's time in which a maker could do nothing for the run until newer weights came; mean of the
        makers. Steps come in order, each once.

        Args:
            events: the calls that ended after `start_ns`.
        """
        ...

    def end(self) -> None:
        """Has makers leave what is not finished. Waits for them."""
        ...

    def leave(self) -> None:
        """Does nothing from here on, as nobody waits for it. Leaving twice is fine."""
        ...

    def summary(self) -> dict[str, Any]:
        """What the summary says of them."""
        ...

    @property
    def counted(self) -> Iterable[Counted]:
        """How many groups were where at which time, for the trace."""
        ...


@dataclass(frozen=True)
class RolloutContext:
    """What makers of every kind work with."""

    config: OnPolicyConfig
    rollout: WorkerGroup
    prompts: "PromptQueue"
    weight_sync: WeightSync
    calls: Calls
    say: Callable[[str], None]
    """Tells the user what happened and did not end the run."""
    lanes: tuple[tuple[int, ...], ...] | None = None
    """For each data-parallel rank of the policy the makers that feed it; None: any maker feeds any."""
    now_ns: Callable[[], int] = time.time_ns
    """The time since the epoch."""


class PromptQueue:
    """The prompts of a run: those first that a run before drew and did not train, then the stream's next ones."""

    def __init__(self, prompts: PromptStream, samples: int) -> None:
        self._prompts, self._samples = prompts, samples
        self._again: deque[int] = deque()

    def take(self, count: int) -> list[int]:
        """The numbers of the next draws."""
        again = [self._again.popleft() for _ in range(min(count, len(self._again)))]
        return again + [row["prompt_id"] for row in self._prompts.take(count - len(again))]

    def batch(self, draws: Iterable[int]) -> Batch:
        """A row for each sample of each of these draws."""
        rows = self._prompts.rows(draws)
        batch = Batch.from_rows(rows).repeat(self._samples)
        batch["sample"] = Batch.from_rows([{"sample": i} for _ in rows for i in range(self._samples)])
        return batch

    def location(self, draw: int) -> str:
        """Where the prompt of a draw stands."""
        return self._prompts.location(draw)

    def __len__(self) -> int:
        """Prompts that there are."""
        return len(self._prompts)

    def state(self, untrained: Iterable[int]) -> dict[str, Any]:
        """Args: `untrained` were taken and are in nobody's training yet."""
        return self._prompts.state() | {"untrained": [*untrained, *self._again]}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._prompts.restore(state)
        self._again = deque(state["untrained"])


@dataclass(frozen=True)
class _Asked:
    """A batch ahead: its draws, their rows, and the responses, perhaps not there yet."""

    draws: Sequence[int]
    prompts: Batch
    responses: Batch


class BatchRollouts:
    """One call of `generate` for each step: for the step itself, or for one that is so many ahead.

    The calls of a step ahead are submitted before those of the step, and so before its weights: they are answered while
    it trains, with the weights of the step before.
    """

    streams = False
    counted = ()

    def __init__(self, setting: RolloutContext, *, ahead: int = 0) -> None:
        self._setting, self._ahead = setting, ahead
        self._asked = 0
        self._batches: deque[_Asked] = deque()
        self._logged: tuple[Logged, ...] = ()

    def begin(self, policy: WorkerGroup | None, step: int, version: int) -> None:
        self._asked = step + len(self._batches)

    def batch(self, step: int, version: int) -> Batch:
        config, draws = self._setting.config, self._setting.prompts
        while self._asked < min(step + self._ahead, config.steps):
            self._asked += 1
            taken = draws.take(config.prompts_per_step)
            batch = draws.batch(taken)
            self._batches.append(_Asked(taken, batch, self._setting.rollout.generate.submit(batch)))
        asked = self._batches.popleft()
        batch = asked.prompts.union(asked.responses)
        if self._ahead:
            self._logged = (staleness(batch, version, self._ahead),)
        return batch

    def sync_weights(self, actor: WorkerGroup, rollout: WorkerGroup, version: int) -> ComparedWeights | None:
        return self._setting.weight_sync.send(actor, rollout, version)

    def catch_up(self) -> None:
        """Calls come in the order of submission: the weights are before whatever comes now."""

    def logged(self) -> tuple[Logged, ...]:
        told, self._logged = self._logged, ()
        return told

    def waited_s(self, step: int, events: Sequence[CallEvent], start_ns: int, end_ns: int) -> float:
        if step + self._ahead >= self._setting.config.steps:
            return 0.0  # all that the run needs was generated before the step's weights
        return waited_for_weights(events, self._setting.rollout.role, start_ns, end_ns)

    def end(self) -> None:
        """What is ahead is answered, and read by nobody."""

    def leave(self) -> None:
        """There is nothing to leave."""

    def summary(self) -> dict[str, Any]:
        return {}

    def state(self) -> Mapping[str, Any]:
        return self._setting.prompts.state(draw for asked in self._batches for draw in asked.draws)

    def rows(self) -> Batch | None:
        """All that is ahead, which a run that goes on trains as one that was never interrupted would."""
        ahead = [asked.prompts.select(*IDENTITY).union(asked.responses) for asked in self._batches]
        return Batch.concat(ahead) if ahead else None

    def restore(self, state: Mapping[str, Any], rows: SavedRows | None) -> None:
        setting, draws = self._setting, self._setting.prompts
        draws.restore(state)
        if rows is None:
            return
        count, num_rows = setting.config.prompts_per_step, setting.config.batch_size
        taken = draws.take(len(state["untrained"]))
        prompts = draws.batch(taken)
        responses = rows.load(prompts, setting.rollout.tasks)
        for number in range(len(taken) // count):
            own = slice(number * num_rows, (number + 1) * num_rows)
            numbers = taken[number * count : (number + 1) * count]
            self._batches.append(_Asked(numbers, prompts.rows(own), responses.rows(own)))
