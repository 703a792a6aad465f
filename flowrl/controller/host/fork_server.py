"""Fork server: imports all modules of a worker once, and forks worker processes for Ray.

Imports of torch and transformers take seconds per process. A forked process starts in milliseconds and shares the
memory of the imported modules. The server starts no threads, because these do not survive a fork. The server does not
import ray, because ray reads the environment on import.
"""

import array
import atexit
import contextlib
import fcntl
import gc
import importlib
import json
import os
import runpy
import secrets
import select
import selectors
import shlex
import signal
import socket
import struct
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from flowrl.controller.host.fork_client import die_with_parent, set_parent_death_signal
from flowrl.data.folders.private_folder import private_folder
from flowrl.data.folders.process_stat import read_start_time, read_stat

PRELOADED = ("flowrl.controller.host.host",)
"""Modules that every server imports before it forks."""

_CLIENT = Path(__file__).with_name("fork_client.py")
_RAYLET = "raylet"
"""Program of Ray that starts the clients."""

_BACKLOG = 1024
_END_TIMEOUT_S = 5.0
_START = (
    "import sys; sys.path[:] = {path!r}; "
    "from flowrl.controller.host.fork_server import main; main({listener}, {modules}, {exits!r})"
)


class ForkServer:
    """Starts a fork server. If this process is killed, the server kills all forked processes and exits.

    The server imports `modules` before it forks.
    """

    def __init__(self, modules: tuple[str, ...] = ()) -> None:
        name = secrets.token_hex(4)
        self._path, self._exits = private_folder() / f"fork-{name}", private_folder() / f"exits-{name}"
        self._exits.touch(mode=0o600)
        self._num_ended: Counter[str] = Counter()
        """Name -> number of ended processes that `find_ended` has returned."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(str(self._path))
            listener.listen(_BACKLOG)  # clients wait in the backlog while the server imports
            code = _START.format(
                path=sys.path, listener=listener.fileno(), modules=(*PRELOADED, *modules), exits=str(self._exits)
            )
            # The server must not start OpenMP threads. Workers set their own number of threads. It must not initialize
            # the CUDA driver, because forked processes could not use it. torch therefore detects GPUs through NVML.
            environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.PIPE,
                env=environment,
                pass_fds=[listener.fileno()],
                start_new_session=True,  # a terminal's Ctrl-C must reach only the driver
            )
        atexit.register(self.end)

    @property
    def is_running(self) -> bool:
        """Whether the server runs. It exits if one of its imports has used CUDA. Ray then starts Python instead."""
        return self._process.poll() is None

    @property
    def py_executable(self) -> str:
        """Shell command that Ray runs instead of Python."""
        return shlex.join([sys.executable, "-IS", str(_CLIENT), str(self._path)])

    def find_exit(self, name: str, timeout_s: float = 5.0) -> tuple[int, int] | None:
        """Returns (process id, wait status) of the newest ended process with this name; None if it is unknown.

        Waits up to `timeout_s` seconds for the status of the newest process, because its peers may notice its end
        earlier than the server. Waits at most half a second if the process still runs.
        """
        started_s = time.monotonic()
        while True:
            exits = _read_exits(self._exits)[name]
            if not exits or exits[-1][1] is not None:
                break
            limit_s = timeout_s if read_start_time(exits[-1][0]) is None else min(timeout_s, 0.5)
            if time.monotonic() - started_s > limit_s:
                break
            time.sleep(0.02)
        ended = [(process_id, status) for process_id, status in exits if status is not None]
        return ended[-1] if ended else None

    def find_ended(self, names: Collection[str]) -> list[str]:
        """Returns the names of processes that have ended since the previous call."""
        exits = _read_exits(self._exits)
        ended = []
        for name in names:
            num_ended = sum(status is not None for _, status in exits[name])
            if num_ended > self._num_ended[name]:
                ended.append(name)
            self._num_ended[name] = num_ended
        return ended

    def end(self) -> None:
        """Ends the server, which kills all forked processes.

        A server that does not respond is killed. Then forked processes that have called `survive_fork_server` remain.
        """
        atexit.unregister(self.end)
        assert self._process.stdin is not None
        with self._process:
            self._process.stdin.close()
            try:
                self._process.wait(_END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
        # The file of exits stays until the private folder is removed, because a backend may still read it.
        self._path.unlink(missing_ok=True)


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


_children: set[int] = set()
"""Ids of the forked processes whose wait status the server has not read. The kernel does not reuse these ids."""

_exit_log: Path | None = None
"""File of the names and wait statuses of forked processes, in the server and in forked processes."""


def _log_exit(line: str) -> None:
    # All processes append to the file. Short writes in append mode are atomic.
    if _exit_log is not None:
        with contextlib.suppress(FileNotFoundError), _exit_log.open("a") as file:  # the driver may have ended
            file.write(f"{line}\n")


def _read_exits(path: Path) -> defaultdict[str, list[tuple[int, int | None]]]:
    """Maps each name to the (process id, wait status) pairs of its processes, oldest first.

    The status of a running process is None.
    """
    exits: defaultdict[str, list[tuple[int, int | None]]] = defaultdict(list)
    names: dict[int, str] = {}
    for line in path.read_text().splitlines():
        event, number, value = line.split()
        process_id = int(number)
        if event == "started":
            names[process_id] = value
            exits[value].append((process_id, None))
        elif (name := names.pop(process_id, None)) is not None:
            exits[name][exits[name].index((process_id, None))] = process_id, int(value)
    return exits


def main(listener: int, modules: Sequence[str], exits: str) -> None:
    """Runs the server. Each forked process returns from the server loop and runs the requested program.

    `exits` is the file that receives the names and wait statuses of forked processes.
    """
    global _exit_log
    _exit_log = Path(exits)
    with _end_with_driver():
        for name in modules:
            importlib.import_module(name)
        if not _can_fork():
            os._exit(0)
    # Without this, the garbage collector would write to shared pages and thereby copy them.
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # otherwise the interpreter warns at exit
    # The end of a forked process wakes the server, which then reads its wait status.
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    with socket.socket(fileno=listener) as listening:
        request = _serve(listening)
    if request is None:
        os._exit(0)  # a normal exit takes more than a second, because it deletes all imported modules
    _run_request(request)


def _can_fork() -> bool:
    if "torch" not in sys.modules:
        return True
    from flowrl.devices.device import can_fork  # noqa: PLC0415 (only if torch is there)

    return can_fork()


@contextlib.contextmanager
def _end_with_driver() -> Iterator[None]:
    """Ends this process if the driver ends during the block.

    The server cannot notice this itself, because it does not read stdin during imports.
    """
    flags = fcntl.fcntl(sys.stdin, fcntl.F_GETFL)
    # The end of the driver closes the pipe, which sends SIGIO. The default handler of SIGIO ends the process.
    fcntl.fcntl(sys.stdin, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(sys.stdin, fcntl.F_SETFL, flags | os.O_ASYNC)
    if select.select([sys.stdin], [], [], 0)[0]:
        sys.exit()  # the driver has already ended
    yield
    fcntl.fcntl(sys.stdin, fcntl.F_SETFL, flags)


def _serve(listener: socket.socket) -> _ForkRequest | None:
    """Serves fork requests until the driver exits. Returns the request in each forked process, None in the server.

    Kills all forked processes when the driver exits, because Ray cannot end processes that are stopped or not yet
    registered.
    """
    driver_id = os.getppid()
    ended, wakeup = socket.socketpair()
    with selectors.DefaultSelector() as selector, ended, wakeup:
        wakeup.setblocking(False)
        signal.set_wakeup_fd(wakeup.fileno(), warn_on_full_buffer=False)
        for file in (listener, sys.stdin, ended):
            selector.register(file, selectors.EVENT_READ)
        while True:
            ready = [key.fileobj for key, _ in selector.select()]
            if sys.stdin in ready:
                for process_id in _children:
                    os.kill(process_id, signal.SIGKILL)
                return None
            if ended in ready:
                ended.recv(1 << 12)
                _reap()
            if listener not in ready:
                continue
            with listener.accept()[0] as client:
                request = _read_request(client) if _is_of_raylet(client, driver_id) else None
                if request is None:
                    continue
                server_pid = os.getpid()
                if (child := os.fork()) == 0:
                    signal.set_wakeup_fd(-1)
                    die_with_parent(server_pid)
                    return request
                _children.add(child)
                for file in request.output:
                    os.close(file)
                with contextlib.suppress(OSError):  # the client may have been killed
                    client.sendall(b"+")


def _is_of_raylet(client: socket.socket, driver_id: int) -> bool:
    """Returns whether the parent process of a client is a raylet that the driver has started.

    This excludes processes of reward functions and environments, which run as the same user. Without namespaces, these
    could read a secret of the client, but they cannot choose their parent.
    """
    process_id, _, _ = struct.unpack("3i", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    parent_id = read_stat(process_id).parent_id
    try:
        is_raylet = Path(f"/proc/{parent_id}/exe").readlink().name == _RAYLET
    except OSError:  # ended, or of another user
        return False
    return is_raylet and read_stat(parent_id).parent_id == driver_id


def _reap() -> None:
    """Logs the wait statuses of all forked processes that have ended."""
    with contextlib.suppress(ChildProcessError):
        while (end := os.waitpid(-1, os.WNOHANG))[0]:
            _children.discard(end[0])
            _log_exit(f"ended {end[0]} {end[1]}")


def survive_fork_server(name: str) -> None:
    """Lets this process outlive a killed parent. A worker process calls this function as soon as Ray manages it.

    If the fork server has started this process, `ForkServer.find_exit(name)` returns its wait status after its end.
    """
    set_parent_death_signal(0)
    _log_exit(f"started {os.getpid()} {name}")


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
    except (OSError, EOFError, TypeError, ValueError):
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
