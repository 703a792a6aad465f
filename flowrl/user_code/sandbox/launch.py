"""Starts sandboxes, which run code in a restricted process, and collects their results."""

import json
import os
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from flowrl.data.folders.private_folder import create_folder, remove_tree

_FOLDER = Path(__file__).parent
_RUNNER, _CALLS = _FOLDER / "runner.py", _FOLDER / "proxied_calls.py"
_ISOLATION = _FOLDER.parent / "isolation.py"
_ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "PYTHONIOENCODING": "utf-8:backslashreplace",
    # Libraries start one thread per core, which counts as a process and reserves address space.
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
}
"""All environment variables of the code."""

_GRACE_S = 5.0
"""Time after which a runner that does not end by itself is killed."""


@lru_cache(maxsize=1)
def _create_parent(process_id: int) -> Path:
    """Creates a folder. Each sandbox of the process has a folder in it."""
    return create_folder("code").path


Mode = Literal["probe", "program", "serve", "check"]


@dataclass(frozen=True)
class SandboxLimits:
    """Resources of a sandbox."""

    timeout_s: float = 5.0
    """Wall time, and CPU time of each process."""

    memory_mb: float = 512.0
    """Resident memory of all processes, and address space of each process, in MB (10^6 bytes)."""

    max_processes: int = 32
    """Number of processes and threads."""

    max_file_mb: float = 16.0
    """Size of a written file, including the output, in MiB."""


class Sandbox:
    """A running sandbox. Leaving the context ends all its processes."""

    def __init__(
        self,
        mode: Mode,
        code: str = "",
        limits: SandboxLimits | None = None,
        *,
        stdin: str = "",
        connection: socket.socket | None = None,
        entry_point: str | None = None,
    ) -> None:
        """Starts the code.

        Args:
            mode: `program`: runs the code as a program. `serve`: runs the code, and then executes the calls of the
                sandbox at the other end of `connection`. `check`: runs the code as a test, which calls the functions of
                that other sandbox. `probe`: writes the missing protections as JSON.
            code: Python code.
            limits: resources of the code.
            stdin: standard input.
            connection: socket to the other sandbox. Closed here.
            entry_point: function that the tests use. None: all functions.
        """
        self._limits = limits = limits or SandboxLimits()
        self._folder = tempfile.mkdtemp(dir=_create_parent(os.getpid()))
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 (closed at the end of the context)
        descriptor = None if connection is None else connection.fileno()
        settings: dict[str, Any] = {
            "mode": mode,
            "code": code,
            "folder": self._folder,
            "isolation": str(_ISOLATION),
            "socket": descriptor,
            "entry_point": entry_point,
            "calls": str(_CALLS),
            "calls_source": _CALLS.read_text(encoding="utf-8") if mode in ("serve", "check") else "",
            **{name: getattr(limits, name) for name in ("timeout_s", "memory_mb", "max_processes", "max_file_mb")},
        }
        with tempfile.TemporaryFile() as source, tempfile.TemporaryFile() as given:
            source.write(json.dumps(settings).encode())
            given.write(stdin.encode(errors="surrogatepass"))
            for file in (source, given):
                file.seek(0)
            self._process = subprocess.Popen(
                [sys.executable, "-I", str(_RUNNER), str(source.fileno())],
                stdin=given,
                stdout=self._output,
                stderr=subprocess.DEVNULL,
                pass_fds=[source.fileno(), *([] if descriptor is None else [descriptor])],
                env=_ENVIRONMENT,
                cwd="/",
                start_new_session=True,
            )
        if connection is not None:
            connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.terminate()  # the runner then kills all processes
        self._wait(_GRACE_S)
        self._output.close()
        remove_tree(self._folder)

    def wait(self) -> int:
        """Returns the exit code of the code: 0 for success. 124: the time limit, 125: the memory limit."""
        return self._wait(self._limits.timeout_s + _GRACE_S)

    def read_output(self) -> str:
        """Returns the standard output."""
        self._output.seek(0)
        return self._output.read().decode(errors="replace")

    def _wait(self, timeout_s: float) -> int:
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, 9)
            return self._process.wait()


@lru_cache(maxsize=1)
def find_missing_protections() -> tuple[str, ...]:
    """Returns the protections that this system does not offer to a sandbox, by name.

    The names are those of `isolate`, `reading` (the code can read files of the user), `descendants` (a process that the
    code starts could survive) and `memory` (the code can hold memory that is not counted).
    """
    with Sandbox("probe") as sandbox:
        sandbox.wait()
        return tuple(json.loads(sandbox.read_output() or '["sandbox"]'))
