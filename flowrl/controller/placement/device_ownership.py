"""Who has the memory of a device that several processes use: a ledger, kept where calls are submitted.

`ResidentWorker` is its counterpart inside of one process.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence

from flowrl.controller.backends.base import Backend
from flowrl.controller.calls.calls import CallRef, Calls
from flowrl.controller.placement.plan import Slot


class DeviceOwnership:
    """The processes of a plan whose devices others use too, and those that are there now.

    It only says who must go before whom: a call waits for the going of others, whose own calls were all submitted
    before. So what is submitted later waits for what was submitted earlier and never the other way round, and no two
    processes can wait for each other.
    """

    def __init__(self, slots: Iterable[Slot]) -> None:
        """`slots`: every process of the plan."""
        users: defaultdict[tuple[int, int], list[Slot]] = defaultdict(list)
        for slot in slots:
            for place in slot.places:
                users[place].append(slot)
        self._beside: dict[Slot, tuple[Slot, ...]] = {}
        """Process -> the others on its devices; those that have theirs alone are not in it."""
        for shared in users.values():
            for slot in shared if len(shared) > 1 else ():
                others = (other for other in shared if other != slot)
                self._beside[slot] = tuple(dict.fromkeys((*self._beside.get(slot, ()), *others)))
        self._yields: set[Slot] = set()
        self._present: set[Slot] = set()

    def is_shared(self, slot: Slot) -> bool:
        """Whether another process uses one of its devices."""
        return slot in self._beside

    def settle(self, slot: Slot, can_offload: bool) -> list[Slot]:
        """A worker is made in a process: as `claim`. `can_offload`: it can leave its devices to others."""
        if can_offload and slot in self._beside:
            self._yields.add(slot)
        return self.claim(slot)

    def claim(self, slot: Slot) -> list[Slot]:
        """Gives a process its devices; those that must leave them first.

        One that cannot leave is among them if this one can: it is not to come back while a call of the other runs.
        """
        if slot not in self._beside:
            return []
        leaving = [
            other
            for other in self._beside[slot]
            if other in self._present and not self._yields.isdisjoint((slot, other))
        ]
        self._present.difference_update(leaving)
        self._present.add(slot)
        return leaving

    def forget(self, slots: Sequence[Slot]) -> None:
        """These processes were ended, and others are started in their place."""
        self._present.difference_update(slots)
        self._yields.difference_update(slots)

    def leave(self, slots: Iterable[Slot], others: Iterable[Slot]) -> bool:
        """Whether some of these processes leave their devices when some of the others are called."""
        theirs = set(others)
        return any(not theirs.isdisjoint(self._beside[slot]) for slot in self._yields.intersection(slots))


class DeviceEviction:
    """Has processes leave their devices as the ledger says."""

    def __init__(self, ledger: DeviceOwnership, backend: Backend, calls: Calls, kind: str) -> None:
        self.ledger = ledger
        self._backend, self._calls, self._kind = backend, calls, kind

    def before(self, slot: Slot) -> list[CallRef]:
        """A process is about to be called: what the call must wait for."""
        return self._send(self.ledger.claim(slot))

    def before_first(self, slot: Slot, *, can_offload: bool) -> list[CallRef]:
        """A worker is about to be made in a process, which can leave its devices or not: as `before`."""
        return self._send(self.ledger.settle(slot, can_offload))

    def _send(self, leaving: Iterable[Slot]) -> list[CallRef]:
        # Of a pool that has failed no process is left.
        return [self._leave(slot) for slot in leaving if self._calls.failures.get_error(slot.pool) is None]

    def _leave(self, slot: Slot) -> CallRef:
        role, rank = self._calls.recovery.get_first_role(slot)
        replaceable = self._calls.recovery.get_plan(slot) is not None
        report = self._backend.evict(slot, role, rank, replaceable=replaceable)
        record = self._calls.add(report, role, rank, "evict", slot, f"{self._kind}:{slot.device}")
        return CallRef(report, record, self._calls)
