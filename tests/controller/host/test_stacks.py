"""Stacks of processes that do not respond otherwise."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from flowrl.controller.host import process_probe
from flowrl.controller.host.process_probe import (
    Frame,
    Stack,
    StackDump,
    collect_stack_dumps,
    find_processes,
    kill_processes,
    parse_host_stack,
)

STUCK = """
import sys
from flowrl.controller.host.process_probe import enable_stack_dumps

def in_c():
    print(flush=True)
    sum(range(10**14))

def in_python():
    print(flush=True)
    while True:
        pass

def without_handler():
    import signal
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    in_python()

def forked():
    import os
    if os.fork():
        in_python()
    import time
    time.sleep(600)

enable_stack_dumps({name!r})
{call}()
"""


@contextmanager
def stuck(call: str, name: str) -> Iterator[int]:
    """Starts a process with this name that hangs in a function. Yields its process id."""
    program = STUCK.format(call=call, name=name)
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(0.2)  # usually enough to enter native code
        try:
            yield process.pid
        finally:
            process.kill()


def test_stacks_are_dumped_while_native_code_holds_the_interpreter(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(process_probe, "_DUMP_TIMEOUT_S", 60.0)
    with stuck("in_c", "first-of-two"), stuck("in_python", "second-of-two"):
        for _ in range(2):
            dumps = collect_stack_dumps(["first-of-two", "second-of-two", "nobody"])
            assert set(dumps) == {"first-of-two", "second-of-two"}
            assert "in in_c\n" in dumps["first-of-two"].text and "in in_python\n" in dumps["second-of-two"].text
            assert [dump.text.count("most recent call first") for dump in dumps.values()] == [1, 1]
            assert all(0 < dump.age_s < 60 for dump in dumps.values())


def test_a_stopped_process_is_reported_without_a_stack():
    with stuck("in_python", "one-that-stops") as process_id:
        os.kill(process_id, signal.SIGSTOP)
        os.waitid(os.P_PID, process_id, os.WSTOPPED | os.WNOWAIT)
        dump = collect_stack_dumps(["one-that-stops"])["one-that-stops"]
        assert dump.is_stopped and parse_host_stack(dump).is_stopped
        assert kill_processes(["one-that-stops"]) == {process_id}


def test_the_stack_of_a_name_is_that_of_its_newest_process():
    with stuck("in_c", "one-of-two"), stuck("in_python", "one-of-two") as replacement:
        dump = collect_stack_dumps(["one-of-two"])["one-of-two"]
        assert dump.process_id == replacement and "in in_python\n" in dump.text


def test_a_process_is_not_confused_with_those_that_it_has_forked():
    with stuck("forked", "one-that-forks") as process_id:
        assert collect_stack_dumps(["one-that-forks"])["one-that-forks"].process_id == process_id
        assert len(kill_processes(["one-that-forks"])) == 2


def remaining(name: str, count: int) -> list[int]:
    """Returns the ids of the processes of a name, as soon as there are at most `count`. On a busy machine, a killed
    process is found until the kernel has ended it.
    """
    deadline = time.monotonic() + 60
    while True:
        found = [process.process_id for process in find_processes([name]).get(name, ())]
        if len(found) <= count or time.monotonic() > deadline:
            return found
        time.sleep(0.01)


def test_all_processes_of_a_name_are_killed():
    with stuck("forked", "one-of-three") as old, stuck("in_python", "one-of-three") as replacement:
        killed = kill_processes(["one-of-three"])
        assert len(killed) == 3 and {old, replacement} < killed
        assert remaining("one-of-three", 0) == []


def test_a_process_is_killed_without_its_replacement():
    with stuck("forked", "one-to-replace") as old, stuck("in_python", "one-to-replace") as replacement:
        assert old in kill_processes(["one-to-replace"], worker_id=old)
        assert remaining("one-to-replace", 1) == [replacement]
        assert kill_processes(["one-to-replace"], worker_id=old) == set()


def test_a_process_that_writes_no_stack_is_reported_with_its_age(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(process_probe, "_DUMP_TIMEOUT_S", 0.1)
    with stuck("without_handler", "one-that-is-silent"):
        dump = collect_stack_dumps(["one-that-is-silent"])["one-that-is-silent"]
    stack = parse_host_stack(dump)
    assert stack.is_missing and not stack.is_stopped and 0.2 <= stack.age_s < 60


def test_a_process_that_has_ended_has_no_stack():
    with stuck("in_python", "one-that-ends"):
        pass
    assert collect_stack_dumps(["one-that-ends"]) == {}


def test_processes_that_end_during_the_search_are_skipped():
    ends_s = time.monotonic() + 1.5
    with stuck("in_python", "one-that-stays"):
        while time.monotonic() < ends_s:
            ending = [subprocess.Popen(["sleep", f"{0.002 * i}"]) for i in range(5)]
            for _ in range(5):
                assert list(find_processes(["one-that-stays", "nobody"])) == ["one-that-stays"]
            for process in ending:
                process.wait()


DUMP = """Thread 0x00007f68110b86c0 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 327 in wait
  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap

Current thread 0x00007f6858c27b80 (most recent call first):
  File "/site-packages/torch/distributed/distributed_c10d.py", line 3200 in all_reduce
  File "/home/user/train.py", line 16 in update
  File "/home/user/flowrl/controller/host/host.py", line 153 in _run
  File "/home/user/flowrl/controller/host/host.py", line 120 in call
"""


def test_the_frames_of_a_method_are_those_above_its_host():
    stack = parse_host_stack(StackDump(3.0, DUMP))
    assert stack.frames == (
        Frame("/site-packages/torch/distributed/distributed_c10d.py", 3200, "all_reduce"),
        Frame("/home/user/train.py", 16, "update"),
    )
    assert stack.in_collective and not stack.is_recovering and stack.age_s == 3.0
    assert str(stack.frames[1]) == "update (/home/user/train.py, line 16)"


def test_a_replacement_that_replays_calls_is_recovering():
    recovering = DUMP + '  File "/home/user/flowrl/controller/ray_backend.py", line 70 in recover\n'
    assert parse_host_stack(StackDump(3.0, recovering)).is_recovering


def test_a_process_between_calls_has_no_frames():
    assert parse_host_stack(StackDump(3.0, DUMP.split("\n\n")[0])) == Stack(age_s=3.0)
    assert parse_host_stack(None) == Stack()
