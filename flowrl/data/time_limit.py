"""Limits the time of a block of code, even if the code catches exceptions."""

import contextlib
import gc
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

_REPEAT_S = 0.1
"""Seconds after which a time limit interrupts again, because the first interruption may be lost."""

_RELEASES = {"__del__", "remove", "_remove"}
"""Functions that run when an object is freed. The interpreter prints and ignores exceptions in these functions."""


class TimeLimitError(BaseException):
    """Raised after a time limit. Not an Exception, because sympy catches every Exception in many functions."""


@contextlib.contextmanager
def time_limit(timeout_s: float) -> Iterator[None]:
    """Raises TimeLimitError after `timeout_s` seconds, and again until the block ends. Works only in the main thread.

    A limit that raises an Exception once, such as math-verify's limit, has no effect if sympy catches the exception.
    """
    if threading.current_thread() is not threading.main_thread():  # Python allows signal handlers only there
        yield
        return
    is_active = True

    def interrupt(number: int, frame: FrameType | None) -> None:
        if is_active and not _is_releasing(frame):
            raise TimeLimitError

    start = time.monotonic()
    handler = signal.signal(signal.SIGALRM, interrupt)
    remaining, interval = signal.setitimer(signal.ITIMER_REAL, timeout_s, _REPEAT_S)
    try:
        try:
            yield
        finally:
            is_active = False
    finally:
        if remaining:  # a timer of the caller
            remaining = max(remaining - (time.monotonic() - start), _REPEAT_S)
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL if handler is None else handler)
        signal.setitimer(signal.ITIMER_REAL, remaining, interval)


def _is_releasing(frame: FrameType | None) -> bool:
    """Returns whether the interpreter is freeing an object, and would therefore ignore an exception."""
    callbacks = [getattr(callback, "__code__", None) for callback in gc.callbacks]
    while frame is not None:
        if frame.f_code.co_name in _RELEASES or frame.f_code in callbacks:
            return True
        frame = frame.f_back
    return False
