"""Reward functions for the tests of `score_in_process`. They import little, so the process imports them quickly."""

import subprocess
import sys
import time
from pathlib import Path


def wait_for_sandbox(response: str, **_: object) -> float:
    """Starts a process that does not end, and writes its process id to the file `response`."""
    command = [sys.executable, "-c", "import time; time.sleep(120)", response]
    with subprocess.Popen(command) as sandbox:
        Path(response).write_text(str(sandbox.pid))
    return 0.0


def hang(response: str, **_: object) -> float:
    return wait_for_service(response)


def wait_for_service(response: str) -> float:
    time.sleep(0 if response else 60)
    return 0.0
