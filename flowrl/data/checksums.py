"""Durable files with checksums: synced to disk, with a CRC-32 that detects corruption.

CRC-32 is faster than most disks and detects errors of disks, copies and full file systems. It does not protect against
deliberate manipulation.
"""

import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from flowrl.config.user_errors import UserError

_CHUNK_BYTES = 16 * 1024**2
"""Bytes per chunk. Checksumming and writing one chunk after the other reuses the CPU cache."""


class CheckpointError(UserError):
    """A checkpoint cannot be written, or is corrupt or of the wrong kind."""


class FileChecksum(NamedTuple):
    """Size and checksum of a file at the time it was written."""

    size: int
    """Size in bytes."""
    crc32: int


@dataclass(frozen=True)
class Saved:
    """The checkpoint files that one rank has written."""

    files: Mapping[str, FileChecksum] = field(default_factory=dict)
    """Maps a path below the worker's folder to its checksum. The driver checksums files that are not listed."""

    architecture: str = ""
    """Description of the model architecture, compared on loading."""


class ChecksummedFile:
    """A new file whose checksum is computed while it is written. `finish` syncs it to disk."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self._crc32 = 0
        self.size = 0
        """Bytes written so far."""

    def write(self, data: memoryview) -> None:
        """Appends bytes. Raises `OSError`."""
        for start in range(0, len(data), _CHUNK_BYTES):
            chunk = data[start : start + _CHUNK_BYTES]
            self._crc32 = zlib.crc32(chunk, self._crc32)
            self._file.write(chunk)
        self.size += len(data)

    def align(self, num_bytes: int) -> int:
        """Pads the file with zeros to a multiple of `num_bytes` and returns its size."""
        self.write(memoryview(bytes(-self.size % num_bytes)))
        return self.size

    def finish(self) -> FileChecksum:
        """Syncs the file to disk, closes it and returns its checksum. Raises `OSError`."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self.close()
        return FileChecksum(self.size, self._crc32)

    def close(self) -> None:
        """Closes the file without syncing."""
        self._file.close()


def write_with_checksum(path: Path, data: bytes) -> FileChecksum:
    """Writes a file, syncs it to disk and returns its checksum. Raises `OSError`."""
    file = ChecksummedFile(path)
    try:
        file.write(memoryview(data))
        return file.finish()
    finally:
        file.close()


def write_json_with_checksum(path: Path, value: Any) -> FileChecksum:
    """Writes `value` as JSON, syncs it to disk and returns its checksum. Raises `OSError`."""
    return write_with_checksum(path, json.dumps(value).encode())


def checksum_of(path: Path) -> FileChecksum:
    """Computes the checksum of an existing file. Raises `OSError`."""
    size = crc32 = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            size += len(chunk)
            crc32 = zlib.crc32(chunk, crc32)
    return FileChecksum(size, crc32)


def sync_folder(folder: Path) -> None:
    """Syncs a folder to disk. Without it, a synced file may have no directory entry after a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
