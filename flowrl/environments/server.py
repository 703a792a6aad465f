"""The main loop of a process of environments: runs the episodes of one host in an event loop."""

import asyncio
import contextvars
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

from flowrl.config import UserError, import_function
from flowrl.config.user_errors import convert_errors
from flowrl.environments.base import ModelResponse
from flowrl.environments.requests import InvalidValueError, check_observation, check_start, encode_body
from flowrl.environments.user_calls import (
    CountedOutput,
    OutputLimitError,
    call_user,
    count_output,
    describe_error,
    num_hanging,
    start_threads,
)
from flowrl.rewards.reward_function import is_async
from flowrl.user_code.guard import ProcessContext

_MAX_BATCH_BYTES = 1 << 22
_MAX_MESSAGE = 4000
"""Characters of an error message that is sent."""

_BEAT_S = 0.2
"""Interval in which the event loop reports that it is not blocked."""

_BLOCKED_S = 1.0
"""Time beyond the timeout after which the event loop counts as blocked."""

_NO_TIMEOUT_S = 1e9

_episode: "contextvars.ContextVar[int | None]" = contextvars.ContextVar("episode", default=None)


@dataclass(eq=False)
class _Episode:
    number: int
    environment: Any = None  # Any: an object of the user
    current: "asyncio.Task[Any] | None" = None
    """The current call."""

    is_in_thread: bool = False
    """Whether the current call is that of a sync method."""

    late: "asyncio.Task[Any] | None" = None
    """A call that has timed out and still runs. The next call waits for it."""

    num_timeouts: int = 0
    tasks: "set[asyncio.Task[Any]]" = field(default_factory=set)
    """Tasks that answer requests."""


class _TimedOut(Exception):
    """Raised if a call has not ended in time."""


class EnvironmentServer:
    """Runs the episodes of a process."""

    def __init__(self, context: ProcessContext) -> None:
        self._context, self._settings = context, context.settings
        self._timeout_s: float = context.settings["timeout_s"] or _NO_TIMEOUT_S
        self._episodes: dict[int, _Episode] = {}
        self._late: set[asyncio.Task[Any]] = set()
        self._replies: list[bytes] = []
        self._num_bytes = 0
        self._has_flush = False
        self._is_retiring = False
        self._factory: Callable[..., Any] = dict
        self._name, self._options = "", {}
        self._send_lock = threading.Lock()
        self._beat_s = time.monotonic()
        self._process_id = os.getpid()
        self._task_episodes: WeakKeyDictionary[asyncio.Task[Any], int | None] = WeakKeyDictionary()

    def load(self) -> None:
        """Reads the first message and imports the class."""
        message = json.loads(self._context.channel.recv_bytes())
        self._name, self._options = message["name"], message["options"]

        def describe(error: BaseException) -> UserError:
            return UserError(f"the environment {self._name} cannot be imported: {describe_error(error, 'the import')}")

        try:
            with convert_errors(describe, kinds=BaseException, keep=UserError):
                self._factory = import_function(self._name)
        except UserError as error:
            self._send({"kind": "not_loaded", "name": self._name, "message": str(error)[:_MAX_MESSAGE]})
        else:
            self._send({"kind": "loaded", "name": self._name})

    async def run(self) -> None:
        """Handles requests until the host closes the socket."""
        loop = asyncio.get_running_loop()
        loop.set_task_factory(self._make_task)
        start_threads(self._settings["threads"])
        loop.add_reader(self._context.channel.fileno(), self._read)
        if self._timeout_s < _NO_TIMEOUT_S:
            threading.Thread(target=self._watch_loop, args=(loop,), daemon=True).start()
        while True:
            self._beat_s = time.monotonic()
            await asyncio.sleep(_BEAT_S)

    def _make_task(self, loop: asyncio.AbstractEventLoop, coroutine: Any, **kwargs: Any) -> "asyncio.Task[Any]":
        """Creates a task that remembers its episode."""
        task = asyncio.Task(coroutine, loop=loop, **kwargs)
        self._task_episodes[task] = _episode.get()
        return task

    def _watch_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        """Reports the episode that blocks the event loop. Runs in a thread."""
        main = threading.main_thread().ident
        while True:
            time.sleep(_BEAT_S)
            if time.monotonic() - self._beat_s < self._timeout_s + _BLOCKED_S:
                continue
            task = asyncio.current_task(loop)
            episode = None if task is None else self._task_episodes.get(task)
            frame = sys._current_frames().get(main) if main is not None else None
            location = f"{frame.f_code.co_name} ({frame.f_code.co_filename}, line {frame.f_lineno})" if frame else ""
            self._send({"kind": "blocked", "episode": episode, "location": location})
            return

    def _read(self) -> None:
        try:
            message = json.loads(self._context.channel.recv_bytes())
        except EOFError:
            os._exit(0)
        for item in message["items"]:
            self._start(item)

    def _start(self, item: Mapping[str, Any]) -> None:
        number = item["episode"]
        if item["op"] == "reset":
            self._episodes[number] = _Episode(number)
        episode = self._episodes.get(number)
        if episode is None:  # it has failed, and its failure is on the way
            self._reply(item["id"], {"failure": "lost", "message": "the episode has ended"})
            return
        _episode.set(number)
        task = asyncio.get_running_loop().create_task(self._answer(episode, item))
        _episode.set(None)
        episode.tasks.add(task)
        task.add_done_callback(episode.tasks.discard)

    async def _answer(self, episode: _Episode, item: Mapping[str, Any]) -> None:
        """Performs a request and sends its result. A failure ends the episode."""
        count_output()
        failure, message = None, ""
        try:
            body = encode_body(await self._perform(episode, item))
        except _TimedOut:
            failure = "timeout"
            message = f"environment {self._name} did not return within {self._timeout_s:g} s from {item['op']}"
        except InvalidValueError as error:
            failure, message = "invalid", f"environment {self._name}: {error}"
        except MemoryError as error:
            failure, message = "memory", describe_error(error, f"environment {self._name}")
            self._retire()  # libraries may not work any more
        except OutputLimitError as error:
            failure, message = "output", describe_error(error, f"environment {self._name}")
        except BaseException as error:  # noqa: BLE001 - user code, such as SystemExit
            failure, message = "raised", describe_error(error, f"environment {self._name}")
        if failure is not None:
            body = json.dumps({"failure": failure, "message": message[:_MAX_MESSAGE]}).encode()
        self._reply_encoded(item["id"], body)
        if failure is not None and item["op"] != "close":
            await self._close(episode)

    async def _perform(self, episode: _Episode, item: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the JSON of the result of a request."""
        if item["op"] == "reset":
            return await self._limited(episode, self._reset(episode, item["body"]), is_thread=False)
        if item["op"] == "step":
            return await self._step(episode, ModelResponse(**item["body"]))
        if (current := episode.current) is not None and not current.done():  # the host ignores its reply
            self._give_up(episode, current, is_thread=episode.is_in_thread)
        await self._close(episode)
        return {}

    async def _reset(self, episode: _Episode, row: Mapping[str, Any]) -> dict[str, Any]:
        episode.environment = await call_user(self._factory, **self._options)
        start = await call_user(episode.environment.reset, row)
        return check_start(start, getattr(episode.environment, "tools", ()))

    async def _step(self, episode: _Episode, response: ModelResponse) -> dict[str, Any]:
        step = episode.environment.step
        try:
            value = await self._limited(episode, call_user(step, response), is_thread=not is_async(step))
        except _TimedOut:
            episode.num_timeouts += 1
            if self._settings["on_timeout"] == "fail" or episode.num_timeouts > self._settings["max_timeouts"]:
                raise
            text = self._settings["timeout_message"].replace("{timeout_s:g}", f"{self._timeout_s:g}")
            # The chat template is checked with these roles only, and may rewrite earlier turns before messages of other
            # roles.
            role = next(iter(getattr(episode.environment, "observation_roles", ())), "user")
            messages = [{"role": role, "content": text}]
            return {"messages": messages, "info": {"reason": "timeout", "counts": {"timeout": 1}}}
        return check_observation(value)

    async def _limited(self, episode: _Episode, call: Any, *, is_thread: bool) -> Any:
        """Returns the result of a call of the user. Raises _TimedOut if it takes too long.

        The call of an async function is then canceled. A thread cannot be canceled. In both cases, the next call of
        the episode waits until this one has ended.
        """
        deadline_s = time.monotonic() + self._timeout_s
        if episode.late is not None:
            await asyncio.wait({episode.late}, timeout=self._timeout_s)
            if not episode.late.done():
                call.close()
                raise _TimedOut
        episode.is_in_thread = is_thread
        task = episode.current = asyncio.get_running_loop().create_task(call)
        try:
            await asyncio.wait({task}, timeout=max(0.0, deadline_s - time.monotonic()))
        finally:
            if not task.done():
                self._give_up(episode, task, is_thread=is_thread)
        if not task.done() or task.cancelling():
            raise _TimedOut
        return task.result()

    def _give_up(self, episode: _Episode, task: "asyncio.Task[Any]", *, is_thread: bool) -> None:
        if not is_thread:
            task.cancel()
        episode.late = task
        self._late.add(task)
        task.add_done_callback(self._forget_late)
        asyncio.get_running_loop().call_later(_BEAT_S, self._check_hanging)

    def _forget_late(self, task: "asyncio.Task[Any]") -> None:
        self._late.discard(task)
        if not task.cancelled():
            task.exception()  # otherwise asyncio would log that nobody has read it

    def _check_hanging(self) -> None:
        """Retires the process if many calls hang, and gives it up if few threads remain."""
        hanging = len(self._late) + num_hanging()
        if hanging >= self._settings["threads"] // 4:
            self._retire()
        if hanging >= self._settings["threads"] * 3 // 4:
            self._send({"kind": "exhausted"})

    async def _close(self, episode: _Episode) -> None:
        """Closes an environment, once."""
        if self._episodes.get(episode.number) is episode:
            del self._episodes[episode.number]
        environment, episode.environment = episode.environment, None
        if environment is None:
            return
        close = environment.close
        try:
            await self._limited(episode, call_user(close), is_thread=not is_async(close))
        except (_TimedOut, Exception):  # noqa: BLE001 - user code; the episode has its result
            return

    def _retire(self) -> None:
        if not self._is_retiring:
            self._is_retiring = True
            self._send({"kind": "retire"})

    def _reply(self, number: int, body: Mapping[str, Any]) -> None:
        self._reply_encoded(number, json.dumps(body).encode())

    def _reply_encoded(self, number: int, body: bytes) -> None:
        """Sends a reply together with others of the same iteration of the event loop."""
        self._replies.append(b'{"id":%d,"body":%b}' % (number, body))
        self._num_bytes += len(body)
        if self._num_bytes > _MAX_BATCH_BYTES:
            self._flush()
        elif not self._has_flush:
            self._has_flush = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._has_flush = False
        if self._replies:
            payload = b'{"kind":"replies","items":[%b]}' % b",".join(self._replies)
            self._replies, self._num_bytes = [], 0
            self._write(payload)

    def _send(self, message: Mapping[str, Any]) -> None:
        self._write(json.dumps(message).encode())

    def _write(self, payload: bytes) -> None:
        if os.getpid() != self._process_id:  # a child that an environment forked returned instead of exiting
            os._exit(0)
        try:
            with self._send_lock:
                self._context.channel.send_bytes(payload)
        except OSError:  # an environment has closed the descriptor
            os._exit(1)


def serve(context: ProcessContext) -> NoReturn:
    """Runs the main loop of the process."""
    for number in (signal.SIGINT, signal.SIGALRM):  # of a timer that an environment has left running
        signal.signal(number, signal.SIG_IGN)
    sys.stdout, sys.stderr = CountedOutput(sys.stdout), CountedOutput(sys.stderr)  # type: ignore[assignment]
    server = EnvironmentServer(context)
    server.load()
    asyncio.run(server.run())
    os._exit(0)
