"""Writes rows as JSON lines in the order of the prompts: to a file that a killed program resumes, or to a stream."""

import codecs
import fcntl
import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TextIO

from flowrl.checkpoints.run_folder import replacing
from flowrl.config import UserError
from flowrl.config.source import parse_json
from flowrl.data.metric import finite

Row = Mapping[str, Any]  # Any: values of JSON
Key = tuple[int, int]
"""Index of a prompt, and index of the response among those of the prompt."""

_HEADER = "flowrl_generate"
_START = b'{"flowrl_generate": '
_PROMPT, _SAMPLE = "prompt_index", "sample"


class ResponseOutput(Protocol):
    """Destination of generated responses. Each row has `prompt_index` and `sample`."""

    done: frozenset[Key]
    """Rows that an earlier program has written."""

    def write(self, row: Row) -> None:
        """Adds a row."""
        ...

    def close(self, *, is_complete: bool) -> None:
        """Closes the output. If it is complete, writes the final file."""
        ...


def encode_row(row: Row, *, ascii_only: bool = False) -> str:
    """Converts a row to a line of JSON. With `ascii_only`, all characters except ASCII are written as escape sequences
    such as `\\u00e9`.
    """
    return json.dumps(finite(row), ensure_ascii=ascii_only, allow_nan=False) + "\n"


class StreamOutput:
    """Writes rows to a stream in the order of `keys`, each as soon as those before it are written.

    A stream with another encoding than UTF-8 gets only ASCII characters.
    """

    def __init__(self, stream: TextIO, keys: list[Key]) -> None:
        self.done: frozenset[Key] = frozenset()
        self._stream, self._keys, self._waiting = stream, iter(keys), dict[Key, str]()
        self._next = next(self._keys, None)
        self._ascii_only = codecs.lookup(stream.encoding or "utf-8").name != "utf-8"

    def write(self, row: Row) -> None:
        self._waiting[row[_PROMPT], row[_SAMPLE]] = encode_row(row, ascii_only=self._ascii_only)
        while self._next in self._waiting:
            self._stream.write(self._waiting.pop(self._next))
            self._next = next(self._keys, None)
        self._stream.flush()

    def close(self, *, is_complete: bool) -> None:
        """Does nothing. Rows that wait for a missing earlier row are not written."""


def check_is_new(path: Path) -> None:
    """Raises UserError if the file of complete rows exists."""
    if path.exists():
        raise UserError(f"--output: {path} already exists: remove it, or choose another file")


class ResumableFile:
    """Collects rows in `FILE.partial`, and sorts them into `FILE` when all are complete.

    The first line of the partial file has the settings. A program that is started again with the same settings
    continues it.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        """Opens the partial file, or creates it.

        Raises UserError if the file exists, if it is in use by another program, or if its settings differ.
        """
        self._path, self._partial = path, path.with_name(path.name + ".partial")
        check_is_new(path)
        self._offsets: dict[Key, int] = {}
        try:
            self._file: BinaryIO = self._partial.open("a+b")
        except OSError as error:
            raise self._write_error(error) from error
        with ExitStack() as on_error:
            on_error.callback(self._file.close)  # otherwise, the lock of the file would remain
            self._open(settings)
            on_error.pop_all()
        self.done = frozenset(self._offsets)

    def _open(self, settings: Mapping[str, Any]) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._resume(settings)
        except BlockingIOError as error:
            raise UserError(
                f"--output: {self._partial} is in use by another program: wait until it has ended, or choose another "
                f"file"
            ) from error
        except OSError as error:
            raise self._write_error(error) from error

    def _write_error(self, error: OSError) -> UserError:
        return UserError(
            f"--output: {self._path} cannot be written ({error.strerror}): choose another file, or free disk space and "
            f"run the same command again, which continues"
        )

    def _resume(self, settings: Mapping[str, Any]) -> None:
        settings = json.loads(json.dumps(settings))
        self._file.seek(0)
        position, old = 0, None
        for line in self._file:
            if not line.endswith(b"\n"):
                if position == 0 and not line.startswith(_START[: len(line)]):
                    raise self._foreign_error()
                break  # the program was killed while it wrote the line
            try:
                value = parse_json(line)
                if position == 0:
                    old = value[_HEADER]
                else:
                    self._offsets[value[_PROMPT], value[_SAMPLE]] = position
            except (ValueError, LookupError, TypeError) as error:
                raise self._foreign_error() from error
            position += len(line)
        if old is not None and self._offsets:
            for name in {**old, **settings}:
                if old.get(name) != settings.get(name):
                    raise UserError(
                        f"{name} was {old.get(name)} when {self._partial} was begun, but is {settings.get(name)} now: "
                        f"restore it, or remove the file to start over"
                    )
            self._file.truncate(position)
        else:
            self._file.truncate(0)
            self._append(encode_row({_HEADER: settings}))

    def _foreign_error(self) -> UserError:
        return UserError(
            f"--output: {self._partial} was not written by flowrl generate: remove it, or choose another file"
        )

    def write(self, row: Row) -> None:
        self._append(encode_row(row))

    def _append(self, line: str) -> None:
        try:
            self._file.write(line.encode())
            self._file.flush()
        except OSError as error:
            raise self._write_error(error) from error

    def close(self, *, is_complete: bool) -> None:
        try:
            if is_complete:
                self._finish()
        except OSError as error:
            raise self._write_error(error) from error
        finally:
            self._file.close()

    def _finish(self) -> None:
        self._file.seek(0)
        self._offsets.clear()
        position = len(self._file.readline())
        for line in self._file:
            value = json.loads(line)
            self._offsets[value[_PROMPT], value[_SAMPLE]] = position
            position += len(line)
        with replacing(self._path) as temporary, temporary.open("wb") as output:
            for key in sorted(self._offsets):
                self._file.seek(self._offsets[key])
                output.write(self._file.readline())
        self._partial.unlink()
