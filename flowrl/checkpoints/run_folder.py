"""The output folder of one run: files, lock and atomic writes.

The lock is an advisory lock (flock) on an open file. The operating system releases it when the process ends, so the
lock file of a killed run does not block other runs. Readers need no lock.
"""

import errno
import fcntl
import json
import logging
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import Any, TextIO

import yaml

from flowrl.checkpoints.system_info import SYSTEM_FILE, describe_system
from flowrl.config.source import read_json
from flowrl.config.user_errors import UserError
from flowrl.data.console import LogFormatter
from flowrl.data.metric import finite

LOCK = "run.lock"

_LOCK_TIMEOUT_S = 0.5
"""Seconds for which `folder_lock` retries, because `check_not_locked` also holds the lock for a moment."""

_logger = logging.getLogger(__name__)


class RunFolderError(UserError):
    """Raised if a run cannot use its output folder."""


class RunFolder:
    """Paths in the output folder of a run. `RunFolder.create` creates the folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.metrics = path / "metrics.jsonl"
        self.trace = path / "trace.json"
        self.summary = path / "summary.json"
        self.inputs = path / "inputs.json"
        """Size and CRC-32 of each input of the run, by its setting."""
        self.ray_log = path / "ray.log"
        """Messages of Ray's own processes."""
        self.rollouts = path / "rollouts"
        """Folder of the generated text (flowrl/report/rollout_log.py)."""
        self.profiles = path / "profiles"
        """Folder of the profiles of calls (`report.profile`), by step, role and rank."""
        self.model = path / "model"
        """Folder of the trained policy, in the format of `save_pretrained`."""

    @classmethod
    def create(cls, path: Path | str, resolved_config: Mapping[str, Any]) -> "RunFolder":
        """Creates the folder and writes `config.yaml` and `system.json`.

        Raises RunFolderError if the folder contains files.
        """
        check_is_new(Path(path))
        return cls.reopen(path, resolved_config)

    @classmethod
    def reopen(cls, path: Path | str, resolved_config: Mapping[str, Any]) -> "RunFolder":
        """Writes `config.yaml` and `system.json` into the folder of a run that resumes.

        Removes `model/` of an earlier end of the run, because the weights of later checkpoints are newer. Raises
        RunFolderError if the folder is not writable.
        """
        folder = Path(path)
        text = yaml.safe_dump(dict(resolved_config), sort_keys=False, allow_unicode=True)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with replacing(folder / "config.yaml") as temporary:
                temporary.write_text(text, encoding="utf-8")
            write_json(folder / SYSTEM_FILE, describe_system())
            shutil.rmtree(cls(folder).model, ignore_errors=True)
        except OSError as error:
            raise _write_error(folder, error) from error
        return cls(folder)

    def clear(self) -> None:
        """Removes all files except the lock."""
        for path in self.path.iterdir():
            if path.name != LOCK:
                _remove(path)


def _write_error(folder: Path, error: OSError) -> RunFolderError:
    return RunFolderError(f"cannot write to output folder {folder} ({error.strerror}): set output to a writable folder")


def check_is_new(folder: Path) -> None:
    """Raises RunFolderError if the folder contains files."""
    if (folder / "config.yaml").exists():
        raise RunFolderError(
            f"output folder {folder} has another run in it (config.yaml exists): set output to a new folder, remove "
            f"it, or continue it with resume=auto"
        )
    if folder.exists() and not folder.is_dir():
        raise RunFolderError(f"output {folder} is a file: set output to a folder")
    others = [path.name for path in folder.iterdir() if path.name != LOCK] if folder.exists() else []
    if others:
        raise RunFolderError(f"output folder {folder} is not empty (it has {others[0]}): set output to a new folder")


# Atomic writes.


def write_json(path: Path, value: Any, *, indent: int | None = 2) -> None:
    """Writes a value as strict JSON, atomically. NaN and infinities become null."""
    text = json.dumps(finite(value), indent=indent, allow_nan=False)
    with replacing(path) as temporary:
        temporary.write_text(text + "\n", encoding="utf-8")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a temporary path. At the end of the block, the file at this path replaces `path`, or is removed if the
    block raises.
    """
    temporary = path.with_name(f".{path.name}{_temporary_suffix()}")
    try:
        with naming_full_disk(path):
            yield temporary
        if temporary.is_dir() and path.is_dir():
            shutil.rmtree(path)
        os.replace(temporary, path)
    finally:
        _remove(temporary)


def is_disk_full(error: OSError) -> bool:
    """Returns whether a write failed because of a full disk, a quota, or the largest allowed file size."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def naming_full_disk(path: Path) -> Iterator[None]:
    """Sets `filename` of an error about a full disk to `path`, because errors of `write` and `flush` name no file."""
    try:
        yield
    except OSError as error:
        if is_disk_full(error):
            error.filename = str(path)
        raise


def remove_temporary_files(folder: Path) -> None:
    """Removes the temporary files that interrupted workers of this program left in `folder`."""
    for path in folder.glob(f".*{_temporary_suffix()}"):
        _remove(path)


def _temporary_suffix() -> str:
    return f".{os.getpid()}.tmp"


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)  # ignores errors, because a worker may still write into the folder
    else:
        path.unlink(missing_ok=True)


@contextmanager
def log_to_file(logger_name: str) -> Iterator[Callable[[Path], None]]:
    """Stores the records of a logger during the block. The yielded function sets the file to which they are appended.

    The file is created with the first record. Records that cannot be written are lost without a message, because the
    run itself reports a full disk or a lost folder.
    """
    logger, handler = logging.getLogger(logger_name), MemoryHandler(capacity=1)  # stores more records without a target
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)

    def set_file(path: Path) -> None:
        file = _SilentFileHandler(path, encoding="utf-8", delay=True)
        file.setFormatter(LogFormatter("%(asctime)s %(message)s"))
        handler.setTarget(file)
        handler.flush()

    try:
        yield set_file
    finally:
        logger.removeHandler(handler)
        file = handler.target
        handler.close()
        if file is not None:
            with suppress(OSError):
                file.close()


class _SilentFileHandler(logging.FileHandler):
    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError):  # the file cannot be created
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        """Ignores a failed write, because logging would print a traceback."""


# The lock.


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Holds the exclusive lock of an output folder during the block. On a file system without locks, logs a warning.

    Creates the folder if necessary. At the end, removes the folder if it is empty. Raises RunFolderError if another run
    holds the lock or the folder is not writable.
    """
    created = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        file = _open_locked(folder)
    except OSError as error:
        raise _write_error(folder, error) from error
    if file is None:
        raise _locked_error(folder)
    try:
        yield
    finally:
        (folder / LOCK).unlink(missing_ok=True)  # before the lock is released, so that the next run creates a new file
        file.close()
        with suppress(OSError):
            for path in created:
                path.rmdir()


def check_not_locked(folder: Path) -> None:
    """Raises RunFolderError if another run holds the lock of the folder. Changes nothing."""
    try:
        with (folder / LOCK).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        raise _locked_error(folder) from None
    except OSError:
        return  # the lock file does not exist; `folder_lock` reports other errors


def _open_locked(folder: Path) -> TextIO | None:
    """Opens and locks the lock file, or returns None if another process holds the lock."""
    deadline_s = time.monotonic() + _LOCK_TIMEOUT_S
    while time.monotonic() < deadline_s:
        folder.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):  # a run that just ended may have removed the folder
            file = (folder / LOCK).open("a+", encoding="utf-8")
            if _try_lock(file) and _is_current(folder / LOCK, file):
                file.truncate(0)
                file.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}))
                file.flush()
                return file
            file.close()
        time.sleep(_LOCK_TIMEOUT_S / 10)
    return None


def _try_lock(file: TextIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        _logger.warning("%s cannot be locked against other runs: %s", Path(file.name).parent, error.strerror)
    return True


def _is_current(path: Path, file: TextIO) -> bool:
    """Returns whether `path` still refers to the open file. A run that just ended may have removed its lock file."""
    with suppress(FileNotFoundError):
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    return False


def _locked_error(folder: Path) -> RunFolderError:
    try:
        owner = read_json(folder / LOCK)
        process = f"process {owner['pid']} on {owner['host']}"
    except (OSError, ValueError):
        process = "another process"
    return RunFolderError(
        f"output folder {folder} is in use by {process}: wait until that run has ended, or set output to another folder"
    )
