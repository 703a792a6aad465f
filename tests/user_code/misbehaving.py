"""Reward functions that misbehave as the column `kind` states. They import little, so processes load them quickly."""

import asyncio
import ctypes
import fcntl
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any


def fork_daemon() -> float:
    """Starts a process that is no child of this one, in its own session, which ignores SIGTERM."""
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execv(sys.executable, [sys.executable, "-c", code])
        os._exit(0)
    return 1.0


def fork_without_end() -> float:
    while True:
        os.fork()


def hang_without_signals() -> float:
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    while True:
        time.sleep(1)


def print_without_end() -> float:
    while True:
        print("x" * 1000)  # noqa: T201 - the misbehavior


def channels() -> list[socket.socket]:
    """Returns the sockets of this process, one of which takes its results."""
    sockets = []
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        try:
            sockets.append(socket.socket(fileno=os.dup(descriptor)))
        except OSError:
            continue
    return sockets


def write_to_channels(data: bytes) -> float:
    for channel in channels():
        channel.send(data)
    time.sleep(600)
    return 1.0


def add_rows() -> float:
    """Writes to all pipes from which this process reads, such as that of the rows that it may begin."""
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        try:
            if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY and stat.S_ISFIFO(
                os.fstat(descriptor).st_mode
            ):
                os.set_blocking(descriptor, True)
                writer = os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK)
                while True:
                    os.write(writer, b"x")
        except OSError:
            continue
    return 1.0


def use_all_memory() -> float:
    return float(len([bytearray(1 << 24) for _ in range(1 << 20)]))


def change_process() -> float:
    os.chdir("/")
    sys.setrecursionlimit(200)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    os.umask(0o777)
    return 1.0


def start_thread() -> float:
    threading.Thread(target=time.sleep, args=[600]).start()
    return 1.0


def start_program() -> float:
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    return 1.0


def fork_and_return() -> float:
    os.fork()
    return 1.0


def signal_all() -> float:
    os.kill(-1, signal.SIGKILL)
    return 1.0


def kill_parent() -> float:
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(600)
    return 1.0


def recurse() -> float:
    return recurse() + 1


def close_output() -> float:
    sys.stdout.close()
    sys.stderr.close()
    return 1.0


def raised(error: BaseException) -> float:
    raise error


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError

    __repr__ = __str__


class NoNumber:
    def __float__(self) -> float:
        raise OSError

    def __repr__(self) -> str:
        raise OSError


ACTIONS: dict[str, Callable[[], Any]] = {
    "hang": lambda: time.sleep(600),
    "loop": lambda: [None for _ in iter(int, 1)],
    "native_hang": lambda: ctypes.PyDLL(None).sleep(600),
    "hang_without_signals": hang_without_signals,
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "exception": lambda: {}["key"],
    "system_exit": lambda: sys.exit(0),
    "keyboard_interrupt": lambda: raised(KeyboardInterrupt()),
    "unprintable": lambda: raised(Unprintable()),
    "long_message": lambda: raised(ValueError("x" * 10**7)),
    "surrogates": lambda: raised(ValueError("\udcff\0")),
    "recursion": recurse,
    "none": lambda: None,
    "nan": lambda: float("nan"),
    "infinite": lambda: float("-inf"),
    "text": lambda: "1.0",
    "complex": lambda: 1 + 0j,
    "large": lambda: 10**400,
    "too_large": lambda: 1e30,
    "no_number": NoNumber,
    "exit": lambda: os._exit(3),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "terminate": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "segfault": lambda: ctypes.string_at(0),
    "abort": os.abort,
    "memory": use_all_memory,
    "print": print_without_end,
    "garbage": lambda: write_to_channels(b"\x00\x00\x00\x05hello"),
    "long_frame": lambda: write_to_channels(b"\xff" * 100),
    "nested_frame": lambda: write_to_channels(b"\x00\x01\x00\x00" + b"[" * 0x10000),
    "forged_score": lambda: write_to_channels(b'\x00\x00\x00\x2c{"kind":"result","id":-1,"outcomes":[{}],"a":1}'[:48]),
    "add_rows": add_rows,
    "doze": lambda: time.sleep(0.1) or 1.0,
    "fork_bomb": fork_without_end,
    "close_descriptors": lambda: os.closerange(0, 1 << 16),
    "change_process": change_process,
    "daemon": fork_daemon,
    "thread": start_thread,
    "program": start_program,
    "fork_and_return": fork_and_return,
    "kill_parent": kill_parent,
    "signal_all": signal_all,
    "close_output": close_output,
}


def score(response: str, kind: str, **columns: Any) -> Any:
    if kind == "wait":  # until the file exists
        while not os.path.exists(columns["prompt"]):
            time.sleep(0.01)
    elif kind:
        return ACTIONS[kind]()
    return float(len(response))


async def score_async(response: str, kind: str) -> Any:
    await asyncio.sleep(0.05)
    if kind == "async_hang":
        await asyncio.sleep(600)
    while kind == "not_cancelled":
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            continue
    if kind == "cancelled":
        raise asyncio.CancelledError
    return score(response, kind)


def score_batch(response: list[str], kind: list[str]) -> Any:
    scores = [score(*row) for row in zip(response, kind, strict=True) if row[1] not in ("short", "number")]
    return 1.0 if "number" in kind else scores
