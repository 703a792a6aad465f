"""The clock of a call starts when its process and its inputs are available."""

import pytest

from flowrl.controller.calls.failures import CallRecord, Deadlines, is_starting, make_deadline_error
from flowrl.controller.host.process_probe import Frame, Stack
from flowrl.controller.placement.plan import Slot
from flowrl.controller.wire import Report
from flowrl.data.batch.block import LocalRef
from tests.errors import missing_facts

REPORT = Report(0, 0, 0, 0)


def record(number: int, rank: int, timeout_s: float | None = 10.0, inputs: tuple[CallRecord, ...] = ()) -> CallRecord:
    slot = Slot("main", rank, 0, rank, rank)
    return CallRecord(number, LocalRef(REPORT), "actor", rank, "update", slot, "cpu:0", 0, timeout_s, inputs)


def overdue_ids(deadlines: Deadlines, now_s: float) -> list[int]:
    return [call.call_id for call in deadlines.find_overdue(now_s)]


def test_a_call_is_late_after_its_own_seconds():
    deadlines = Deadlines()
    for new_record in (record(1, 0, 10.0), record(2, 1, 20.0), record(3, 2, None)):
        deadlines.add(new_record)
    assert overdue_ids(deadlines, 100.0) == []
    assert overdue_ids(deadlines, 110.0) == []
    assert overdue_ids(deadlines, 110.5) == [1]
    assert overdue_ids(deadlines, 10_000.0) == [1, 2]


def test_the_time_behind_an_earlier_call_of_the_process_does_not_count():
    deadlines = Deadlines()
    first, second = record(1, 0), record(2, 0)
    deadlines.add(first)
    deadlines.add(second)
    assert overdue_ids(deadlines, 0.0) == []
    assert overdue_ids(deadlines, 9.0) == []
    first.report = REPORT
    assert deadlines.get_current("main", 0) is second
    assert overdue_ids(deadlines, 15.0) == []
    assert overdue_ids(deadlines, 24.0) == []
    assert overdue_ids(deadlines, 25.5) == [2]


def test_the_time_until_its_inputs_are_there_does_not_count():
    deadlines = Deadlines()
    source = record(1, 0, None)
    deadlines.add(source)
    deadlines.add(record(2, 1, inputs=(source,)))
    assert overdue_ids(deadlines, 0.0) == overdue_ids(deadlines, 50.0) == []
    source.report = REPORT
    assert overdue_ids(deadlines, 51.0) == []
    assert overdue_ids(deadlines, 61.5) == [2]


def test_the_time_in_which_another_process_is_replaced_does_not_count():
    deadlines = Deadlines()
    first, second = record(1, 0), record(2, 1)
    for call in (first, second):
        call.start_timeout_s = 30.0
        deadlines.add(call)
    assert overdue_ids(deadlines, 0.0) == []
    for now_s in (8.0, 16.0):
        deadlines.restart_clocks({second.slot: 5.0}, now_s)
    assert overdue_ids(deadlines, 25.0) == [2]  # the process that is replaced has its own limits
    assert overdue_ids(deadlines, 26.5) == [1, 2]
    deadlines.restart_clocks({second.slot: 5.0}, 35.0)
    assert overdue_ids(deadlines, 45.0) == [2]
    deadlines.restart_clocks({second.slot: 5.0}, 45.0)  # past the limit of the start
    assert overdue_ids(deadlines, 45.5) == [1, 2]


def test_a_call_that_is_done_is_not_late():
    deadlines = Deadlines()
    done = record(1, 0)
    deadlines.add(done)
    assert overdue_ids(deadlines, 0.0) == []
    done.report = REPORT
    assert overdue_ids(deadlines, 100.0) == []
    assert deadlines.get_current("main", 0) is None


@pytest.mark.parametrize("start_timeout_s", [None, 1000.0])
def test_a_process_without_a_stack_is_starting_only_if_it_is_younger_than_the_call(start_timeout_s: float | None):
    """A process in an uninterruptible system call writes no stack, and would otherwise count as starting for ever."""
    call = record(1, 0, 10.0)
    call.start_timeout_s, call.running_since_s = start_timeout_s, 100.0
    assert not is_starting(call, Stack(age_s=60.0, is_missing=True), 111.0)
    assert call.running_since_s == 100.0
    assert is_starting(call, Stack(age_s=5.0, is_missing=True), 111.0)
    assert call.running_since_s == 111.0
    assert not is_starting(call, Stack(age_s=16.0, is_missing=True), 122.0)


def test_the_clock_of_a_call_starts_again_once_in_a_replacement_process() -> None:
    call, frames = record(1, 0, 10.0), (Frame("rewards.py", 7, "score"),)
    call.running_since_s = 100.0
    assert is_starting(call, Stack(frames, age_s=5.0), 111.0)
    assert call.running_since_s == 111.0
    assert not is_starting(call, Stack(frames, age_s=16.0), 122.0)


@pytest.mark.parametrize(
    ("setting", "starting_since_s", "expected"),
    [
        ("call_timeout_s", None, ("call_timeout_s", "10")),
        ("start_timeout_s", None, ("start_timeout_s", "10")),
        ("call_timeout_s", 100.0, ("call_timeout_s", "10")),
        ("call_timeout_s", 50.0, ("start_timeout_s", "40")),
    ],
)
def test_the_error_names_the_setting_to_raise(
    setting: str, starting_since_s: float | None, expected: tuple[str, str]
) -> None:
    """The start of a replacement process has a deadline of its own."""
    call, stack = record(1, 0, 10.0), Stack(frames=(Frame("rewards.py", 7, "score"),))
    call.timeout_setting, call.start_timeout_s, call.starting_since_s = setting, 40.0, starting_since_s
    error = make_deadline_error(call, call, stack, (), 111.0)
    assert not missing_facts(str(error), *expected, "rewards.py", "7", "score")
    other = ({"call_timeout_s", "start_timeout_s"} - {expected[0]}).pop()
    assert missing_facts(str(error), other)


def test_the_error_of_a_stopped_process_names_no_setting() -> None:
    call = record(1, 0, 10.0)
    error = make_deadline_error(call, call, Stack(is_stopped=True), (), 111.0)
    assert not missing_facts(str(error), "SIGSTOP") and missing_facts(str(error), "call_timeout_s")
