"""Fork server: a process with all worker imports loaded, which forks worker processes for Ray.

The imports (torch, transformers, tensordict) take seconds per process. A fork takes milliseconds and shares their
memory. The server starts no threads and does not import ray, because threads do not survive a fork and ray reads the
environment when it is imported.
"""

import array
import atexit
import contextlib
import ctypes
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
"""Modules that the server imports, with all their imports."""

_CLIENT = Path(__file__).with_name("fork_client.py")
_BACKLOG = 1024
_START = "import sys; sys.path[:] = {path!r}; from flowrl.controller.host.fork_server import main; main({listener})"


class ForkServer:
    """A fork server. It exits when this process ends, even if this process is killed."""

    def __init__(self) -> None:
        # Only this user can access a socket in the temporary folder.
        self._folder = tempfile.TemporaryDirectory(prefix="flowrl-")
        self._path = Path(self._folder.name) / "fork"
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(str(self._path))
            listener.listen(_BACKLOG)  # clients wait in the backlog while the server imports
            code = _START.format(path=sys.path, listener=listener.fileno())
            # The server must not start OpenMP threads; a worker sets its own number.
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
        """Kills the server, and with it the forked processes that have not called `survive_fork_server`."""
        atexit.unregister(self.end)
        with self._process:
            self._process.kill()
        self._folder.cleanup()


@cache
def fork_server() -> ForkServer:
    """Returns the fork server of this process; starts it on the first call."""
    return ForkServer()


@dataclass(frozen=True)
class _ForkRequest:
    """A request to start a process."""

    argv: list[str]
    """Path of a Python file, and its arguments."""
    env: dict[str, str]
    cwd: str
    output: tuple[int, ...]
    """File descriptors of stdout and stderr."""


def main(listener: int) -> None:
    """Runs the server, and then the requested program in each forked process."""
    for name in PRELOADED:
        importlib.import_module(name)
    # Keep the garbage collector from touching, and thereby copying, the shared pages.
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # otherwise the interpreter warns at exit
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # forked processes are reaped automatically
    with socket.socket(fileno=listener) as listening:
        request = _serve(listening)
    if request is not None:
        _run_request(request)


def _serve(listener: socket.socket) -> _ForkRequest | None:
    """Serves fork requests until the driver exits. Returns the request in a forked process and None in the server."""
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
                    _die_with_parent(server_pid)
                    return request
                for file in request.output:
                    os.close(file)
                with contextlib.suppress(OSError):  # the client may have been killed
                    client.sendall(b"+")


def _die_with_parent(parent_pid: int) -> None:
    """Has the kernel kill this process when its parent exits.

    Ray kills only processes that have registered with it. Without this, a process forked while the driver shuts down
    would search for the ended Ray for up to a minute.
    """
    _set_parent_death_signal(signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


def survive_fork_server() -> None:
    """Lets a worker process, which Ray now manages, outlive the fork server."""
    _set_parent_death_signal(0)


def _set_parent_death_signal(number: int) -> None:
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, number, 0, 0, 0)


def _read_request(client: socket.socket) -> _ForkRequest | None:
    """Reads a client's request. Returns None if it is incomplete or malformed."""
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
    """Gives a forked process the state of a new interpreter and runs its program."""
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
