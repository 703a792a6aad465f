"""One run at a time in an output folder.

The lock is the operating system's own on an open file, which ends with the process that holds it, however that ends: a
file that a killed run has left blocks nobody. Programs that only read the folder need no lock.
"""

import fcntl
import json
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from flowrl.checkpoints.run_folder import LOCK, RunFolderError, unwritable

_PATIENCE_S = 0.5
"""Whoever only looks at a lock holds it for a moment, and whoever has just taken it writes its name into the file."""

_logger = logging.getLogger(__name__)


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Keeps other runs out of an output folder for the length of the block. Makes the folder where there is none,
    and removes that at the end if it has stayed empty.

    A file system without such locks is told of by a warning, and keeps nobody out.

    Raises:
        RunFolderError: another run is in it, or it cannot be written; nothing has changed.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        file = _locked(folder)
    except OSError as error:
        raise unwritable(folder, error) from error
    if file is None:
        raise _held(folder)
    try:
        yield
    finally:
        (folder / LOCK).unlink(missing_ok=True)  # before the lock ends: the next run makes a file of its own
        file.close()
        with suppress(OSError):
            for path in made:
                path.rmdir()


def refuse_if_held(folder: Path) -> None:
    """Raises `RunFolderError` where another run is in the folder now. Changes nothing."""
    try:
        with (folder / LOCK).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        raise _held(folder) from None
    except OSError:
        return  # nobody was in it, or `folder_lock` says what is wrong with it


def _locked(folder: Path) -> TextIO | None:
    """The open file of a lock that this process now holds; None while another holds it. Raises OSError."""
    until_s = time.monotonic() + _PATIENCE_S
    while time.monotonic() < until_s:
        folder.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):  # the run that ended meanwhile has removed the folder that it made
            file = (folder / LOCK).open("a+", encoding="utf-8")
            if _takes(file) and _is_at(folder / LOCK, file):
                file.truncate(0)
                file.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}))
                file.flush()
                return file
            file.close()
        time.sleep(_PATIENCE_S / 10)
    return None


def _takes(file: TextIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        _logger.warning("no lock keeps other runs out of %s: %s", Path(file.name).parent, error.strerror)
    return True


def _is_at(path: Path, file: TextIO) -> bool:
    """Whether the file is still the one of its name: the run that ended meanwhile has removed its own."""
    with suppress(FileNotFoundError):
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    return False


def _held(folder: Path) -> RunFolderError:
    try:
        owner = json.loads((folder / LOCK).read_text(encoding="utf-8"))
        who = f"process {owner['pid']} on {owner['host']}"
    except (OSError, ValueError):
        who = "another process"
    return RunFolderError(
        f"output folder {folder} is in use by the run of {who}: wait until that has ended, or set output to another "
        f"folder"
    )
