"""Atomic creation of folders: write to a temporary folder, then rename it."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from flowrl.config import UserError


@contextmanager
def write_atomically(folder: Path) -> Iterator[Path]:
    """Yields a temporary folder, and renames it to `folder` at the end of the `with` block.

    Deletes the temporary folder if the block raises. Raises `UserError` if the folder cannot be written.
    """
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        yield partial
        partial.rename(folder)
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise UserError(
            f"{folder} cannot be written ({reason}): free disk space, or use a folder on another disk"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
