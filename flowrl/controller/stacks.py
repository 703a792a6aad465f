"""Where a process stands, asked from outside: also when native code holds its interpreter and no method answers."""

import contextlib
import faulthandler
import os
import re
import signal
import time
from pathlib import Path
from typing import NamedTuple

_DUMP_TIMEOUT_S = 2.0
_FRAME = re.compile(r'  File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>.+)')
_HOST = "flowrl/controller/host.py"


class Frame(NamedTuple):
    """One line of a stack."""

    file: str
    line: int
    function: str

    @property
    def in_collective(self) -> bool:
        """Whether it belongs to torch's process groups."""
        return "torch/distributed/" in self.file

    def __str__(self) -> str:
        return f"{self.function} ({self.file}, line {self.line})"


def arm() -> int:
    """Lets other processes of this user ask for this one's stacks with SIGUSR1. Returns the file they go to.

    The file has no name, so that it goes with the process: /proc shows it to who knows its number.
    """
    file = os.memfd_create("stacks") if hasattr(os, "memfd_create") else os.open(os.devnull, os.O_WRONLY)
    # Written by the signal handler itself, without the interpreter.
    faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
    return file


def dump_of(process_id: int, file: int) -> str:
    """The stacks of all threads of an armed process on this machine; empty if it does not tell."""
    path = Path(f"/proc/{process_id}/fd/{file}")
    with contextlib.suppress(OSError):
        before = len(path.read_bytes())
        os.kill(process_id, signal.SIGUSR1)
        deadline = time.monotonic() + _DUMP_TIMEOUT_S
        size = before
        while time.monotonic() < deadline:
            time.sleep(0.05)
            dump = path.read_bytes()
            if len(dump) == size > before:
                return dump[before:].decode(errors="replace")
            size = len(dump)
    return ""


def method_frames(dump: str) -> list[Frame]:
    """The frames of the worker's method in a dump, the innermost first; empty when the process runs none."""
    for thread in dump.split("\n\n"):
        frames = [
            Frame(match["file"], int(match["line"]), match["function"])
            for match in map(_FRAME.fullmatch, thread.splitlines())
            if match
        ]
        depth = next((i for i, frame in enumerate(frames) if frame.file.endswith(_HOST)), None)
        if depth is not None:
            return frames[:depth]
    return []
