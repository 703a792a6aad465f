"""A lock keeps two runs out of one folder, and the lock of a killed run is released."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from flowrl.checkpoints.run_folder import LOCK, RunFolder, RunFolderError, check_is_new, check_not_locked, folder_lock

ROOT = Path(__file__).parents[2]
HOLD = """
import sys, time
from pathlib import Path
from flowrl.checkpoints.run_folder import folder_lock

with folder_lock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def other(tmp_path: Path) -> Iterator[subprocess.Popen]:
    """Another process that holds the lock of the folder."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path / "run")], cwd=ROOT, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"held\n"
    yield process
    process.kill()
    process.communicate()


def state(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir()}


def test_a_second_run_is_rejected_with_folder_process_and_host_and_changes_nothing(
    other: subprocess.Popen, tmp_path: Path
) -> None:
    before = state(tmp_path / "run")
    owner = rf"\b{other.pid} .*{socket.gethostname()}"
    with pytest.raises(RunFolderError, match=owner), folder_lock(tmp_path / "run"):
        raise AssertionError("two runs have locked the folder")
    with pytest.raises(RunFolderError, match=owner):
        check_not_locked(tmp_path / "run")
    assert state(tmp_path / "run") == before


def test_the_lock_of_a_killed_run_is_released(other: subprocess.Popen, tmp_path: Path) -> None:
    other.send_signal(signal.SIGKILL)
    other.wait()
    assert (tmp_path / "run" / LOCK).exists()
    check_not_locked(tmp_path / "run")
    check_is_new(tmp_path / "run")
    with folder_lock(tmp_path / "run"):
        assert str(os.getpid()) in (tmp_path / "run" / LOCK).read_text()
        with pytest.raises(RunFolderError, match=rf"\b{os.getpid()}\b"):
            check_not_locked(tmp_path / "run")


def test_a_released_lock_leaves_no_files(tmp_path: Path) -> None:
    with folder_lock(tmp_path / "runs" / "one"):
        pass
    assert not list(tmp_path.iterdir())
    with folder_lock(tmp_path / "runs" / "one"):
        RunFolder.create(tmp_path / "runs" / "one", {})
    assert {path.name for path in (tmp_path / "runs" / "one").iterdir()} == {"config.yaml", "system.json"}


def test_an_existing_folder_is_kept(tmp_path: Path) -> None:
    with folder_lock(tmp_path):
        pass
    assert tmp_path.exists() and not list(tmp_path.iterdir())


def test_concurrent_processes_hold_the_lock_one_at_a_time(tmp_path: Path) -> None:
    """The lock file is deleted on release. A process that opened the deleted file must not hold the next lock."""

    def lock_repeatedly(number: int) -> int:
        num_locks = 0
        while num_locks < 25:
            with suppress(RunFolderError), folder_lock(tmp_path / "run"):
                with (tmp_path / "locked").open("x"):
                    num_locks += 1
                (tmp_path / "locked").unlink()
        return num_locks

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lock_repeatedly, range(4))) == [25] * 4
    assert not list(tmp_path.rglob(LOCK))


def test_a_folder_that_cannot_be_created_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(RunFolderError, match="file"), folder_lock(folder):
            pass


def test_a_folder_that_is_emptied_keeps_its_lock(tmp_path: Path) -> None:
    with folder_lock(tmp_path):
        folder = RunFolder.create(tmp_path, {})
        (folder.model / "deep").mkdir(parents=True)
        folder.clear()
        assert [path.name for path in tmp_path.iterdir()] == [LOCK]
