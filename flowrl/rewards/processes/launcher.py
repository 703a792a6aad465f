"""The process that starts the processes of reward functions by forking itself. It never runs user code.

A pool has one launcher. It imports Python and flowrl once, so a new process starts in milliseconds. Each process of a
reward function has a guard, its parent, which ends all processes that the function has started:

    pool -> launcher -> guard (first process of a process namespace) -> process of reward functions -> others
"""

import contextlib
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
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from flowrl.data.folders.private_folder import find_private_paths, remove_folder
from flowrl.data.folders.process_stat import read_stat
from flowrl.rewards.processes.isolation import (
    Isolation,
    adopt_orphans,
    end_with_parent,
    enter_process_namespace,
    hide_paths,
    isolate,
    limit_process_ids,
    limit_shared_memory,
    mount_proc,
    probe_namespaces,
)
from flowrl.rewards.processes.scorer import STACK_SIGNAL, ProcessContext

MAX_PROCESSES = 512
"""Processes and threads of one process of reward functions and its descendants."""

MAX_FILE_MB = 1024.0
"""Size in MiB of a file that a reward function may write."""

MAX_SHARED_MEMORY_MB = 256
"""Size in MiB of /dev/shm, for all processes that a process of reward functions starts."""

WRITE_STACKS, KILL = b"s", b"k"
"""Requests of the pool to a guard."""

_GUARDS_END_S = 3.0
"""Timeout for the end of the guards. The launcher then kills its children, the processes of guards that were killed."""

NUM_DESCRIPTORS = 5
_POLL_MS = 1000
_DESCRIPTOR = 900
"""Smallest number of the descriptors of a process, which user code does not reach by accident."""


Serve = Callable[[ProcessContext], NoReturn]
"""Main loop of a process."""


def main(control: socket.socket, parent: int, folder: str, roots: Sequence[str], serve: Serve) -> None:
    """Forks a process for each message until the pool closes the socket. A message contains descriptors and settings.

    Args:
        control: socket of the pool.
        parent: id of the process of the pool.
        folder: private folder of the pool. It is removed when the launcher and the guards have ended.
        roots: folders with private folders, and files with a token (`list_private_roots`). Processes do not see them.
        serve: main loop of the processes.
    """
    end_with_parent()
    if os.getppid() != parent:
        return
    adopt_orphans()
    alive = _remove_at_end(folder, control)
    is_probed = False
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, 1 << 16, NUM_DESCRIPTORS)
        if not data:
            break
        settings = json.loads(data)
        if not is_probed:
            probe_namespaces(allow_network=settings["allow_network"])
            is_probed = True
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the processes
        if os.fork() == 0:
            _run(partial(_start, control, roots, settings, descriptors, serve), descriptors[1])
        for descriptor in descriptors:
            os.close(descriptor)
    os.close(alive)
    signal.signal(signal.SIGALRM, lambda *_: _kill_children())
    signal.setitimer(signal.ITIMER_REAL, _GUARDS_END_S, 0.1)
    with contextlib.suppress(ChildProcessError):  # each guard ends, because the pool has closed its socket
        os.wait()  # for all, because SIGCHLD is ignored


def _remove_at_end(folder: str, control: socket.socket) -> int:
    """Starts a process that removes the folder after the launcher and the guards have ended.

    The pool cannot remove it if its process is killed. Ray kills all processes at the end of a run in a cluster.
    Returns a descriptor that the launcher and the guards keep open.
    """
    ended, alive = os.pipe()
    if os.fork() == 0:
        os.close(alive)
        control.close()
        null = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):  # otherwise, a reader of the program's output would wait for this process
            os.dup2(null, number)
        _run(lambda: _remove_after(ended, folder), 2)
    os.close(ended)
    return alive


def _remove_after(ended: int, folder: str) -> None:
    os.read(ended, 1)
    remove_folder(Path(folder))


def _run(body: Any, output: int) -> NoReturn:  # Any: a function of the forked process
    """Runs the body of a forked process, and ends the process without the cleanup of its parent."""
    code = 1
    try:
        body()
        code = 0
    except BaseException:  # noqa: BLE001 - reported to the pool
        os.write(output, traceback.format_exc().encode(errors="replace")[-4000:])
    finally:
        os._exit(code)


def _start(
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
    """Starts the process of reward functions. Reports its end, and ends all its descendants."""
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
        _run(lambda: _work(settings, own, unavailable, parent, serve, is_limited=is_limited), 2)
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
    """Returns the exit status of the process, or None if the pool asks to end it. Reaps adopted processes."""
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
            if request != WRITE_STACKS:  # KILL, or the pool has closed the socket
                return None
            os.kill(worker, STACK_SIGNAL)


def _kill_descendants(worker: int) -> None:
    """Kills the group of the process and all processes that the guard has adopted, until none is left."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(worker, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        while True:
            _kill_children()
            os.wait()


def _kill_children() -> None:
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
    serve(ProcessContext(socket.socket(fileno=channel), output, stacks, rows, settings, (*unavailable, *missing)))


def _move(descriptor: int) -> int:
    """Returns a copy of the descriptor with a high number, which programs that the function starts do not inherit."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, min(_DESCRIPTOR, max(limit // 2, 16)))
