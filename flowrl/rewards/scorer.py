"""The main loop of a process that calls reward functions: reads calls from a socket and sends scores back."""

import asyncio
import contextlib
import inspect
import json
import math
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn, SupportsFloat

from flowrl.config.user_errors import convert_errors
from flowrl.rewards.reward_function import (
    MAX_SCORE,
    SHORT_REPR,
    FunctionKind,
    RewardError,
    RewardFunction,
    accepted_names,
    describe_failure,
    is_async,
    load_answer_function,
    load_reward_function,
    make_error,
    show_value,
    shown_inputs,
)
from flowrl.user_code.guard import CALL_START, ProcessContext

_MAX_MESSAGE = 4000
"""Characters of an error message that is sent."""

_LATE_S = 0.2
"""A timer of an async call that is this late shows that another call has blocked the event loop."""

_CANCEL_S = 1.0
"""Time for an async call to end after its cancellation."""

_ASYNCIO = os.path.dirname(asyncio.__file__)

Row = Mapping[str, Any]  # Any: values of JSON


def score_row(function: RewardFunction, name: str, row: Row) -> float:
    """Returns the score of one row, whose columns are the keyword arguments of the function `name`.

    Awaits the result of an async function in a new event loop. Raises RewardError if the function raises an exception
    or does not return a finite number.
    """
    with _as_reward_error(name, row):
        value = function(**row)
        if inspect.iscoroutine(value):
            value = asyncio.run(value)
    return check_score(value, name, row)


async def score_row_async(function: RewardFunction, name: str, row: Row) -> float:
    """Returns the score of one row by an async function, like `score_row`, in the running event loop."""
    with _as_reward_error(name, row):
        value = await function(**row)
    return check_score(value, name, row)


def score_batch(function: RewardFunction, name: str, rows: Sequence[Row]) -> list[float | RewardError]:
    """Returns the scores of rows by one call of a batched function, which receives one list per column.

    A column that some rows lack contains None for these rows. An invalid score is returned as its RewardError. Raises
    RewardError if the function raises an exception or does not return one value per row.
    """
    columns = {column: [row.get(column) for row in rows] for row in rows for column in row}
    with _as_reward_error(name, rows[0] if len(rows) == 1 else {}):
        values = function(**columns)
        if inspect.iscoroutine(values):
            values = asyncio.run(values)
    values = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(values, list | tuple) or len(values) != len(rows):
        shown = f"{len(values)} values" if isinstance(values, list | tuple) else show_value(values)
        raise make_error("invalid", f"reward function {name} returned {shown}: return a list of {len(rows)} numbers")
    scores: list[float | RewardError] = []
    for value, row in zip(values, rows, strict=True):
        try:
            scores.append(check_score(value, name, row))
        except RewardError as error:
            scores.append(error)
    return scores


def _as_reward_error(name: str, row: Row, kind: FunctionKind = "reward function") -> AbstractContextManager[None]:
    """Converts exceptions of the block, which calls a function of the user, by `describe_failure`."""
    return convert_errors(lambda error: describe_failure(error, name, row, kind))


def check_score(value: object, name: str, row: Row) -> float:
    """Returns the value as a float. Raises RewardError if it is not a finite number of at most `MAX_SCORE`."""
    shown = f"reward function {name} returned a value whose __float__"
    with convert_errors(lambda error: make_error("invalid", f"{shown} raised {type(error).__name__}")):
        score = _finite_number(value)
    if score is None:
        text = f"reward function {name} returned {show_value(value)}{shown_inputs(row)}; return a finite number"
        raise make_error("invalid", text)
    if abs(score) > MAX_SCORE:
        raise make_error(
            "invalid",
            f"reward function {name} returned {score:g}{shown_inputs(row)}, and the gradient would overflow: return a "
            f"number from -{MAX_SCORE:g} to {MAX_SCORE:g}",
        )
    return score


def _finite_number(value: object) -> float | None:
    """Returns a value with a finite `__float__`, such as a NumPy scalar or a tensor of one element; otherwise None."""
    if not isinstance(value, SupportsFloat):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # for example an array of two elements
        return None
    return number if math.isfinite(number) else None


def extract_answer(function: Callable[[str], object], name: str, response: str) -> str | None:
    """Returns the final answer of a response. An answer without visible characters is None.

    Raises RewardError if the function raises an exception or returns a value that is neither text nor None.
    """
    with _as_reward_error(name, {"response": response}, "answer function"):
        answer = function(response)
    if answer is not None and not isinstance(answer, str):
        raise make_error(
            "invalid",
            f"answer function {name} returned {show_value(answer)} for response {SHORT_REPR.repr(response)}: return "
            f"text, or None",
        )
    return (answer or "").strip() or None


class _Function:
    """A function that the process has loaded."""

    def __init__(self, message: Mapping[str, Any]) -> None:  # Any: values of JSON
        """Imports the function of the message. Raises RewardError if that fails, or its signature is wrong."""
        self.name: str = message["function"]
        """Import name, which messages show."""
        self.kind: FunctionKind = message["function_kind"]
        self.is_batched: bool = message["is_batched"]
        if self.kind == "answer function":
            self.call: RewardFunction = load_answer_function(self.name)
            self.columns, self.accepts_all = ["response"], False
        else:
            self.call = load_reward_function(self.name, message["options"])
            self.columns, self.accepts_all = accepted_names(self.call)
        self.is_async = not self.is_batched and is_async(self.call)

    def as_reward_error(self, row: Row) -> AbstractContextManager[None]:
        """Converts all exceptions of user code, also SystemExit, which would end the process or the event loop."""

        def describe(error: BaseException) -> RewardError:
            return describe_failure(error, self.name, row, self.kind)

        return convert_errors(describe, kinds=BaseException, keep=RewardError)

    def compute(self, rows: Sequence[Row]) -> list[dict[str, Any]]:
        if self.kind == "answer function":
            return [{"answer": extract_answer(self.call, self.name, rows[0]["response"])}]
        if self.is_batched:
            return [_outcome(score) for score in score_batch(self.call, self.name, rows)]
        return [_outcome(score_row(self.call, self.name, rows[0]))]


class Scorer:
    """Calls reward functions in this process, one call at a time, or many calls of async functions."""

    def __init__(self, context: ProcessContext) -> None:
        self._context = context
        self._timeout_s: float | None = context.settings["timeout_s"]
        self._functions: dict[str, _Function] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._deferred: deque[Mapping[str, Any]] = deque()
        """Messages received after the first synchronous call, which wait until all async calls have ended."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._process_id = os.getpid()
        self._umask = os.umask(0)
        os.umask(self._umask)
        self._folder, self._recursion_limit = os.getcwd(), sys.getrecursionlimit()

    def run(self) -> NoReturn:
        """Handles messages. Raises EOFError when the pool closes the connection."""
        while True:
            self._handle(self._deferred.popleft() if self._deferred else self._receive())

    def _receive(self) -> Mapping[str, Any]:
        """Waits for a message. Raises EOFError if the pool has closed the connection."""
        return json.loads(self._context.channel.recv_bytes())

    def _handle(self, message: Mapping[str, Any]) -> None:
        if message["kind"] == "load":
            self._load(message)
        elif self._is_async_call(message):
            self._loop = self._loop or asyncio.new_event_loop()
            self._loop.run_until_complete(self._serve(message))
        else:
            self._score(message["id"], self._functions[message["name"]], message["rows"])

    def _is_async_call(self, message: Mapping[str, Any]) -> bool:
        return message["kind"] == "call" and self._functions[message["name"]].is_async

    def _load(self, message: Mapping[str, Any]) -> None:
        name = message["name"]

        def describe(error: BaseException) -> RewardError:
            return RewardError(f"cannot import {message['function']} ({type(error).__name__})")

        try:
            with convert_errors(describe, kinds=BaseException, keep=RewardError):
                function = self._functions[name] = _Function(message)
        except RewardError as error:
            self._send({"kind": "not_loaded", "name": name, "message": str(error)[:_MAX_MESSAGE]})
        else:
            columns = {"names": function.columns, "accepts_all": function.accepts_all}
            self._send({"kind": "loaded", "name": name, "is_async": function.is_async, **columns})

    def _score(self, number: int, function: _Function, rows: Sequence[Row]) -> None:
        """Scores the rows of a message: by one call of a batched function, otherwise one after the other.

        The pool can reclaim rows that have not begun. `continues` reports whether the next row has begun.
        """
        if function.is_batched:
            self._send({"kind": "result", "id": number, **self._call(function, rows)})
            return
        for i, row in enumerate(rows):
            result = self._call(function, [row])
            # After a failure for lack of memory, libraries may be in an invalid state.
            continues = i + 1 < len(rows) and result.get("failure") != "memory" and self._claim_row()
            self._send({"kind": "result", "id": number, "continues": continues, **result})
            if not continues:
                return

    def _claim_row(self) -> bool:
        """Begins the next row of the message. Returns False if the pool has reclaimed it."""
        try:
            return bool(os.read(self._context.rows, 1))
        except OSError:  # also if a function has closed the descriptor
            return False

    def _call(self, function: _Function, rows: Sequence[Row]) -> dict[str, Any]:
        """Scores the rows by one call, and undoes changes of the process state that later calls would see."""
        with contextlib.suppress(OSError):  # a function has closed the descriptor
            os.write(self._context.output, CALL_START)
        try:
            with function.as_reward_error(rows[0]):
                return {"outcomes": function.compute(rows)}
        except RewardError as error:
            return _outcome(error)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            sys.setrecursionlimit(self._recursion_limit)
            os.umask(self._umask)
            with contextlib.suppress(OSError):  # the folder was removed
                os.chdir(self._folder)

    async def _serve(self, first: Mapping[str, Any]) -> None:
        """Runs async calls concurrently, and reads further calls, until all calls have ended."""
        loop = asyncio.get_running_loop()
        finished = asyncio.Event()

        def start(message: Mapping[str, Any]) -> None:
            # The pool sends other messages as soon as it has the last result, which is before the calls' tasks end.
            if self._deferred or not self._is_async_call(message):
                self._deferred.append(message)
                return
            finished.clear()
            call = self._call_async(message["id"], self._functions[message["name"]], message["rows"][0])
            task = asyncio.create_task(call)
            self._tasks.add(task)
            task.add_done_callback(finish)

        def finish(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if not self._tasks:
                finished.set()

        def read() -> None:
            try:
                start(self._receive())
            except EOFError:
                os._exit(0)

        start(first)
        descriptor = self._context.channel.fileno()
        loop.add_reader(descriptor, read)
        try:
            while self._tasks:
                await finished.wait()
        finally:
            loop.remove_reader(descriptor)

    async def _call_async(self, number: int, function: _Function, row: Row) -> None:
        async def call() -> dict[str, Any]:
            try:
                with function.as_reward_error(row):
                    return {"outcomes": [_outcome(await score_row_async(function.call, function.name, row))]}
            except RewardError as error:
                return _outcome(error)

        loop = asyncio.get_running_loop()
        start_s = loop.time()
        task = asyncio.create_task(call())
        await asyncio.wait({task}, timeout=self._timeout_s)
        if task.done():
            self._send({"kind": "result", "id": number, **task.result()})
            return
        assert self._timeout_s is not None
        is_late = loop.time() - start_s - self._timeout_s > _LATE_S
        text = f"reward function {function.name} did not return within {self._timeout_s:g} s{_location(task)}"
        self._send({"kind": "result", "id": number, "failure": "timeout", "message": text, "is_late": is_late})
        task.cancel()
        await asyncio.wait({task}, timeout=_CANCEL_S)
        if not task.done():
            self._send({"kind": "stuck"})

    def _send(self, message: Mapping[str, Any]) -> None:
        if os.getpid() != self._process_id:  # a child that the function forked returned instead of exiting
            os._exit(0)
        try:
            self._context.channel.send_bytes(json.dumps(message).encode())
        except OSError:  # the function has closed the descriptor
            os._exit(1)


def _outcome(score: float | RewardError) -> dict[str, Any]:
    if isinstance(score, RewardError):
        return {"failure": score.kind, "message": str(score)[:_MAX_MESSAGE]}
    return {"score": score}


def _location(task: "asyncio.Task[Any]") -> str:
    """Returns the innermost frame of an async call that waits, apart from frames of asyncio."""
    coroutine, location = task.get_coro(), ""
    while (frame := getattr(coroutine, "cr_frame", None)) is not None:
        code = frame.f_code
        if not code.co_filename.startswith(_ASYNCIO):
            location = f"; at the timeout it was in {code.co_name} ({code.co_filename}, line {frame.f_lineno})"
        coroutine = getattr(coroutine, "cr_await", None)
    return location


def serve(context: ProcessContext) -> NoReturn:
    """Runs the main loop of the process."""
    Scorer(context).run()
