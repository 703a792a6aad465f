import zlib
from pathlib import Path

import pytest

from flowrl.data.checksums import (
    ChecksummedFile,
    FileChecksum,
    checksum_of,
    sync_folder,
    write_json_with_checksum,
    write_with_checksum,
)


def test_the_checksum_of_a_file_is_equal_when_written_and_when_read(tmp_path: Path) -> None:
    file = ChecksummedFile(tmp_path / "a")
    file.write(memoryview(b"123"))
    assert file.align(8) == 8
    file.write(memoryview(b"456789"))
    expected = FileChecksum(14, zlib.crc32(b"123\0\0\0\0\0" + b"456789"))
    assert file.finish() == expected == checksum_of(tmp_path / "a")


def test_the_checksum_is_crc32() -> None:
    """The check value of the polynomial that zlib, gzip and PNG use."""
    assert zlib.crc32(b"123456789") == 0xCBF43926


def test_the_checksum_does_not_depend_on_chunks(tmp_path: Path) -> None:
    data = bytes(range(256)) * (140 * 1024)
    assert (
        write_with_checksum(tmp_path / "a", data)
        == FileChecksum(len(data), zlib.crc32(data))
        == checksum_of(tmp_path / "a")
    )


def test_json_and_empty_files_have_checksums(tmp_path: Path) -> None:
    assert write_json_with_checksum(tmp_path / "a", {"x": 1}) == FileChecksum(8, zlib.crc32(b'{"x": 1}'))
    assert write_with_checksum(tmp_path / "b", b"") == FileChecksum(0, 0)
    sync_folder(tmp_path)


def test_a_file_that_cannot_be_created_raises(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_with_checksum(tmp_path / "none" / "a", b"")
