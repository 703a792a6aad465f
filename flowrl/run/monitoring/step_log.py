"""Log of the steps of a run: their calls, metrics and durations."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from flowrl.config import ReportConfig, UserError
from flowrl.controller.calls.calls import Calls
from flowrl.controller.calls.failures import CallRecord
from flowrl.controller.calls.profiled_step import ProfiledStep
from flowrl.controller.dispatch import Future
from flowrl.data.batch.block import LocalRef
from flowrl.data.events import CallEvent
from flowrl.data.metric import Logged, Mean, Metric, merge_metrics
from flowrl.report.trace import IdleTracker, RecordedCalls
from flowrl.report.usage import usage_metrics
from flowrl.run.evaluation import Evaluation, PendingEvaluation

WaitedS = Callable[[int, Sequence[CallEvent], int, int], float]
"""Returns the seconds in which the rollout waited for weights. Arguments: step, recent calls, start in ns, end in ns.
"""

_TRACED_STEPS = 4
"""Number of latest complete steps whose calls stay in the trace, up to `MAX_RECENT_CALLS` calls."""

_MAX_REPORT_DELAY_NS = 10**9
"""Largest delay in ns between the end of a call and the arrival of its report on the driver."""

_MAX_STEPS_IN_FLIGHT = 3
"""Number of steps whose calls may lack a log record: the open step, the previous step, and the step before it."""

_MAX_SHOWN = 60
"""Largest number of characters of a wrong value in an error message."""


@dataclass
class _Step:
    """A step whose calls may still be running."""

    begun_ns: int
    submitted_ns: int = 0
    metrics: list[Logged] = field(default_factory=list)
    calls: list[CallRecord] = field(default_factory=list)


class StepLog:
    """Assigns calls and metrics to steps, and measures the duration of each step.

    The driver runs ahead of the workers. A step is unresolved until its calls are done.
    """

    def __init__(self, calls: Calls, elapsed_s: float, config: ReportConfig, profiles: Path) -> None:
        """`elapsed_s` is the duration of the run before it was resumed, and `profiles` is the folder for profiles."""
        self._calls, self._config, self._profiles = calls, config, profiles
        self.recorded = RecordedCalls(calls.events)
        self._begun_ns: deque[int] = deque(maxlen=_TRACED_STEPS + _MAX_STEPS_IN_FLIGHT)
        """Times at which the last steps began."""
        self._ended_ns = time.time_ns()
        self._started_ns = self._ended_ns - int(elapsed_s * 1e9)
        self._steps: dict[int, _Step] = {}
        self._current: int | None = None
        """Step to which later metrics belong; None before the first step."""
        self._is_timed = False
        """Whether later calls count for the duration of the current step."""
        self._initial: list[Logged] = []
        self._policy: str | None = None
        self._waited_s: WaitedS | None = None
        self._roles: tuple[str, ...] = ()
        self._excluded_role: str | None = None
        self._idle = IdleTracker()

    def measure_idleness(
        self, policy: str | None, roles: Iterable[str], waited_s: WaitedS, *, excluded_role: str | None = None
    ) -> None:
        """Adds idle times of `roles` to the metrics of later steps.

        `policy` is the trained role, and `waited_s` measures how long the rollout waited for weights. `excluded_role`
        generates continuously, so its calls are not assigned to steps.
        """
        self._policy, self._roles, self._waited_s = policy, tuple(roles), waited_s
        self._excluded_role = excluded_role

    def begin(self, step: int) -> None:
        """Begins a step. Later calls and metrics belong to it."""
        self._steps[step] = _Step(time.time_ns())
        self._begun_ns.append(self._steps[step].begun_ns)
        with self._calls.lock:
            self.recorded.drop_oldest(keep_from_ns=self._begun_ns[0] - _MAX_REPORT_DELAY_NS)
        self._current, self._is_timed = step, True
        profile = self._config.profile
        if profile is not None and step in profile.steps:
            folder = self._profiles.absolute() / f"step-{step:06d}"
            self._calls.profiled = ProfiledStep(folder, profile.ranks, self._excluded_role)

    def end(self) -> None:
        """Ends the current step after its last training call. Later calls do not count for the duration of the step."""
        if self._current is not None and self._is_timed:
            self._steps[self._current].submitted_ns = time.time_ns()
            calls = self._calls.required()
            self._steps[self._current].calls = [call for call in calls if call.role != self._excluded_role]
            self._is_timed, self._calls.profiled = False, None

    def add(self, metrics: tuple[Logged, ...]) -> None:
        """Adds metrics to the current step, or, before the first step, to the initial metrics.

        Raises UserError if the record of the current step is already written.
        """
        if self._current is None:
            self._initial.extend(metrics)
        elif self._current in self._steps:
            self._steps[self._current].metrics.extend(metrics)
        else:
            raise UserError(
                f"run.log was called after the metrics of step {self._current} were written: log them in the loop over "
                "steps, before run.save_model and run.finish"
            )

    @property
    def has_begun(self) -> bool:
        """Whether the first step has begun."""
        return self._current is not None

    @property
    def is_timed(self) -> bool:
        """Whether a step has begun, and later calls count for its duration."""
        return self._is_timed

    def pop_initial(self) -> dict[str, float]:
        """Waits for the metrics that were added before the first step, and returns them."""
        merged = merge_metrics([_as_metrics(logged) for logged in self._initial])
        self._initial = []
        return {name: metric.result() for name, metric in merged.items()}

    @property
    def unresolved(self) -> list[int]:
        """Steps that have no log record yet, oldest first."""
        return sorted(self._steps)

    def resolve(self, step: int) -> dict[str, float]:
        """Waits for all calls of a step and returns its metrics.

        `seconds` is the time from the end of the previous step to the end of this step's last call.
        """
        done = self._steps[step]
        merged = merge_metrics([_as_metrics(logged) for logged in done.metrics])
        del self._steps[step]  # after the metrics, because a step whose call failed has no record and is not saved
        self._calls.wait(done.calls, None)
        with self._calls.lock:  # a schedule may append events on a thread
            events = list(self._events_of(done))
            ended_ns = max((event.ended_ns for event in events), default=done.submitted_ns)
            recent = self._recent()
            waits = self._waits(step, events, recent, ended_ns)
        values = {name: metric.result() for name, metric in merged.items()} | waits
        values |= usage_metrics((event for event in recent if event.ended_ns <= ended_ns), self._config.peak_tflops)
        values["seconds"] = (ended_ns - self._ended_ns) / 1e9
        values["elapsed_s"] = (ended_ns - self._started_ns) / 1e9
        self._ended_ns = ended_ns
        if "response_tokens" in values:
            values["tokens_per_s"] = values["response_tokens"] / values["seconds"]
        return values

    def _events_of(self, step: _Step) -> Iterator[CallEvent]:
        # Newest first. With two steps in flight, reports of the previous step may arrive after reports of this step.
        for event in reversed(self._calls.events):
            if event.ended_ns < step.begun_ns:
                return
            if step.begun_ns <= event.submitted_ns <= step.submitted_ns and event.role != self._excluded_role:
                yield event

    def _recent(self) -> list[CallEvent]:
        """Returns the calls that have ended since the end of the previous step, newest first."""
        recent = []
        for event in reversed(self._calls.events):
            if event.ended_ns < self._ended_ns - _MAX_REPORT_DELAY_NS:
                break
            if event.ended_ns > self._ended_ns:
                recent.append(event)
        return recent

    def _waits(
        self, step: int, events: Iterable[CallEvent], recent: Sequence[CallEvent], ended_ns: int
    ) -> dict[str, float]:
        """Returns the idle times since the end of the previous step. Empty if `measure_idleness` was not called."""
        if not self._roles:
            return {}
        begun_ns = self._ended_ns
        values = self._idle.idle_fractions(recent, self._roles, begun_ns, ended_ns)
        first_ns = min((event.started_ns for event in events if event.role == self._policy), default=begun_ns)
        values["wait_data_s"] = max(0, first_ns - begun_ns) / 1e9
        if self._waited_s is not None:
            values["wait_weights_s"] = self._waited_s(step, recent, begun_ns, ended_ns)
        return values

    def reset_clock(self) -> None:
        """Excludes the time until now, such as an evaluation, from the next step's `seconds`."""
        self._ended_ns = time.time_ns()


class RecordQueue:
    """Writes log records in the order of steps. A record waits for the evaluations of its step, so that it contains
    their metrics. These evaluations may run alongside training.
    """

    def __init__(
        self, write: Callable[[int, Mapping[str, float]], None], finish: Callable[[int, Evaluation], None]
    ) -> None:
        """`write` writes the record of a step. Before that, `finish` receives the evaluations of this step."""
        self._write, self._finish = write, finish
        self._records: deque[tuple[int, dict[str, float]]] = deque()
        self._pending: deque[tuple[int, PendingEvaluation]] = deque()
        """(step, evaluation) of the evaluations whose results are not written yet."""

    @property
    def pending_evaluations(self) -> list[tuple[int, int]]:
        """Step and number of rows of each evaluation whose result is not written yet."""
        return [(step, evaluation.num_rows) for step, evaluation in self._pending]

    def add_evaluation(self, step: int, evaluation: PendingEvaluation) -> None:
        """Adds an evaluation to the record of its step. Evaluations must be added in ascending order of steps."""
        self._pending.append((step, evaluation))

    def add_record(self, step: int, values: Mapping[str, float]) -> None:
        """Adds the record of a step, and writes all records whose evaluations have finished. Does not wait."""
        self._records.append((step, dict(values)))
        self.flush(-1)

    def flush(self, last_step: int) -> None:
        """Waits for evaluations of steps up to `last_step`, and writes all records whose evaluations have finished."""
        for step, evaluation in self._pending:
            if step <= last_step:
                evaluation.wait()
        while self._records:
            step, values = self._records[0]
            own = [evaluation for other, evaluation in self._pending if other <= step]
            if not all(evaluation.done() for evaluation in own):
                return
            for evaluation in own:
                values |= dict(evaluation)
                self._finish(step, evaluation)
                self._pending.popleft()
            self._records.popleft()
            self._write(step, values)

    def drop_evaluations(self) -> None:
        """After an error, discards the pending evaluations, and writes the records without them."""
        self._pending.clear()
        self.flush(-1)


def check_logged(logged: object) -> None:
    """Raises UserError unless `logged` is a dictionary of metrics or a future. A future's result is checked later."""
    if not isinstance(logged, Future | LocalRef):
        _check_metrics(logged)


def _check_metrics(metrics: object) -> None:
    if not isinstance(metrics, Mapping):
        raise UserError(
            f"run.log got {_shorten(metrics)}: log a dictionary of numbers such as {{'accuracy': 0.5}}, which an "
            "evaluation must return too, or a future of a dictionary"
        )
    for name, value in metrics.items():
        if not isinstance(name, str):
            raise UserError(f"run.log got {_shorten(name)} as the name of a metric: use a string")
        if isinstance(value, bool) or not (isinstance(value, int | float) or hasattr(value, "result")):
            raise UserError(
                f"run.log: {name} is {_shorten(value)}, which is not a number: log a Python number (NaN is recorded as "
                f"null) or a metric such as Mean, and convert other types with float"
            )


def _shorten(value: object) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def _as_metrics(logged: Logged) -> dict[str, Metric]:
    values = logged if isinstance(logged, Mapping) else logged.get()
    _check_metrics(values)
    return {name: Mean(float(v), 1) if isinstance(v, int | float) else v for name, v in values.items()}


_MEASURED_FRACTION = 0.01
"""Largest fraction of the run's time in which the memory is measured."""


class PeakMemory:
    """Largest memory that this process and its child processes have used at once.

    One measurement takes more than 10 ms, because the kernel counts all pages of the processes. Therefore, only some
    steps are measured, so that measurements take at most 1 % of the run's time.
    """

    def __init__(self, measure: Callable[[], float] | None = None) -> None:
        self._measure = measure or _resident_mb
        self._due_s = 0.0
        self.peak_mb = 0.0

    def measure_mb(self, *, is_required: bool = False) -> float:
        """Returns the peak in MB (10^6 bytes). Measures the memory if it is due or required."""
        start_s = time.monotonic()
        if is_required or start_s >= self._due_s:
            self.peak_mb = max(self.peak_mb, self._measure())
            end_s = time.monotonic()
            self._due_s = end_s + (end_s - start_s) / _MEASURED_FRACTION
        return self.peak_mb


def _resident_mb() -> float:
    """Returns the memory of this process and its descendants in MB. Shared pages count once (PSS)."""
    import psutil  # noqa: PLC0415 (Ray has a copy of psutil, which can be imported after ray)

    driver = psutil.Process()
    total = 0
    for process in (driver, *driver.children(recursive=True)):
        try:
            # Only Linux reports PSS, the proportional share of pages that several processes map.
            info = process.memory_full_info()._asdict()
            total += info.get("pss", info["rss"])
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return total / 1e6
