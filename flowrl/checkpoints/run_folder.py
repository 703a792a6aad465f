"""The run folder: everything that one run leaves behind, and nothing of any other run."""

import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from flowrl.config.errors import UserError

LOCK = "run.lock"
"""File in the folder of a run that is going on; see `flowrl.checkpoints.folder_lock`."""


class RunFolderError(UserError):
    """The output folder cannot take this run."""


@dataclass(frozen=True)
class RunFolder:
    """Where one run writes. Make one with `RunFolder.create`."""

    path: Path

    @classmethod
    def create(cls, path: Path | str, resolved_config: Mapping[str, Any]) -> "RunFolder":
        """Makes the folder and writes `config.yaml` into it.

        Args:
            path: a folder that does not exist yet, or is empty.
            resolved_config: the whole configuration as plain values (`model_dump(mode="json")`).
        Raises:
            RunFolderError: the folder holds another run or other files, or cannot be made; nothing has been written.
        """
        refuse_if_taken(Path(path))
        return cls.reopen(path, resolved_config)

    @classmethod
    def reopen(cls, path: Path | str, resolved_config: Mapping[str, Any]) -> "RunFolder":
        """The same for the folder of a run that is gone on with. Raises `RunFolderError`: it cannot be written."""
        folder = Path(path)
        text = yaml.safe_dump(dict(resolved_config), sort_keys=False, allow_unicode=True)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with replacing(folder / "config.yaml") as temporary:
                temporary.write_text(text, encoding="utf-8")
        except OSError as error:
            raise unwritable(folder, error) from error
        return cls(folder)

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def curves(self) -> Path:
        return self.path / "curves.png"

    @property
    def trace(self) -> Path:
        return self.path / "trace.json"

    @property
    def timeline(self) -> Path:
        return self.path / "timeline.png"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def model(self) -> Path:
        """The trained policy as a `save_pretrained` folder; write it through `replacing`."""
        return self.path / "model"

    def empty(self) -> None:
        """Removes all but the lock, which is for who holds it to remove."""
        for path in self.path.iterdir():
            if path.name != LOCK:
                _remove(path)


def unwritable(folder: Path, error: OSError) -> RunFolderError:
    """The error for an output folder that cannot be written."""
    return RunFolderError(
        f"output folder {folder} cannot be written ({error.strerror}); set output to a folder that can"
    )


def refuse_if_taken(folder: Path) -> None:
    """Raises `RunFolderError` where a run's folder cannot be made: it holds another run, or something else."""
    if (folder / "config.yaml").exists():
        raise RunFolderError(
            f"output folder {folder} holds another run (it has a config.yaml); set output to a new folder or remove "
            f"it, or go on with that run by resume=auto"
        )
    if folder.exists() and not folder.is_dir():
        raise RunFolderError(f"output {folder} is a file; set output to a folder")
    others = [path.name for path in folder.iterdir() if path.name != LOCK] if folder.exists() else []
    if others:
        raise RunFolderError(
            f"output folder {folder} is not empty (it has {others[0]}); set output to a new or an empty folder"
        )


def write_json(path: Path, value: Any, *, indent: int | None = 2) -> None:
    """Writes `value` as strict JSON, whole or not at all. A number that is not finite becomes null."""
    text = json.dumps(finite(value), indent=indent, allow_nan=False)
    with replacing(path) as temporary:
        temporary.write_text(text + "\n", encoding="utf-8")


def finite(value: Any) -> Any:
    """The same nested value, with null for every number that JSON cannot hold."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [finite(item) for item in value]
    return value


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a temporary path beside `path`, which becomes `path` when the block ends without an error.

    The block writes a file, or makes a folder. On an error what it wrote is removed and `path` is as before.
    """
    temporary = path.with_name(f".{path.name}{_temporary_suffix()}")
    try:
        yield temporary
        if temporary.is_dir() and path.is_dir():
            shutil.rmtree(path)
        os.replace(temporary, path)
    except BaseException:
        _remove(temporary)
        raise


def remove_unfinished(folder: Path) -> None:
    """Removes what this program began in `folder` and nobody writes any more: a worker may go on for a while."""
    for path in folder.glob(f".*{_temporary_suffix()}"):
        _remove(path)


def _temporary_suffix() -> str:
    return f".{os.getpid()}.tmp"


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)  # a worker may still write into it
    else:
        path.unlink(missing_ok=True)
