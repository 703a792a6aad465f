"""A folder that appears whole or not at all."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from flowrl.config import UserError


@contextmanager
def appears_whole(folder: Path) -> Iterator[Path]:
    """Gives the path of a folder to write, which has its name once the block ends.

    Raises:
        UserError: it cannot be written; nothing of it is then left.
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
            f"{folder} cannot be written ({reason}): make room, or name a folder on another disk"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
