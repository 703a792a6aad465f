"""The private folder of this process in the temporary folder, for sockets, Ray's files and the token of Ray.

Only the owner can enter the folder (mode 0700), because Ray makes its own folders accessible to everyone. The folder is
deleted at exit. A killed process leaves its folder, which the next process of the same user deletes. `create_folder`
creates further folders of this kind, such as those of exported models.

The marker in a folder contains the id and the start time of its process, and is locked (flock) while this process runs.
The lock also protects the folder from processes in other containers, which cannot use the process id. On a shared file
system, the lock may not reach other hosts, so the marker also contains the host name and the boot id. All containers of
a host have the same boot id.
"""

import atexit
import fcntl
import getpass
import json
import os
import platform
import re
import secrets
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from flowrl.config import UserError
from flowrl.data.folders.process_stat import read_start_time

PREFIX = "flowrl-"
MARKER = "process.json"
MAX_PARENT_BYTES = 25
"""Length limit of the parent folder's path.

Paths of Unix sockets have at most 107 bytes. The longest path is that of Ray's object store:
PARENT/flowrl-12345678/r/session_2026-01-31_23-59-59_999999_4194304/sockets/plasma_store.
"""
_REMOVAL_TIMEOUT_S = 5.0


class PrivateFolder:
    """A folder that is deleted by `remove`, at exit, or by another process after a kill of this process."""

    def __init__(self, path: Path) -> None:
        """Creates the folder and its marker."""
        self.path, self.process_id = path, os.getpid()
        self.marker = -1
        """File descriptor that holds the lock. A child process that inherits the descriptor keeps the folder locked
        after a kill of this process.
        """
        # Registered before the folder exists, so that a signal in between leaves no folder.
        atexit.register(self.remove)
        path.mkdir(mode=0o700)
        self.marker = _write_marker(path)

    def remove(self) -> None:
        """Deletes the folder. Has no effect in forked children of the process that created the folder."""
        atexit.unregister(self.remove)
        if os.getpid() == self.process_id:
            remove_folder(self.path)
            with suppress(OSError):  # removed before
                os.close(self.marker)
            self.marker = -1

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.remove()


_folder: PrivateFolder | None = None
_large_folder: PrivateFolder | None = None


def private_folder() -> Path:
    """Returns the private folder of this process. The first call deletes abandoned folders and creates the folder."""
    global _folder
    if _folder is None or _folder.process_id != os.getpid():
        _folder = _create_folder(_find_parent())
    return _folder.path


def temporary_folder() -> Path:
    """Returns the folder for temporary files of worker processes, which is deleted at exit.

    If the private folder is in the user's temporary folder, returns a folder in it. Otherwise, returns a folder in a
    second private folder, which is in the user's temporary folder. Only sockets need a short path, and /tmp may be too
    small for large files.
    """
    global _large_folder
    folder, parent = private_folder(), Path(tempfile.gettempdir()).absolute()
    if folder.parent != parent:
        if _large_folder is None or _large_folder.process_id != os.getpid():
            _large_folder = _create_folder(parent)
        folder = _large_folder.path
    path = folder / "t"
    path.mkdir(mode=0o700, exist_ok=True)
    return path


def create_folder(kind: str, parent: Path | None = None) -> PrivateFolder:
    """Creates a folder for temporary files of this process in `parent` (None: the user's temporary folder), and deletes
    it at exit. Deletes abandoned folders first.

    `kind` is a part of the folder's name. As a context manager, the result yields the path, and deletes the folder at
    the end of the block.
    """
    return _create_folder(parent or Path(tempfile.gettempdir()).absolute(), f"{kind}-")


def _create_folder(parent: Path, kind: str = "") -> PrivateFolder:
    remove_abandoned_folders(parent)
    return PrivateFolder(parent / f"{PREFIX}{kind}{secrets.token_hex(4)}")


def list_private_roots() -> list[Path]:
    """Returns the folders that contain private folders, and the files that contain a token of Ray.

    The folders are `RAY_TMPDIR`, /tmp, and the temporary folders of this process and of its driver.
    """
    temporary = Path(tempfile.gettempdir()).absolute()
    around = [path.parent for path in temporary.parents if (path / MARKER).is_file()]
    ray = Path(os.environ.get("RAY_TMPDIR", "/tmp")).absolute()
    token = Path(os.environ.get("RAY_AUTH_TOKEN_PATH", os.path.expanduser("~/.ray/auth_token"))).absolute()
    return list(dict.fromkeys([temporary, *around, ray, Path("/tmp"), token]))


def find_private_paths(roots: Iterable[Path]) -> list[Path]:
    """Returns the paths within `roots` that give control over runs: private folders, and tokens and sockets of Ray."""
    paths: list[Path] = []
    for root in roots:
        if os.path.isfile(root):  # False if this user may not enter its folder, unlike `Path.is_file`
            paths.append(root)
        elif os.path.isdir(root):
            paths += (marker.parent for marker in root.glob(f"{PREFIX}*/{MARKER}"))
            paths += root.glob("ray/session_*/sockets")
    return paths


def set_temporary_folder(folder: str) -> None:
    """Makes this process and its child processes write temporary files to `folder`.

    The cache of torch's compiler keeps its folder.
    """
    try:
        user = re.sub(r'[\\/:*?"<>|]', "_", getpass.getuser())
    except (KeyError, OSError):  # a user without a name
        user = f"uid_{os.getuid()}"
    # torch's default, computed before TMPDIR changes
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(tempfile.gettempdir(), f"torchinductor_{user}")))
    os.environ["TMPDIR"] = tempfile.tempdir = folder


def _find_parent() -> Path:
    """Returns `RAY_TMPDIR`, or the temporary folder if its path is short enough, or else /tmp."""
    chosen = os.environ.get("RAY_TMPDIR")
    parent = Path(chosen or tempfile.gettempdir()).absolute()
    if len(os.fsencode(parent)) <= MAX_PARENT_BYTES:
        return parent
    if chosen:
        raise UserError(
            f"RAY_TMPDIR is {parent}, whose path is too long for Ray's sockets: set a folder with a path of at most "
            f"{MAX_PARENT_BYTES} bytes"
        )
    return Path("/tmp")


def _write_marker(folder: Path) -> int:
    process_id = os.getpid()
    marker = os.open(folder / MARKER, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with suppress(OSError):  # a file system without locks
        fcntl.flock(marker, fcntl.LOCK_EX)
    process = {"pid": process_id, "start_time_s": read_start_time(process_id)} | read_boot()
    os.write(marker, json.dumps(process).encode())
    return marker


def read_boot() -> dict[str, str]:
    """Returns the host name, and the id of the current boot, which is empty without /proc."""
    boot_id = ""
    with suppress(OSError):
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return {"host": platform.node(), "boot_id": boot_id}


def remove_abandoned_folders(parent: Path) -> None:
    """Deletes the folders in `parent` that belong to this user and whose process has ended.

    Keeps folders without a valid marker, and files of other users. Several processes may run this function at the same
    time.
    """
    with suppress(OSError):
        for path in list(parent.glob(f"{PREFIX}*")):
            with suppress(OSError), _lock_abandoned(path) as is_abandoned:
                if is_abandoned:
                    remove_folder(path)


@contextmanager
def _lock_abandoned(folder: Path) -> Iterator[bool]:
    """Locks the marker of a folder. Yields whether its process has ended. Raises OSError if the marker is in use."""
    if not _is_own(folder.lstat(), stat.S_ISDIR):
        yield False
        return
    marker = os.open(folder / MARKER, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.flock(marker, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield _is_own(os.fstat(marker), stat.S_ISREG) and _has_ended(os.read(marker, 1000))
    finally:
        os.close(marker)


def _is_own(status: os.stat_result, is_kind: Callable[[int], bool]) -> bool:
    return status.st_uid == os.geteuid() and is_kind(status.st_mode)


def _has_ended(marker: bytes) -> bool:
    """Returns whether the process of a marker has ended. Returns False if the marker is corrupt or of another host."""
    try:
        process = json.loads(marker)
        process_id, start_time_s = int(process["pid"]), float(process["start_time_s"])
        host, boot_id = process["host"], process["boot_id"]
    except (ValueError, TypeError, KeyError):
        return False
    here = read_boot()
    if boot_id != here["boot_id"]:
        return host == here["host"]  # this host has restarted since
    if not boot_id and host != here["host"]:
        return False
    return process_id > 0 and read_start_time(process_id) != start_time_s


def remove_tree(path: Path | str) -> None:
    """Deletes a folder as far as the system allows. User code may have created folders of any depth."""
    try:
        shutil.rmtree(path, ignore_errors=True)
    except RecursionError:
        subprocess.run(["rm", "-rf", "--", path], stderr=subprocess.DEVNULL, check=False)


def remove_folder(path: Path) -> None:
    """Deletes a folder. Retries for some seconds, because processes that are ending may create files in it."""
    deadline = time.monotonic() + _REMOVAL_TIMEOUT_S
    while True:
        # The marker last: if this process is killed, another process can finish the removal.
        with suppress(OSError):
            for entry in os.scandir(path):
                if entry.is_dir(follow_symlinks=False):
                    remove_tree(entry.path)
                elif entry.name != MARKER:
                    os.unlink(entry.path)
        remove_tree(path)
        if not path.exists() or time.monotonic() > deadline:
            return
        time.sleep(0.05)
