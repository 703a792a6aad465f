"""SIGINT, SIGTERM and SIGHUP before and after the part of a program that has handlers of its own."""

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
