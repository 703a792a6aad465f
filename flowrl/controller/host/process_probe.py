"""Finds worker processes and reads their stacks with signals and /proc, even while native code holds the GIL."""

import contextlib
import faulthandler
import os
import re
import signal
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

from flowrl.data.folders.process_stat import read_start_time, read_stat

_DUMP_TIMEOUT_S = 2.0
_DUMP_LINK = re.compile(r"/memfd:(?P<name>.+)\.(?P<worker_id>\d+) \(deleted\)")
_FRAME = re.compile(r'  File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>.+)')
_HOST_FILE, _RECOVERY_FUNCTION = "flowrl/controller/host/host.py", "recover"


class Frame(NamedTuple):
    file: str
    line: int
    function: str

    @property
    def in_collective(self) -> bool:
        return "torch/distributed/" in self.file

    def __str__(self) -> str:
        return f"{self.function} ({self.file}, line {self.line})"


class StackDump(NamedTuple):
    age_s: float
    text: str
    """Stacks of all threads, in the format of `faulthandler`."""
    is_stopped: bool = False
    """Whether a signal (SIGSTOP) had stopped the process."""
    process_id: int | None = None


class Stack(NamedTuple):
    """Stack of the current call of a worker process."""

    frames: tuple[Frame, ...] = ()
    """Frames of the worker method or constructor, innermost first; empty between calls."""
    is_recovering: bool = False
    """Whether the process is still restoring the state of the process that it replaces."""
    age_s: float = 0.0
    """Seconds since the process started."""
    is_stopped: bool = False
    """Whether a signal (SIGSTOP) had stopped the process."""
    is_missing: bool = False
    """Whether the process has not written its stack."""

    @property
    def in_collective(self) -> bool:
        """Whether the call waits for other ranks in a collective."""
        return any(frame.in_collective for frame in self.frames[:3])


class NamedProcess(NamedTuple):
    """A process with enabled stack dumps."""

    process_id: int
    started_s: float
    """Start in seconds since boot."""
    dump_file: Path
    worker_id: int
    """Id of the worker process that has enabled the dumps. Processes that this process forks inherit its file."""


def enable_stack_dumps(name: str) -> None:
    """Makes this process write its stacks to an anonymous file on SIGUSR1. `find_processes` uses `name` to find it."""
    link = f"{name}.{os.getpid()}"
    file = os.memfd_create(link) if hasattr(os, "memfd_create") else os.open(os.devnull, os.O_WRONLY)
    # The signal handler writes the stacks itself, without the interpreter.
    faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)


def find_processes(names: Collection[str]) -> dict[str, list[NamedProcess]]:
    """Returns name -> processes on this machine with enabled stack dumps, oldest first.

    A name has several processes if its worker process has forked, or if an old process remains next to its
    replacement.
    """
    processes: dict[str, list[NamedProcess]] = {}
    for process_id in (int(path.name) for path in Path("/proc").glob("[0-9]*")):
        # Processes may end during the search, and files of other users are not readable.
        with contextlib.suppress(OSError):
            for path in Path(f"/proc/{process_id}/fd").iterdir():
                with contextlib.suppress(OSError):
                    link = _DUMP_LINK.fullmatch(os.readlink(path))
                    if link is None or link["name"] not in names:
                        continue
                    if (started_s := read_start_time(process_id)) is not None:
                        process = NamedProcess(process_id, started_s, path, int(link["worker_id"]))
                        processes.setdefault(link["name"], []).append(process)
    return {name: sorted(found, key=lambda process: process.started_s) for name, found in processes.items()}


def find_workers(names: Collection[str]) -> dict[str, NamedProcess]:
    """Returns name -> newest worker process on this machine. Ignores the processes that workers have forked."""
    workers = {}
    for name, processes in find_processes(names).items():
        for process in processes:
            if process.process_id == process.worker_id:
                workers[name] = process
    return workers


def kill_processes(names: Collection[str], worker_id: int | None = None) -> set[int]:
    """Kills processes with enabled stack dumps on this machine. Returns the ids of the killed processes.

    `worker_id` limits the kill to one worker process and the processes that it has forked.
    """
    killed: set[int] = set()
    seen: set[int] = set()
    while True:
        processes = [process for own in find_processes(names).values() for process in own]
        unseen = {each.process_id for each in processes if worker_id in (None, each.worker_id)} - seen
        if not unseen:
            return killed
        # The next iteration finds processes that these processes have forked in the meantime.
        seen |= unseen
        for process_id in unseen:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process_id, signal.SIGKILL)
                killed.add(process_id)


def collect_stack_dumps(names: Sequence[str]) -> dict[str, StackDump]:
    """Returns the stacks of processes on this machine. Skips processes that have ended.

    The text is empty if a process is stopped or does not respond. A process does not respond in a system call that
    signals cannot interrupt, or if its code has replaced the handler of SIGUSR1.
    """
    before = {}
    for name, (process_id, _, path, _) in find_workers(names).items():
        with contextlib.suppress(OSError):
            stat = read_stat(process_id)
            if stat.state not in "ZX":
                age_s, size = time.clock_gettime(time.CLOCK_BOOTTIME) - stat.started_s, len(path.read_bytes())
                before[name] = StackDump(age_s, "", stat.state == "T", process_id), path, size
                os.kill(process_id, signal.SIGUSR1)
    # A stopped process handles no signal. If it were continued, it could finish the call that has failed.
    return {
        name: dump if dump.is_stopped else dump._replace(text=_read_appended(path, size))
        for name, (dump, path, size) in before.items()
    }


def _read_appended(path: Path, size_before: int) -> str:
    """Waits until a dump file stops growing, and returns the text after the first `size_before` bytes."""
    deadline, size = time.monotonic() + _DUMP_TIMEOUT_S, size_before
    with contextlib.suppress(OSError):
        while time.monotonic() < deadline:
            time.sleep(0.05)
            dump = path.read_bytes()
            if len(dump) == size > size_before:
                return dump[size_before:].decode(errors="replace")
            size = len(dump)
    return ""


def parse_host_stack(dump: StackDump | None) -> Stack:
    """Returns the stack of the current call: the frames called by the host's own code. None gives an empty stack."""
    if dump is None:
        return Stack()
    for thread in dump.text.split("\n\n"):
        frames = [
            Frame(match["file"], int(match["line"]), match["function"])
            for match in map(_FRAME.fullmatch, thread.splitlines())
            if match
        ]
        depth = next((i for i, frame in enumerate(frames) if frame.file.endswith(_HOST_FILE)), None)
        if depth is not None:
            is_recovering = any(frame.function == _RECOVERY_FUNCTION for frame in frames[depth:])
            return Stack(tuple(frames[:depth]), is_recovering, dump.age_s, dump.is_stopped)
    return Stack(age_s=dump.age_s, is_stopped=dump.is_stopped, is_missing=not dump.text)
