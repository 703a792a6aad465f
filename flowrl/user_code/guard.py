"""The guard of a process of user code: starts and restricts the process, reports its end, and ends its descendants."""

import contextlib
import faulthandler
import fcntl
import io
import json
import os
import resource
import select
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from flowrl.data.folders.private_folder import find_private_paths
from flowrl.data.folders.process_stat import read_stat
from flowrl.user_code.isolation import (
    Isolation,
    adopt_orphans,
    end_with_parent,
    enter_process_namespace,
    hide_paths,
    isolate,
    limit_process_ids,
    limit_shared_memory,
    mount_proc,
)

STACK_SIGNAL = signal.SIGRTMIN + 9
"""Signal that makes the process write the stacks of its threads. The C library reserves the first few."""

CALL_START = b"\x1e"
"""Separates the output of a call from earlier output: the record separator of ASCII."""

MAX_PROCESSES = 512
"""Processes and threads of one process of user code and its descendants."""

MAX_FILE_MB = 1024.0
"""Size in MiB of a file that a process may write."""

MAX_SHARED_MEMORY_MB = 256
"""Size in MiB of /dev/shm, for all processes that a process of user code starts."""

WRITE_STACKS, KILL = b"s", b"k"
"""Requests of the supervisor to a guard."""

_POLL_MS = 1000
_DESCRIPTOR = 900
"""Smallest number of the descriptors of a process, which user code does not reach by accident."""


class ProcessContext(NamedTuple):
    """What the main loop of a process receives."""

    channel: Connection
    """Connection to the supervisor, with messages of JSON."""
    output: int
    """Descriptor for printed text."""
    rows: int
    """Descriptor of the pipe of rows that it may score."""
    settings: Mapping[str, Any]  # Any: values of JSON


Serve = Callable[[ProcessContext], NoReturn]
"""Main loop of a process."""


def run_forked(body: Any, output: int) -> NoReturn:  # Any: a function of the forked process
    """Runs the body of a forked process, and ends the process without the cleanup of its parent."""
    code = 1
    try:
        body()
        code = 0
    except BaseException:  # noqa: BLE001 - reported to the supervisor
        os.write(output, traceback.format_exc().encode(errors="replace")[-4000:])
    finally:
        os._exit(code)


def start_guard(
    control: socket.socket, roots: Sequence[str], settings: dict[str, Any], descriptors: Sequence[int], serve: Serve
) -> None:
    """Becomes the guard, or starts it as the first process of a new process namespace."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    control.close()
    has_namespace = enter_process_namespace()
    if has_namespace:
        starter = os.pidfd_open(os.getpid())
        if os.fork() != 0:
            return  # the launcher adopts the guard
        # From then on, the launcher is the parent, whose end also ends the guard.
        select.select([starter], [], [])
        os.close(starter)
    unavailable = [] if has_namespace else ["descendants"]
    can_mount = has_namespace and mount_proc()
    is_limited = can_mount and limit_process_ids(MAX_PROCESSES)
    if not (can_mount and hide_paths(find_private_paths(map(Path, roots)), Path(settings["folder"]))):
        unavailable.append("private_folders")
    if not (can_mount and limit_shared_memory(MAX_SHARED_MEMORY_MB)):
        unavailable.append("shared_memory")
    os.setsid()
    _guard(settings, descriptors, unavailable, serve, has_namespace=has_namespace, is_limited=is_limited)


def _guard(
    settings: dict[str, Any],
    descriptors: Sequence[int],
    unavailable: list[str],
    serve: Serve,
    *,
    has_namespace: bool,
    is_limited: bool,
) -> None:
    """Starts the process of user code. Reports its end, and ends all its descendants."""
    channel, output, guard, stacks, rows = descriptors
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    if has_namespace:
        end_with_parent()  # the kernel then ends all processes of the namespace
    else:
        adopt_orphans()
    parent = os.getpid()
    worker = os.fork()
    if worker == 0:
        for descriptor in (wake_read, wake_write, guard):
            os.close(descriptor)
        os.dup2(output, 2)
        own = (channel, output, stacks, rows)
        run_forked(lambda: _work(settings, own, unavailable, parent, serve, is_limited=is_limited), 2)
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)
    for descriptor in (channel, output, stacks, rows):
        os.close(descriptor)
    signal.set_wakeup_fd(wake_write)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    status = _wait(worker, guard, wake_read)
    if status is not None:
        with contextlib.suppress(OSError):
            os.write(guard, json.dumps({"status": os.waitstatus_to_exitcode(status)}).encode())
    if not has_namespace:
        _kill_descendants(worker)


def _wait(worker: int, guard: int, wake: int) -> int | None:
    """Returns the exit status of the process, or None if the supervisor requests its end. Reaps adopted processes."""
    poller = select.poll()
    poller.register(guard, select.POLLIN)
    poller.register(wake, select.POLLIN)
    while True:
        events = dict(poller.poll(_POLL_MS))
        if wake in events:
            os.read(wake, 1 << 12)
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == worker:
                    return ended[1]
        if guard in events:
            request = os.read(guard, 1)
            if request != WRITE_STACKS:  # KILL, or the supervisor has closed the socket
                return None
            os.kill(worker, STACK_SIGNAL)


def _kill_descendants(worker: int) -> None:
    """Kills the group of the process and all processes that the guard has adopted, until none is left."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(worker, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        while True:
            kill_children()
            os.wait()


def kill_children() -> None:
    for child in _children():
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


def _children() -> Iterator[int]:
    parent = os.getpid()
    for entry in os.scandir("/proc"):
        if entry.name.isdecimal():
            child = int(entry.name)
            if read_stat(child).parent_id == parent:
                yield child


def _work(
    settings: dict[str, Any],
    descriptors: Sequence[int],
    unavailable: list[str],
    parent: int,
    serve: Serve,
    *,
    is_limited: bool,
) -> NoReturn:
    """Restricts the current process and runs the main loop."""
    channel, output, stacks, rows = descriptors
    os.setsid()
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (output, 1)):
        os.dup2(source, target)
    channel, output, stacks, rows = (_move(descriptor) for descriptor in (channel, output, stacks, rows))
    os.closerange(3, channel)
    os.environ["TMPDIR"] = tempfile.tempdir = settings["folder"]
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(io.FileIO(number, "w", closefd=False), "utf-8", "backslashreplace", line_buffering=True)
        for number in (1, 2)
    )
    isolation = Isolation(
        memory_mb=settings["memory_mb"],
        allow_network=settings["allow_network"],
        max_processes=MAX_PROCESSES,
        max_file_mb=MAX_FILE_MB,
    )
    missing = [name for name in isolate(isolation) if not (name == "processes" and is_limited)]
    end_with_parent()
    if os.getppid() != parent:
        os._exit(1)
    faulthandler.register(STACK_SIGNAL, file=stacks, all_threads=True)
    context = ProcessContext(Connection(channel), output, rows, settings)
    context.channel.send_bytes(json.dumps({"kind": "ready", "unavailable": [*unavailable, *missing]}).encode())
    with contextlib.suppress(EOFError):  # the supervisor has closed the connection
        serve(context)
    os._exit(0)


def _move(descriptor: int) -> int:
    """Returns a copy of the descriptor with a high number, which programs that user code starts do not inherit."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, min(_DESCRIPTOR, max(limit // 2, 16)))
