"""A restricted process cannot use more than `Isolation` allows. Protections that the system lacks are skipped."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run_isolated(settings: str, code: str, *, before: str = "", needs: str = "") -> object:
    """Runs `code` in a new process with an `Isolation(settings)`, and returns the value of its variable `result`."""
    program = f"""
import json, os, sys
from pathlib import Path
from flowrl.user_code.isolation import *
{before}
unavailable = isolate(Isolation({settings}))
if {needs!r} in unavailable:
    print('"skip"')
    sys.exit()
try:
    {code}
except (OSError, MemoryError) as error:
    result = type(error).__name__
print(json.dumps(result))
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout, done.stderr
    result = json.loads(done.stdout)
    if result == "skip":
        pytest.skip(f"this system does not offer the protection of {needs}")
    return result


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("result = Path(FOLDER, 'new').write_text('abc')", 3),
        (
            "Path(FOLDER, 'a').write_text('a'); os.rename(f'{FOLDER}/a', f'{FOLDER}/b'); result = os.listdir(FOLDER)",
            ["b"],
        ),
        ("result = Path('/dev/null').write_text('abc')", 3),
        ("result = Path(OTHER, 'kept').read_text()", "text"),
        ("Path(OTHER, 'new').write_text('abc')", "PermissionError"),
        ("Path(OTHER, 'kept').unlink()", "PermissionError"),
        ("os.truncate(f'{OTHER}/kept', 0)", "PermissionError"),
        ("os.mkdir(f'{OTHER}/new')", "PermissionError"),
        ("os.rename(f'{OTHER}/kept', f'{FOLDER}/kept')", "PermissionError"),
        ("os.link(f'{OTHER}/kept', f'{FOLDER}/kept')", "PermissionError"),
        ("os.symlink(OTHER, f'{FOLDER}/link'); Path(FOLDER, 'link', 'new').write_text('abc')", "PermissionError"),
    ],
)
@pytest.mark.parametrize("uses_mounts", [False, True])
def test_only_the_writable_folder_is_written(tmp_path: Path, code: str, expected: object, uses_mounts: bool) -> None:
    folder, other = tmp_path / "folder", tmp_path / "other"
    for path in (folder, other):
        path.mkdir()
    (other / "kept").write_text("text")
    before = f"FOLDER, OTHER = {str(folder)!r}, {str(other)!r}\n"
    if uses_mounts:  # as in a kernel without Landlock
        before += "from flowrl.user_code import isolation\nisolation._TRUNCATE_ABI = isolation._SCOPE_ABI = 99\n"
    result = run_isolated(f"writable=Path({str(folder)!r})", code, before=before, needs="files")
    assert result == expected or (expected == "PermissionError" and result == "OSError")
    assert (other / "kept").read_text() == "text"
    assert [path.name for path in other.iterdir()] == ["kept"]


@pytest.mark.parametrize("kind", ["SOCK_STREAM", "SOCK_DGRAM"])
def test_no_network_is_reachable(kind: str) -> None:
    code = f"import socket; result = socket.socket(socket.AF_INET, socket.{kind}).connect(('127.0.0.1', 9))"
    assert run_isolated("", code, needs="network") == "OSError"


def test_the_network_is_reachable_if_allowed() -> None:
    code = "import socket; result = socket.create_server(('127.0.0.1', 0)).getsockname()[0]"
    assert run_isolated("allow_network=True", code) == "127.0.0.1"


def test_the_environment_of_the_parent_is_hidden() -> None:
    code = "result = Path(f'/proc/{os.getppid()}/environ').read_text()"
    assert run_isolated("", code, needs="environment") == "PermissionError"


def test_a_process_outside_cannot_be_signaled() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        assert run_isolated("", f"result = os.kill({other.pid}, 9)", needs="signals") == "PermissionError"
        assert other.poll() is None
        other.kill()


def test_memory_is_limited() -> None:
    assert run_isolated("memory_mb=500", "result = len(bytes(600 * 2**20))") == "MemoryError"
    assert run_isolated("memory_mb=500", "result = len(bytes(100 * 2**20))") == 100 * 2**20


def test_the_size_of_a_file_is_limited(tmp_path: Path) -> None:
    file = tmp_path / "file"
    assert run_isolated("max_file_mb=1", f"result = Path({str(file)!r}).write_bytes(bytes(2 * 2**20))") == "OSError"
    assert file.stat().st_size <= 2**20


def test_the_number_of_processes_is_limited() -> None:
    code = "import subprocess; result = len([subprocess.Popen(['sleep', '5']) for _ in range(20)])"
    assert run_isolated("max_processes=10", code, needs="processes") == "BlockingIOError"


def test_cpu_time_is_limited() -> None:
    code = (
        "import subprocess; result = subprocess.run([sys.executable, '-c', 'while True: pass'], timeout=60).returncode"
    )
    assert run_isolated("cpu_s=1", code) in (-9, -24)  # SIGKILL or SIGXCPU


def test_a_missing_writable_folder_is_rejected(tmp_path: Path) -> None:
    assert run_isolated("", f"isolate(Isolation(writable=Path({str(tmp_path / 'no')!r})))") == "NotADirectoryError"


def test_dropped_rights_do_not_return_with_a_program() -> None:
    code = "import subprocess; result = subprocess.check_output(['cat', '/proc/self/status'], text=True)"
    status = str(run_isolated("", code))
    assert "CapEff:\t0000000000000000" in status and "CapBnd:\t0000000000000000" in status


def test_the_names_of_missing_protections_are_known() -> None:
    names = {"environment", "network", "signals", "files", "processes"}
    result = run_isolated("max_processes=100, writable=Path('/tmp')", "result = unavailable")
    assert isinstance(result, list) and json.dumps(result) and names.issuperset(result)
