"""Stacks of processes that answer nothing else."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from flowrl.controller.stacks import Frame, dump_of, method_frames

STUCK = """
import sys
from flowrl.controller.stacks import arm

def in_c():
    sum(range(10**14))

def in_python():
    while True:
        pass

print(arm(), flush=True)
{call}()
"""


@contextmanager
def stuck(call: str) -> Iterator[tuple[int, int]]:
    """A process that is stuck in a function, and the file of its stacks."""
    with subprocess.Popen(
        [sys.executable, "-c", STUCK.format(call=call)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        file = int(process.stdout.readline())
        time.sleep(0.2)
        yield process.pid, file
        process.kill()


def test_a_process_tells_where_it_is_while_native_code_holds_its_interpreter():
    for call in ("in_c", "in_python"):
        with stuck(call) as (process_id, file):
            first, second = dump_of(process_id, file), dump_of(process_id, file)
        assert f"in {call}\n" in first
        assert second.count("most recent call first") == first.count("most recent call first") == 1


def test_a_process_that_has_ended_tells_nothing():
    with stuck("in_python") as (process_id, file):
        pass
    assert dump_of(process_id, file) == ""
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


DUMP = """Thread 0x00007f68110b86c0 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 327 in wait
  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap

Current thread 0x00007f6858c27b80 (most recent call first):
  File "/site-packages/torch/distributed/distributed_c10d.py", line 3200 in all_reduce
  File "/home/user/train.py", line 16 in update
  File "/home/user/flowrl/controller/host.py", line 153 in _run
  File "/home/user/flowrl/controller/host.py", line 120 in call
"""


def test_the_frames_of_a_method_are_those_above_its_host():
    frames = method_frames(DUMP)
    assert frames == [
        Frame("/site-packages/torch/distributed/distributed_c10d.py", 3200, "all_reduce"),
        Frame("/home/user/train.py", 16, "update"),
    ]
    assert [frame.in_collective for frame in frames] == [True, False]
    assert str(frames[1]) == "update (/home/user/train.py, line 16)"


def test_a_process_between_calls_has_no_frames():
    assert method_frames(DUMP.split("\n\n")[0]) == []
