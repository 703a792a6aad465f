"""One process of user code: its limits, its sockets and pipes, and the description of its end."""

import contextlib
import json
import os
import re
import signal
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from flowrl.data.folders.private_folder import remove_tree
from flowrl.user_code.guard import CALL_START
from flowrl.user_code.launcher import Launcher

OUTPUT_PER_CALL = 1 << 20
"""Bytes that a process may print during a call. Then its writes block."""

_OUTPUT_KEPT = 2000
"""Bytes of the last output that an error message contains."""

_FRAME = re.compile(r'  File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>.+)')


@dataclass(frozen=True)
class ProcessLimits:
    """Limits of the processes of a supervisor."""

    workers: int = 1
    """Number of processes."""

    timeout_s: float | None = 60.0
    """Time of a call. None: no limit."""

    memory_mb: float | None = None
    """Address space of each process in MB (10^6 bytes). A thread needs 8 MiB."""

    allow_network: bool = False
    load_timeout_s: float | None = 120.0
    """Time to import a function or a class."""

    environment: tuple[str, ...] = ()
    """Names of further environment variables that the processes receive."""


class ProcessPipes:
    """The supervisor's ends of the sockets and pipes of a process and its guard. They never block."""

    def __init__(self, launcher: Launcher, settings: Mapping[str, Any]) -> None:
        """Requests the process from the launcher. Raises OSError if that has ended."""
        self.channel, channel = socket.socketpair()
        """Calls and results."""
        self.guard, guard = socket.socketpair()
        self.output, output = os.pipe()
        self.stacks, stacks = os.pipe()
        rows, self.rows = os.pipe()
        """Has a byte per sent row that may begin. The process takes one before all rows of a message but the first."""
        # The process can change the flags of its own end, and could make reads of the supervisor block.
        self.reclaimed_rows = os.open(f"/proc/self/fd/{rows}", os.O_RDONLY)
        self._folder = None
        try:
            # `close` removes this folder, because a killed process cannot remove its temporary files.
            self._folder = launcher.make_folder()
            for descriptor in (stacks, rows):  # a signal handler writes the stacks
                os.set_blocking(descriptor, False)
            launcher.start(
                {**settings, "folder": self._folder}, [channel.fileno(), output, guard.fileno(), stacks, rows]
            )
        except OSError:
            self.close()
            raise
        finally:
            for end in (channel, guard):
                end.close()
            for descriptor in (output, stacks, rows):
                os.close(descriptor)
        for end in (self.channel, self.guard):
            end.setblocking(False)
        for descriptor in (self.output, self.stacks, self.rows, self.reclaimed_rows):
            os.set_blocking(descriptor, False)
        self.printed = bytearray()
        """The last output of the call."""
        self.allowance = OUTPUT_PER_CALL
        """Bytes that the process may still print during the call."""
        self._stacks, self._status = bytearray(), bytearray()

    def read_output(self) -> bool:
        """Reads printed text. Returns False if the process has printed as much as one call may."""
        data = _read(self.output, min(1 << 16, self.allowance))
        if data is None:
            return True
        self.allowance -= len(data)
        self.printed = (self.printed + data)[-_OUTPUT_KEPT:]
        return bool(data) and self.allowance > 0

    def read_stacks(self) -> bool:
        """Reads the stacks of the threads. Returns False at the end of the pipe."""
        data = _read(self.stacks, 1 << 16)
        if data and len(self._stacks) < 1 << 18:
            self._stacks += data
        return data is None or bool(data)

    def read_guard(self) -> bool:
        """Reads the exit status. Returns False if the guard has ended, and with it all other processes."""
        try:
            data = self.guard.recv(1 << 10)
        except BlockingIOError:
            return True
        except ConnectionError:
            data = b""
        self._status += data
        return bool(data)

    def request(self, what: bytes) -> None:
        """Requests the stacks of the process (`WRITE_STACKS`) or its end (`KILL`) from the guard."""
        with contextlib.suppress(OSError):
            self.guard.send(what)

    def close(self) -> None:
        """Closes the sockets and pipes, so that the guard ends all processes, and removes their temporary files."""
        for end in (self.channel, self.guard):
            end.close()
        for descriptor in (self.output, self.stacks, self.rows, self.reclaimed_rows):
            os.close(descriptor)
        if self._folder is not None:
            remove_tree(self._folder)

    def status(self) -> int | None:
        """Returns the exit status as in `subprocess`, or None if it is unknown."""
        try:
            return int(json.loads(self._status)["status"])
        except ValueError:
            return None

    def location(self, caller: str | None) -> str:
        """Returns the innermost line that the file `caller` has called as text, or an empty text if it is unknown."""
        for thread in self._stacks.decode(errors="replace").split("\n\n"):
            frames = [match.groupdict() for match in map(_FRAME.fullmatch, thread.splitlines()) if match]
            if next((i for i, frame in enumerate(frames) if frame["file"] == caller), 0):
                return "; at the timeout it was in {function} ({file}, line {line})".format(**frames[0])
        return ""

    def last_output(self) -> str:
        """Returns the last printed text for an error message."""
        with contextlib.suppress(OSError):
            self.read_output()
        text = self.printed.rpartition(CALL_START)[2].decode(errors="replace").strip()
        printed = f", after it printed more than {OUTPUT_PER_CALL >> 20} MiB" if self.allowance <= 0 else ""
        return f"{printed}; its last output: {text}" if text else ""


def describe_end(owner: str, status: int | None) -> tuple[Literal["exited", "killed"], str]:
    """Returns the kind and the description of the end of a process during a call of `owner`, such as a function."""
    if status is None:
        return "killed", f"the process of {owner} ended (cause unknown)"
    if status >= 0:
        return "exited", f"{owner} ended its process with exit code {status}: return a value or raise an exception"
    number = signal.Signals(-status)
    is_kill = number is signal.SIGKILL
    cause = "sender unknown; the kernel sends it if the memory is exhausted" if is_kill else signal.strsignal(number)
    return "killed", f"the process of {owner} was killed by {number.name} ({cause})"


def _read(descriptor: int, size: int) -> bytes | None:
    """Returns bytes of a pipe, or None if there are none yet."""
    try:
        return os.read(descriptor, max(size, 1))
    except BlockingIOError:
        return None
