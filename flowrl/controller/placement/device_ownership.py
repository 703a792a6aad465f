"""Eviction of processes from shared devices. `ResidentWorker` does the same for workers within one process."""

from collections import defaultdict
from collections.abc import Iterable, Sequence

from flowrl.controller.backends.base import Backend
from flowrl.controller.calls.calls import CallRef, Calls
from flowrl.controller.placement.plan import Slot


class DeviceOwnership:
    """Tracks which processes own the memory of shared devices, and selects the processes to evict before a call.

    Deadlock is impossible: a call waits only for its evictions, and an eviction only for calls submitted earlier.
    """

    def __init__(self, slots: Iterable[Slot]) -> None:
        users: defaultdict[tuple[int, int], list[Slot]] = defaultdict(list)
        for slot in slots:
            for device in slot.node_devices:
                users[device].append(slot)
        self._sharers: dict[Slot, tuple[Slot, ...]] = {}
        """Process -> other processes on its devices. Contains only processes with shared devices."""
        for shared in users.values():
            for slot in shared if len(shared) > 1 else ():
                others = (other for other in shared if other != slot)
                self._sharers[slot] = tuple(dict.fromkeys((*self._sharers.get(slot, ()), *others)))
        self._can_offload: set[Slot] = set()
        self._owners: set[Slot] = set()

    def is_shared(self, slot: Slot) -> bool:
        return slot in self._sharers

    def claim_for_worker(self, slot: Slot, can_offload: bool) -> list[Slot]:
        """Calls `claim` for a new worker. `can_offload` allows later calls to evict the process."""
        if can_offload and slot in self._sharers:
            self._can_offload.add(slot)
        return self.claim(slot)

    def claim(self, slot: Slot) -> list[Slot]:
        """Makes a process the owner of its devices, and returns the previous owners that must be evicted.

        If this process can offload, the result includes owners that cannot. Their eviction waits for their calls.
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
        self._owners.difference_update(slots)
        self._can_offload.difference_update(slots)

    def is_evicted_by(self, slots: Iterable[Slot], others: Iterable[Slot]) -> bool:
        """Returns whether a call to a process in `others` evicts a process in `slots`."""
        callers = set(others)
        return any(not callers.isdisjoint(self._sharers[slot]) for slot in self._can_offload.intersection(slots))


class DeviceEviction:
    """Sends evictions to processes before other processes use their devices."""

    def __init__(self, ledger: DeviceOwnership, backend: Backend, calls: Calls, kind: str) -> None:
        self.ledger = ledger
        self._backend, self._calls, self._kind = backend, calls, kind

    def before(self, slot: Slot) -> list[CallRef]:
        """Evicts other processes before a call to a process. Returns the evictions that the call must wait for."""
        return self._evict_all(self.ledger.claim(slot))

    def before_first(self, slot: Slot, *, can_offload: bool) -> list[CallRef]:
        """Evicts other processes before the construction of a worker. Returns the evictions to wait for."""
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
