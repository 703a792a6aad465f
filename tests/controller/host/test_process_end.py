"""The end of a process as an error message."""

import signal
import subprocess
import sys

import pytest

from flowrl.controller.host.process_end import count_oom_kills, describe_end
from tests.errors import missing_facts


def wait_status(code: str) -> int:
    """Returns the wait status of a Python program."""
    returncode = subprocess.run([sys.executable, "-IS", "-c", code], check=False).returncode
    return -returncode if returncode < 0 else returncode << 8


def test_an_exit_code_is_reported():
    status = wait_status("import os; os._exit(3)")
    assert not missing_facts(describe_end(status, is_own_kill=False, has_oom_kill=False), "3")


@pytest.mark.parametrize("number", [signal.SIGBUS, signal.SIGTERM])
def test_a_signal_is_reported(number: signal.Signals):
    status = wait_status(f"import os; os.kill(os.getpid(), {number.value})")
    assert not missing_facts(describe_end(status, is_own_kill=False, has_oom_kill=True), number.name)


def test_every_sender_of_sigkill_has_its_own_message():
    cases = [(True, False), (False, True), (False, False), (False, None)]
    messages = [describe_end(signal.SIGKILL, is_own_kill=own, has_oom_kill=oom) for own, oom in cases]
    assert len(set(messages)) == len(cases)
    assert not any(missing_facts(message, "SIGKILL") for message in messages)


def test_the_counter_of_out_of_memory_kills_never_decreases():
    first, second = count_oom_kills(), count_oom_kills()
    assert (first is None and second is None) or (first is not None and second is not None and first <= second)
