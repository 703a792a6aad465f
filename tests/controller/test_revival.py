"""What the driver keeps of processes that may be replaced."""

from flowrl.controller.host import Construction, Host
from flowrl.controller.plan import Mesh, Slot
from flowrl.controller.register import Contract, Dispatch
from flowrl.controller.revival import Revivals
from flowrl.controller.wire import Request
from flowrl.data.block import LocalRef
from tests.controller.faults import Judge

SLOT = Slot("judges", 0, 0, 0, 0)
MADE = Construction("judge", Judge, (10,), {}, Mesh(1, 1, 1, 1), 0, 0, 0, "cpu", 1)


def load(number: int, offset: int, *, replay: bool = True) -> Request:
    contract = Contract(Dispatch.ONE_TO_ALL, replay=replay)
    return Request(number, "judge", 0, 0, "load", {"offset": offset}, contract, returns_batch=False)


def test_a_process_needs_its_workers_and_their_last_states():
    revivals = Revivals()
    revivals.constructed(SLOT, MADE)
    refs = [LocalRef("weights")]
    revivals.called(SLOT, load(1, 5), [])
    revivals.called(SLOT, load(2, 6), refs)
    revivals.called(SLOT, load(3, 7, replay=False), [])
    revival = revivals.of(SLOT)
    assert revival is not None and revival.made == (MADE,)
    assert [(state.number, kept) for state, kept in revival.states] == [(2, tuple(refs))]
    assert revivals.of(SLOT) is revival


def test_a_pool_with_a_stateful_role_is_not_brought_back():
    revivals = Revivals()
    revivals.constructed(SLOT, MADE)
    revivals.rule_out(["judges"])
    assert revivals.of(SLOT) is None


def test_a_host_knows_what_it_lacks_and_where_its_state_is_behind_or_ahead():
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
