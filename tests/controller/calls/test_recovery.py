"""Recovery plans of processes that may be replaced."""

from pathlib import Path

import pytest

from flowrl.controller.backends.inline_backend import InlineBackend
from flowrl.controller.calls.calls import Calls
from flowrl.controller.calls.failures import Recovery
from flowrl.controller.host.host import Host, ReplaceableHost
from flowrl.controller.placement.plan import Mesh, Slot
from flowrl.controller.wire import Construction, RecoveryPlan, Report, Request
from flowrl.controller.worker import Contract, Dispatch
from flowrl.data.batch.block import LocalRef
from tests.controller.faulty_workers import Scorer, SlowRestart

SLOT = Slot("judges", 0, 0, 0, 0)
MADE = Construction("judge", Scorer, (10,), {}, Mesh(1, 1, 1, 1), 0, 0, 0, "cpu", 1)


def load(number: int, offset: int, *, replay: bool = True) -> Request:
    contract = Contract(Dispatch.ONE_TO_ALL, replay=replay)
    return Request(number, "judge", 0, 0, "load", {"offset": offset}, contract, returns_batch=False)


def test_a_plan_has_the_constructions_and_the_last_state():
    recovery = Recovery()
    recovery.record_construction(SLOT, MADE)
    refs = [LocalRef("weights")]
    recovery.record_call(SLOT, load(1, 5), [])
    recovery.record_call(SLOT, load(2, 6), refs)
    recovery.record_call(SLOT, load(3, 7, replay=False), [])
    plan = recovery.get_plan(SLOT)
    assert plan is not None and plan.constructions == (MADE,)
    assert [(state.call_id, held) for state, held in plan.replay_log] == [(2, tuple(refs))]
    assert recovery.get_plan(SLOT) is plan


def test_a_pool_with_a_stateful_role_is_not_recoverable():
    recovery = Recovery()
    recovery.record_construction(SLOT, MADE)
    recovery.mark_unrecoverable(["judges"])
    assert recovery.get_plan(SLOT) is None


def test_a_host_reports_missing_stale_and_newer_states():
    host = Host()
    assert host.lacks([MADE])
    host.construct(MADE)
    assert not host.lacks([MADE])
    assert not host.is_behind("judge", []) and not host.is_ahead("judge", [])
    assert host.is_behind("judge", [load(4, 1)])
    host.call(load(4, 1))
    assert not host.is_behind("judge", [load(4, 1)]) and not host.is_ahead("judge", [load(4, 1)])
    assert host.is_ahead("judge", [load(2, 1)]) and host.is_ahead("judge", [])
    host.construct(MADE)
    assert not host.is_ahead("judge", [])


def load_chunk(number: int, chunk: int | None) -> Request:
    contract = Contract(Dispatch.ONE_TO_ALL, replay="chunk")
    arguments = {"offset": number} | ({} if chunk is None else {"chunk": chunk})
    return Request(number, "judge", 0, 0, "load", arguments, contract, returns_batch=False)


def test_the_replay_log_retains_a_chunked_state_until_the_next_state():
    recovery = Recovery()
    recovery.record_construction(SLOT, MADE)
    for number, chunk in ((1, None), (2, 1), (3, 2)):
        recovery.record_call(SLOT, load_chunk(number, chunk), [LocalRef(number)])
    first = recovery.get_plan(SLOT)
    recovery.record_call(SLOT, load_chunk(4, 0), [LocalRef(4)])
    second = recovery.get_plan(SLOT)
    assert first is not None and [request.call_id for request in first.requests] == [1, 2, 3]
    assert [refs[0].get() for _, refs in first.replay_log] == [1, 2, 3]
    assert second is not None and [request.call_id for request in second.requests] == [4]


def test_replayed_states_overwrite_a_later_state_that_they_cover():
    host = Host()
    host.construct(MADE)
    assert host.overwrites_state("judge", [])
    host.call(load(4, 1))
    assert host.overwrites_state("judge", [load(2, 1)]) and not host.overwrites_state("judge", [])
    host.construct(MADE)
    assert host.overwrites_state("judge", [])


def test_each_replacement_of_a_process_is_counted():
    calls = Calls(InlineBackend())
    for is_replacement in (False, True, True):
        report = LocalRef(Report(0, 0, 0, 0, is_replacement=is_replacement))
        calls.wait([calls.add(report, "scorer", 0, "score", SLOT, "cpu:0")], None)
    assert calls.get_num_replacements(SLOT) == 2


@pytest.mark.parametrize("is_constructed_first", [True, False])
def test_a_replacement_process_constructs_its_worker_once(tmp_path: Path, is_constructed_first: bool):
    """The call and the construction of a lost process reach its replacement in any order."""
    host, lines = ReplaceableHost(list), tmp_path / "lines"
    construction = Construction("judge", SlowRestart, (lines, 0.0), {}, Mesh(1, 1, 1, 1), 0, 0, 0, "cpu", 1)
    plan = RecoveryPlan((construction,), ((load(4, 7), ()),))
    request = Request(5, "judge", 0, 0, "process_id", {}, Contract(Dispatch.ONE_TO_ALL), returns_batch=False)
    if is_constructed_first:
        host.construct_once(construction)
    reports = [host.call_after_recovery(request, plan)[1], host.call_after_recovery(request, plan)[1]]
    host.construct_once(construction)
    assert lines.read_text() == "constructed\n"
    assert [report.is_replacement for report in reports] == [not is_constructed_first, False]
