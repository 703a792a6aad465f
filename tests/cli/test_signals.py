"""SIGINT, SIGTERM and SIGHUP before and after the part of a program that has handlers of its own."""

import os
import pty
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

DURING_IMPORTS = """
import os, signal, sys
class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == "flowrl.cli.main":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupting())
import flowrl.cli
"""

AFTER_THE_RUN = """
import os, signal, sys
from pathlib import Path
from flowrl.checkpoints.run_folder import folder_lock
from flowrl.cli import exit_code
from flowrl.run.interrupt import Interruption
def program():
    with folder_lock(Path(sys.argv[1])):
        with Interruption(print):
            pass
        os.kill(os.getpid(), int(sys.argv[2]))
        print("not ended")
sys.exit(exit_code(program))
"""


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_ctrl_c_during_the_imports_prints_one_line():
    ended = run(DURING_IMPORTS)
    assert ended.returncode == -signal.SIGINT and ended.stderr.splitlines() == ["interrupted"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_after_the_handlers_of_a_run_are_removed_still_releases_the_folder(
    tmp_path: Path, number: signal.Signals
):
    (tmp_path / "results.txt").touch()
    ended = run(AFTER_THE_RUN, str(tmp_path), str(int(number)))
    assert (ended.returncode, ended.stdout) == (128 + number, "") and number.name in ended.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["results.txt"]


def test_a_program_that_nohup_started_ignores_sighup():
    program = "import signal; from flowrl.cli import exit_code; exit_code(lambda: signal.raise_signal(signal.SIGHUP))"
    ended = run(f"import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN); {program}; print('not ended')")
    assert (ended.returncode, ended.stdout) == (0, "not ended\n")


WRITING = """
import fcntl, sys, termios, time
from flowrl.cli import exit_code
fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # the terminal of this session
def program():
    try:
        print("started", flush=True)
        while True:
            time.sleep(0.05)
            print("working", flush=True)  # fails once the terminal is closed
    finally:
        open(sys.argv[1], "w").close()
        print("ended", flush=True)
sys.exit(exit_code(program))
"""


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_program_whose_terminal_is_closed_cleans_up_and_has_the_code_of_sighup(tmp_path: Path, unbuffered: str):
    """The kernel sends SIGHUP, and writes to the terminal fail from then on, also those of buffers at exit."""
    controller, terminal = pty.openpty()
    command = [sys.executable, "-c", WRITING, str(tmp_path / "cleaned")]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
        start_new_session=True,
    )
    os.close(terminal)
    assert select.select([controller], [], [], 60)[0]
    os.close(controller)
    assert process.wait(60) == 128 + signal.SIGHUP
    assert (tmp_path / "cleaned").exists()


CONVERTED = """
import os, signal, sys
from flowrl.cli import exit_code
def program():
    try:
        os.kill(os.getpid(), int(sys.argv[1]))
    except KeyboardInterrupt:
        os.kill(os.getpid(), signal.SIGHUP)  # ignored, because the program is already ending
        raise KeyboardInterrupt from None  # as Ray does
sys.exit(exit_code(program))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_a_library_converts_has_its_own_exit_code(number: signal.Signals):
    ended = run(CONVERTED, str(int(number)))
    assert ended.returncode == 128 + number and number.name in ended.stderr
