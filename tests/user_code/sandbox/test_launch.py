"""A sandbox leaves no files: its own process removes them, or a later one."""

import os
import subprocess
import sys
from pathlib import Path

from flowrl.data.folders.private_folder import remove_abandoned_folders

ROOT = Path(__file__).parents[3]
PROGRAM = """
from flowrl.user_code.sandbox.launch import Sandbox
with Sandbox("program", "import time; time.sleep(60)"):
    print("started", flush=True)
    input()
"""


def test_the_files_of_a_killed_process_are_removed_by_a_later_one(tmp_path: Path) -> None:
    pipe, variables = subprocess.PIPE, os.environ | {"TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", PROGRAM]
    with subprocess.Popen(command, cwd=ROOT, env=variables, stdin=pipe, stdout=pipe) as run:
        assert run.stdout is not None and run.stdout.readline() == b"started\n"
        assert any(tmp_path.iterdir())
        run.kill()
    remove_abandoned_folders(tmp_path)
    assert list(tmp_path.iterdir()) == []
