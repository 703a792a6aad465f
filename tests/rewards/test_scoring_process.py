"""`score_in_process` returns scores, stops a reward function that hangs, and reports one that ends its process."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from flowrl.rewards.reward_function import RewardError
from flowrl.rewards.scoring_process import score_in_process
from tests.errors import rejects
from tests.rewards import scored_functions

HERE = "tests.rewards.test_scoring_process"
FUNCTIONS = "tests.rewards.scored_functions"
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


def test_scores_are_returned_in_order() -> None:
    assert score_in_process(f"{HERE}:count", ROWS, 60) == score_in_process(f"{HERE}:count", ROWS, None) == [3, 0, 6]


def test_a_hang_is_reported_with_its_location_and_the_deadline() -> None:
    lines = Path(scored_functions.__file__).read_text().splitlines()
    line = next(i for i, text in enumerate(lines, 1) if text.strip().startswith("time.sleep"))
    facts = ("hang", len(ROWS), "wait_for_service", scored_functions.__file__, line, 0.5, "call_timeout_s")
    with rejects(*facts, error=RewardError):
        score_in_process(f"{FUNCTIONS}:hang", ROWS, 0.5)


@pytest.mark.parametrize(("function", "fact"), [("end", 3), ("kill", "SIGKILL"), ("fail", "KeyError")])
def test_other_failures_are_reported(function: str, fact: object) -> None:
    with rejects(function, fact, error=RewardError):
        score_in_process(f"{HERE}:{function}", ROWS, 60)


def test_the_first_process_of_a_program_does_not_receive_interrupts() -> None:
    program = (
        "from flowrl.rewards.scoring_process import score_in_process\n"
        "if __name__ == '__main__':\n"
        f"    print(score_in_process('{FUNCTIONS}:interrupt_is_blocked', [{{'response': ''}}], None))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout == "[1.0]\n", done.stderr


@pytest.mark.slow
def test_the_deadline_ends_the_processes_that_the_function_has_started(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    with rejects("wait_for_sandbox", error=RewardError):
        score_in_process(f"{FUNCTIONS}:wait_for_sandbox", [{"response": str(file)}], 2)
    sandbox = int(file.read_text())
    for _ in range(100):
        if not psutil.pid_exists(sandbox) or psutil.Process(sandbox).status() == psutil.STATUS_ZOMBIE:
            return
        time.sleep(0.1)
    psutil.Process(sandbox).kill()
    pytest.fail("the process is still running")


@pytest.mark.slow
def test_an_import_that_hangs_is_ended_at_the_deadline() -> None:
    with rejects(
        "tests.rewards.slow_import",
        "score",
        ROOT / "tests/rewards/slow_import.py",
        2,
        "call_timeout_s",
        error=RewardError,
    ):
        score_in_process("tests.rewards.slow_import:score", ROWS, 2)
