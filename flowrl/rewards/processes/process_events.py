"""Waits for events of the sockets and pipes of many processes, in one thread that other threads can wake."""

import selectors
import socket
from collections.abc import Callable
from typing import Any

from flowrl.rewards.processes.process import ScoringProcess

Handler = Callable[[int], object]
"""Receives the mask of events of a socket or pipe."""


class ProcessEvents:
    """A selector of the sockets and pipes of processes."""

    def __init__(self, on_wake: Callable[[], object]) -> None:
        """`on_wake` is called in the thread of `handle` after `wake`."""
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        for end in (self._wake, self._woken):
            end.setblocking(False)
        self._is_awake = False
        self._selector.register(self._woken, selectors.EVENT_READ, lambda _: on_wake())

    def wake(self) -> None:
        """Ends the wait of `handle`. Can be called from any thread, under the lock that also guards `accept_wake`."""
        if not self._is_awake:
            self._is_awake = True
            self._wake.send(b"w")

    def accept_wake(self) -> None:
        """Allows the next `wake`. Call it in `on_wake`."""
        self._woken.recv(1 << 12)
        self._is_awake = False

    def handle(self, timeout_s: float | None) -> None:
        """Waits for events, and calls their handlers."""
        for key, mask in self._selector.select(timeout_s):
            current = self.key_of(key.fileobj)
            if current is not None and current.data is key.data:  # not removed by an earlier event
                key.data(mask)

    def add(self, process: ScoringProcess, on_channel: Handler, on_stacks: Handler, on_guard: Handler) -> None:
        """Registers the handlers for events of a process, and starts to read its output."""
        for source, handler in (
            (process.channel, on_channel),
            (process.stacks, on_stacks),
            (process.guard, on_guard),
        ):
            self._selector.register(source, selectors.EVENT_READ, handler)
        self.watch_output(process)

    def watch_output(self, process: ScoringProcess) -> None:
        """Reads the output of a process until it has printed as much as it may."""
        if self.key_of(process.output) is None:
            self._selector.register(
                process.output,
                selectors.EVENT_READ,
                lambda _: self.remove_unless(process.output, process.read_output()),
            )

    def watch_writes(self, process: ScoringProcess) -> None:
        """Waits until the channel of a process can be written to if the process has unsent bytes."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if process.has_unsent else 0)
        key = self.key_of(process.channel)
        if key is not None and key.events != events:
            self._selector.modify(process.channel, events, key.data)

    def remove_unless(self, source: Any, is_open: bool) -> None:  # Any: a socket or a descriptor
        """Ignores further events of a source if `is_open` is false."""
        if not is_open and self.key_of(source) is not None:
            self._selector.unregister(source)

    def key_of(self, source: Any) -> selectors.SelectorKey | None:  # Any: a socket or a descriptor
        """Returns the registration of a source, or None if it is not registered or closed."""
        is_closed = isinstance(source, socket.socket) and source.fileno() < 0
        return None if is_closed else self._selector.get_map().get(source)

    def remove(self, process: ScoringProcess) -> None:
        """Ignores further events of a process, and closes its sockets and pipes."""
        for source in (process.channel, process.output, process.stacks, process.guard):
            self.remove_unless(source, False)
        process.close()

    def close(self) -> None:
        self._selector.close()
        self._wake.close()
        self._woken.close()
