"""Which calls and metrics belong to which step of a loop, and when the step is done."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from flowrl.controller.calls.call_record import CallRecord
from flowrl.controller.calls.calls import Calls
from flowrl.data.events import CallEvent
from flowrl.data.metric import Logged, Mean, Metric, merge_metrics
from flowrl.schedules.schedule_metrics import Idleness

_HEARD_LATE_NS = 10**9
"""The driver hears of calls in another order than that in which they end, but not so much later."""

Waited = Callable[[int, Sequence[CallEvent], int, int], float]
"""Seconds for which makers waited for weights in a step, given the calls that had not ended before it, in nanoseconds
from when to when it went."""


def _as_metrics(logged: Logged) -> dict[str, Metric]:
    values = logged if isinstance(logged, Mapping) else logged.get()
    return {name: Mean(float(v), 1) if isinstance(v, int | float) else v for name, v in values.items()}


@dataclass
class _Step:
    begun_ns: int
    submitted_ns: int = 0
    metrics: list[Logged] = field(default_factory=list)
    calls: list[CallRecord] = field(default_factory=list)


class StepLog:
    """The steps that were begun and not yet resolved: the driver runs ahead of the workers."""

    def __init__(self, calls: Calls, elapsed_s: float = 0.0) -> None:
        """Args: `elapsed_s` went by before, in a run that is gone on with."""
        self._calls = calls
        self._ended_ns = time.time_ns()
        self._started_ns = self._ended_ns - int(elapsed_s * 1e9)
        self.last_ended_ns: int | None = None
        """When the step had ended that was resolved last."""
        self._steps: dict[int, _Step] = {}
        self._open: int | None = None
        self._policy: str | None = None
        self._waited: Waited | None = None
        self._roles: tuple[str, ...] = ()
        self._apart: str | None = None
        self._idleness = Idleness()

    def follow(self, policy: str | None, roles: Iterable[str], waited: Waited, *, apart: str | None = None) -> None:
        """From now on steps tell also who waited.

        Args:
            policy: the role that is trained.
            roles: of which to tell.
            waited: of the makers.
            apart: the role whose calls are no part of a step: it works all the time.
        """
        self._policy, self._roles, self._waited, self._apart = policy, tuple(roles), waited, apart

    def begin(self, step: int) -> None:
        """Opens a step: what is submitted and logged from now on is its own."""
        self._steps[step] = _Step(time.time_ns())
        self._open = step

    def end(self) -> None:
        """Closes the step that is open, if one is."""
        if self._open is not None:
            self._steps[self._open].submitted_ns = time.time_ns()
            self._steps[self._open].calls = [call for call in self._calls.expected() if call.role != self._apart]
            self._open = None

    def add(self, metrics: tuple[Logged, ...]) -> None:
        """Adds metrics to the open step. Raises `RuntimeError` outside of one: they would have no line to stand on."""
        if self._open is None:
            raise RuntimeError("run.log was called outside of the loop over steps; metrics belong to a step")
        self._steps[self._open].metrics.extend(metrics)

    @property
    def unresolved(self) -> list[int]:
        """The steps without a line, oldest first."""
        return sorted(self._steps)

    def resolve(self, step: int) -> dict[str, float]:
        """Waits until a step is done in every group; its metrics, and when it was done.

        `seconds` runs from the end of the step before to the end of this one's last call, wherever the driver stands.
        """
        done = self._steps.pop(step)
        merged = merge_metrics([_as_metrics(logged) for logged in done.metrics])
        self._calls.settle(done.calls, None)
        own = list(self._events_of(done))
        ended_ns = max((event.ended_ns for event in own), default=done.submitted_ns)
        values = {name: metric.result() for name, metric in merged.items()} | self._waits(step, own, ended_ns)
        values["seconds"] = (ended_ns - self._ended_ns) / 1e9
        values["elapsed_s"] = (ended_ns - self._started_ns) / 1e9
        self._ended_ns = self.last_ended_ns = ended_ns
        if "response_tokens" in values:
            values["tokens_per_s"] = values["response_tokens"] / values["seconds"]
        return values

    def _events_of(self, step: _Step) -> Iterator[CallEvent]:
        # Newest first, and calls of the step before may be heard of after this one's: two steps are in flight at most.
        for event in reversed(self._calls.events):
            if event.ended_ns < step.begun_ns:
                return
            if step.begun_ns <= event.submitted_ns <= step.submitted_ns and event.role != self._apart:
                yield event

    def _waits(self, step: int, own: Iterable[CallEvent], ended_ns: int) -> dict[str, float]:
        """Who had nothing to do since the step before ended, given the calls of the step itself."""
        if not self._roles:
            return {}
        begun_ns, recent = self._ended_ns, []
        for event in reversed(self._calls.events):
            if event.ended_ns < begun_ns - _HEARD_LATE_NS:
                break
            if event.ended_ns > begun_ns:
                recent.append(event)
        values = self._idleness.of(recent, self._roles, begun_ns, ended_ns)
        first_ns = min((event.started_ns for event in own if event.role == self._policy), default=begun_ns)
        values["wait_data_s"] = max(0, first_ns - begun_ns) / 1e9
        if self._waited is not None:
            values["wait_weights_s"] = self._waited(step, recent, begun_ns, ended_ns)
        return values

    def pause(self) -> None:
        """What was done until now, an evaluation say, is no step's time."""
        self._ended_ns = time.time_ns()
