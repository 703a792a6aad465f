"""`Launcher`: forks processes of user code from a process that never runs user code.

A supervisor has one launcher. It imports Python and flowrl once, so a new process starts in milliseconds. Each process
has a guard, its parent, which ends all processes that user code has started:

    supervisor -> launcher -> guard (first process of a process namespace) -> process of user code -> others
"""

import array
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from flowrl.data.folders.private_folder import create_folder, list_private_roots, remove_folder
from flowrl.user_code.guard import Serve, kill_children, run_forked, start_guard
from flowrl.user_code.isolation import adopt_orphans, end_with_parent, probe_namespaces

_GUARDS_END_S = 3.0
"""Timeout for the end of the guards. The launcher then kills its children, the processes of guards that were killed."""

_NUM_DESCRIPTORS = 5

_VARIABLES = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|TZ|TMPDIR|LANG|LANGUAGE|LC_\w+|PYTHON(PATH|HOME|UTF8|HASHSEED|WARNINGS)|VIRTUAL_ENV|"
    r"CONDA_PREFIX|LD_LIBRARY_PATH|XDG_\w+|(OMP|MKL|OPENBLAS|NUMEXPR)_NUM_THREADS|TOKENIZERS_PARALLELISM|NLTK_DATA|"
    r"HF_(HOME|HUB_CACHE|DATASETS_CACHE|HUB_OFFLINE|DATASETS_OFFLINE)|SSL_CERT_(FILE|DIR)|REQUESTS_CA_BUNDLE"
)
"""Variables of the environment that user code receives. Others, such as tokens and passwords, are removed."""

_PROXIES = re.compile(r"(HTTPS?|ALL|NO)_PROXY", re.IGNORECASE)


def environment_of(variables: Mapping[str, str], *, allow_network: bool, also: tuple[str, ...] = ()) -> dict[str, str]:
    """Returns the variables that a process of user code receives. `also` are names of further variables."""
    passed = {
        name: value
        for name, value in variables.items()
        if _VARIABLES.fullmatch(name) or name in also or (allow_network and _PROXIES.fullmatch(name))
    }
    # Each process is one worker of many, so a library must not start a thread per core.
    return {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", **passed}


class Launcher:
    """Starts the launcher program (`main`) in a subprocess. It ends with the thread that has created it."""

    def __init__(self, environment: Mapping[str, str], main_loop: str) -> None:
        """`environment` are the variables of the processes. `main_loop` is the module of their function `serve`."""
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._folder = create_folder("functions")
        self.folder = self._folder.path
        roots = [str(root) for root in list_private_roots()]
        program = (
            f"import sys; sys.path[:] = {sys.path!r}\n"
            "import socket\n"
            "from flowrl.user_code import launcher\n"
            f"from {main_loop} import serve\n"
            f"control = socket.socket(fileno={theirs.fileno()})\n"
            f"launcher.main(control, {os.getpid()}, {str(self.folder)!r}, {roots!r}, serve)"
        )
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", program],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=dict(environment),
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    def make_folder(self) -> str:
        """Creates the temporary folder of a process. Raises ConnectionError if the launcher has ended, because its
        folder is then removed.
        """
        try:
            return tempfile.mkdtemp(dir=self.folder)
        except FileNotFoundError as error:
            if self._process.poll() is None:  # a program that cleans /tmp has removed the folder
                self.folder.mkdir(mode=0o700, exist_ok=True)
                return tempfile.mkdtemp(dir=self.folder)
            raise ConnectionError(f"the launcher has ended: its folder {self.folder} has been removed") from error

    def start(self, settings: Mapping[str, Any], descriptors: list[int]) -> None:
        """Requests a new process. Raises OSError if the launcher has ended."""
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
        self.socket.sendmsg([json.dumps(settings).encode()], ancillary)

    def close(self) -> None:
        """Ends the launcher after all its processes have ended. Close the guards first."""
        self.socket.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._folder.remove()


def main(control: socket.socket, parent: int, folder: str, roots: Sequence[str], serve: Serve) -> None:
    """Forks a process for each message, which has descriptors and settings, until the supervisor closes the socket.

    Args:
        control: socket of the supervisor.
        parent: id of the process of the supervisor.
        folder: private folder of the launcher. It is removed when the launcher and the guards have ended.
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
        data, descriptors, _, _ = socket.recv_fds(control, 1 << 16, _NUM_DESCRIPTORS)
        if not data:
            break
        settings = json.loads(data)
        if not is_probed:
            probe_namespaces(allow_network=settings["allow_network"])
            is_probed = True
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the processes
        if os.fork() == 0:
            run_forked(partial(start_guard, control, roots, settings, descriptors, serve), descriptors[1])
        for descriptor in descriptors:
            os.close(descriptor)
    os.close(alive)
    signal.signal(signal.SIGALRM, lambda *_: kill_children())
    signal.setitimer(signal.ITIMER_REAL, _GUARDS_END_S, 0.1)
    with contextlib.suppress(ChildProcessError):  # each guard ends, because the supervisor has closed its socket
        os.wait()  # for all, because SIGCHLD is ignored


def _remove_at_end(folder: str, control: socket.socket) -> int:
    """Starts a process that removes the folder after the launcher and the guards have ended.

    The supervisor cannot remove it if its process is killed. Ray kills all processes at the end of a run in a cluster.
    Returns a descriptor that the launcher and the guards keep open.
    """
    ended, alive = os.pipe()
    if os.fork() == 0:
        os.close(alive)
        control.close()
        null = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):  # otherwise, a reader of the program's output would wait for this process
            os.dup2(null, number)
        run_forked(lambda: _remove_after(ended, folder), 2)
    os.close(ended)
    return alive


def _remove_after(ended: int, folder: str) -> None:
    os.read(ended, 1)
    remove_folder(Path(folder))
