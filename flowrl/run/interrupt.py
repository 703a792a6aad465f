"""Handles the signals that end a program. The first SIGINT (Ctrl-C) or SIGTERM ends a run after the current step, and a
second one aborts the run. SIGHUP, which arrives when the terminal is closed, aborts at once.
"""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from types import FrameType, TracebackType
from typing import Any, Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""Signals that `Interruption` handles."""

_ENDING_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
"""Signals that kill a program without handlers for them, so that its temporary files and processes remain."""

_DUPLICATE_S = 0.3
"""Seconds after a signal in which another one is ignored, because timeout(1) signals the program and its process group.
"""


class Interrupted(KeyboardInterrupt):
    """Raised if a signal ended a run or a check. The message names the last step and the folder of the results, or the
    interrupted check.
    """

    def __init__(self, signal_number: int, message: str) -> None:
        super().__init__(message)
        self.exit_code = 128 + signal_number
        """128 + number of the signal, as a shell reports for a program that a signal ended."""


@contextmanager
def raise_on_ending_signals() -> Iterator[None]:
    """Makes SIGTERM and SIGHUP raise `Interrupted` in the block, so that the program cleans up. By default, these
    signals would kill the program.

    After a signal, `Interrupted` replaces any exception that leaves the block, because Ray turns exceptions of handlers
    into KeyboardInterrupt, and every write to a closed terminal raises OSError. Further signals of these kinds are
    ignored until the process ends, because they would interrupt the clean-up. Outside of the main thread, does nothing.
    Signals that the program already handles or ignores (such as SIGHUP after nohup) keep their handlers.
    """
    is_main = threading.current_thread() is threading.main_thread()
    numbers = [number for number in _ENDING_SIGNALS if is_main and signal.getsignal(number) is signal.SIG_DFL]

    interrupted: Interrupted | None = None

    def end(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        if interrupted is None:
            interrupted = Interrupted(number, f"ended by {signal.Signals(number).name}")
            raise interrupted

    for number in numbers:
        signal.signal(number, end)
    try:
        yield
    except BaseException as error:  # see above: any class may replace the exception of the handler
        if interrupted is None or isinstance(error, Interrupted):
            raise
        raise interrupted from error
    finally:
        if interrupted is None:
            for number in numbers:
                signal.signal(number, signal.SIG_DFL)


class Interruption:
    """Handles SIGINT and SIGTERM during a run, and restores the previous handlers afterwards.

    Before `defer`, a signal raises KeyboardInterrupt immediately. After `defer`, the first signal is only stored in
    `signal`, and the second raises KeyboardInterrupt. If a signal was received, the end of the block raises
    `Interrupted`, unless an exception other than KeyboardInterrupt leaves the block.

    Python handles signals only on the main thread, so a run on another thread cannot be interrupted.
    """

    def __init__(self, notify: Callable[[str], None]) -> None:
        """`notify` prints a line for the user. It is called on a separate thread."""
        self.signal: signal.Signals | None = None
        """First signal that was received, or None."""
        self.progress = "before the first step; nothing was saved"
        """Last step and folder of the results, for the message of `Interrupted`."""
        self._notify = notify
        self._action: str | None = None
        self._received_s = 0.0
        self._previous: dict[signal.Signals, Any] = {}  # Any: as signal.getsignal returns it
        # A handler may interrupt a print, so it only puts lines into this queue, which is safe at any time.
        self._lines: SimpleQueue[str | None] = SimpleQueue()
        self._printer = threading.Thread(target=self._print_lines, name="interruption", daemon=True)

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            # Signals that nohup or a shell's & ignores stay ignored. None means that the handler is not Python's.
            handlers = {number: signal.getsignal(number) for number in _SIGNALS}
            self._previous = {n: handler for n, handler in handlers.items() if handler not in (None, signal.SIG_IGN)}
            self._printer.start()
            self.install()
        return self

    def install(self) -> None:
        """Installs the handlers. Call it again if a library has replaced them.

        Raises KeyboardInterrupt if a signal was received before `defer`. The exception of the handler may have been
        lost, because Python ignores exceptions in some places, for example while a process is forked.
        """
        if self.signal is not None and self._action is None:
            raise KeyboardInterrupt
        for number in self._previous:
            signal.signal(number, self._on_signal)

    def defer(self, action: str, progress: str) -> None:
        """Makes the first signal set `signal` and print `action`, instead of raising KeyboardInterrupt. Sets the
        attribute `progress`.
        """
        self._action, self.progress = action, progress

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        is_first = self.signal is None
        if not is_first and now_s - self._received_s < _DUPLICATE_S:
            return
        self.signal, self._received_s = signal.Signals(number), now_s
        if not is_first or self._action is None:
            raise KeyboardInterrupt
        name = "Ctrl-C" if self.signal is signal.SIGINT else self.signal.name
        self._lines.put(f"interrupt received: {self._action} ({name} again to abort)")

    def _print_lines(self) -> None:
        while (line := self._lines.get()) is not None:
            self._notify(line)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        if self._printer.is_alive():
            self._lines.put(None)
            self._printer.join()
        # Ray turns any exception of a handler into a plain KeyboardInterrupt, so `Interrupted` is raised here.
        if self.signal is not None and (error is None or isinstance(error, KeyboardInterrupt)):
            cause = "interrupted" if self.signal is signal.SIGINT else f"ended by {self.signal.name}"
            raise Interrupted(self.signal, f"{cause} {self.progress}") from None
