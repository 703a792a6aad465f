"""The end of a process as an error message."""

import signal
import sys

import pytest

from flowrl.controller.host.process_end import ProcessEnds, count_oom_kills, describe_end, parse_oom_kills
from tests.errors import missing_facts


def test_an_exit_code_is_reported():
    assert not missing_facts(describe_end(3, is_own_kill=False, has_oom_kill=False), "3")


@pytest.mark.parametrize("number", [signal.SIGBUS, signal.SIGTERM])
def test_a_signal_is_reported(number: signal.Signals):
    assert not missing_facts(describe_end(-number, is_own_kill=False, has_oom_kill=True), number.name)


def test_every_sender_of_sigkill_has_its_own_message():
    cases = [(True, False), (False, True), (False, False), (False, None)]
    messages = [describe_end(-signal.SIGKILL, is_own_kill=own, has_oom_kill=oom) for own, oom in cases]
    assert len(set(messages)) == len(cases)
    assert not any(missing_facts(message, "SIGKILL") for message in messages)


MEMORY_EVENTS = "low 0\nhigh 0\nmax 41\noom 5\noom_kill 3\noom_group_kill 1\n"
OOM_CONTROL = "oom_kill_disable 0\nunder_oom 1\noom_kill 7\n"


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (MEMORY_EVENTS, 3),
        (OOM_CONTROL, 7),
        ("nr_free_pages 12\noom_kill 0\nnuma_hit 5\n", 0),
        ("oom_kill_disable 0\nunder_oom 0\n", None),  # Linux before 4.13
        ("", None),
    ],
)
def test_out_of_memory_kills_are_counted_in_the_files_of_the_kernel(text: str, count: int | None):
    assert parse_oom_kills(text) == count


@pytest.mark.skipif(sys.platform != "linux", reason="reads the files of Linux")
def test_this_kernel_counts_out_of_memory_kills():
    count = count_oom_kills()
    assert count is not None and count >= 0


def describe_kill(ends: ProcessEnds, process_id: int, now_s: float) -> str:
    return ends.describe(("worker", process_id), -signal.SIGKILL, now_s=now_s)


OOM, NOT_OOM, UNKNOWN = (
    describe_end(-signal.SIGKILL, is_own_kill=False, has_oom_kill=has_oom_kill) for has_oom_kill in (True, False, None)
)


def test_the_cause_of_an_end_never_changes():
    ends = ProcessEnds(0)
    assert describe_kill(ends, 1, 0.0) == NOT_OOM
    ends.record_oom_kills(1, 5.0)
    assert describe_kill(ends, 1, 5.0) == NOT_OOM
    assert describe_kill(ends, 2, 5.0) == OOM
    ends.record_oom_kills(1, 500.0)
    assert describe_kill(ends, 2, 500.0) == OOM


def test_processes_that_are_killed_together_have_the_same_cause():
    ends = ProcessEnds(3)
    for process_id, now_s in ((1, 100.0), (2, 100.0), (3, 102.0)):
        ends.record_oom_kills(5, now_s)
        assert describe_kill(ends, process_id, now_s) == OOM


def test_an_earlier_out_of_memory_kill_does_not_explain_a_later_kill():
    ends = ProcessEnds(0)
    ends.record_oom_kills(1, 10.0)
    ends.record_oom_kills(1, 100.0)
    assert describe_kill(ends, 1, 100.0) == UNKNOWN
    ends.record_oom_kills(2, 110.0)
    assert describe_kill(ends, 2, 110.0) == OOM


def test_the_cause_is_unknown_if_the_kernel_does_not_count():
    ends = ProcessEnds(None)
    ends.record_oom_kills(None, 1.0)
    assert describe_kill(ends, 1, 1.0) == UNKNOWN
