"""Restricts the memory, processes, files and network of the current process. Requires Linux, but no root rights.

A user namespace hides the environment variables of other processes, and a network namespace hides the network. Landlock
protects files, or read-only mounts in kernels without Landlock. Missing protections are reported by name.
"""

import contextlib
import ctypes
import functools
import os
import resource
import signal
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

MIB = 1024**2

_LIBC = ctypes.CDLL(None, use_errno=True)

# Constants of the kernel. The numbers of these system calls are the same on all 64-bit machines except alpha.
_CLONE_NEWNS, _CLONE_NEWUSER, _CLONE_NEWPID, _CLONE_NEWNET = 0x00020000, 0x10000000, 0x20000000, 0x40000000
_CLONE_NEWIPC = 0x08000000
_SYS_MOUNT_SETATTR, _SYS_LANDLOCK_CREATE, _SYS_LANDLOCK_ADD, _SYS_LANDLOCK_RESTRICT = 442, 444, 445, 446
_PR_SET_PDEATHSIG, _PR_CAPBSET_DROP, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 24, 36, 38
_PROCESS_NAMESPACE = _CLONE_NEWUSER | _CLONE_NEWNS | _CLONE_NEWPID | _CLONE_NEWIPC
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 1, 2, 4, 8
_NO_PROGRAMS = _MS_NOSUID | _MS_NODEV | _MS_NOEXEC
_MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = 32, 4096, 16384, 1 << 18
_MNT_DETACH = 2
_MOUNT_ATTR_RDONLY, _AT_FDCWD, _AT_RECURSIVE = 1, -100, 0x8000
_CAPABILITY_VERSION, _NUM_CAPABILITIES = 0x20080522, 64

_LANDLOCK_WRITE = 1 << 1 | 1 << 14  # contents of files: write, truncate
_LANDLOCK_CHANGE = _LANDLOCK_WRITE | sum(1 << bit for bit in range(4, 14))  # also create, remove, rename and link
_LANDLOCK_TCP = 1 << 0 | 1 << 1  # bind, connect
_LANDLOCK_SCOPES = 1 << 0 | 1 << 1  # abstract sockets, signals
_TRUNCATE_ABI, _TCP_ABI, _SCOPE_ABI = 3, 4, 6
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full")
"""Devices that programs write to and that keep nothing."""


@dataclass(frozen=True)
class Isolation:
    """Resources that a process and its children may use. None: no limit."""

    memory_mb: float | None = None
    """Address space of each process in MB (10^6 bytes). Not the sum over processes."""

    allow_network: bool = False
    """False: has no network interface, not even the loopback."""

    max_processes: int | None = None
    """Number of processes and threads, including the process itself."""

    max_file_mb: float | None = None
    """Size of a written file in MiB. Not the sum over files."""

    writable: Path | None = None
    """The only folder in which files may be created, changed or removed."""

    cpu_s: float | None = None
    """CPU seconds of each process, rounded up. The kernel kills a process that uses more."""


_CAN = {
    "environment": "read the environment variables of other processes of the user",
    "network": "send data over the network",
    "signals": "send signals to other processes of the user",
    "files": "write files outside its folder",
    "processes": "start any number of processes",
    "descendants": "leave processes behind",
    "private_folders": "read the private folders of runs, such as the token of Ray",
    "shared_memory": "fill /dev/shm, and leave data there",
}
"""Missing protection -> what code can do without it."""


def describe_missing(protections: Sequence[str]) -> str:
    """Returns what code can do because the system does not offer these protections."""
    return ", ".join(f"{_CAN[name]} ({name})" for name in protections)


def isolate(isolation: Isolation) -> tuple[str, ...]:
    """Restricts the current process and its future children. Returns the protections that the system does not offer.

    The names are `environment` (the variables of other processes cannot be read), `network`, `signals` (processes
    outside cannot be signaled), `files` and `processes`. Call it in a new process with one thread, before user code.
    Open file descriptors remain usable. Not reversible.
    """
    if isolation.writable is not None and not isolation.writable.is_dir():
        raise NotADirectoryError(f"{isolation.writable} is not a folder: create it before the process is restricted")
    flags = _CLONE_NEWUSER | (0 if isolation.allow_network else _CLONE_NEWNET)
    unavailable = []
    has_user_namespace = _enter(flags)
    if not has_user_namespace:
        unavailable.append("environment")
        if not isolation.allow_network and not _enter(_CLONE_NEWNET):  # allowed for root
            unavailable.append("network")
    if not _limit_processes(isolation.max_processes, is_own_namespace=has_user_namespace):
        unavailable.append("processes")
    _set_limits(isolation)
    _LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)  # a program with the setuid bit gains nothing; Landlock requires it
    unavailable += _restrict_with_landlock(isolation, blocks_tcp="network" in unavailable)
    _drop_capabilities()
    return tuple(unavailable)


def end_with_parent() -> None:
    """Lets the kernel kill the current process when the thread that started it ends. Call it after `isolate`."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def adopt_orphans() -> None:
    """Makes the current process the parent of descendants whose parent ends, so that it can find and kill them."""
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def enter_process_namespace() -> bool:
    """Gives the next forked child its own process ids, and returns True, or False if the system does not allow it.

    When that child ends, the kernel kills all processes that descend from it, and frees their System V memory. Call
    `mount_proc` in the child, and then the functions that change other mounts.
    """
    return _enter(_PROCESS_NAMESPACE)


def probe_namespaces(*, allow_network: bool) -> None:
    """Tests in child processes which namespaces the system allows. Processes that are forked later reuse the result."""
    for flags in (_PROCESS_NAMESPACE, _CLONE_NEWUSER | (0 if allow_network else _CLONE_NEWNET)):
        _can_enter(flags)


def mount_proc() -> bool:
    """Replaces /proc of the current mount namespace by that of the current process namespace. Returns True if done."""
    return (
        _LIBC.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None) == 0
        and _LIBC.mount(b"proc", b"/proc", b"proc", _NO_PROGRAMS, None) == 0
    )


def hide_paths(paths: Iterable[Path], kept: Path) -> bool:
    """Replaces folders by empty read-only ones, and files by /dev/null, for the current mount namespace.

    The folder `kept` remains, also within a hidden folder. Returns False, without effects, if the system does not allow
    it. A process that enters a further user namespace cannot undo it, because the kernel locks these mounts for it.
    """
    original = os.open(kept, os.O_PATH | os.O_CLOEXEC)
    mounted: list[Path] = []
    is_done = True
    for path in sorted(paths):  # a folder precedes its content, which does not exist after the folder is hidden
        if path.is_dir():
            is_mounted = _mount("tmpfs", path, _NO_PROGRAMS, "size=64k,nr_inodes=64,mode=755")
        else:
            is_mounted = path.exists() and _mount("/dev/null", path, _MS_BIND)
        mounted += [path] if is_mounted else []
        is_done = is_done and (is_mounted or not path.exists())  # its process may remove it at the same time
    if is_done and not kept.exists():
        kept.mkdir(parents=True)
        is_done = _mount(f"/proc/self/fd/{original}", kept, _MS_BIND)
    os.close(original)
    for path in filter(Path.is_dir, mounted):
        if is_done:
            is_done = _mount("tmpfs", path, _NO_PROGRAMS | _MS_REMOUNT | _MS_RDONLY) or not path.exists()
    if not is_done:
        for path in mounted:
            _LIBC.umount2(bytes(path), _MNT_DETACH)
    return is_done


def limit_shared_memory(max_mb: int) -> bool:
    """Gives the current mount namespace a /dev/shm of its own, of at most `max_mb` MiB. Returns True if done.

    The kernel frees its memory at the end of the namespace.
    """
    folder = Path("/dev/shm")
    options = f"size={max_mb}m,nr_inodes={16 * max_mb},mode=1777"
    return not folder.is_dir() or _mount("tmpfs", folder, _MS_NOSUID | _MS_NODEV, options)


def _mount(source: str, target: Path, flags: int, options: str | None = None) -> bool:
    """Mounts a new tmpfs, or a file or folder with the flag `_MS_BIND`. Returns True if done."""
    data = None if options is None else options.encode()
    return _LIBC.mount(source.encode(), bytes(target), b"tmpfs", flags, data) == 0


def limit_process_ids(max_processes: int) -> bool:
    """Limits the process ids of the current process namespace. Returns True if the kernel supports it (Linux 6.14).

    It also holds for root, for which the kernel ignores RLIMIT_NPROC. The kernel's minimum is 301.
    """
    file = Path("/proc/sys/kernel/pid_max")
    try:
        before = file.read_text()
        file.write_text(str(max(301, max_processes)))
        return file.read_text() != before or int(before) <= max(301, max_processes)
    except OSError:
        return False


def _enter(flags: int) -> bool:
    """Enters new namespaces. Returns False, without effects, if the system does not allow it."""
    return _can_enter(flags) and _unshare(flags)


@functools.cache
def _can_enter(flags: int) -> bool:
    """Returns whether a forked child can enter new namespaces.

    Some systems allow a new user namespace, but then deny its use, so the current process must not try first.
    """
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if _unshare(flags) and (not flags & _CLONE_NEWPID or _can_mount_proc()) else 1
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1] == 0


def _unshare(flags: int) -> bool:
    user, group = os.geteuid(), os.getegid()
    try:
        if _LIBC.unshare(flags) != 0:
            return False
        if flags & _CLONE_NEWUSER:
            Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
            Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    except (OSError, AttributeError):  # AttributeError: a system without `unshare`
        return False
    return True


def _can_mount_proc() -> bool:
    """Returns whether a child of the current process can mount /proc of a new process namespace."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if mount_proc() else 1
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1] == 0


def _set_limits(isolation: Isolation) -> None:
    _limit(resource.RLIMIT_CORE, 0)
    if isolation.memory_mb is not None:
        _limit(resource.RLIMIT_AS, int(isolation.memory_mb * 10**6))
    if isolation.max_file_mb is not None:
        _limit(resource.RLIMIT_FSIZE, int(isolation.max_file_mb * MIB))
    if isolation.cpu_s is not None:
        _limit(resource.RLIMIT_CPU, max(1, -int(-isolation.cpu_s // 1)))


def _limit(kind: int, value: int) -> None:
    _, hard = resource.getrlimit(kind)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))


def _limit_processes(max_processes: int | None, *, is_own_namespace: bool) -> bool:
    """Limits the number of processes. Returns False if the kernel does not enforce it for the current user."""
    if max_processes is None:
        return True
    counts_namespace = is_own_namespace and _kernel_version() >= (5, 14)
    _limit(resource.RLIMIT_NPROC, max_processes + (0 if counts_namespace else _count_tasks()))
    return os.geteuid() != 0  # the kernel does not limit the root user of the machine


def _kernel_version() -> tuple[int, int]:
    major, minor = os.uname().release.split(".")[:2]
    return int(major), int("".join(filter(str.isdigit, minor)) or 0)


def _count_tasks() -> int:
    """Returns the number of processes and threads of the current user."""
    count, user = 0, os.geteuid()
    for entry in os.scandir("/proc"):
        with contextlib.suppress(OSError):  # ends meanwhile
            if entry.name.isdecimal() and entry.stat().st_uid == user:
                count += len(os.listdir(f"{entry.path}/task"))
    return count


def _restrict_with_landlock(isolation: Isolation, *, blocks_tcp: bool) -> Sequence[str]:
    """Restricts writes to `isolation.writable`, and signals to processes of the same restriction."""
    abi = _LIBC.syscall(_SYS_LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1)
    unavailable = [] if abi >= _SCOPE_ABI else ["signals"]
    writable = isolation.writable
    uses_landlock = abi >= _TRUNCATE_ABI
    if writable is not None and not uses_landlock and not _mount_read_only(writable):
        unavailable.append("files")
    rights = (
        _LANDLOCK_CHANGE if writable is not None and uses_landlock else 0,
        _LANDLOCK_TCP if blocks_tcp and abi >= _TCP_ABI else 0,  # UDP remains, so the network counts as unavailable
        _LANDLOCK_SCOPES if abi >= _SCOPE_ABI else 0,
    )
    if not any(rights):
        return unavailable
    attributes = struct.pack("QQQ", *rights)[: 8 if abi < _TCP_ABI else 16 if abi < _SCOPE_ABI else 24]
    rules = _LIBC.syscall(_SYS_LANDLOCK_CREATE, attributes, ctypes.c_size_t(len(attributes)), 0)
    is_done = rules >= 0
    if is_done:
        if rights[0]:
            assert writable is not None
            is_done = _allow(rules, str(writable), _LANDLOCK_CHANGE)
            for device in filter(os.path.exists, _DEVICES):
                _allow(rules, device, _LANDLOCK_WRITE)
        is_done = _LIBC.syscall(_SYS_LANDLOCK_RESTRICT, rules, 0) == 0 and is_done
        os.close(rules)
    if not is_done:
        unavailable += [name for name, used in (("files", rights[0]), ("signals", rights[2])) if used]
    return unavailable


def _allow(rules: int, path: str, rights: int) -> bool:
    """Adds a rule for a folder or file to a Landlock rule set."""
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    rule = struct.pack("=Qi", rights, descriptor)
    try:
        return _LIBC.syscall(_SYS_LANDLOCK_ADD, rules, 1, rule, 0) == 0
    finally:
        os.close(descriptor)


def _mount_read_only(writable: Path) -> bool:
    """Makes all mounts read-only except `writable`, in a new mount namespace. Returns False if not allowed."""
    folder = os.fsencode(writable.resolve())
    if not _enter(_CLONE_NEWNS):  # allowed in a user namespace of this process, or for root
        return False
    path = ctypes.c_char_p(b"/")
    read_only = struct.pack("QQQQ", _MOUNT_ATTR_RDONLY, 0, 0, 0)
    writes = struct.pack("QQQQ", 0, _MOUNT_ATTR_RDONLY, 0, 0)
    size = ctypes.c_size_t(len(read_only))
    return (
        _LIBC.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None) == 0
        and _LIBC.mount(folder, folder, None, _MS_BIND, None) == 0
        and _LIBC.syscall(_SYS_MOUNT_SETATTR, _AT_FDCWD, path, _AT_RECURSIVE, read_only, size) == 0
        and _LIBC.syscall(_SYS_MOUNT_SETATTR, _AT_FDCWD, ctypes.c_char_p(folder), 0, writes, size) == 0
    )


def _drop_capabilities() -> None:
    """Removes the rights of root, which a user namespace grants within it."""
    for capability in range(_NUM_CAPABILITIES):
        _LIBC.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
    header = struct.pack("=Ii", _CAPABILITY_VERSION, 0)
    _LIBC.capset(header, bytes(24))
