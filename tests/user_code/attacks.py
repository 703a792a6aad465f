"""Reward functions and an environment that try to reach other runs of the user."""

import contextlib
import ctypes
import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

from flowrl.environments.base import ChatMessage, ModelResponse, Observation, Row

SHARED_MEMORY_KEY = 0x0F10_0004
_LIBC = ctypes.CDLL(None, use_errno=True)
_CLONE_NEWNS, _CLONE_NEWUSER = 0x00020000, 0x10000000
_MNT_DETACH, _IPC_CREAT = 2, 0o1000
_MIB = 1024**2


def _connect(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
    return True


def _unmount(folder: Path) -> bool:
    """Removes the mounts over a folder, with all rights in a namespace of its own."""
    if (child := os.fork()) == 0:
        is_entered = _LIBC.unshare(_CLONE_NEWUSER | _CLONE_NEWNS) == 0
        while _LIBC.umount2(bytes(folder), _MNT_DETACH) == 0:
            pass
        os._exit(0 if is_entered and (folder / "token").exists() else 1)
    return os.waitpid(child, 0)[1] == 0


def reach(folder: Path) -> list[str]:
    """Returns the ways by which this process reaches the content of a private folder."""
    ways: dict[str, Callable[[], object]] = {
        "list": lambda: {path.name for path in folder.iterdir()} - {"t"},
        "token": (folder / "token").read_text,
        "socket": lambda: _connect(folder / "socket"),
        "first process": Path(f"/proc/1/root{folder}/token").read_text,
        "unmount": lambda: _unmount(folder),
    }
    reached = []
    for name, way in ways.items():
        with contextlib.suppress(OSError):
            if way():
                reached.append(name)
    return reached


def count_ways(response: str) -> float:
    """Returns in how many ways the private folder `response` is reached."""
    return float(len(reach(Path(response))))


def write_temporary_file(response: str) -> float:
    """Returns the size of a new file in the temporary folder of the process."""
    return float(Path(os.environ["TMPDIR"], "file").write_text(response))


def leave_shared_memory(response: str) -> float:
    """Leaves shared memory of both kinds, and returns the size in MiB of the file `response` in /dev/shm."""
    _LIBC.shmget(SHARED_MEMORY_KEY, 4096, _IPC_CREAT | 0o600)
    size = 0
    with Path("/dev/shm", response).open("wb") as file, contextlib.suppress(OSError):
        for size in range(0, 320, 32):
            os.posix_fallocate(file.fileno(), size * _MIB, 32 * _MIB)
    return float(size)


class Intruder:
    """Answers with the ways by which it reaches the private folder in the prompt of its row."""

    def reset(self, row: Row) -> Sequence[ChatMessage]:
        return [{"role": "user", "content": " ".join(reach(Path(row["prompt"])))}]

    def step(self, response: ModelResponse) -> Observation:
        return Observation(done=True)
