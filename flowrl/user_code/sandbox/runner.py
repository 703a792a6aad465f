"""Program that runs code in a sandbox. `launch.py` starts it in a new process.

The runner starts the first process of a new process namespace, with its own root folder. This process starts the code.
The runner ends all processes when the code ends, at the time limit, or if they need too much memory. Without
namespaces, it adopts and kills the descendants of the code.
"""

import contextlib
import importlib.util
import json
import os
import resource
import select
import signal
import sys
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

_POLL_S = 0.05
_MAX_OPEN_FILES = 64

TIMED_OUT, TOO_MUCH_MEMORY = 124, 125
"""Exit codes of the runner."""


def main() -> NoReturn:
    """Runs the code in the settings, which the descriptor in the first argument contains."""
    with os.fdopen(int(sys.argv[1])) as file:
        settings: dict[str, Any] = json.load(file)
    isolation = _load(settings["isolation"])
    isolation.end_with_parent()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    has_namespace = isolation.enter_sandbox_namespaces()
    if not has_namespace:
        isolation.adopt_orphans()
    read, write = os.pipe()
    first = os.fork()
    if first == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.close(read)
        _run(lambda: _start(isolation, settings, has_namespace, write))
    os.close(write)
    code = 1
    try:
        os.waitpid(first, os.WNOHANG)
        code = _watch(first, read, settings)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        _kill_all(first, isolation)
        os._exit(code)


def _load(path: str) -> types.ModuleType:
    """Imports a file without its package, so that the process starts fast."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module
    spec.loader.exec_module(module)
    return module


def _run(body: Callable[[], int]) -> NoReturn:
    """Runs the body of a forked process, and ends the process without the cleanup of its parent."""
    code = 1
    try:
        code = body()
    except SystemExit as end:
        code = _exit_code(end.code)
    except BaseException as error:  # noqa: BLE001 (a process boundary: the exit code reports the failure)
        with contextlib.suppress(Exception):
            sys.excepthook(type(error), error, error.__traceback__)
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        os._exit(code)


def _exit_code(code: Any) -> int:  # Any: the argument of sys.exit
    return 0 if code is None else code & 255 if isinstance(code, int) else 1


# The watching process.


def _watch(first: int, ended: int, settings: dict[str, Any]) -> int:
    """Returns the exit code of the code, or the reason for which it must be killed.

    `first` is the process below the runner. `ended` is a pipe to which it writes the exit code.
    """
    deadline_s = time.monotonic() + settings["timeout_s"]
    limit = settings["memory_mb"] * 10**6
    while (left_s := deadline_s - time.monotonic()) > 0:
        if select.select([ended], [], [], min(left_s, _POLL_S))[0]:
            code = os.read(ended, 4)
            return int(code) if code else 1  # without a code, the first process was killed
        if sum(memory for _, _, memory in _descendants()) > limit:
            return TOO_MUCH_MEMORY
    return TIMED_OUT


def _descendants() -> Iterator[tuple[int, int, int]]:
    """Yields process id, parent and resident bytes of each descendant of the runner."""
    table = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):  # ends meanwhile
                fields = Path(entry.path, "stat").read_text().rpartition(")")[2].split()
                table[int(entry.name)] = (int(fields[1]), int(fields[21]) * resource.getpagesize())
    known = {os.getpid()}
    while new := {process for process, (parent, _) in table.items() if parent in known and process not in known}:
        yield from ((process, *table[process]) for process in new)
        known |= new


def _kill_all(first: int, isolation: types.ModuleType) -> None:
    """Kills all descendants, until none is left."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(first, signal.SIGKILL)  # also kills its namespace
    with contextlib.suppress(ChildProcessError):
        while True:
            for process, _, _ in _descendants():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            os.wait()


# The first process of the namespace.


def _start(isolation: types.ModuleType, settings: dict[str, Any], has_namespace: bool, ended: int) -> int:
    """Starts the code, and reports its exit code."""
    isolation.end_with_parent()
    has_root = has_namespace and isolation.enter_root(settings["folder"])
    folder = "/tmp" if has_root else settings["folder"]
    is_limited = has_root and isolation.limit_process_ids(settings["max_processes"])
    isolation.allow_tracing(False)  # the code cannot read or trace this process
    child = os.fork()
    if child == 0:
        os.close(ended)
        # The own files of a process that is not dumpable belong to root, such as /proc/self/uid_map.
        isolation.allow_tracing(True)
        if not has_namespace:
            isolation.end_with_parent()
        _run(lambda: _execute(isolation, settings, folder, has_namespace, has_root, is_limited))
    while True:
        process, status = os.wait()
        if process == child:
            code = os.waitstatus_to_exitcode(status)
            os.write(ended, str(code if code >= 0 else 128 - code).encode())
            signal.pause()  # until the runner kills this process and thereby the namespace


# The process of the code.


def _execute(
    isolation: types.ModuleType,
    settings: dict[str, Any],
    folder: str,
    has_namespace: bool,
    has_root: bool,
    is_limited: bool,
) -> int:
    """Restricts the current process and runs the code. Returns its exit code."""
    sys.dont_write_bytecode = True
    os.chdir(folder)
    os.setsid()
    descriptor = settings["socket"]
    if descriptor is None:
        os.closerange(3, 65536)
    else:
        os.closerange(3, descriptor)
        os.closerange(descriptor + 1, 65536)
    resource.setrlimit(resource.RLIMIT_NOFILE, (_MAX_OPEN_FILES, _MAX_OPEN_FILES))
    missing = isolation.isolate(
        isolation.Isolation(
            memory_mb=settings["memory_mb"],
            max_processes=settings["max_processes"],
            max_file_mb=settings["max_file_mb"],
            writable=Path(folder),
            cpu_s=settings["timeout_s"],
        )
    )
    # The runner has also entered a user namespace, and the process namespace has its own /proc.
    available = {"processes": is_limited, "environment": has_namespace, "signals": has_namespace}
    unavailable = [name for name in missing if not available.get(name, False)]
    unavailable += [] if has_namespace else ["descendants"]
    unavailable += [] if has_root else ["reading"]
    unavailable += [] if isolation.deny_hidden_memory() else ["memory"]
    if settings["mode"] == "probe":
        sys.stdout.write(json.dumps(unavailable))
        return 0
    if settings["mode"] == "program":
        return _run_program(settings["code"])
    calls = settings["calls"]
    code = compile(settings["calls_source"], calls, "exec")
    module = types.ModuleType("calls")
    exec(code, module.__dict__)
    return module.serve(settings, descriptor) if settings["mode"] == "serve" else module.check(settings, descriptor)


def _run_program(code: str) -> int:
    """Runs the code as a program, as `python solution.py` would."""
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    sys.argv[:] = ["solution.py"]
    exec(compile(code, "solution.py", "exec"), module.__dict__)
    for thread in [one for one in _threads() if one is not None]:
        thread.join()
    return 0


def _threads() -> list[Any]:  # Any: threads
    threading = sys.modules.get("threading")
    if threading is None:
        return []
    current = threading.current_thread()
    return [thread for thread in threading.enumerate() if thread is not current and not thread.daemon]


if __name__ == "__main__":
    main()
