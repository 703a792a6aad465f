"""`ScoringPool`: calls reward functions in separate processes, so that a misbehaving call costs only its row."""

import itertools
import math
import os
import selectors
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from flowrl.rewards.processes.frames import FrameError, encode_frame
from flowrl.rewards.processes.pool_settings import FunctionSpec, Outcome, PoolLimits
from flowrl.rewards.processes.pool_state import (
    MESSAGE_S,
    CallInFlight,
    LoadedFunction,
    ProcessState,
    QueuedRow,
    Results,
    find_problem,
    parse_outcome,
)
from flowrl.rewards.processes.process import Launcher, ScoringProcess, describe_end, environment_of
from flowrl.rewards.processes.process_events import ProcessEvents
from flowrl.rewards.reward_function import Failure, select_columns

_ASYNC_GRACE_S = 1.0
"""Time beyond the timeout of async calls, in which the process itself ends a call, before the pool ends the process."""

_STACKS_S = 2.0
"""Time for a process to write its stacks after a timeout."""

_SESSION_S = 1.0
"""Time for which a process accepts further async calls while rows of other functions wait."""

_MAX_START_FAILURES = 3
"""Processes in a row that ended before they could load a function."""

_MAX_ROWS_PER_MESSAGE = 64

_SEARCHED_ROWS = 64
"""Maximum number of rows at the head of a queue that a process may not score and that are skipped."""


class ScoringPool:
    """Scores rows with reward functions, in processes that start with `start`, or when rows are submitted.

    A process whose call hangs, ends or is killed is replaced. `submit` can be called from any thread. The results are
    set by the pool's thread, so callbacks of futures must be fast.
    """

    def __init__(self, functions: Sequence[FunctionSpec], limits: PoolLimits) -> None:
        self._limits = limits
        self._functions = {spec.name: LoadedFunction(spec) for spec in functions}
        if len(self._functions) < len(functions):
            raise ValueError(f"reward functions have the same name: {', '.join(spec.name for spec in functions)}")
        if (
            min(
                limits.workers,
                limits.max_concurrent,
                *(1 if spec.batch_size is None else spec.batch_size for spec in functions),
            )
            < 1
        ):
            raise ValueError("workers, max_concurrent and batch_size must be at least 1")
        self.unavailable: tuple[str, ...] = ()
        """Protections that the system does not offer (`isolate`). Known after the start of the first process."""

        self._lock = threading.Lock()
        self._inbox: deque[QueuedRow] = deque()
        self._is_closed = False
        self._warm_ups: list[threading.Event] = []
        """Calls of `start` whose processes are not ready."""
        self._probes: list[threading.Event] = []
        """Calls of `find_missing_protections` that wait for a process."""
        self._thread: threading.Thread | None = None
        self._events = ProcessEvents(self._read_inbox)
        # The thread owns everything below.
        self._launcher: Launcher | None = None
        self._processes: dict[int, ProcessState] = {}
        self._numbers = itertools.count()
        self._order = itertools.count()
        self._front = itertools.count(-1, -1)
        self._results = Results()
        self._num_start_failures = 0
        self._has_reported = False
        """Whether a process has reported the protections that it lacks."""

    def submit(self, name: str, row: Mapping[str, Any]) -> "Future[Outcome]":
        """Returns the future outcome of a row. `row` has the columns of the row, of which the function receives those
        that it accepts. Does not block.
        """
        future: Future[Outcome] = Future()
        entry = QueuedRow(self._functions[name], row, future)
        with self._lock:
            if self._is_closed:
                raise RuntimeError("the pool of reward functions is closed")
            self._inbox.append(entry)
            self._notify()
        return future

    def start(self) -> threading.Event:
        """Starts all processes and imports all functions in each. Does not wait.

        The result is set when that is done or has failed.
        """
        done = threading.Event()
        with self._lock:
            if self._is_closed:
                raise RuntimeError("the pool of reward functions is closed")
            self._warm_ups.append(done)
            self._notify()
        return done

    def find_missing_protections(self) -> tuple[str, ...]:
        """Returns the protections that the system does not offer (`isolate`). Starts a process if none has started, and
        blocks until it is ready. Returns an empty tuple if no process can start.
        """
        done = threading.Event()
        with self._lock:
            if self._is_closed:
                raise RuntimeError("the pool of reward functions is closed")
            self._probes.append(done)
            self._notify()
        done.wait()
        return self.unavailable

    def close(self) -> None:
        """Ends all processes and the thread. Rows without an outcome fail. Can be called again."""
        with self._lock:
            was_closed, self._is_closed = self._is_closed, True
            if self._thread is not None and not was_closed:
                self._notify()
        if self._thread is not None:
            self._thread.join()
        self._events.close()

    def __enter__(self) -> "ScoringPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _notify(self) -> None:
        """Wakes the thread, and starts it for the first row."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="rewards", daemon=True)
            self._thread.start()
        self._events.wake()

    # The thread.

    def _run(self) -> None:
        try:
            while not self._is_closed:
                self._events.handle(self._wait_s())
                self._check_deadlines()
                self._dispatch()
                self._results.set(wait=any(process.has_more_results for process in self._processes.values()))
        finally:
            self._is_closed = True
            self._end()

    def _end(self) -> None:
        """Ends all processes and fails the remaining rows."""
        in_flight = []
        for process in list(self._processes.values()):
            in_flight += [row for call in process.calls.values() for row in call.rows]
            self._remove(process)
        if self._launcher is not None:
            self._launcher.close()
        with self._lock:
            queued = [row for function in self._functions.values() for _, row in function.queue]
            rows = [*in_flight, *self._inbox, *queued]
            self._inbox.clear()
            for done in (*self._warm_ups, *self._probes):
                done.set()
        for row in rows:
            self._results.add(row, Outcome(None, "closed", "the pool of reward functions was closed"))
        self._results.set()

    def _read_inbox(self) -> None:
        with self._lock:
            self._events.accept_wake()
            rows, self._inbox = self._inbox, deque()
        for row in rows:
            row.function.queue.append((next(self._order), row))

    def _wait_s(self) -> float | None:
        times = [
            time_s
            for process in self._processes.values()
            for time_s in (process.kill_s, process.load_deadline_s, process.call_deadline_s, process.reclaim_s)
        ]
        first_s = min(times, default=math.inf)
        return None if math.isinf(first_s) else max(0.0, first_s - time.monotonic())

    def _check_deadlines(self) -> None:
        now_s = time.monotonic()
        for process in list(self._processes.values()):
            if now_s >= process.kill_s:
                process.kill_s = math.inf
                process.process.kill()
            elif process.ending is None and (now_s >= process.load_deadline_s or now_s >= process.call_deadline_s):
                process.ending = ("timeout", "")
                process.load_deadline_s, process.kill_s = math.inf, now_s + _STACKS_S
                process.process.request_stacks()
            elif now_s >= process.reclaim_s:
                try:
                    self._queue_first(process.reclaim())
                except ValueError as error:
                    self._end_corrupt(process, error)

    # Events of a process.

    def _start_process(self) -> bool:
        """Starts a process. Returns False if the launcher cannot start one."""
        limits = self._limits
        settings = {
            "memory_mb": limits.memory_mb, "allow_network": limits.allow_network, "timeout_s": limits.timeout_s,
        }  # fmt: skip
        if self._launcher is None:
            variables = environment_of(os.environ, allow_network=limits.allow_network, also=limits.environment)
            self._launcher = Launcher(variables)
        try:
            process = ProcessState(ScoringProcess(next(self._numbers), self._launcher, settings))
        except ConnectionError:  # killed, for example because the memory was exhausted
            self._launcher.close()
            self._launcher = None
            self._count_start_failure("the launcher of the processes has ended")
            with self._lock:
                self._events.wake()  # otherwise, no event may follow that starts another process for the waiting rows
            return False
        self._processes[process.process.number] = process
        self._events.add(
            process.process,
            on_channel=lambda mask: self._on_channel(process, mask),
            on_stacks=lambda _: self._on_stacks(process),
            on_guard=lambda _: self._on_guard(process),
        )
        return True

    def _on_stacks(self, process: ProcessState) -> None:
        self._events.remove_unless(process.process.stacks, process.process.read_stacks())
        if process.kill_s < math.inf:
            process.kill_s = min(process.kill_s, time.monotonic() + 0.05)

    def _on_channel(self, process: ProcessState, mask: int) -> None:
        if mask & selectors.EVENT_WRITE:
            process.process.write()
            process.delay_reclaim()
            self._events.watch_writes(process.process)
        if mask & selectors.EVENT_READ:
            self._read_messages(process)

    def _read_messages(self, process: ProcessState) -> None:
        try:
            for message in process.process.read_messages():
                if process.ending is None:
                    self._handle(process, message)
        except EOFError:
            self._events.remove_unless(process.process.channel, False)
            if process.ending is None:  # usually its end, which the guard reports next
                process.ending = ("exited", "")
                process.kill_s = time.monotonic() + _STACKS_S
        except (FrameError, LookupError, TypeError, ValueError) as error:
            self._events.remove_unless(process.process.channel, False)
            if process.ending is None:
                self._end_corrupt(process, error)

    def _end_corrupt(self, process: ProcessState, error: Exception) -> None:
        process.ending = ("corrupt", f"wrote invalid data to a descriptor of the pool ({error})")
        process.process.kill()

    def _handle(self, process: ProcessState, message: Mapping[str, Any]) -> None:  # Any: unchecked values of JSON
        """Handles a message. Raises LookupError, TypeError or ValueError if it is not valid."""
        kind = message["kind"]
        if kind == "ready" and not process.is_ready:
            process.is_ready, self._num_start_failures = True, 0
            self.unavailable, self._has_reported = tuple(map(str, message["unavailable"])), True
        elif kind in ("loaded", "not_loaded") and process.loading is not None:
            function = process.loading
            if message["name"] != function.spec.name:
                raise ValueError("unexpected name")
            if kind == "not_loaded":
                self._end_load(process)
                self._reject(function, "not_loaded", str(message["message"]))
                return
            names = [str(name) for name in message["names"]]
            function.names, function.accepts_all = names, bool(message["accepts_all"])
            function.is_async = bool(message["is_async"])
            self._end_load(process)
            process.loaded.add(function.spec.name)
        elif kind == "result":
            self._handle_result(process, message)
        elif kind == "stuck":
            process.is_retiring = True
        else:
            raise ValueError("unexpected message")
        if process.is_retiring and not process.calls:
            process.ending = ("closed", "")
            process.process.kill()

    def _handle_result(self, process: ProcessState, message: Mapping[str, Any]) -> None:
        call = process.calls[message["id"]]
        function = call.rows[0].function
        if function.is_sequential:
            self._handle_row(process, message, call)
            return
        has_several, kind = len(call.rows) > 1, function.spec.kind
        if "outcomes" in message:
            outcomes = [parse_outcome(outcome, kind) for outcome in message["outcomes"]]
            if len(outcomes) != len(call.rows):
                raise ValueError("a wrong number of outcomes")
        else:
            outcomes = [parse_outcome(message, kind)] * len(call.rows)
            has_several = has_several or (bool(message.get("is_late")) and not process.is_exclusive)
        del process.calls[message["id"]]
        process.is_exclusive = process.is_exclusive and bool(process.calls)
        seconds = time.monotonic() - call.start_s
        if "outcomes" not in message and has_several:
            self._retry_alone(call.rows)
            return
        for row, outcome in zip(call.rows, outcomes, strict=True):
            self._end_attempt(process, row, replace(outcome, seconds=seconds))
            if outcome.failure == "memory":  # libraries may be in an invalid state
                process.is_retiring = True

    def _handle_row(self, process: ProcessState, message: Mapping[str, Any], call: CallInFlight) -> None:
        """Handles the outcome of the running row of a sequential function."""
        (outcome,) = message.get("outcomes", (message,))
        continues = bool(message["continues"])
        if continues and len(call.rows) == 1:
            raise ValueError("an unexpected row")
        now_s = time.monotonic()
        seconds = now_s - call.start_s
        outcome = replace(parse_outcome(outcome, call.rows[0].function.spec.kind), seconds=seconds)
        if not continues:  # the process begins none of the other rows
            process.process.reclaim_rows(len(call.rows) - 1)
        row = call.rows.pop(0)
        if continues:
            call.start_s, call.deadline_s = now_s, call.deadline_s + seconds
            process.process.allow_output()
            self._events.watch_output(process.process)
        else:
            del process.calls[message["id"]]
            if call.rows:
                self._queue_first(call.rows)
            elif now_s < call.reclaim_s < math.inf:
                row.function.rows_per_message = min(2 * row.function.rows_per_message, _MAX_ROWS_PER_MESSAGE)
        self._end_attempt(process, row, outcome)
        process.is_retiring |= outcome.failure == "memory"  # libraries may be in an invalid state

    def _end_attempt(self, process: ProcessState, row: QueuedRow, outcome: Outcome) -> None:
        """Sets the outcome of a row, or queues the row for another attempt."""
        row.num_attempts += 1
        if outcome.failure is not None and row.num_attempts <= self._limits.retries:
            row.failed_in = process.process.number
            row.function.queue.appendleft((next(self._front), row))
            return
        self._results.add(row, replace(outcome, num_attempts=row.num_attempts))

    def _queue_first(self, rows: Sequence[QueuedRow]) -> None:
        """Queues rows, in their order, before all others."""
        for row in reversed(rows):
            row.function.queue.appendleft((next(self._front), row))

    def _retry_alone(self, rows: Iterable[QueuedRow]) -> None:
        """Queues rows whose common call or process failed. The row that caused it then fails alone."""
        for row in rows:
            row.is_alone = True
            row.function.queue.appendleft((next(self._front), row))

    def _end_load(self, process: ProcessState) -> None:
        assert process.loading is not None
        process.loading.num_loading -= 1
        process.loading, process.load_deadline_s = None, math.inf

    def _reject(self, function: LoadedFunction, kind: Failure, message: str) -> None:
        """Fails all rows of a function that cannot be loaded."""
        function.error = function.error or Outcome(None, kind, message, num_attempts=0)

    def _on_guard(self, process: ProcessState) -> None:
        """Handles the end of a process. Results that it has sent before are valid."""
        own = process.process
        if own.read_guard():
            return
        if process.ending is None or process.ending == ("exited", ""):
            process.ending = None
            while process.ending is None and self._events.key_of(own.channel) is not None and own.has_data():
                self._read_messages(process)
        calls, output = list(process.calls.values()), own.last_output()
        kind, text = self._describe_end(process)
        self._remove(process)
        if process.loading is not None:
            is_slow = kind == "timeout"
            self._reject(process.loading, kind if is_slow else "not_loaded", f"{text} during the import{output}")
            self._end_load(process)
        elif not process.is_ready:
            self._count_start_failure(output)
        rows = [row for call in calls for row in call.rows]
        if rows and rows[0].function.is_sequential:
            self._queue_first(rows[1:])  # they have not begun
            rows = rows[:1]
        if len(rows) == 1:
            seconds = time.monotonic() - calls[0].start_s
            self._end_attempt(process, rows[0], Outcome(None, kind, f"{text}{output}", seconds))
        else:
            self._retry_alone(rows)

    def _describe_end(self, process: ProcessState) -> tuple[Failure, str]:
        """Returns the kind and the description of the failure of the calls in flight, or of the import."""
        own = process.process
        functions = [call.rows[0].function for call in process.calls.values()]
        title = next((function.spec.title for function in [process.loading, *functions] if function is not None), "")
        kind, text = process.ending or ("exited", "")
        if kind == "timeout":
            limit_s = self._limits.timeout_s if process.loading is None else self._limits.load_timeout_s
            return kind, f"{title} did not return within {limit_s:g} s{own.location()}"
        if kind == "exited":
            return describe_end(title, own.status())
        return kind, f"{title} {text}"

    def _count_start_failure(self, output: str) -> None:
        self._num_start_failures += 1
        if self._num_start_failures >= _MAX_START_FAILURES:
            for function in self._functions.values():
                self._reject(function, "not_loaded", f"processes of reward functions cannot start{output}")

    def _remove(self, process: ProcessState) -> None:
        self._events.remove(process.process)
        del self._processes[process.process.number]

    # Distribution of rows.

    def _dispatch(self) -> None:
        """Gives waiting rows to processes, oldest rows first, and starts processes that they need."""
        for function in self._functions.values():
            if function.error is not None:
                while function.queue:
                    self._results.add(function.queue.popleft()[1], function.error)
        if self._warm_ups:
            self._continue_warm_up()
        self._continue_probes()
        waiting = sorted((f for f in self._functions.values() if f.queue), key=lambda f: f.queue[0][0])
        demand = 0
        for function in waiting:
            while function.queue and self._dispatch_one(function):
                pass
            demand += math.ceil(len(function.queue) / function.capacity(self._limits))
        alive = [p for p in self._processes.values() if p.ending is None and not p.is_retiring]
        num_coming = sum(not p.is_ready or p.loading is not None for p in alive)
        for _ in range(min(demand - num_coming, self._limits.workers - len(alive))):
            if not self._start_process():
                break
        if demand and alive and all(p.is_idle for p in alive) and len(alive) >= self._limits.workers:
            # Each waiting row has failed in the only process, so it needs another one.
            alive[0].ending = ("closed", "")
            alive[0].process.kill()

    def _continue_warm_up(self) -> None:
        """Starts processes and imports until each process has all functions."""
        if all(function.error is not None for function in self._functions.values()):
            alive = []
        else:
            while len(self._processes) < self._limits.workers and self._start_process():
                pass
            alive = list(self._processes.values())
        functions = [function for function in self._functions.values() if function.error is None]
        for process in alive:
            missing = [function for function in functions if function.spec.name not in process.loaded]
            if missing and process.is_idle:
                self._load(process, missing[0])
        if all(p.is_ready and all(f.spec.name in p.loaded for f in functions) for p in alive):
            with self._lock:
                for done in self._warm_ups:
                    done.set()
                self._warm_ups.clear()

    def _continue_probes(self) -> None:
        """Starts a process that reports the protections that it lacks, and ends the probes after its report."""
        if not self._probes:
            return
        if not self._has_reported and self._num_start_failures < _MAX_START_FAILURES:
            if not self._processes:
                self._start_process()
            return
        with self._lock:
            for done in self._probes:
                done.set()
            self._probes.clear()

    def _dispatch_one(self, function: LoadedFunction) -> bool:
        """Sends one call, or starts one import. Returns False if no process can take a row of the function."""
        name = function.spec.name
        idle = [process for process in self._processes.values() if process.is_idle]
        with_function = [process for process in idle if name in process.loaded]
        if function.is_async:
            with_function = [p for p in self._processes.values() if self._can_add(p, function)] + with_function
        for process in with_function:
            if rows := self._take(function, process, len(with_function)):
                self._call(process, function, rows)
                return True
        if with_function:
            return False
        others = [process for process in idle if name not in process.loaded]
        needed = math.ceil(len(function.queue) / function.capacity(self._limits))
        if others and function.num_loading < needed:
            self._load(others[0], function)
            return True
        return False

    def _can_add(self, process: ProcessState, function: LoadedFunction) -> bool:
        """Returns whether a process with async calls in flight accepts a call of this function."""
        if not (process.is_usable and process.is_async and process.calls) or function.spec.name not in process.loaded:
            return False
        if process.is_exclusive or len(process.calls) >= self._limits.max_concurrent:
            return False
        has_others = any(other.queue and other is not function for other in self._functions.values())
        return not has_others or time.monotonic() - process.session_start_s < _SESSION_S

    def _take(self, function: LoadedFunction, process: ProcessState, num_idle: int) -> list[QueuedRow]:
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
            if row.failed_in == process.process.number or (row.is_alone and (rows or process.calls)):
                skipped.append(entry)
                continue
            rows.append(row)
            if row.is_alone or len(rows) == size:
                break
        queue.extendleft(reversed(skipped))
        return rows

    def _load(self, process: ProcessState, function: LoadedFunction) -> None:
        spec = function.spec
        process.loading = function
        function.num_loading += 1
        if self._limits.load_timeout_s is not None:
            process.load_deadline_s = time.monotonic() + self._limits.load_timeout_s
        message = {"kind": "load", "name": spec.name, "function": spec.function, "options": dict(spec.options)}
        message |= {"is_batched": spec.batch_size is not None, "function_kind": spec.kind}
        self._send(process, encode_frame(message))

    def _call(self, process: ProcessState, function: LoadedFunction, rows: list[QueuedRow]) -> None:
        assert function.names is not None
        start_s = time.monotonic()
        rows, values = self._select_sendable(function, rows)
        if not rows:
            return
        timeout_s = math.inf if self._limits.timeout_s is None else self._limits.timeout_s
        grace_s = _ASYNC_GRACE_S if function.is_async else 0.0
        if not process.calls:
            process.session_start_s, process.is_async = start_s, function.is_async
        process.is_exclusive = rows[0].is_alone
        number = next(self._numbers)
        call = process.calls[number] = CallInFlight(rows, start_s, start_s + timeout_s + grace_s, len(rows))
        try:
            process.process.start_call(len(rows) - 1 if function.is_sequential else 0)
        except ValueError as error:
            self._end_corrupt(process, error)
            return
        self._events.watch_output(process.process)
        self._send(process, encode_frame({"kind": "call", "id": number, "name": function.spec.name, "rows": values}))
        if function.is_sequential and not process.is_exclusive:
            call.reclaim_s = time.monotonic() + MESSAGE_S  # rows take time to encode and to write

    def _select_sendable(
        self, function: LoadedFunction, rows: Sequence[QueuedRow]
    ) -> tuple[list[QueuedRow], list[dict[str, Any]]]:
        """Returns the rows and the values of the columns that the function receives. Rows without JSON fail."""
        assert function.names is not None
        sendable, values_of_rows = [], []
        for row in rows:
            names = select_columns(function.names, function.accepts_all, row.columns)
            values = {name: row.columns[name] for name in names if name not in function.spec.options}
            problem = next((text for name, value in values.items() if (text := find_problem(name, value))), None)
            if problem is None:
                sendable.append(row)
                values_of_rows.append(values)
            else:
                text = f"{function.spec.title} cannot receive {problem}"
                self._results.add(row, Outcome(None, "invalid", text, num_attempts=0))
        return sendable, values_of_rows

    def _send(self, process: ProcessState, frame: bytes) -> None:
        process.process.send(frame)
        self._events.watch_writes(process.process)
