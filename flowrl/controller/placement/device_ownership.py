"""Ownership of devices that several processes share. The driver updates it whenever it submits a call.

`ResidentWorker` does the same for the workers of one process.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence

from flowrl.controller.backends.base import Backend
from flowrl.controller.calls.calls import CallRef, Calls
from flowrl.controller.placement.plan import Slot


class DeviceOwnership:
    """Tracks which processes own the memory of shared devices, and decides which processes to evict before a call.

    A call waits only for evictions, and an eviction waits only for calls submitted earlier. Waits therefore follow the
    order of submission, and deadlock is impossible.
    """

    def __init__(self, slots: Iterable[Slot]) -> None:
        """`slots` are all processes of the plan."""
        users: defaultdict[tuple[int, int], list[Slot]] = defaultdict(list)
        for slot in slots:
            for device in slot.node_devices:
                users[device].append(slot)
        self._sharers: dict[Slot, tuple[Slot, ...]] = {}
        """Maps a process to the other processes on its devices. Processes with exclusive devices are absent."""
        for shared in users.values():
            for slot in shared if len(shared) > 1 else ():
                others = (other for other in shared if other != slot)
                self._sharers[slot] = tuple(dict.fromkeys((*self._sharers.get(slot, ()), *others)))
        self._can_offload: set[Slot] = set()
        self._owners: set[Slot] = set()

    def is_shared(self, slot: Slot) -> bool:
        """Returns whether another process uses one of the slot's devices."""
        return slot in self._sharers

    def claim_for_worker(self, slot: Slot, can_offload: bool) -> list[Slot]:
        """Claims the devices for a new worker, like `claim`. `can_offload`: the worker can be evicted later."""
        if can_offload and slot in self._sharers:
            self._can_offload.add(slot)
        return self.claim(slot)

    def claim(self, slot: Slot) -> list[Slot]:
        """Makes a process the owner of its devices and returns the processes to evict first.

        The result includes a process that cannot offload if this one can, so that this one waits for its calls.
        """
        if slot not in self._sharers:
            return []
        evicted = [
            other
            for other in self._sharers[slot]
            if other in self._owners and not self._can_offload.isdisjoint((slot, other))
        ]
        self._owners.difference_update(evicted)
        self._owners.add(slot)
        return evicted

    def forget(self, slots: Sequence[Slot]) -> None:
        """Removes processes that were ended, before others are started in their slots."""
        self._owners.difference_update(slots)
        self._can_offload.difference_update(slots)

    def is_evicted_by(self, slots: Iterable[Slot], others: Iterable[Slot]) -> bool:
        """Returns whether a call to one of `others` evicts one of `slots`."""
        callers = set(others)
        return any(not callers.isdisjoint(self._sharers[slot]) for slot in self._can_offload.intersection(slots))


class DeviceEviction:
    """Sends the evictions that `DeviceOwnership` requires."""

    def __init__(self, ledger: DeviceOwnership, backend: Backend, calls: Calls, kind: str) -> None:
        self.ledger = ledger
        self._backend, self._calls, self._kind = backend, calls, kind

    def before(self, slot: Slot) -> list[CallRef]:
        """Evicts other processes before a call to `slot`; the call must wait for the returned evictions."""
        return self._evict_all(self.ledger.claim(slot))

    def before_first(self, slot: Slot, *, can_offload: bool) -> list[CallRef]:
        """Evicts other processes before a worker is constructed in `slot`, like `before`."""
        return self._evict_all(self.ledger.claim_for_worker(slot, can_offload))

    def _evict_all(self, evicted: Iterable[Slot]) -> list[CallRef]:
        # A failed pool has no processes left.
        return [self._evict(slot) for slot in evicted if self._calls.failures.get_error(slot.pool) is None]

    def _evict(self, slot: Slot) -> CallRef:
        role, rank = self._calls.recovery.get_first_role(slot)
        replaceable = self._calls.recovery.get_plan(slot) is not None
        report = self._backend.evict(slot, role, rank, replaceable=replaceable)
        record = self._calls.add(report, role, rank, "evict", slot, f"{self._kind}:{slot.device}")
        return CallRef(report, record, self._calls)
