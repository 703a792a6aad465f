"""Calls functions of users in an event loop: async functions in the loop, other functions in threads."""

import asyncio
import contextvars
import inspect
import io
import os
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from flowrl.config.user_errors import describe_exception
from flowrl.rewards.reward_function import is_async

MAX_PRINTED = 1 << 20
"""Characters that one call may print."""

_printed: contextvars.ContextVar[list[int] | None] = contextvars.ContextVar("printed", default=None)
"""Number of characters that the current call has printed."""

_hanging: "set[Future[Any]]" = set()  # Any: results of users
"""Calls in threads that nobody waits for any more."""


class UserExit(Exception):
    """Replaces an exception that would end the event loop, such as SystemExit."""


class OutputLimitError(RuntimeError):
    """Raised in a call that prints too much."""


def num_hanging() -> int:
    """Returns the number of threads with a call whose caller has given up."""
    return len(_hanging)


def count_output() -> None:
    """Starts the count of printed characters of the current task."""
    _printed.set([0])


class CountedOutput(io.TextIOBase):
    """A text stream that refuses further output of a call that has printed `MAX_PRINTED` characters."""

    def __init__(self, stream: io.TextIOBase) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        printed = _printed.get()
        if printed is not None:
            printed[0] += len(text)
            if printed[0] > MAX_PRINTED:
                raise OutputLimitError(f"printed more than {MAX_PRINTED} characters")
        return self._stream.write(text)

    def flush(self) -> None:
        self._stream.flush()

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._stream.fileno()


async def call_user(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # Any: values of the user
    """Returns the result of a function of the user, with its exceptions. A sync function runs in a thread.

    If the call of a sync function is canceled, its thread continues and counts as hanging until it returns.

    Raises:
        UserExit: the function has raised SystemExit, KeyboardInterrupt or CancelledError.
    """
    if is_async(function):
        return await _await_user(function(*args, **kwargs))
    future = start_threads().submit(contextvars.copy_context().run, _call, function, args, kwargs)
    try:
        result = await asyncio.wrap_future(future)
    except asyncio.CancelledError:
        if not future.done() and not future.cancel():
            _hanging.add(future)
            future.add_done_callback(_hanging.discard)
        raise
    return await _await_user(result) if inspect.isawaitable(result) else result


_threads: list[ThreadPoolExecutor] = []
"""The threads of this process, once they are used."""


def start_threads(max_threads: int = 256) -> ThreadPoolExecutor:
    """Returns the threads of this process. The first call sets their maximum number."""
    if not _threads:
        _threads.append(ThreadPoolExecutor(max_threads, thread_name_prefix="user"))
    return _threads[0]


def _call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    process = os.getpid()
    try:
        return function(*args, **kwargs)
    except BaseException as error:  # in a future, SystemExit would end the event loop
        if isinstance(error, Exception) and not isinstance(error, StopIteration):  # a future cannot have StopIteration
            raise
        raise UserExit(type(error).__name__) from error
    finally:
        if os.getpid() != process:  # a child that the function forked returned instead of exiting
            os._exit(0)


async def _await_user(awaitable: Awaitable[Any]) -> Any:
    process = os.getpid()
    try:
        return await awaitable
    except (SystemExit, KeyboardInterrupt) as error:
        raise UserExit(type(error).__name__) from error
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and not task.cancelling():
            raise UserExit("CancelledError") from error
        raise
    finally:
        if os.getpid() != process:
            os._exit(0)


def describe_error(error: BaseException, owner: str) -> str:
    """Returns a description of an exception, with its location, for a failure of `owner`."""
    if isinstance(error, UserExit) and error.__cause__ is not None:
        error = error.__cause__
    return describe_exception(error, owner)
