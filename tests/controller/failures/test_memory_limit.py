"""A process that takes more memory than its node may use: in a Ray of its own, whose limit is a little above that."""

import os
import subprocess
import sys

import psutil


def test_a_process_that_is_ended_for_lack_of_memory_is_told_as_that():
    memory = psutil.virtual_memory()
    limit = (memory.total - memory.available + 2**31) / memory.total
    env = os.environ | {"RAY_memory_usage_threshold": f"{limit:.4f}", "RAY_memory_monitor_refresh_ms": "100"}
    command = [sys.executable, "-m", "tests.controller.hungry"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.strip() == "actor eat 0 its process was ended because its node ran out of memory", done.stderr[
        -2000:
    ]
