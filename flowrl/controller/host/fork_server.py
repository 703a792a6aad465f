"""A process that has imported what every worker needs, and forks one wherever Ray would start an interpreter.

A worker's imports (torch, transformers, tensordict) take seconds of a core, in each process of a run and in each that
takes a lost one's place; a fork has them in milliseconds, and shares their memory. The server neither computes nor
starts threads, nor imports ray, which reads its settings from the environment when it is imported: what must be a
process's own is made after the fork.
"""

import array
import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import selectors
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

PRELOADED = ("flowrl.controller.host.host", "flowrl.workers")
"""Modules, with all that they import: what the processes of most runs import first."""

_CLIENT = Path(__file__).with_name("fork_client.py")
_BACKLOG = 1024
_START = "import sys; sys.path[:] = {path!r}; from flowrl.controller.host.fork_server import main; main({listener})"


class ForkServer:
    """The fork server of this process. It ends with it, however that ends."""

    def __init__(self) -> None:
        # Only this user can reach a socket in it.
        self._folder = tempfile.TemporaryDirectory(prefix="flowrl-")
        self._path = Path(self._folder.name) / "fork"
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(str(self._path))
            listener.listen(_BACKLOG)  # from here on clients wait for the server, which takes seconds to import
            code = _START.format(path=sys.path, listener=listener.fileno())
            # Imports start no threads for matrices; a worker has as many as its role's setting says.
            environment = {"OMP_NUM_THREADS": "1"} | os.environ
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.PIPE,
                env=environment,
                pass_fds=[listener.fileno()],
                start_new_session=True,  # Ctrl-C in a terminal is for the driver
            )
        atexit.register(self.end)

    @property
    def py_executable(self) -> str:
        """What Ray has to run in place of Python, as a command of a shell."""
        return shlex.join([sys.executable, "-IS", str(_CLIENT), str(self._path)])

    def end(self) -> None:
        """Ends the server; what it has forked goes on."""
        atexit.unregister(self.end)
        with self._process:
            self._process.kill()
        self._folder.cleanup()


@cache
def fork_server() -> ForkServer:
    """The fork server of this process, which is started when it is first asked for."""
    return ForkServer()


@dataclass(frozen=True)
class _Order:
    """A process that is asked for."""

    argv: list[str]
    """A Python file and its arguments."""
    env: dict[str, str]
    cwd: str
    output: tuple[int, ...]
    """File descriptors of standard output and error."""


def main(listener: int) -> None:
    """The server's program, and then that of each process which it forks."""
    for name in PRELOADED:
        importlib.import_module(name)
    # What is there will not become garbage; a collection would only copy its pages into each process.
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # an interpreter that ends complains of what it cannot collect
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for what was forked
    with socket.socket(fileno=listener) as listening:
        order = _serve(listening)
    if order is not None:
        _become(order)


def _serve(listener: socket.socket) -> _Order | None:
    """Forks until the driver is gone; returns in the driver's place with None, and with the order in what it forks."""
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        selector.register(sys.stdin, selectors.EVENT_READ)
        while True:
            ready = [key.fileobj for key, _ in selector.select()]
            if sys.stdin in ready:
                return None
            with listener.accept()[0] as client:
                order = _read(client)
                if order is None:
                    continue
                if os.fork() == 0:
                    return order
                for file in order.output:
                    os.close(file)
                with contextlib.suppress(OSError):  # it has been killed
                    client.sendall(b"+")


def _read(client: socket.socket) -> _Order | None:
    """What a client asks for; None where it has ended in the middle of it."""
    rights = array.array("i")
    try:
        size, ancillary, _, _ = client.recvmsg(4, socket.CMSG_SPACE(2 * rights.itemsize))
        for _, _, data in ancillary:
            rights.frombytes(data)
        text = b""
        while len(text) < int.from_bytes(size, "big"):
            if not (part := client.recv(1 << 20)):
                raise EOFError
            text += part
        return _Order(**json.loads(text), output=tuple(rights))
    except (OSError, EOFError, ValueError):
        for file in rights:
            os.close(file)
        return None


def _become(order: _Order) -> None:
    """Makes a forked process what it would be if Python had been started for it."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    for number, file in enumerate((os.open(os.devnull, os.O_RDONLY), *order.output)):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(order.env)
    os.chdir(order.cwd)
    np.random.seed()  # Python does so for its own generator, or all processes would draw the same numbers
    sys.argv = order.argv
    sys.path.insert(0, str(Path(order.argv[0]).parent))
    runpy.run_path(order.argv[0], run_name="__main__")
