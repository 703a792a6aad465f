"""`python -m tests.ray_starts PID gcs_server` prints when each Ray below a process has started, until it ends."""

import sys
import time
from contextlib import suppress

import psutil

_TICK_S = 0.01
"""Resolution of the start times of processes, which are rounded down."""


def print_starts(process_id: int, program: str, interval_s: float = 1.0) -> None:
    """Prints the start time (monotonic) of each process of a program below a process."""
    seen = set()
    root = psutil.Process(process_id)
    while root.is_running():
        for process in root.children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if process not in seen and process.name() == program:
                    seen.add(process)
                    since_boot = process.create_time() - psutil.boot_time()
                    age = time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot
                    print(time.monotonic() - age + _TICK_S, flush=True)  # noqa: T201 (the purpose of this program)
        time.sleep(interval_s)


if __name__ == "__main__" and sys.platform == "linux":
    with suppress(psutil.NoSuchProcess):
        print_starts(int(sys.argv[1]), sys.argv[2])
