"""The main loop of a process that calls reward functions: reads calls from a socket and sends scores back."""

import asyncio
import contextlib
import faulthandler
import os
import signal
import socket
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, NoReturn

from flowrl.config.user_errors import convert_errors
from flowrl.rewards.processes.frames import FrameReader, encode_frame
from flowrl.rewards.reward_function import (
    FunctionKind,
    RewardError,
    RewardFunction,
    accepted_names,
    describe_failure,
    extract_answer,
    is_async,
    load_answer_function,
    load_reward_function,
    score_batch,
    score_row,
    score_row_async,
)

STACK_SIGNAL = signal.SIGRTMIN + 9
"""Signal that makes the process write the stacks of its threads. The C library reserves the first few."""

CALL_START = b"\x1e"
"""Separates the output of a call from earlier output: the record separator of ASCII."""


class ProcessContext(NamedTuple):
    """What a process gets from the launcher."""

    channel: socket.socket
    """Socket of its messages."""
    output: int
    """Descriptor for printed text."""
    stacks: int
    """Descriptor for the stacks that `STACK_SIGNAL` requests."""
    rows: int
    """Descriptor of the pipe of rows that it may score."""
    settings: Mapping[str, Any]  # Any: values of JSON
    unavailable: Sequence[str]
    """Protections that the system does not offer."""


_MAX_CALL_BYTES = 1 << 30
_MAX_MESSAGE = 4000
"""Characters of an error message that is sent."""

_LATE_S = 0.2
"""A timer of an async call that is this late shows that another call has blocked the event loop."""

_CANCEL_S = 1.0
"""Time for an async call to end after its cancellation."""

_ASYNCIO = os.path.dirname(asyncio.__file__)

Row = dict[str, Any]  # Any: values of JSON


class Scorer:
    """Calls reward functions in this process, one call at a time, or many calls of async functions."""

    def __init__(self, channel: socket.socket, output: int, rows: int, timeout_s: float | None) -> None:
        """`output` takes printed text. `rows` is a pipe with a byte per row that the process may begin."""
        self._channel, self._output, self._rows = channel, output, rows
        self._timeout_s = timeout_s
        self._reader = FrameReader(_MAX_CALL_BYTES)
        self._functions: dict[str, RewardFunction] = {}
        self._import_names: dict[str, str] = {}
        """Name of a function in the pool -> `module:function`, which messages show."""
        self._batched: set[str] = set()
        self._kinds: dict[str, FunctionKind] = {}
        """Name of a function in the pool -> its kind."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._deferred: deque[Mapping[str, Any]] = deque()
        """Messages that wait until all async calls have ended: the first that is not an async call, and later ones."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._process_id = os.getpid()
        self._umask = os.umask(0)
        os.umask(self._umask)
        self._folder, self._recursion_limit = os.getcwd(), sys.getrecursionlimit()

    def run(self) -> NoReturn:
        """Handles messages until the other side closes the socket."""
        while data := self._channel.recv(1 << 16):
            for message in self._reader.feed(data):
                self._handle(message)
                while self._deferred:
                    self._handle(self._deferred.popleft())
        os._exit(0)

    def _handle(self, message: Mapping[str, Any]) -> None:
        name = message["name"]
        if message["kind"] == "load":
            self._load(message)
        elif self._is_async_call(message):
            self._loop = self._loop or asyncio.new_event_loop()
            self._loop.run_until_complete(self._serve(message))
        else:
            self._score(message["id"], name, message["rows"])

    def _is_async_call(self, message: Mapping[str, Any]) -> bool:
        name = message["name"]
        return message["kind"] == "call" and name not in self._batched and is_async(self._functions[name])

    def _load(self, message: Mapping[str, Any]) -> None:
        name, function, is_batched = message["name"], message["function"], message["is_batched"]
        kind = self._kinds[name] = message["function_kind"]
        is_answer = kind == "answer function"

        def describe(error: BaseException) -> RewardError:
            return RewardError(f"cannot import {function} ({type(error).__name__})")

        try:
            with convert_errors(describe, kinds=BaseException, keep=RewardError):
                loaded = (
                    load_answer_function(function) if is_answer else load_reward_function(function, message["options"])
                )
        except RewardError as error:
            self._send({"kind": "not_loaded", "name": name, "message": str(error)[:_MAX_MESSAGE]})
        else:
            self._functions[name], self._import_names[name] = loaded, function
            if is_batched:
                self._batched.add(name)
            names, accepts_all = (["response"], False) if is_answer else accepted_names(loaded)
            self._send({
                "kind": "loaded", "name": name, "is_async": not is_batched and is_async(loaded),
                "names": names, "accepts_all": accepts_all,
            })  # fmt: skip

    def _score(self, number: int, name: str, rows: Sequence[Row]) -> None:
        """Scores the rows of a message: by one call of a batched function, otherwise one after the other.

        The pool can reclaim rows that have not begun. `continues` reports whether the next row has begun.
        """
        if name in self._batched:
            self._send({"kind": "result", "id": number, **self._call(name, rows)})
            return
        for i, row in enumerate(rows):
            result = self._call(name, [row])
            # After a failure for lack of memory, libraries may be in an invalid state.
            continues = i + 1 < len(rows) and result.get("failure") != "memory" and self._claim_row()
            self._send({"kind": "result", "id": number, "continues": continues, **result})
            if not continues:
                return

    def _claim_row(self) -> bool:
        """Begins the next row of the message. Returns False if the pool has reclaimed it."""
        try:
            return bool(os.read(self._rows, 1))
        except OSError:  # also if a function has closed the descriptor
            return False

    def _call(self, name: str, rows: Sequence[Row]) -> dict[str, Any]:
        """Scores the rows by one call, and undoes changes of the process state that later calls would see."""
        function = self._functions[name]
        with contextlib.suppress(OSError):  # a function has closed the descriptor
            os.write(self._output, CALL_START)
        try:
            with self._as_reward_error(name, rows[0]):
                return {"outcomes": self._compute(function, name, rows)}
        except RewardError as error:
            return _outcome(error)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            sys.setrecursionlimit(self._recursion_limit)
            os.umask(self._umask)
            with contextlib.suppress(OSError):  # the folder was removed
                os.chdir(self._folder)

    def _as_reward_error(self, name: str, row: Row) -> AbstractContextManager[None]:
        """Converts all exceptions of user code, also SystemExit, which would end the process."""
        shown, kind = self._import_names[name], self._kinds[name]
        return convert_errors(
            lambda error: describe_failure(error, shown, row, kind), kinds=BaseException, keep=RewardError
        )

    def _compute(self, function: RewardFunction, name: str, rows: Sequence[Row]) -> list[dict[str, Any]]:
        shown = self._import_names[name]
        if self._kinds[name] == "answer function":
            return [{"answer": extract_answer(function, shown, rows[0]["response"])}]
        if name in self._batched:
            return [_outcome(score) for score in score_batch(function, shown, rows)]
        return [_outcome(score_row(function, shown, rows[0]))]

    async def _serve(self, first: Mapping[str, Any]) -> None:
        """Runs async calls concurrently, and reads further calls, until all calls have ended."""
        loop = asyncio.get_running_loop()
        finished = asyncio.Event()

        def start(message: Mapping[str, Any]) -> None:
            task = asyncio.create_task(self._call_async(message["id"], message["name"], message["rows"][0]))
            self._tasks.add(task)
            task.add_done_callback(finish)

        def finish(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if not self._tasks:
                finished.set()

        def start_all(data: bytes) -> None:
            for message in self._reader.feed(data):
                # The pool sends other messages as soon as it has the last result, which is before the calls' tasks end.
                if self._deferred or not self._is_async_call(message):
                    self._deferred.append(message)
                else:
                    finished.clear()
                    start(message)

        def read() -> None:
            data = self._channel.recv(1 << 16)
            if not data:
                os._exit(0)
            start_all(data)

        start(first)
        start_all(b"")  # calls that arrived together with the first
        loop.add_reader(self._channel.fileno(), read)
        try:
            while self._tasks:
                await finished.wait()
        finally:
            loop.remove_reader(self._channel.fileno())

    async def _call_async(self, number: int, name: str, row: Row) -> None:
        shown = self._import_names[name]

        async def call() -> dict[str, Any]:
            try:
                with self._as_reward_error(name, row):  # asyncio would end the loop at SystemExit
                    return {"outcomes": [_outcome(await score_row_async(self._functions[name], shown, row))]}
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
        text = f"reward function {shown} did not return within {self._timeout_s:g} s{_location(task)}"
        self._send({"kind": "result", "id": number, "failure": "timeout", "message": text, "is_late": is_late})
        task.cancel()
        await asyncio.wait({task}, timeout=_CANCEL_S)
        if not task.done():
            self._send({"kind": "stuck", "name": name})

    def _send(self, message: dict[str, Any]) -> None:
        if os.getpid() != self._process_id:  # a child that the function forked returned instead of exiting
            os._exit(0)
        try:
            self._channel.sendall(encode_frame(message))
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
    faulthandler.register(STACK_SIGNAL, file=context.stacks, all_threads=True)
    context.channel.sendall(encode_frame({"kind": "ready", "unavailable": list(context.unavailable)}))
    Scorer(context.channel, context.output, context.rows, context.settings["timeout_s"]).run()
