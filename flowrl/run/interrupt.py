"""How a run is asked to end: Ctrl-C, or the SIGTERM of a scheduler. Once at the next good place, twice now."""

import signal
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from types import FrameType, TracebackType
from typing import Any, Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM)

_ONE_REQUEST_S = 0.3
"""timeout(1) and launchers signal a program and then its process group: what comes twice so soon was meant once."""


class Interrupted(KeyboardInterrupt):
    """A run was ended from outside. Its text says how far the run came and where its results are."""

    def __init__(self, number: int, text: str) -> None:
        super().__init__(text)
        self.exit_code = 128 + number
        """What a shell reports for a program that this signal ended."""


class Interruption:
    """Takes SIGINT and SIGTERM while a run lasts, and gives them back to whoever had them.

    Until `hold` is called they raise `KeyboardInterrupt` where the program stands. From then on the first one is only
    noted in `signal`, for the run to end at its next good place, and the second one raises. On leaving, a run that was
    asked to end raises `Interrupted`.

    Signals are Python's main thread's: a run on another thread is not interrupted, and is as if this were not there.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        """Args: `say` shows a person a line; it is called from a thread of its own."""
        self.signal: signal.Signals | None = None
        """What asked the run to end; None while nothing has."""
        self.left = "before the first step; nothing was kept"
        """How far the run came and where its results are."""
        self._say = say
        self._doing: str | None = None
        self._asked_s = 0.0
        self._before: dict[signal.Signals, Any] = {}  # Any: as signal.getsignal returns it
        # A handler may run in the middle of a print; putting into this queue is the one thing that is safe anywhere.
        self._lines: SimpleQueue[str | None] = SimpleQueue()
        self._speaker = threading.Thread(target=self._speak, name="interruption", daemon=True)

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            # What nohup or a shell's & has set to be ignored stays ignored; None is a handler that is not Python's.
            found = {number: signal.getsignal(number) for number in _SIGNALS}
            self._before = {number: was for number, was in found.items() if was not in (None, signal.SIG_IGN)}
            self._speaker.start()
            self.take()
        return self

    def take(self) -> None:
        """Takes the signals, again where a library that was started in between has taken them."""
        for number in self._before:
            signal.signal(number, self._on_signal)

    def hold(self, doing: str, left: str) -> None:
        """From now on the first signal does not raise.

        Args:
            doing: what the run does when it is asked to end, told to whoever asks.
            left: what `left` is to be.
        """
        self._doing, self.left = doing, left

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        first = self.signal is None
        if not first and now_s - self._asked_s < _ONE_REQUEST_S:
            return
        self.signal, self._asked_s = signal.Signals(number), now_s
        if not first or self._doing is None:
            raise KeyboardInterrupt
        again = "Ctrl-C" if self.signal is signal.SIGINT else self.signal.name
        self._lines.put(f"{self._doing}; {again} again ends it now")

    def _speak(self) -> None:
        while (line := self._lines.get()) is not None:
            self._say(line)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._speaker.is_alive():
            self._lines.put(None)
            self._speaker.join()
        # Ray turns whatever a handler raises while it waits into a plain KeyboardInterrupt: the signal is told here.
        if self.signal is not None and (error is None or isinstance(error, KeyboardInterrupt)):
            cause = "interrupted" if self.signal is signal.SIGINT else f"ended by {self.signal.name}"
            raise Interrupted(self.signal, f"{cause} {self.left}") from None
