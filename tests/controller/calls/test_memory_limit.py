"""A process that exceeds the memory limit of its node, in a separate Ray with a limit just above current use."""

import os
import subprocess
import sys

import psutil
import pytest


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["stateful", "stateless"])
def test_the_error_of_a_process_without_memory_names_the_cause(kind: str):
    memory = psutil.virtual_memory()
    limit = (memory.total - memory.available + 2**31) / memory.total
    env = os.environ | {"RAY_memory_usage_threshold": f"{limit:.4f}", "RAY_memory_monitor_refresh_ms": "100"}
    command = [sys.executable, "-m", "tests.controller.out_of_memory_driver", kind]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.strip() == "actor allocate 0 out of memory", done.stderr[-2000:]
