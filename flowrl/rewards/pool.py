"""`ScoringPool`: calls reward functions in separate processes, so that a misbehaving call costs only its row."""

import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from flowrl.rewards import scorer
from flowrl.rewards.reward_function import (
    MAX_SCORE,
    ONLY_IF_NAMED,
    SHORT_REPR,
    Failure,
    FunctionKind,
    FunctionSpec,
    Outcome,
    RewardError,
)
from flowrl.user_code.process import ProcessLimits
from flowrl.user_code.supervisor import End, Process, Supervisor, Work, encode_json

_ASYNC_GRACE_S = 1.0
"""Time beyond the timeout of async calls, in which the process itself ends a call, before the pool ends the process."""

_SESSION_S = 1.0
"""Time for which a process accepts further async calls while rows of other functions wait."""

_MESSAGE_S = 0.01
"""Time after which the pool reclaims the rows of a message that have not begun."""

_MAX_ROWS_PER_MESSAGE = 64

_SEARCHED_ROWS = 64
"""Maximum number of rows at the head of a queue that a process may not score and that are skipped."""

_FAILURES = ("raised", "invalid", "memory", "timeout")
"""Failures that a process reports itself."""


@dataclass(frozen=True)
class PoolLimits(ProcessLimits):
    """Limits of the processes of a pool."""

    retries: int = 0
    """Number of further attempts for a row whose call failed, each in another process."""

    max_concurrent: int = 64
    """Number of concurrent calls of async functions per process."""


@dataclass(eq=False)
class _Row:
    function: "_Function"
    columns: Mapping[str, Any]
    future: "Future[Outcome]"
    num_attempts: int = 0
    failed_in: int | None = None
    """Number of the process of the last attempt."""

    is_alone: bool = False
    """True: must not share a process with other calls, because it may have caused a failure of several rows."""

    is_running: bool = False


@dataclass(eq=False)
class _Function:
    spec: FunctionSpec
    queue: deque[tuple[int, _Row]] = field(default_factory=deque)
    is_async: bool = False
    names: Sequence[str] = ()
    """Columns that the function names. Known after its first import."""

    accepts_all: bool = False
    rows_per_message: int = 1
    """Rows that a process receives at a time, although it calls the function once per row."""

    @property
    def is_sequential(self) -> bool:
        """Whether a process calls the function once per row, and one call at a time."""
        return not self.is_async and self.spec.batch_size is None


@dataclass(eq=False)
class _Call:
    """Rows of one message. The process of a sequential function scores them in this order."""

    rows: list[_Row]
    """Rows without an outcome. The first one is running."""
    start_s: float
    """Start of the running call."""
    deadline_s: float
    num_rows: int
    """Number of rows of the message."""


@dataclass(eq=False)
class _State:
    """State of a process."""

    is_async: bool = False
    """True: the calls in flight are async, so that others may be added."""

    is_exclusive: bool = False
    session_start_s: float = 0.0


_Process = Process[_Call, _State]


class ScoringPool(Work[_Call, _State]):
    """Scores rows with reward functions, in processes that start with `start`, or when rows are submitted.

    A process whose call hangs, ends or is killed is replaced. `submit` can be called from any thread. The results are
    set by the pool's thread, so callbacks of futures must be fast.
    """

    title, main_loop, caller = "pool of reward functions", scorer.__name__, scorer.__file__

    def __init__(self, functions: Sequence[FunctionSpec], limits: PoolLimits) -> None:
        self._limits = limits
        self._functions = {spec.name: _Function(spec) for spec in functions}
        if len(self._functions) < len(functions):
            raise ValueError(f"reward functions have the same name: {', '.join(spec.name for spec in functions)}")
        sizes = [1 if spec.batch_size is None else spec.batch_size for spec in functions]
        if min(limits.workers, limits.max_concurrent, *sizes) < 1:
            raise ValueError("workers, max_concurrent and batch_size must be at least 1")
        self.supervisor = Supervisor(self, list(self._functions), limits, {})
        self._warm_ups: list[threading.Event] = []
        """Calls of `start` whose processes are not ready."""
        self._order = itertools.count()
        self._front = itertools.count(-1, -1)
        self._outcomes: list[tuple[_Row, Outcome]] = []
        """Outcomes that are not set yet. Results that are set together wake other threads only once."""
        self._latest_s = math.inf
        """Latest time to set the outcomes."""

    def submit(self, name: str, row: Mapping[str, Any]) -> "Future[Outcome]":
        """Returns the future outcome of a row. `row` has the columns of the row, of which the function receives those
        that it accepts. Does not block.
        """
        future: Future[Outcome] = Future()
        self.supervisor.post(_Row(self._functions[name], row, future))
        return future

    def start(self) -> threading.Event:
        """Starts all processes and imports all functions in each. Does not wait.

        The result is set when that is done or has failed.
        """
        warm_up = _WarmUp()
        self.supervisor.post(warm_up)
        return warm_up.done

    # The work of the supervisor, in its thread.

    def make_state(self) -> _State:
        return _State()

    def accept(self, item: "_Row | _WarmUp") -> None:
        if isinstance(item, _Row):
            item.function.queue.append((next(self._order), item))
        else:
            self._warm_ups.append(item.done)

    def fail_all(self, calls: Sequence[_Call], items: "Sequence[_Row | _WarmUp]") -> None:
        rows = [row for call in calls for row in call.rows]
        rows += [row for function in self._functions.values() for _, row in function.queue]
        for item in items:
            if isinstance(item, _Row):
                rows.append(item)
            else:
                self._warm_ups.append(item.done)
        for done in self._warm_ups:
            done.set()
        for row in rows:
            self._add(row, Outcome(None, "closed", "the pool of reward functions was closed"))
        self._set_outcomes()

    def on_message(self, process: _Process, message: Mapping[str, Any]) -> None:  # Any: unchecked values of JSON
        kind = message["kind"]
        if kind == "loaded":
            function = self._functions[message["name"]]
            function.names = [str(name) for name in message["names"]]
            function.accepts_all, function.is_async = bool(message["accepts_all"]), bool(message["is_async"])
        elif kind == "result":
            self._handle_result(process, message)
        elif kind == "stuck":
            process.is_retiring = True
        else:
            raise ValueError("unexpected message")
        if process.is_retiring and not process.calls:
            self.supervisor.end(process, "closed")

    def _handle_result(self, process: _Process, message: Mapping[str, Any]) -> None:
        call = process.calls[message["id"]]
        function = call.rows[0].function
        if function.is_sequential:
            self._handle_row(process, message, call)
            return
        has_several, kind = len(call.rows) > 1, function.spec.kind
        seconds = time.monotonic() - call.start_s
        if "outcomes" in message:
            outcomes = [_parse_outcome(outcome, kind, seconds) for outcome in message["outcomes"]]
            if len(outcomes) != len(call.rows):
                raise ValueError("a wrong number of outcomes")
        else:
            outcomes = [_parse_outcome(message, kind, seconds)] * len(call.rows)
            has_several = has_several or (bool(message.get("is_late")) and not process.state.is_exclusive)
        del process.calls[message["id"]]
        process.state.is_exclusive = process.state.is_exclusive and bool(process.calls)
        if "outcomes" not in message and has_several:
            self._retry_alone(call.rows)
            return
        for row, outcome in zip(call.rows, outcomes, strict=True):
            self._end_attempt(process, row, outcome)

    def _handle_row(self, process: _Process, message: Mapping[str, Any], call: _Call) -> None:
        """Handles the outcome of the running row of a sequential function."""
        (outcome,) = message.get("outcomes", (message,))
        continues = bool(message["continues"])
        if continues and len(call.rows) == 1:
            raise ValueError("an unexpected row")
        now_s = time.monotonic()
        seconds = now_s - call.start_s
        outcome = _parse_outcome(outcome, call.rows[0].function.spec.kind, seconds)
        if not continues:  # the process begins none of the other rows
            process.reclaim_rows(len(call.rows) - 1)
        row = call.rows.pop(0)
        if continues:
            call.start_s, call.deadline_s = now_s, call.deadline_s + seconds
            self.supervisor.allow_output(process)
        else:
            del process.calls[message["id"]]
            if call.rows:
                self._queue_first(call.rows)
            elif now_s < process.timer_s < math.inf:
                row.function.rows_per_message = min(2 * row.function.rows_per_message, _MAX_ROWS_PER_MESSAGE)
            process.timer_s = math.inf
        self._end_attempt(process, row, outcome)

    def on_timer(self, process: _Process) -> None:
        """Reclaims the rows of a slow message that the process has not begun. Its next messages have one row."""
        (call,) = process.calls.values()  # a process of a sequential function has one call at a time
        if process.unsent:  # it has not received the complete message
            process.timer_s = time.monotonic() + _MESSAGE_S
            return
        try:
            num_begun = max(1, len(call.rows) - process.reclaim_rows(len(call.rows) - 1))
        except ValueError as error:
            self.supervisor.end_corrupt(process, error)
            return
        rows, call.rows = call.rows[num_begun:], call.rows[:num_begun]
        call.rows[0].function.rows_per_message = 1
        self._queue_first(rows)

    def describe(self, process: _Process) -> str:
        functions = [call.rows[0].function for call in process.calls.values()]
        if process.loading is not None:
            functions = [self._functions[process.loading]]
        return functions[0].spec.title if functions else ""

    def on_end(self, process: _Process, kind: End, text: str) -> None:
        calls = list(process.calls.values())
        rows = [row for call in calls for row in call.rows]
        if rows and rows[0].function.is_sequential:
            self._queue_first(rows[1:])  # they have not begun
            rows = rows[:1]
        if len(rows) == 1:
            assert kind != "lost", "a pool ends no process for this reason"
            seconds = time.monotonic() - calls[0].start_s
            self._end_attempt(process, rows[0], Outcome(None, kind, text, seconds))
        else:
            self._retry_alone(rows)

    # Outcomes.

    def _end_attempt(self, process: _Process, row: _Row, outcome: Outcome) -> None:
        """Sets the outcome of a row, or queues the row for another attempt."""
        process.is_retiring |= outcome.failure == "memory"  # libraries may be in an invalid state
        row.num_attempts += 1
        if outcome.failure is not None and row.num_attempts <= self._limits.retries:
            row.failed_in = process.number
            self._queue_first([row])
            return
        self._add(row, outcome if row.num_attempts == 1 else replace(outcome, num_attempts=row.num_attempts))

    def _queue_first(self, rows: Sequence[_Row]) -> None:
        """Queues rows, in their order, before all others."""
        for row in reversed(rows):
            row.function.queue.appendleft((next(self._front), row))

    def _retry_alone(self, rows: Iterable[_Row]) -> None:
        """Queues rows whose common call or process failed. The row that caused it then fails alone."""
        for row in rows:
            row.is_alone = True
            self._queue_first([row])

    def _add(self, row: _Row, outcome: Outcome) -> None:
        if not self._outcomes:
            self._latest_s = time.monotonic() + _MESSAGE_S
        self._outcomes.append((row, outcome))

    def _set_outcomes(self) -> None:
        outcomes, self._outcomes = self._outcomes, []
        for row, outcome in outcomes:
            if row.is_running or row.future.set_running_or_notify_cancel():
                row.future.set_result(outcome)

    def _has_more_results(self, process: _Process, now_s: float) -> bool:
        """Returns whether results of a message with several rows follow soon."""
        return now_s < process.timer_s < math.inf and any(call.num_rows > 1 for call in process.calls.values())

    # Distribution of rows.

    def dispatch(self) -> None:
        """Gives waiting rows to processes, oldest rows first, and starts processes that they need. Sets outcomes."""
        processes, errors = self.supervisor.processes, self.supervisor.errors
        for name, (kind, message) in errors.items():
            queue = self._functions[name].queue
            while queue:
                assert kind in ("not_loaded", "timeout")
                self._add(queue.popleft()[1], Outcome(None, kind, message, num_attempts=0))
        if self._warm_ups:
            self._continue_warm_up()
        waiting = sorted((f for f in self._functions.values() if f.queue), key=lambda f: f.queue[0][0])
        demand = 0
        for function in waiting:
            while function.queue and self._dispatch_one(function):
                pass
            demand += self._num_needed(function)
        alive = [p for p in processes.values() if p.ending is None and not p.is_retiring]
        num_coming = sum(not p.is_ready or p.loading is not None for p in alive)
        for _ in range(min(demand - num_coming, self._limits.workers - len(alive))):
            if self.supervisor.start_process() is None:
                break
        if demand and alive and all(map(_is_idle, alive)) and len(alive) >= self._limits.workers:
            # Each waiting row has failed in the only process, so it needs another one.
            self.supervisor.end(alive[0], "closed")
        now_s = time.monotonic()
        if now_s >= self._latest_s or not any(self._has_more_results(p, now_s) for p in processes.values()):
            self._set_outcomes()

    def _num_needed(self, function: _Function) -> int:
        """Returns the number of processes that could score the waiting rows of a function now."""
        capacity = self._limits.max_concurrent if function.is_async else function.spec.batch_size or 1
        return math.ceil(len(function.queue) / capacity)

    def _continue_warm_up(self) -> None:
        """Starts processes and imports until each process has all functions."""
        names = [name for name in self._functions if name not in self.supervisor.errors]
        processes = self.supervisor.processes
        while names and len(processes) < self._limits.workers and self.supervisor.start_process() is not None:
            pass
        alive = list(processes.values()) if names else []
        for process in alive:
            missing = [name for name in names if name not in process.loaded]
            if missing and _is_idle(process):
                self._load(process, self._functions[missing[0]])
        if all(process.is_ready and process.loaded.issuperset(names) for process in alive):
            for done in self._warm_ups:
                done.set()
            self._warm_ups.clear()

    def _dispatch_one(self, function: _Function) -> bool:
        """Sends one call, or starts one import. Returns False if no process can take a row of the function."""
        name, processes = function.spec.name, self.supervisor.processes.values()
        idle = [process for process in processes if _is_idle(process)]
        with_function = [process for process in idle if name in process.loaded]
        if function.is_async:
            with_function = [p for p in processes if self._can_add(p, function)] + with_function
        for process in with_function:
            if rows := self._take(function, process, len(with_function)):
                self._call(process, function, rows)
                return True
        others = [process for process in idle if name not in process.loaded]
        num_loading = sum(process.loading == name for process in processes)
        if with_function or not others or num_loading >= self._num_needed(function):
            return False
        self._load(others[0], function)
        return True

    def _can_add(self, process: _Process, function: _Function) -> bool:
        """Returns whether a process with async calls in flight accepts a call of this function."""
        state = process.state
        if not (process.is_usable and state.is_async and process.calls) or function.spec.name not in process.loaded:
            return False
        if state.is_exclusive or len(process.calls) >= self._limits.max_concurrent:
            return False
        has_others = any(other.queue and other is not function for other in self._functions.values())
        return not has_others or time.monotonic() - state.session_start_s < _SESSION_S

    def _take(self, function: _Function, process: _Process, num_idle: int) -> list[_Row]:
        """Removes the rows of a process's next call from the queue. `num_idle` processes share the queue."""
        queue, skipped, rows = function.queue, [], []
        size = function.spec.batch_size or 1
        if function.is_sequential:
            size = min(function.rows_per_message, math.ceil(len(queue) / num_idle))
        for _ in range(min(len(queue), _SEARCHED_ROWS + size)):
            entry = queue.popleft()
            row = entry[1]
            if not row.is_running and not row.future.set_running_or_notify_cancel():
                continue
            row.is_running = True
            if row.failed_in == process.number or (row.is_alone and (rows or process.calls)):
                skipped.append(entry)
                continue
            rows.append(row)
            if row.is_alone or len(rows) == size:
                break
        queue.extendleft(reversed(skipped))
        return rows

    def _load(self, process: _Process, function: _Function) -> None:
        spec = function.spec
        message = {"function": spec.function, "options": dict(spec.options)}
        message |= {"is_batched": spec.batch_size is not None, "function_kind": spec.kind}
        self.supervisor.load(process, spec.name, message)

    def _call(self, process: _Process, function: _Function, rows: Sequence[_Row]) -> None:
        """Sends rows to a process. Rows with a column that has no JSON fail."""
        start_s = time.monotonic()
        encoded = [(row, self._encode(function, row)) for row in rows]
        sent = [row for row, text in encoded if text is not None]
        if not sent:
            return
        timeout_s = math.inf if self._limits.timeout_s is None else self._limits.timeout_s
        grace_s = _ASYNC_GRACE_S if function.is_async else 0.0
        if not process.calls:
            process.state.session_start_s, process.state.is_async = start_s, function.is_async
        process.state.is_exclusive = sent[0].is_alone
        number = next(self.supervisor.numbers)
        process.calls[number] = _Call(sent, start_s, start_s + timeout_s + grace_s, len(sent))
        body = b",".join(text for _, text in encoded if text is not None)
        head = encode_json({"kind": "call", "id": number, "name": function.spec.name})
        payload = b'%b,"rows":[%b]}' % (head[:-1], body)
        self.supervisor.call(process, payload, len(sent) - 1 if function.is_sequential else 0)
        if function.is_sequential and not process.state.is_exclusive:
            process.timer_s = time.monotonic() + _MESSAGE_S  # rows take time to encode and to write

    def _encode(self, function: _Function, row: _Row) -> bytes | None:
        """Returns the columns that the function receives as JSON. If a column has no JSON, the row fails."""
        names, spec = function.names, function.spec
        values = {
            name: value
            for name, value in row.columns.items()
            if (name in names or (function.accepts_all and name not in ONLY_IF_NAMED)) and name not in spec.options
        }
        try:
            return encode_json(values)
        except (TypeError, ValueError, RecursionError):
            text = next(text for name, value in values.items() if (text := _find_problem(name, value)))
            text = f"{spec.title} cannot receive {text}"
            self._add(row, Outcome(None, "invalid", text, num_attempts=0))
            return None


class _WarmUp:
    """A call of `ScoringPool.start`."""

    def __init__(self) -> None:
        self.done = threading.Event()


def _is_idle(process: _Process) -> bool:
    return process.is_usable and not process.calls and process.loading is None


def _find_problem(name: str, value: Any) -> str | None:  # Any: the value of a column
    """Returns why the value of a column cannot be sent to another process."""
    try:
        encode_json({name: value})
    except (TypeError, ValueError, RecursionError) as error:
        return f"column {name}: {error}"
    return None


def _parse_outcome(outcome: Mapping[str, Any], kind: FunctionKind, seconds: float) -> Outcome:  # Any: unchecked JSON
    """Returns the outcome of the first attempt. Raises LookupError, TypeError or ValueError if it is invalid."""
    if "failure" in outcome:
        failure: Failure = outcome["failure"]
        if failure not in _FAILURES:
            raise ValueError("unknown failure")
        return Outcome(None, failure, str(outcome["message"]), seconds)
    if kind == "answer function":
        answer = outcome["answer"]
        if answer is not None and not isinstance(answer, str):
            raise ValueError("an invalid answer")
        return Outcome(None, answer=answer, seconds=seconds)
    score = outcome["score"]
    if isinstance(score, bool) or not isinstance(score, int | float) or not abs(score) <= MAX_SCORE:
        raise ValueError("an invalid score")
    return Outcome(float(score), seconds=seconds)


def extract_answers(name: str, responses: Sequence[str], limits: PoolLimits) -> list[str | None]:
    """Returns the final answer of each response. The function `name` runs in separate processes with these limits.

    Raises RewardError if a call fails, for example because the function raises an exception, returns neither text nor
    None, exceeds the timeout, or ends its process.
    """
    with ScoringPool([FunctionSpec(name, name, kind="answer function")], limits) as pool:
        futures = [pool.submit(name, {"response": response}) for response in responses]
        return [_answer(future.result(), response) for future, response in zip(futures, responses, strict=True)]


def _answer(outcome: Outcome, response: str) -> str | None:
    if outcome.failure is None:
        return outcome.answer
    text = SHORT_REPR.repr(response)
    row = "" if text in outcome.message or outcome.failure == "not_loaded" else f" for response {text}"
    fix = ": make it faster, or increase timeout_s of reward or environment" if outcome.failure == "timeout" else ""
    raise RewardError(f"{outcome.message}{row}{fix}")
