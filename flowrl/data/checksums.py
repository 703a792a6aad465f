"""Writes files that are synced to disk and have a CRC-32 checksum, which detects accidental corruption."""

import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from flowrl.config.user_errors import UserError

_CHUNK_BYTES = 16 * 1024**2
"""Bytes per chunk. A chunk is small enough to stay in the CPU cache between checksum computation and write."""


class CheckpointError(UserError):
    """Raised if a checkpoint cannot be written, is corrupt, or is incompatible with the run."""


class FileChecksum(NamedTuple):
    size: int
    crc32: int


@dataclass(frozen=True)
class Saved:
    """Checkpoint files that a rank has written."""

    files: Mapping[str, FileChecksum] = field(default_factory=dict)
    """Path below the worker's folder -> checksum. The driver computes the checksums of all other files."""

    architecture: str = ""
    """Description of the model architecture. A checkpoint can be loaded only into the same architecture."""


class ChecksummedFile:
    """A new file whose checksum is computed during writing. `finish` syncs the file to disk."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self._crc32 = 0
        self.size = 0
        """Number of bytes written so far."""

    def write(self, data: memoryview) -> None:
        """Appends bytes. Raises `OSError` if writing fails."""
        for start in range(0, len(data), _CHUNK_BYTES):
            chunk = data[start : start + _CHUNK_BYTES]
            self._crc32 = zlib.crc32(chunk, self._crc32)
            self._file.write(chunk)
        self.size += len(data)

    def align(self, num_bytes: int) -> int:
        """Pads the file with zeros to a multiple of `num_bytes`. Returns the new size of the file."""
        self.write(memoryview(bytes(-self.size % num_bytes)))
        return self.size

    def finish(self) -> FileChecksum:
        """Syncs the file to disk, closes it and returns its checksum. Raises `OSError` if this fails."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self.close()
        return FileChecksum(self.size, self._crc32)

    def close(self) -> None:
        self._file.close()


def write_with_checksum(path: Path, data: bytes) -> FileChecksum:
    """Writes a file, syncs it to disk and returns its checksum. Raises `OSError` if this fails."""
    file = ChecksummedFile(path)
    try:
        file.write(memoryview(data))
        return file.finish()
    finally:
        file.close()


def write_json_with_checksum(path: Path, value: Any) -> FileChecksum:
    """Writes `value` as JSON, syncs the file to disk and returns its checksum. Raises `OSError` if this fails."""
    return write_with_checksum(path, json.dumps(value).encode())


def checksum_of(path: Path) -> FileChecksum:
    """Computes the checksum of an existing file. Raises `OSError` if the file cannot be read."""
    size = crc32 = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            size += len(chunk)
            crc32 = zlib.crc32(chunk, crc32)
    return FileChecksum(size, crc32)


def sync_folder(folder: Path) -> None:
    """Syncs a folder to disk, so that new files in it survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
