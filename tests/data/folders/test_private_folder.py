"""The private folder is accessible only to its owner, and is deleted at exit or by the next process."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from flowrl.config import UserError
from flowrl.data.folders.private_folder import (
    MARKER,
    MAX_PARENT_BYTES,
    find_private_paths,
    list_private_roots,
    private_folder,
    read_boot,
    remove_abandoned_folders,
    remove_folder,
)
from flowrl.data.folders.process_stat import read_start_time
from tests.errors import rejects

MODULE = private_folder.__module__
HOLD = f"from {MODULE} import private_folder; print(private_folder(), flush=True); input()"


@pytest.fixture
def parent() -> Iterator[Path]:
    """A folder with a short path."""
    with tempfile.TemporaryDirectory(prefix="fp", dir="/tmp") as folder:
        yield Path(folder)


@contextmanager
def holder(
    parent: Path, code: str = HOLD, environment: Mapping[str, str] | None = None
) -> "Iterator[tuple[subprocess.Popen[str], Path]]":
    """A process with a private folder, which ends at the end of the block."""
    pipe = subprocess.PIPE
    environment = environment or os.environ | {"RAY_TMPDIR": str(parent)}
    with subprocess.Popen([sys.executable, "-c", code], env=environment, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, Path(process.stdout.readline().strip())
        finally:
            process.kill()


def abandon(parent: Path, name: str = "flowrl-abandoned", **changes: object) -> Path:
    """Creates the folder of an ended process: this process's id with another start time."""
    folder = parent / name
    (folder / "r" / "session").mkdir(parents=True)
    (folder / "r" / "session" / "log").write_text("log")
    marker = {"pid": os.getpid(), "start_time_s": (read_start_time(os.getpid()) or 0) - 1} | read_boot() | changes
    (folder / MARKER).write_text(json.dumps(marker))
    return folder


def test_only_the_owner_can_enter_the_folder(parent: Path) -> None:
    with holder(parent) as (process, folder):
        assert folder.parent == parent
        assert [path.name for path in folder.iterdir()] == [MARKER]
        assert folder.stat().st_mode & 0o777 == 0o700
        assert (folder / MARKER).stat().st_mode & 0o777 == 0o600
        started_s = read_start_time(process.pid)
        marker = {"pid": process.pid, "start_time_s": started_s} | read_boot()
        assert json.loads((folder / MARKER).read_text()) == marker


@pytest.mark.parametrize(
    "ending", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), None], ids=["Ctrl-C", "end of the program"]
)
def test_the_folder_is_deleted_at_exit(parent: Path, ending: signal.Signals | None) -> None:
    with holder(parent) as (process, folder):
        assert folder.exists()
        if ending is not None:
            process.send_signal(ending)
        process.communicate("\n", timeout=60)
    assert not list(parent.iterdir())


@pytest.mark.slow
def test_a_forked_child_does_not_delete_the_folder_of_its_parent(parent: Path) -> None:
    code = (
        f"import os, sys; {HOLD.removesuffix('; input()')}\nif os.fork() == 0: sys.exit()\nos.wait(); print(); input()"
    )
    with holder(parent, code) as (process, folder):
        assert process.stdout is not None
        process.stdout.readline()
        assert (folder / MARKER).exists()


def test_the_next_process_deletes_the_folder_of_a_killed_process(parent: Path) -> None:
    with holder(parent) as (process, folder):
        process.kill()
        process.wait()
        (folder / "r").mkdir()
        assert folder.exists()
    with holder(parent) as (_, second):
        assert list(parent.iterdir()) == [second] != [folder]


@pytest.mark.slow
def test_processes_that_start_together_keep_the_folders_of_each_other(parent: Path) -> None:
    for number in range(20):
        abandon(parent, f"flowrl-abandoned-{number}")
    starts = [holder(parent) for _ in range(3)]
    with starts[0] as (_, a), starts[1] as (_, b), starts[2] as (_, c):
        assert sorted(parent.iterdir()) == sorted([a, b, c])


def test_a_folder_is_deleted_only_if_its_process_has_ended(parent: Path) -> None:
    reused_id = abandon(parent, "flowrl-reused-id")
    ended = abandon(parent, "flowrl-ended", pid=2**22 - 1)
    running = abandon(parent, "flowrl-running", start_time_s=read_start_time(os.getpid()))
    remove_abandoned_folders(parent)
    assert not reused_id.exists() and not ended.exists() and (running / "r" / "session" / "log").exists()


def test_a_folder_of_another_host_is_kept(parent: Path) -> None:
    """The lock of another host is not visible here on some shared file systems, and process ids mean nothing."""
    other = abandon(parent, "flowrl-other-host", host="other", boot_id="other")
    restarted = abandon(parent, "flowrl-restarted", boot_id="earlier", start_time_s=read_start_time(os.getpid()))
    container = abandon(parent, "flowrl-container", host="a container on this host")
    remove_abandoned_folders(parent)
    assert (other / "r" / "session" / "log").exists() and not restarted.exists() and not container.exists()


def test_a_locked_folder_is_kept(parent: Path) -> None:
    """The process of a folder may run in another container, where its id is another one."""
    folder = abandon(parent)
    with (folder / MARKER).open() as marker:
        fcntl.flock(marker, fcntl.LOCK_EX)
        remove_abandoned_folders(parent)
        assert (folder / "r" / "session" / "log").exists()
    remove_abandoned_folders(parent)
    assert not folder.exists()


@pytest.mark.parametrize(
    "marker",
    [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"pid": 4194303}', b'{"pid": "x", "start_time_s": 1}', b'{"pid": -1}'],
)
def test_a_folder_with_a_corrupt_marker_is_kept(parent: Path, marker: bytes) -> None:
    folder = abandon(parent)
    (folder / MARKER).write_bytes(marker)
    remove_abandoned_folders(parent)
    assert (folder / "r" / "session" / "log").exists()


def test_a_folder_without_a_marker_and_other_folders_are_kept(parent: Path) -> None:
    (abandon(parent, "flowrl-unmarked") / MARKER).unlink()
    abandon(parent, "ray")
    marker = abandon(parent, "flowrl-marker-is-a-folder") / MARKER
    marker.unlink()
    marker.mkdir()
    (abandon(parent, "flowrl-marker-is-a-pipe") / MARKER).unlink()
    os.mkfifo(parent / "flowrl-marker-is-a-pipe" / MARKER)
    (parent / "flowrl-file").touch()
    before = sorted(parent.rglob("*"))
    remove_abandoned_folders(parent)
    assert sorted(parent.rglob("*")) == before


def test_links_are_not_followed(parent: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as other:
        target = abandon(Path(other), "target")
        (parent / "flowrl-link").symlink_to(target)
        marker = abandon(parent, "flowrl-linked-marker") / MARKER
        marker.rename(Path(other) / MARKER)
        marker.symlink_to(Path(other) / MARKER)
        abandoned = abandon(parent)
        (abandoned / "r" / "link").symlink_to(target)
        remove_abandoned_folders(parent)
        assert not abandoned.exists() and marker.exists()
        assert (target / "r" / "session" / "log").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can create files of other users")
def test_folders_and_markers_of_other_users_are_kept(parent: Path) -> None:
    folder, marker = abandon(parent, "flowrl-other-folder"), abandon(parent, "flowrl-other-marker") / MARKER
    os.chown(folder, 65534, 65534)
    os.chown(marker, 65534, 65534)
    remove_abandoned_folders(parent)
    assert (folder / MARKER).exists() and marker.exists()


def test_private_paths_are_private_folders_and_the_sockets_and_tokens_of_ray(parent: Path) -> None:
    folder, sockets, token = abandon(parent), parent / "ray/session_1/sockets", parent / "token"
    sockets.mkdir(parents=True)
    token.touch()
    (parent / "flowrl-unmarked").mkdir()
    assert sorted(find_private_paths([parent, token, parent / "missing"])) == [folder, sockets, token]


def test_private_folders_are_searched_beside_the_one_that_contains_the_temporary_folder(
    parent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes of a local Ray have a temporary folder in the private folder of the driver."""
    temporary = abandon(parent) / "t"
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(parent / "token"))
    assert {temporary, parent, parent / "token"} <= set(list_private_roots())


def test_a_ray_folder_whose_path_is_too_long_for_sockets_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[MODULE], "_folder", None)
    long = tmp_path / ("x" * MAX_PARENT_BYTES)
    monkeypatch.setenv("RAY_TMPDIR", str(long))
    with rejects("RAY_TMPDIR", str(long), MAX_PARENT_BYTES, error=UserError):
        private_folder()


@pytest.mark.slow
@pytest.mark.parametrize("end", ["exit", pytest.param("kill", marks=pytest.mark.slow)])
def test_only_temporary_files_are_in_a_long_temporary_folder(tmp_path: Path, end: str) -> None:
    """Ray's sockets need a short path, but /tmp may be small."""
    environment = {name: value for name, value in os.environ.items() if name != "RAY_TMPDIR"}
    long = tmp_path / ("x" * MAX_PARENT_BYTES)
    long.mkdir()
    code = f"from {MODULE} import *; print(private_folder(), temporary_folder(), flush=True); input()"
    folders = set()
    for last in {"exit": ["exit"], "kill": ["kill", "exit"]}[
        end
    ]:  # the next process deletes the folder of a killed one
        with holder(long, code, environment | {"TMPDIR": str(long)}) as (process, output):
            sockets, temporary = map(Path, str(output).split())
            folders.add(temporary)
            assert sockets.parent == Path("/tmp") and temporary.parent.parent == long
            for folder in (sockets, temporary.parent):
                assert folder.stat().st_mode & 0o777 == 0o700 and (folder / MARKER).exists()
            assert list(long.iterdir()) == [temporary.parent]
            if last == "kill":
                process.kill()
            process.communicate("\n", timeout=60)
    assert not any(path.exists() for path in folders) and not list(long.iterdir()) and not sockets.exists()


@pytest.mark.slow
def test_further_folders_are_in_the_temporary_folder_and_also_deleted(tmp_path: Path) -> None:
    code = f"from {MODULE} import create_folder; print(create_folder('model').path, flush=True); input()"
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    with holder(tmp_path, code, environment) as (process, killed):
        assert killed.parent == tmp_path and killed.name.startswith("flowrl-model-")
        assert killed.stat().st_mode & 0o777 == 0o700
        process.kill()
        process.wait()
    assert killed.exists()
    with holder(tmp_path, code, environment) as (process, second):
        assert list(tmp_path.iterdir()) == [second]
        process.communicate("\n", timeout=60)
    assert list(tmp_path.iterdir()) == []


def test_temporary_files_are_in_the_private_folder_by_default(parent: Path) -> None:
    code = f"from {MODULE} import *; print(private_folder(), temporary_folder(), flush=True); input()"
    with holder(parent, code, os.environ | {"TMPDIR": str(parent), "RAY_TMPDIR": str(parent)}) as (_, output):
        sockets, temporary = map(Path, str(output).split())
        assert temporary == sockets / "t" and list(parent.iterdir()) == [sockets]


def test_a_folder_deeper_than_the_recursion_limit_is_removed(tmp_path: Path) -> None:
    current = os.open(tmp_path, os.O_PATH)
    for name in ["top", *["a"] * (sys.getrecursionlimit() + 100)]:
        os.mkdir(name, dir_fd=current)
        parent, current = current, os.open(name, os.O_PATH, dir_fd=current)
        os.close(parent)
    os.close(current)
    remove_folder(tmp_path / "top")
    assert list(tmp_path.iterdir()) == []
