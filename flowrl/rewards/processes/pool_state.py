"""State of a pool: its rows, functions, processes and calls in flight. Only the thread of the pool uses it."""

import math
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from flowrl.rewards.processes.frames import encode_frame
from flowrl.rewards.processes.pool_settings import FunctionSpec, Outcome, PoolLimits
from flowrl.rewards.processes.process import ScoringProcess
from flowrl.rewards.reward_function import MAX_SCORE, Failure, FunctionKind

MESSAGE_S = 0.01
"""Time after which the pool reclaims the rows of a message that have not begun."""

_FAILURES = ("raised", "invalid", "memory", "timeout")
"""Failures that a process reports itself."""


@dataclass(eq=False)
class QueuedRow:
    function: "LoadedFunction"
    columns: Mapping[str, Any]
    future: "Future[Outcome]"
    num_attempts: int = 0
    failed_in: int | None = None
    """Number of the process of the last attempt."""

    is_alone: bool = False
    """True: must not share a process with other calls, because it may have caused a failure of several rows."""

    is_running: bool = False


@dataclass(eq=False)
class LoadedFunction:
    spec: FunctionSpec
    queue: deque[tuple[int, QueuedRow]] = field(default_factory=deque)
    is_async: bool = False
    names: Sequence[str] | None = None
    """Columns that the function names. None: not loaded yet."""

    accepts_all: bool = False
    error: Outcome | None = None
    """Outcome of all rows if the function cannot be loaded."""

    num_loading: int = 0
    rows_per_message: int = 1
    """Rows that a process receives at a time, although it calls the function once per row."""

    @property
    def is_sequential(self) -> bool:
        """Whether a process calls the function once per row, and one call at a time."""
        return not self.is_async and self.spec.batch_size is None

    def capacity(self, limits: PoolLimits) -> int:
        """Returns the number of rows that one process scores at a time."""
        return limits.max_concurrent if self.is_async else self.spec.batch_size or 1


@dataclass(eq=False)
class CallInFlight:
    """Rows of one message. The process of a sequential function scores them in this order."""

    rows: list[QueuedRow]
    """Rows without an outcome. The first one is running."""
    start_s: float
    """Start of the running call."""
    deadline_s: float
    num_rows: int
    """Number of rows of the message."""
    reclaim_s: float = math.inf
    """Time to reclaim the rows that have not begun."""


@dataclass(eq=False)
class ProcessState:
    """A process with the calls in flight."""

    process: ScoringProcess
    is_ready: bool = False
    loaded: set[str] = field(default_factory=set)
    loading: LoadedFunction | None = None
    load_deadline_s: float = math.inf
    calls: dict[int, CallInFlight] = field(default_factory=dict)
    is_async: bool = False
    """True: the calls in flight are async, so that others may be added."""

    is_exclusive: bool = False
    is_retiring: bool = False
    """True: gets no further calls and ends after those in flight."""

    session_start_s: float = 0.0
    ending: tuple[Failure, str] | None = None
    """Reason why the pool ends the process."""

    kill_s: float = math.inf
    """Time to kill it after a timeout. Until then, it writes its stacks."""

    @property
    def is_idle(self) -> bool:
        return self.is_usable and not self.calls and self.loading is None

    @property
    def is_usable(self) -> bool:
        return self.is_ready and self.ending is None and not self.is_retiring

    @property
    def call_deadline_s(self) -> float:
        """Time at which the first call exceeds its timeout."""
        return min((call.deadline_s for call in self._running_calls), default=math.inf)

    @property
    def reclaim_s(self) -> float:
        """Time to call `reclaim`."""
        return min((call.reclaim_s for call in self._running_calls), default=math.inf)

    @property
    def _running_calls(self) -> Iterable[CallInFlight]:
        """Calls in flight, unless the pool ends the process."""
        return self.calls.values() if self.ending is None else ()

    @property
    def has_more_results(self) -> bool:
        """Whether results of a message with several rows follow soon."""
        return any(call.num_rows > 1 for call in self.calls.values()) and time.monotonic() < self.reclaim_s < math.inf

    def delay_reclaim(self) -> None:
        """Restarts the time until `reclaim`, because the process has only now received a part of its message."""
        for call in self.calls.values():
            if call.reclaim_s < math.inf:
                call.reclaim_s = time.monotonic() + MESSAGE_S

    def reclaim(self) -> list[QueuedRow]:
        """Removes and returns the rows of a slow message that the process has not begun.

        The next messages with rows of this function have one row. Raises ValueError if the process has added rows.
        """
        (call,) = self.calls.values()  # a process of a sequential function has one call at a time
        num_begun = max(1, len(call.rows) - self.process.reclaim_rows(len(call.rows) - 1))
        rows, call.rows, call.reclaim_s = call.rows[num_begun:], call.rows[:num_begun], math.inf
        call.rows[0].function.rows_per_message = 1
        return rows


class Results:
    """Outcomes that are not set yet. Results that are set together wake other threads only once."""

    def __init__(self) -> None:
        self._outcomes: list[tuple[QueuedRow, Outcome]] = []
        self._latest_s = math.inf
        """Latest time to set the outcomes."""

    def add(self, row: QueuedRow, outcome: Outcome) -> None:
        if not self._outcomes:
            self._latest_s = time.monotonic() + MESSAGE_S
        self._outcomes.append((row, outcome))

    def set(self, *, wait: bool = False) -> None:
        """Sets all outcomes. With `wait`, keeps them for up to `MESSAGE_S`."""
        if wait and time.monotonic() < self._latest_s:
            return
        outcomes, self._outcomes = self._outcomes, []
        for row, outcome in outcomes:
            if row.is_running or row.future.set_running_or_notify_cancel():
                row.future.set_result(outcome)


def find_problem(name: str, value: Any) -> str | None:  # Any: the value of a column
    """Returns why the value of a column cannot be sent to another process."""
    if value is None or isinstance(value, str | int | float):
        return None
    try:
        encode_frame({name: value})
    except (TypeError, ValueError, RecursionError) as error:
        return f"column {name}: {error}"
    return None


def parse_outcome(outcome: Mapping[str, Any], kind: FunctionKind) -> Outcome:  # Any: unchecked JSON
    """Returns the outcome of a row, without times. Raises LookupError, TypeError or ValueError if it is invalid."""
    if "failure" in outcome:
        failure = outcome["failure"]
        if failure not in _FAILURES:
            raise ValueError("unknown failure")
        return Outcome(None, failure, str(outcome["message"]))
    if kind == "answer function":
        answer = outcome["answer"]
        if answer is not None and not isinstance(answer, str):
            raise ValueError("an invalid answer")
        return Outcome(None, answer=answer)
    score = outcome["score"]
    if isinstance(score, bool) or not isinstance(score, int | float) or not abs(score) <= MAX_SCORE:
        raise ValueError("an invalid score")
    return Outcome(float(score))
