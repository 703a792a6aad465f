"""EventPump: runs idle callbacks in waiting calls of the driver, and on a thread while no call waits."""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from flowrl.controller.calls.failures import CallRecord

THREAD_INTERVAL_S = 0.1
"""Largest time in seconds between two runs of the callbacks on the thread."""

TAKEOVER_S = 0.02
"""Seconds without a waiting call before the thread runs callbacks. Without this delay, the thread would also run
between short calls of the driver, and slow them down.
"""

_JOIN_TIMEOUT_S = 15.0
"""Timeout in seconds for the end of the thread, which may be collecting the stacks of late processes."""

Callback = Callable[[], Iterable[CallRecord]]
"""A non-blocking function. It returns calls whose completion triggers the next run."""

Collect = Callable[[Sequence[CallRecord], float], None]
"""Waits until one of the calls is done, for at most a number of seconds, and resolves all calls that are done. Raises
the first failure.
"""


class EventPump:
    """Runs callbacks repeatedly, so that schedules make progress while the driver waits and while it computes.

    A waiting call runs the callbacks itself. When no call has waited for `TAKEOVER_S` seconds, the driver computes, and
    a thread runs the callbacks. Between two runs, the thread blocks until a triggering call is done. Callbacks run
    under the driver lock: never nested, and never concurrently with each other or with another user of the lock.

    Args:
        lock: the driver lock.
        collect: resolves calls on the thread.
        has_thread: False if calls run in the driver's process. The callbacks then run only in waiting calls.
    """

    def __init__(self, lock: threading.RLock, collect: Collect, *, has_thread: bool) -> None:
        self._lock, self._collect, self._has_thread = lock, collect, has_thread
        self._callbacks: list[Callback] = []
        self._reported: set[CallRecord] = set()
        """Resolved calls that have already triggered a run of the callbacks."""
        self._triggers: list[CallRecord] = []
        """Calls that the last run returned. Their completion triggers the next run."""
        self._is_running = False
        self._num_waiting = 0
        """Number of calls that wait now."""
        self._num_waits = 0
        """Number of calls that have waited so far, including calls that wait now."""
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        """Stops the current thread."""
        self._error: BaseException | None = None
        """Exception on the thread that no call has raised yet."""

    def add(self, callback: Callback) -> Callable[[], None]:
        """Adds a callback, and starts the thread for the first callback. Returns a function that removes it."""
        with self._lock:
            self._callbacks.append(callback)
            if self._has_thread and self._thread is None:
                self._stop = threading.Event()
                self._thread = threading.Thread(
                    target=self._run_thread, args=(self._stop,), name="flowrl-event-pump", daemon=True
                )
                self._thread.start()

        def remove() -> None:
            with self._lock:
                self._callbacks.remove(callback)
                is_last = not self._callbacks
            if is_last:
                self._stop_thread()

        return remove

    def clear(self) -> None:
        """Removes all callbacks, stops the thread, and forgets its exception."""
        with self._lock:
            self._callbacks.clear()
        self._stop_thread()
        self._error = None

    def _stop_thread(self) -> None:
        """Stops the thread, and waits for its end. Does not wait in a callback, because the thread needs the lock to
        end.
        """
        with self._lock:
            is_in_callback = self._is_running  # on this thread, because callbacks run under the lock
            thread, self._thread = self._thread, None
            self._triggers = []
            self._stop.set()
        if thread is not None and not is_in_callback:
            thread.join(_JOIN_TIMEOUT_S)

    def raise_error(self) -> None:
        """Raises the exception that ended the thread, once. Does nothing in a callback, because the exception belongs
        to the driver's next call.
        """
        if self._error is not None and not self._is_running:
            error, self._error = self._error, None
            raise error

    @contextmanager
    def waiting_call(self) -> Iterator[None]:
        """Pauses the thread during the block, because a call waits and runs the callbacks itself."""
        with self._lock:
            self._num_waiting += 1
            self._num_waits += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_waiting -= 1

    def run(self) -> list[CallRecord]:
        """Runs every callback once. Does nothing if a callback calls it. Raises the exception of a callback.

        Returns: the calls whose completion triggers the next run. A resolved call is returned only once.
        """
        if not self._callbacks:
            return []
        with self._lock:
            if self._is_running:
                return []
            self._is_running = True
            try:
                records = [record for callback in tuple(self._callbacks) for record in callback()]
            finally:
                self._is_running = False
            resolved = {record for record in records if record.is_resolved}
            reported, self._reported = self._reported, resolved
            self._triggers = [record for record in records if record not in reported or not record.is_resolved]
            return self._triggers

    def _run_thread(self, stop: threading.Event) -> None:
        try:
            num_waits = -1
            while not stop.is_set():
                if self._num_waiting > 0 or self._num_waits != num_waits:
                    num_waits = self._num_waits
                    stop.wait(TAKEOVER_S)
                    continue
                triggers = self._triggers
                if triggers or not stop.wait(THREAD_INTERVAL_S):
                    self._collect(triggers, THREAD_INTERVAL_S if triggers else 0.0)
                with self._lock:
                    if self._num_waiting == 0 and not stop.is_set():
                        self._run_on_thread()
        except Exception as error:  # noqa: BLE001 (the boundary of a thread)
            if not stop.is_set():
                self._error = error

    def _run_on_thread(self) -> None:
        """Runs the callbacks. Stores an exception of a callback, so that the driver's next call raises it. On this
        thread, the exception would not end the program. The caller holds the driver lock, so that a driver that stops
        the thread cannot miss the exception.
        """
        try:
            self.run()
        except Exception as error:  # a callback may raise anything
            self._error = error
            raise
