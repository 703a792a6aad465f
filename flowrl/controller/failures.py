"""What failed first, and why: processes that may wait for each other fail together, with one cause."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flowrl.controller.backend import Backend
from flowrl.controller.deadlines import Deadlines
from flowrl.controller.errors import DeadlineError, FlowError, ProcessLost, WorkerError
from flowrl.controller.plan import HostSet, Slot
from flowrl.controller.revival import Revivals
from flowrl.controller.stacks import Frame, method_frames
from flowrl.data.block import Ref

if TYPE_CHECKING:
    from flowrl.controller.calls import CallRecord

GRACE_S = 2.0
"""A lost connection says that another rank is gone; so long its own failure, or its end, may take to be known."""

_STARTS = 5
"""Deadlines that a replaced process may take to start."""

NODES_EVERY_S = 1.0
"""How often a driver that waits asks which nodes are alive."""


@dataclass
class _Suspicion:
    """Some rank of a host set lost the connection to another, and what happened there is not known yet."""

    record: "CallRecord"
    symptom: WorkerError
    probes: list[tuple[Slot, Ref]]
    until_s: float


class Failures:
    """The failures of every host set. The first of a set ends its processes, for peers may wait in a collective."""

    def __init__(self, backend: Backend, revivals: Revivals, deadlines: Deadlines, say: Callable[[str], None]) -> None:
        self.first: FlowError | None = None
        """The first failure of the run."""
        self._backend, self._revivals, self._deadlines, self._say = backend, revivals, deadlines, say
        self._sets: dict[str, HostSet] = {}
        self._broken: dict[str, FlowError] = {}
        self._suspicions: dict[str, _Suspicion] = {}
        self._now_s = self._nodes_asked_s = 0.0

    def watch(self, hosts: HostSet) -> None:
        """Takes up a host set that was started."""
        self._sets |= {pool.name: hosts for pool in hosts.pools}

    def of(self, pool: str) -> FlowError | None:
        """Why the processes of a pool were ended; None while they work."""
        return self._broken.get(pool)

    def doubt(self, record: "CallRecord", error: WorkerError) -> bool:
        """Takes up a failure of a call's own process. True: it is a symptom, and the call stays open until its cause
        is known."""
        hosts = self._sets[record.slot.pool]
        if record.slot.pool in self._broken:
            return False
        if not error.symptom:
            self._break(hosts, error)
            return False
        record.symptom = error
        if hosts.name not in self._suspicions:
            probes = [(slot, self._backend.probe(slot)) for slot in hosts.slots]
            self._suspicions[hosts.name] = _Suspicion(record, error, probes, self._now_s + GRACE_S)
        return True

    def _break(self, hosts: HostSet, error: FlowError) -> None:
        self.first = self.first or error
        self._suspicions.pop(hosts.name, None)
        for pool in hosts.pools:
            self._broken[pool.name] = error
            self._backend.end_pool(pool.name)

    def look(self, now_s: float) -> None:
        """Resolves suspicions, and ends what is past its deadline or lost with its node."""
        self._now_s = now_s
        for suspicion in list(self._suspicions.values()):
            self._resolve(suspicion)
        for record in self._deadlines.overdue(now_s):
            if record.slot.pool not in self._broken:
                self._end_late(record)
        if now_s - self._nodes_asked_s > NODES_EVERY_S:
            self._nodes_asked_s = now_s
            self._end_on_lost_nodes()

    def _resolve(self, suspicion: _Suspicion) -> None:
        hosts = self._sets[suspicion.record.slot.pool]
        for slot, probe in suspicion.probes:
            if probe.done():
                try:
                    probe.get()
                except WorkerError as error:
                    return self._break(hosts, self._lost(slot, error.cause, suspicion.record.method))
        if self._now_s > suspicion.until_s:
            self._break(hosts, suspicion.symptom)

    def _lost(self, slot: Slot, cause: str, method: str) -> ProcessLost:
        """A process's end, named by what ran there, or by the first role that lived there."""
        current = self._deadlines.current(slot.pool, slot.rank)
        if current is not None:
            return ProcessLost(current.role, current.rank, slot.node, current.method, cause)
        role, rank = self._revivals.first_role(slot)
        return ProcessLost(role, rank, slot.node, method, cause)

    def _end_on_lost_nodes(self) -> None:
        for node, name in self._backend.lost_nodes().items():
            for hosts in {hosts.name: hosts for hosts in self._sets.values()}.values():
                gone = [slot for slot in hosts.slots if slot.node == node and slot.pool not in self._broken]
                if gone:
                    self._break(hosts, self._lost(gone[0], f"its node ({name}) is gone", "?"))

    # Deadlines.

    def _end_late(self, record: "CallRecord") -> None:
        """Ends a call that is past its deadline: with all processes that may wait for it, or for a new one to do it."""
        replaceable = self._revivals.of(record.slot) is not None
        peers = [record] if replaceable else self._same_call(record)
        dumps = self._backend.stacks([peer.slot for peer in peers])
        if replaceable and record.slot not in dumps and record.times_late < _STARTS:
            # Another process is about to take its place, or has: the time it needs for that is not the call's.
            record.times_late += 1
            record.running_since_s = None
            return
        stacks = {peer.number: method_frames(dumps.get(peer.slot, "")) for peer in peers}
        waiting = [p for p in peers if stacks[p.number] and any(frame.in_collective for frame in stacks[p.number][:3])]
        silent = [peer for peer in peers if peer not in waiting] or [record]
        error = _deadline_error(silent[0], stacks[silent[0].number], [peer.rank for peer in waiting])
        if not replaceable:
            return self._break(self._sets[record.slot.pool], error)
        self._say(f"{error.role}.{error.method} on rank {error.rank} was {error.cause}; its process is replaced")
        record.running_since_s, record.times_late = None, 0
        self._backend.restart(record.slot)

    def _same_call(self, record: "CallRecord") -> "list[CallRecord]":
        """What the processes of a host set run of the same method."""
        slots = self._sets[record.slot.pool].slots
        current = [self._deadlines.current(slot.pool, slot.rank) for slot in slots]
        return [c for c in current if c is not None and (c.role, c.method) == (record.role, record.method)]


def _deadline_error(record: "CallRecord", stack: Sequence[Frame], waiting: Sequence[int]) -> DeadlineError:
    where = f", in {stack[0]}" if stack else ""
    others = f"; rank {', '.join(map(str, waiting))} waits for it" if waiting and record.rank not in waiting else ""
    lines = [f'  File "{frame.file}", line {frame.line}, in {frame.function}' for frame in reversed(stack)]
    cause = f"not done after its deadline of {record.timeout_s:g} s{where}{others}"
    return DeadlineError(record.role, record.rank, record.slot.node, record.method, cause, "\n".join(lines))
