"""Files that cannot be read completely, or are not JSON, are rejected with their path, without reading them."""

import os
import socket
from pathlib import Path

import pytest

from flowrl.config.source import InputFileError, find_file_problem, parse_json, read_json, read_text
from tests.errors import rejects

DEEP = "[" * 200_000


def test_pipes_devices_and_sockets_are_rejected_before_they_are_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link.json").symlink_to("/dev/zero")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
        for name in ("pipe", "link.json", "socket"):
            with rejects(tmp_path / name, error=InputFileError):
                read_text(tmp_path / name)


def test_a_file_beyond_the_limit_is_rejected_with_its_size(tmp_path: Path) -> None:
    with (tmp_path / "large.json").open("wb") as file:
        file.truncate(3_000_000)  # sparse
    with rejects(tmp_path / "large.json", 3, 2, error=InputFileError):
        read_text(tmp_path / "large.json", max_mb=2)
    assert find_file_problem(tmp_path / "large.json", max_mb=3) is None


def test_missing_files_and_folders_are_reported_by_their_reader(tmp_path: Path) -> None:
    assert find_file_problem(tmp_path) is find_file_problem(tmp_path / "missing") is None
    with pytest.raises(FileNotFoundError):
        read_json(tmp_path / "missing")


@pytest.mark.parametrize("content", [DEEP.encode(), b"{", b"\xff"])
def test_a_file_that_is_not_json_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.json").write_bytes(content)
    with rejects(tmp_path / "a.json", error=InputFileError):
        read_json(tmp_path / "a.json")


def test_a_file_of_json_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"é": [1]}', encoding="utf-8")
    assert read_json(tmp_path / "a.json") == {"é": [1]}


def test_deeply_nested_text_is_not_json() -> None:
    with pytest.raises(ValueError, match="nested"):
        parse_json(DEEP)
