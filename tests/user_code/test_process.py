"""Processes of a pool return scores, are stopped if a reward function hangs, and report one that ends them."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from flowrl.data.folders.private_folder import remove_tree
from flowrl.rewards.reward_function import RewardError
from flowrl.user_code.launcher import Launcher, environment_of
from flowrl.user_code.process import ProcessPipes
from tests.errors import rejects
from tests.user_code import scored_functions
from tests.user_code.single_process import score_in_process

HERE = "tests.user_code.test_process"
FUNCTIONS = "tests.user_code.scored_functions"
MAIN_LOOP = "flowrl.rewards.scorer"
ROOT = Path(__file__).parents[2]
ROWS = [{"prompt": "1+1", "response": response, "answer": "2", "level": 3.0} for response in ("2", "", "22")]


def count(response: str, level: float, **_: object) -> float:
    return len(response) * level


def end(**_: object) -> float:
    os._exit(3)


def kill(**_: object) -> float:
    os.kill(os.getpid(), signal.SIGKILL)
    return 0.0


def fail(**_: object) -> float:
    raise KeyError("level")


def command_of(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def test_scores_are_returned_in_order() -> None:
    assert score_in_process(f"{HERE}:count", ROWS, 60) == score_in_process(f"{HERE}:count", ROWS, None) == [3, 0, 6]


def test_a_hang_is_reported_with_its_location_and_the_deadline() -> None:
    lines = Path(scored_functions.__file__).read_text().splitlines()
    line = next(i for i, text in enumerate(lines, 1) if text.strip().startswith("time.sleep"))
    facts = ("hang", "wait_for_service", scored_functions.__file__, line, 0.5, "call_timeout_s")
    with rejects(*facts, error=RewardError):
        score_in_process(f"{FUNCTIONS}:hang", ROWS, 0.5)


@pytest.mark.parametrize(("function", "fact"), [("end", 3), ("kill", "SIGKILL"), ("fail", "KeyError")])
def test_other_failures_are_reported(function: str, fact: object) -> None:
    with rejects(function, fact, error=RewardError):
        score_in_process(f"{HERE}:{function}", ROWS, 60)


def test_an_interrupt_ends_the_processes(tmp_path: Path) -> None:
    """Ctrl-C reaches the process group of the terminal."""
    file = tmp_path / "pid"
    program = (
        "from tests.user_code.single_process import score_in_process\n"
        f"score_in_process('{FUNCTIONS}:wait_for_sandbox', [{{'response': {str(file)!r}}}], None)\n"
    )
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True) as run:
        while not file.exists() and run.poll() is None:
            time.sleep(0.05)
        started = psutil.Process(run.pid).children(recursive=True)
        os.killpg(run.pid, signal.SIGINT)
        _, errors = run.communicate(timeout=120)
    assert "KeyboardInterrupt" in errors
    _, left = psutil.wait_procs(started, timeout=30)
    assert len(started) > 1 and left == []


@pytest.mark.slow
def test_the_deadline_ends_the_processes_that_the_function_has_started(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    with rejects("wait_for_sandbox", error=RewardError):
        score_in_process(f"{FUNCTIONS}:wait_for_sandbox", [{"response": str(file)}], 2)
    assert file.exists()
    assert [process for process in psutil.process_iter() if str(file) in command_of(process)] == []


@pytest.mark.slow
def test_an_import_that_hangs_is_ended_at_the_deadline() -> None:
    with rejects(
        "score",
        ROOT / "tests/user_code/slow_import.py",
        2,
        "call_timeout_s",
        error=RewardError,
    ):
        score_in_process("tests.user_code.slow_import:score", ROWS, 2)


def test_a_process_of_a_launcher_that_has_ended_is_not_started() -> None:
    """A separate process removes the folder of a launcher that has ended, possibly before the pool notices the end."""
    launcher = Launcher(environment_of(os.environ, allow_network=False), MAIN_LOOP)
    launcher._process.kill()
    launcher._process.wait()
    remove_tree(launcher.folder)
    num_descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ConnectionError):
        ProcessPipes(launcher, {})
    assert len(os.listdir("/proc/self/fd")) == num_descriptors
    launcher.close()


def test_a_removed_folder_is_created_again_while_the_launcher_runs() -> None:
    launcher = Launcher(environment_of(os.environ, allow_network=False), MAIN_LOOP)
    remove_tree(launcher.folder)
    assert Path(launcher.make_folder()).parent == launcher.folder
    launcher.close()
