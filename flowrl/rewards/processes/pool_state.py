"""State of a pool: its rows, functions, processes and calls in flight. Only the thread of the pool uses it."""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from flowrl.rewards.processes.frames import encode_frame
from flowrl.rewards.processes.pool_settings import FunctionSpec, Outcome, PoolLimits
from flowrl.rewards.processes.process import ScoringProcess
from flowrl.rewards.reward_function import MAX_SCORE, Failure, FunctionKind

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

    def capacity(self, limits: PoolLimits) -> int:
        """Returns the number of rows that one process scores at a time."""
        return limits.max_concurrent if self.is_async else self.spec.batch_size or 1


@dataclass(eq=False)
class CallInFlight:
    rows: list[QueuedRow]
    start_s: float
    deadline_s: float


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
