"""The files of a local Ray are private, and every local Ray has its own token, which is deleted with it."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from ray._private import worker

from flowrl.controller.backends.local_ray import _delay_signals
from flowrl.data.folders.private_folder import private_folder

NOBODY = 65534


def session_folder() -> Path:
    node: Any = worker._global_node  # None without a Ray
    return Path(node.get_session_dir_path())


def test_only_the_owner_reaches_the_files_and_the_token_of_a_local_ray(ray_session: None) -> None:
    folder = private_folder()
    assert folder.stat().st_mode & 0o777 == 0o700
    session = session_folder()
    assert session.is_relative_to(folder) and (session / "sockets" / "plasma_store").exists()
    token = Path(os.environ["RAY_AUTH_TOKEN_PATH"])
    assert token.parent == folder and token.stat().st_mode & 0o777 == 0o600
    assert len(token.read_text()) == 64
    assert not [path for path in folder.iterdir() if path.is_file() and path.stat().st_mode & 0o077]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_can_neither_read_nor_write_in_the_folder(ray_session: None) -> None:
    session = session_folder()
    for command in (["ls", session], ["touch", f"{session}/file"], ["cat", os.environ["RAY_AUTH_TOKEN_PATH"]]):
        done = subprocess.run(command, user=NOBODY, group=NOBODY, extra_groups=[], capture_output=True, check=False)
        assert done.returncode != 0 and b"Permission denied" in done.stderr


TWICE = """
import os
from pathlib import Path
import ray
from ray._raylet import AuthenticationMode, get_authentication_mode
from flowrl.controller.backends.local_ray import LocalRay
from flowrl.data.folders.private_folder import private_folder

tokens = []
initial_mode = get_authentication_mode()
for mode in ({"RAY_AUTH_MODE": "Disabled"}, {}):
    os.environ.update(mode)
    local_ray = LocalRay(1)
    assert get_authentication_mode() == AuthenticationMode.TOKEN
    tokens.append(Path(os.environ["RAY_AUTH_TOKEN_PATH"]).read_text())
    assert ray.get(ray.remote(num_cpus=0)(lambda: os.getpid()).remote()) != os.getpid()
    local_ray.stop()
    assert [path.name for path in private_folder().iterdir()] == ["process.json"]
    assert os.environ["RAY_AUTH_TOKEN"] == "of the user" and "RAY_AUTH_TOKEN_PATH" not in os.environ
    assert get_authentication_mode() == initial_mode == AuthenticationMode.DISABLED
    assert os.environ.pop("RAY_AUTH_MODE", None) == mode.get("RAY_AUTH_MODE")
assert tokens[0] != tokens[1]
LocalRay(1)  # never stopped: stops at exit
"""


@pytest.fixture
def parent() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="fl", dir="/tmp") as folder:
        yield Path(folder)


@pytest.mark.slow
def test_a_process_can_start_ray_again_with_a_new_token(parent: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {"RAY_AUTH_TOKEN": "of the user", "RAY_TMPDIR": str(parent)}
    done = subprocess.run([sys.executable, "-c", TWICE], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert not list(parent.iterdir())


SLOW_RAYLET = """
import os
import sys
from pathlib import Path
from ray._private import services
from flowrl.controller.backends.local_ray import LocalRay
from flowrl.controller.errors import BackendError
from flowrl.data.folders.private_folder import private_folder

starts, program = Path(sys.argv[1]), Path(sys.argv[2])
num_slow = int(sys.argv[3])
program.write_text(f'''#!/bin/sh
echo start >> {starts}
if [ $(wc -l < {starts}) -le {num_slow} ]; then kill -STOP $$; fi
exec {services.RAYLET_EXECUTABLE} "$@"
''')
program.chmod(0o700)
services.RAYLET_EXECUTABLE = str(program)
try:
    LocalRay(1)
    print("started")
except BackendError as error:
    print(error)
    import psutil
    assert [path.name for path in private_folder().iterdir()] == ["process.json"]
    statuses = [process.status() for process in psutil.Process().children(recursive=True)]
    assert set(statuses) <= {psutil.STATUS_ZOMBIE}, statuses
"""


@pytest.mark.slow
@pytest.mark.parametrize(("num_slow", "expected"), [(1, "started"), (2, "two attempts")])
def test_ray_has_two_attempts_to_start_before_one_error(
    num_slow: int, expected: str, parent: Path, tmp_path: Path
) -> None:
    arguments = [str(tmp_path / "starts"), str(tmp_path / "raylet"), str(num_slow)]
    done = subprocess.run(
        [sys.executable, "-c", SLOW_RAYLET, *arguments],
        env=os.environ | {"RAY_TMPDIR": str(parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert expected in done.stdout and "Traceback" not in done.stderr
    assert (tmp_path / "starts").read_text().count("start") == 2
    assert not list(parent.iterdir())


SIGNALED = """
import os
import signal
import sys
import time
from flowrl.controller.backends.local_ray import LocalRay
from flowrl.data.folders.private_folder import private_folder
import psutil


def interrupt(number, frame):
    raise KeyboardInterrupt


def signal_parent():
    os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(1)  # before the child executes the program of Ray


signal.signal(signal.SIGTERM, interrupt)
if sys.argv[1] == "during the fork":
    os.register_at_fork(after_in_parent=lambda: signal.raise_signal(signal.SIGTERM))
else:
    os.register_at_fork(after_in_child=signal_parent)
try:
    LocalRay(1)
except KeyboardInterrupt:
    time.sleep(1.5)
    assert not psutil.Process().children(recursive=True)
    assert [path.name for path in private_folder().iterdir()] == ["process.json"]
else:
    sys.exit("the signal is lost")
"""


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["during the fork", "before the program starts"])
def test_a_signal_while_ray_forks_a_process_ends_the_start(moment: str, parent: Path) -> None:
    environment = os.environ | {"RAY_TMPDIR": str(parent)}
    command = [sys.executable, "-c", SIGNALED, moment]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert not list(parent.iterdir())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("change", [1, 2, 3, 4])
def test_the_handlers_of_a_program_remain_after_a_signal_while_they_are_replaced(
    number: signal.Signals, change: int
) -> None:
    """`change` counts the handlers that have been replaced and restored when the signal arrives."""
    calls: list[int] = []
    num_changes = 0

    def interrupt(number: int, frame: FrameType | None) -> None:
        calls.append(number)
        raise KeyboardInterrupt

    def send(frame: FrameType, event: str, argument: object) -> None:
        nonlocal num_changes
        if event == "return" and frame.f_code is signal.signal.__code__:
            num_changes += 1
            if num_changes == change:
                signal.raise_signal(number)

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    profiler = sys.getprofile()
    try:
        sys.setprofile(send)
        with pytest.raises(KeyboardInterrupt), _delay_signals():
            pass
        sys.setprofile(profiler)
        assert calls == [number]
        for each in before:
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(each)
        assert calls == [number, *before]
    finally:
        sys.setprofile(profiler)
        for each, handler in before.items():
            signal.signal(each, handler)
