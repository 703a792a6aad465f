"""Atomic creation of folders: write to a temporary folder, then rename it."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from flowrl.config import UserError


@contextmanager
def rename_at_end(folder: Path) -> Iterator[Path]:
    """Yields the path of a folder that the `with` block must create, and renames this folder to `folder` at the end.

    Deletes the temporary folder if the block raises. Raises `UserError` if the folder cannot be created.
    """
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        partial.rmdir()
    except OSError as error:
        raise _write_error(folder, error) from error
    try:
        yield partial
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def write_atomically(folder: Path) -> Iterator[Path]:
    """Yields a temporary folder, and renames it to `folder` at the end of the `with` block.

    Deletes the temporary folder if the block raises. Raises `UserError` if the folder cannot be written.
    """
    try:
        with rename_at_end(folder) as partial:
            partial.mkdir()
            yield partial
    except (OSError, SafetensorError) as error:
        raise _write_error(folder, error) from error


def _write_error(folder: Path, error: Exception) -> UserError:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return UserError(f"{folder} cannot be written ({reason}): free disk space, or use a folder on another disk")
