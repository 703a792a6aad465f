"""Restricts the memory, processes, files and network of the current process. Requires Linux, but no root rights.

Imports only the standard library, because the program of a sandbox loads the file without its package.

A user namespace hides the environment variables of other processes, and a network namespace hides the network. Landlock
protects files, or read-only mounts in kernels without Landlock. Missing protections are reported by name.
"""

import contextlib
import ctypes
import errno
import functools
import os
import platform
import resource
import signal
import struct
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

MIB = 1024**2

_LIBC = ctypes.CDLL(None, use_errno=True)

# Constants of the kernel. The numbers of these system calls are the same on all 64-bit machines except alpha.
_CLONE_NEWNS, _CLONE_NEWUSER, _CLONE_NEWPID, _CLONE_NEWNET = 0x00020000, 0x10000000, 0x20000000, 0x40000000
_CLONE_NEWIPC = 0x08000000
_SYS_MOUNT_SETATTR, _SYS_LANDLOCK_CREATE, _SYS_LANDLOCK_ADD, _SYS_LANDLOCK_RESTRICT = 442, 444, 445, 446
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 4, 24, 36, 38
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
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_SYSTEM_FOLDERS = ("/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/localtime")
_ROOT_DEVICES = ("null", "full", "random", "urandom")  # shared mappings of /dev/zero are memory that is not counted
_UNMAPPED = 65534
"""Id of all users in a user namespace without a mapping."""

# For the filter of system calls.
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


def enter_sandbox_namespaces() -> bool:
    """Gives the next forked child its own processes and network, like `enter_process_namespace`.

    Within a process of a `Launcher`, root has no capabilities and cannot map its id. The namespaces then work with
    fewer mounts.
    """
    flags = _CLONE_NEWNS | _CLONE_NEWUSER | _CLONE_NEWPID | _CLONE_NEWNET
    return enter_process_namespace() or _LIBC.unshare(flags) == 0


def allow_tracing(is_allowed: bool) -> None:
    """Sets whether other processes of the user can read and trace the current process."""
    _LIBC.prctl(_PR_SET_DUMPABLE, int(is_allowed), 0, 0, 0)


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


def enter_root(folder: str) -> bool:
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
    if _LIBC.mount(b"proc", bytes(root / "proc"), b"proc", _NO_PROGRAMS, None) != 0:
        return False
    if os.geteuid() == Path(folder).stat().st_uid != _UNMAPPED:  # files in memory need the id of the user
        _LIBC.mount(b"tmpfs", bytes(root / "tmp"), b"tmpfs", _MS_NOSUID | _MS_NODEV, b"size=64m,mode=700")
    sources = [*_SYSTEM_FOLDERS, *(f"/dev/{name}" for name in _ROOT_DEVICES), sys.base_prefix, sys.prefix]
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


def deny_hidden_memory() -> bool:
    """Denies memory that no process maps, so that it is not resident. Returns False if the system does not offer it.

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
