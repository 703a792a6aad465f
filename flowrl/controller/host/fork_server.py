"""Fork server: imports all modules of a worker once, and forks worker processes for Ray.

Imports of torch and transformers take seconds per process. A fork takes milliseconds and shares their memory. The
server starts no threads, which do not survive a fork, and does not import ray, which reads the environment on import.
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
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from flowrl.controller.host.fork_client import die_with_parent, set_parent_death_signal

PRELOADED = ("flowrl.controller.host.host",)
"""Modules that every server imports before it forks."""

_CLIENT = Path(__file__).with_name("fork_client.py")
_BACKLOG = 1024
_START = (
    "import sys; sys.path[:] = {path!r}; "
    "from flowrl.controller.host.fork_server import main; main({listener}, {modules})"
)


class ForkServer:
    """Starts a fork server, which exits when this process ends, even if this process is killed.

    The server imports `modules` before it forks.
    """

    def __init__(self, modules: tuple[str, ...] = ()) -> None:
        # Other users cannot access the temporary folder.
        self._folder = tempfile.TemporaryDirectory(prefix="flowrl-")
        self._path = Path(self._folder.name) / "fork"
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(str(self._path))
            listener.listen(_BACKLOG)  # clients wait in the backlog while the server imports
            code = _START.format(path=sys.path, listener=listener.fileno(), modules=(*PRELOADED, *modules))
            # The server must not start OpenMP threads. Workers set their own number of threads.
            environment = {"OMP_NUM_THREADS": "1"} | os.environ
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.PIPE,
                env=environment,
                pass_fds=[listener.fileno()],
                start_new_session=True,  # a terminal's Ctrl-C must reach only the driver
            )
        atexit.register(self.end)

    @property
    def py_executable(self) -> str:
        """Shell command that Ray runs instead of Python."""
        return shlex.join([sys.executable, "-IS", str(_CLIENT), str(self._path)])

    def end(self) -> None:
        """Kills the server, and all forked processes that have not called `survive_fork_server`."""
        atexit.unregister(self.end)
        with self._process:
            self._process.kill()
        self._folder.cleanup()


_server: ForkServer | None = None


def fork_server(modules: tuple[str, ...] = ()) -> ForkServer:
    """Returns the fork server of this process. The first call starts it with `modules`."""
    global _server
    if _server is None:
        _server = ForkServer(modules)
    return _server


@dataclass(frozen=True)
class _ForkRequest:
    argv: list[str]
    env: dict[str, str]
    cwd: str
    output: tuple[int, ...]


def main(listener: int, modules: Sequence[str]) -> None:
    """Runs the server. Each forked process returns from the server loop and runs the requested program."""
    for name in modules:
        importlib.import_module(name)
    # Without this, the garbage collector would write to shared pages and thereby copy them.
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # otherwise the interpreter warns at exit
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # forked processes are reaped automatically
    with socket.socket(fileno=listener) as listening:
        request = _serve(listening)
    if request is not None:
        _run_request(request)


def _serve(listener: socket.socket) -> _ForkRequest | None:
    """Serves fork requests until the driver exits. Returns the request in each forked process, None in the server."""
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        selector.register(sys.stdin, selectors.EVENT_READ)
        while True:
            ready = [key.fileobj for key, _ in selector.select()]
            if sys.stdin in ready:
                return None
            with listener.accept()[0] as client:
                request = _read_request(client)
                if request is None:
                    continue
                server_pid = os.getpid()
                if os.fork() == 0:
                    die_with_parent(server_pid)
                    return request
                for file in request.output:
                    os.close(file)
                with contextlib.suppress(OSError):  # the client may have been killed
                    client.sendall(b"+")


def survive_fork_server() -> None:
    """Lets this process outlive its parent. A worker process calls it when Ray manages the process."""
    set_parent_death_signal(0)


def _read_request(client: socket.socket) -> _ForkRequest | None:
    """Reads the request of a client. Returns None if the request is incomplete or malformed."""
    rights = array.array("i")
    try:
        size, ancillary, _, _ = client.recvmsg(4, socket.CMSG_SPACE(2 * rights.itemsize))
        for _, _, data in ancillary:
            rights.frombytes(data)
        text = b""
        while len(text) < int.from_bytes(size, "big"):
            if not (chunk := client.recv(1 << 20)):
                raise EOFError
            text += chunk
        return _ForkRequest(**json.loads(text), output=tuple(rights))
    except (OSError, EOFError, ValueError):
        for file in rights:
            os.close(file)
        return None


def _run_request(request: _ForkRequest) -> None:
    """Resets a forked process to the state of a new interpreter and runs the requested program."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    for number, file in enumerate((os.open(os.devnull, os.O_RDONLY), *request.output)):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(request.env)
    os.chdir(request.cwd)
    np.random.seed()  # Python reseeds its own generator after a fork, NumPy does not
    sys.argv = request.argv
    sys.path.insert(0, str(Path(request.argv[0]).parent))
    runpy.run_path(request.argv[0], run_name="__main__")
