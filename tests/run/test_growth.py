"""A long run on Ray neither fills the memory of its driver and of Ray's processes nor the disk."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from flowrl.data.events import MAX_COUNTS
from flowrl.report.chrome_trace import read_trace
from flowrl.report.trace import MAX_CALLS

ROOT = Path(__file__).parents[2]
STEPS = (500, 1200, 2000)
"""Measured steps. The recorded calls reach their limit before the second one."""
BYTES_PER_STEP = 2_000


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_driver_ray_and_trace_do_not_grow_with_the_number_of_steps(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.run.soaking_run", str(tmp_path), *map(str, STEPS)]
    ended = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    measured = json.loads(ended.stdout.splitlines()[-1])
    before, after = measured[1:]
    num_steps = STEPS[2] - STEPS[1]
    growth = {name: (after[name] - before[name]) / num_steps for name in ("driver", "gcs_server", "raylet")}
    assert max(growth.values()) < BYTES_PER_STEP, f"bytes per step: {growth}"
    trace = read_trace(tmp_path / "out")
    assert MAX_CALLS <= len(trace.events) < 1.2 * MAX_CALLS and len(trace.counts) <= MAX_COUNTS
    assert trace.dropped_until_ns > 0
    assert (tmp_path / "out" / "trace.json").stat().st_size < 1_000 * MAX_CALLS
    lines = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, STEPS[-1] + 1))
