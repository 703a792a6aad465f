"""Where a process stands, asked from outside: also when native code holds its interpreter and no method answers."""

import contextlib
import faulthandler
import os
import re
import signal
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

_DUMP_TIMEOUT_S = 2.0
_FRAME = re.compile(r'  File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>.+)')
_HOST, _REVIVING = "flowrl/controller/host/host.py", "revive"


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


def arm(name: str) -> None:
    """Lets other processes of this user ask for this one's stacks, by a name that no other process has.

    They go to a file without a place in any folder, which ends with the process; its name is how the process is found.
    """
    file = os.memfd_create(name) if hasattr(os, "memfd_create") else os.open(os.devnull, os.O_WRONLY)
    # Written by the signal handler itself, without the interpreter.
    faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)


class Dump(NamedTuple):
    """What a process tells of itself."""

    age_s: float
    """Seconds since it was started."""
    text: str
    """The stacks of all its threads, as `faulthandler` writes them."""


def dumps_of(names: Sequence[str]) -> dict[str, Dump]:
    """The stacks of all threads of armed processes on this machine; without those that are not there, or silent."""
    before = {}
    for name, (process_id, path) in armed(names).items():
        with contextlib.suppress(OSError, psutil.NoSuchProcess):
            age_s = time.time() - psutil.Process(process_id).create_time()
            before[name] = age_s, path, len(path.read_bytes())
            os.kill(process_id, signal.SIGUSR1)
    return {
        name: Dump(age_s, text) for name, (age_s, path, size) in before.items() if (text := _settled_text(path, size))
    }


def armed(names: Collection[str]) -> dict[str, tuple[int, Path]]:
    """Name -> process and the file of its stacks, of those on this machine."""
    links = {f"/memfd:{name} (deleted)": name for name in names}
    found = {}
    for process_id in psutil.pids() if names else ():
        # Files are closed and processes end while this looks at them; others' files are not for this user to see.
        with contextlib.suppress(OSError):
            for path in Path(f"/proc/{process_id}/fd").iterdir():
                with contextlib.suppress(OSError):
                    if (name := links.get(os.readlink(path))) is not None:
                        found[name] = process_id, path
    return found


def _settled_text(path: Path, before: int) -> str:
    """What a process adds to its file, once it has stopped adding."""
    deadline, size = time.monotonic() + _DUMP_TIMEOUT_S, before
    with contextlib.suppress(OSError):
        while time.monotonic() < deadline:
            time.sleep(0.05)
            dump = path.read_bytes()
            if len(dump) == size > before:
                return dump[before:].decode(errors="replace")
            size = len(dump)
    return ""


class Stack(NamedTuple):
    """What a host's process is at."""

    frames: tuple[Frame, ...] = ()
    """Of the worker's method or constructor, the innermost first; none between calls."""
    revives: bool = False
    """Whether the process is becoming what a lost one was, before it comes to the call itself."""
    age_s: float = 0.0
    """Seconds since the process was started."""

    @property
    def in_collective(self) -> bool:
        """Whether it waits for other ranks."""
        return any(frame.in_collective for frame in self.frames[:3])


def host_stack(dump: Dump | None) -> Stack:
    """The part of a dump that is the host's."""
    if dump is None:
        return Stack()
    for thread in dump.text.split("\n\n"):
        frames = [
            Frame(match["file"], int(match["line"]), match["function"])
            for match in map(_FRAME.fullmatch, thread.splitlines())
            if match
        ]
        depth = next((i for i, frame in enumerate(frames) if frame.file.endswith(_HOST)), None)
        if depth is not None:
            revives = any(frame.function == _REVIVING for frame in frames[depth:])
            return Stack(tuple(frames[:depth]), revives, dump.age_s)
    return Stack(age_s=dump.age_s)
