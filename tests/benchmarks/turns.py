"""Lets a benchmark decide when each of several programs takes its next training step.

Imports only the standard library, because a program may run in another environment.
"""

import socket
from pathlib import Path

GO, READY = b"g", b"r"


class TurnClient:
    """The program's end: it reports each step and waits until the benchmark permits the next one."""

    def __init__(self, path: Path | str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(str(path))

    def wait(self) -> None:
        """Reports that the previous step is complete. Blocks until the next step may begin."""
        self._socket.sendall(READY)
        if self._socket.recv(1) != GO:
            raise SystemExit(0)  # the benchmark has ended


class TurnServer:
    """The benchmark's end, for one program."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._connection: socket.socket | None = None
        """None until the program has connected."""

    def accept(self, timeout_s: float) -> None:
        """Waits until the program is about to begin its first step. Raises TimeoutError."""
        self._listener.settimeout(timeout_s)
        self._connection, _ = self._listener.accept()
        self._await_ready()

    def set_timeout(self, seconds: float) -> None:
        """Limits the time of one step."""
        self._program.settimeout(seconds)

    def run_steps(self, count: int) -> None:
        """Lets the program take `count` steps and waits for their end."""
        for _ in range(count):
            self.permit()
            self._await_ready()

    def permit(self) -> None:
        self._program.sendall(GO)

    @property
    def _program(self) -> socket.socket:
        assert self._connection is not None, "the program has not connected"
        return self._connection

    def _await_ready(self) -> None:
        if self._program.recv(1) != READY:
            raise RuntimeError(f"the program at {self.path.name} has ended early")

    def close(self) -> None:
        self._listener.close()
        if self._connection is not None:
            self._connection.close()
