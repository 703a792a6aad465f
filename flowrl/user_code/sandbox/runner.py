"""Program that runs code in a sandbox. `launch.py` starts it in a new process.

The runner starts the first process of a new process namespace, with its own root folder. This process starts the code.
The runner ends all processes when the code ends, at the time limit, or if they need too much memory. Without
namespaces, it adopts and kills the descendants of the code.
"""

import contextlib
import ctypes
import errno
import importlib.util
import json
import os
import platform
import resource
import select
import signal
import struct
import sys
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

_PR_SET_DUMPABLE, _CLONE_NEWNS, _CLONE_NEWIPC, _CLONE_NEWUSER = 4, 0x00020000, 0x08000000, 0x10000000
_NAMESPACES = _CLONE_NEWNS | _CLONE_NEWUSER | 0x20000000 | 0x40000000  # mounts, user, processes, network
_MS_BIND, _MS_REC, _MS_PRIVATE, _MNT_DETACH = 4096, 16384, 1 << 18, 2
_MS_NOSUID_NODEV_NOEXEC = 2 | 4 | 8
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_SYSTEM_FOLDERS = ("/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/localtime")
_DEVICES = ("null", "full", "random", "urandom")  # shared mappings of /dev/zero are memory that is not counted
_POLL_S = 0.05
_MAX_OPEN_FILES = 64

# Numbers in the kernel, for the filter of system calls.
_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 22, 2
_LOAD, _JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_IF_SET, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _DENY, _DENY_AS_MISSING = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
_X32_CALLS = 0x40000000
_MAP_SHARED, _MAP_ANONYMOUS = 0x01, 0x20
_CLONE3, _IO_URING_SETUP = 435, 425
_HIDDEN_MEMORY = {
    "x86_64": (0xC000003E, 9, 56, (319, 447, 29, 64, 68, 240, 248, 249, 250, 272, _IO_URING_SETUP)),
    "aarch64": (0xC00000B7, 222, 220, (279, 447, 194, 190, 186, 180, 217, 218, 219, 97, _IO_URING_SETUP)),
}
"""Machine -> its number, the numbers of mmap and clone, and those of denied calls.

The denied calls are memfd_create, memfd_secret, shmget, semget, msgget, mq_open, add_key, request_key, keyctl, unshare
and io_uring_setup.
"""

_UNMAPPED = 65534
"""Id of all users in a user namespace without a mapping."""
TIMED_OUT, TOO_MUCH_MEMORY = 124, 125
"""Exit codes of the runner."""

_LIBC = ctypes.CDLL(None, use_errno=True)


def main() -> NoReturn:
    """Runs the code in the settings, which the descriptor in the first argument contains."""
    with os.fdopen(int(sys.argv[1])) as file:
        settings: dict[str, Any] = json.load(file)
    isolation = _load(settings["isolation"])
    isolation.end_with_parent()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    # Within the pool, root has no capabilities and cannot map its id. The namespaces then work with fewer mounts.
    has_namespace = isolation.enter_process_namespace() or _LIBC.unshare(_NAMESPACES) == 0
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
    has_root = has_namespace and _enter_root(settings["folder"])
    folder = "/tmp" if has_root else settings["folder"]
    is_limited = has_root and isolation.limit_process_ids(settings["max_processes"])
    _LIBC.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)  # the code cannot read or trace this process
    child = os.fork()
    if child == 0:
        os.close(ended)
        # The own files of a process that is not dumpable belong to root, such as /proc/self/uid_map.
        _LIBC.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)
        if not has_namespace:
            isolation.end_with_parent()
        _run(lambda: _execute(isolation, settings, folder, has_namespace, has_root, is_limited))
    while True:
        process, status = os.wait()
        if process == child:
            code = os.waitstatus_to_exitcode(status)
            os.write(ended, str(code if code >= 0 else 128 - code).encode())
            signal.pause()  # until the runner kills this process and thereby the namespace


def _enter_root(folder: str) -> bool:
    """Replaces the root folder by one that contains only Python, system libraries and /tmp. Returns True if done."""
    number = _PIVOT_ROOT.get(platform.machine())
    # In a mount namespace of its own, because the runner needs the old root, whose /proc lists all processes.
    # Without a namespace for System V objects, the code could use those of other programs of the user.
    if number is None or _LIBC.unshare(_CLONE_NEWNS | _CLONE_NEWIPC) != 0:
        return False
    if _LIBC.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None) != 0:
        return False
    root = Path(folder)
    for name in ("proc", "dev", "tmp"):
        (root / name).mkdir()
    if _LIBC.mount(folder.encode(), folder.encode(), None, _MS_BIND, None) != 0:
        return False
    if _LIBC.mount(b"proc", bytes(root / "proc"), b"proc", _MS_NOSUID_NODEV_NOEXEC, None) != 0:
        return False
    if os.geteuid() == Path(folder).stat().st_uid != _UNMAPPED:  # files in memory need the id of the user
        _LIBC.mount(b"tmpfs", bytes(root / "tmp"), b"tmpfs", 2 | 4, b"size=64m,mode=700")
    sources = [*_SYSTEM_FOLDERS, *(f"/dev/{name}" for name in _DEVICES), sys.base_prefix, sys.prefix]
    is_done = all(_bind(Path(source), root) for source in dict.fromkeys(sources))
    os.chdir(root)
    is_done = is_done and _LIBC.syscall(number, b".", b".") == 0 and _LIBC.umount2(b".", _MNT_DETACH) == 0
    if not is_done:
        raise OSError(ctypes.get_errno(), "the root folder of the sandbox cannot be created")
    os.chdir("/tmp")
    return True


def _bind(source: Path, root: Path) -> bool:
    """Makes a file or folder visible below the new root. Returns False if it exists but cannot be mounted."""
    target = root / source.relative_to("/")
    if not os.path.lexists(source) or target.exists():  # missing, or within a folder that is mounted
        return True
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_symlink() and source.parent == Path("/"):  # such as /lib -> usr/lib
        target.symlink_to(os.readlink(source))
        return True
    if source.is_dir():
        target.mkdir()
    else:
        target.touch()
    return _LIBC.mount(bytes(source.resolve()), bytes(target), None, _MS_BIND | _MS_REC, None) == 0


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
    unavailable += [] if _deny_hidden_memory() else ["memory"]
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


def _deny_hidden_memory() -> bool:
    """Denies memory that no process maps, which the runner cannot count. Returns False if the system does not offer it.

    Such memory is in anonymous files, System V objects, message queues, keys, rings for input and output, file systems
    that are mounted in a new user namespace, and unmapped pages of shared mappings.
    """
    if platform.machine() not in _HIDDEN_MEMORY:
        return False
    machine, mmap, clone, denied = _HIDDEN_MEMORY[platform.machine()]
    # A filter reads the system call from a struct seccomp_data. These are the offsets of its fields.
    number_at, machine_at, flags_of_clone_at, flags_of_mmap_at = 0, 4, 16, 40
    to_mmap, to_missing, to_deny, to_allow = "mmap", "missing", "deny", "allow"
    program: list[tuple[int, int, str | None, str | None]] = [
        (_LOAD, machine_at, None, None),
        (_JUMP_EQUAL, machine, None, to_deny),
        (_LOAD, number_at, None, None),
        (_JUMP_AT_LEAST, _X32_CALLS, to_deny, None),
        *((_JUMP_EQUAL, number, to_deny, None) for number in denied),
        (_JUMP_EQUAL, _CLONE3, to_missing, None),  # its flags are in memory; the C library then uses clone
        (_JUMP_EQUAL, mmap, to_mmap, None),
        (_JUMP_EQUAL, clone, None, to_allow),
        (_LOAD, flags_of_clone_at, None, None),
        (_JUMP_IF_SET, _CLONE_NEWUSER, to_deny, to_allow),
        (_LOAD, flags_of_mmap_at, None, None),
        (_JUMP_IF_SET, _MAP_ANONYMOUS, None, to_allow),
        (_JUMP_IF_SET, _MAP_SHARED, to_deny, to_allow),
        (_RETURN, _DENY_AS_MISSING, None, None),
        (_RETURN, _DENY, None, None),
        (_RETURN, _ALLOW, None, None),
    ]
    end = len(program)
    targets = {to_mmap: end - 6, to_missing: end - 3, to_deny: end - 2, to_allow: end - 1}
    code = b"".join(
        struct.pack("=HBBI", kind, *(targets[to] - i - 1 if to is not None else 0 for to in jumps), value)
        for i, (kind, value, *jumps) in enumerate(program)
    )
    text = ctypes.create_string_buffer(code, len(code))
    argument = ctypes.create_string_buffer(struct.pack("@HP", len(program), ctypes.addressof(text)))
    pointer = ctypes.c_void_p(ctypes.addressof(argument))
    return _LIBC.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, pointer, 0, 0) == 0


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
