"""What failed first, and why: processes that may wait for each other fail together, with one cause."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flowrl.controller.backends.base import Backend
from flowrl.controller.calls.deadlines import Deadlines
from flowrl.controller.errors import DeadlineError, FlowError, ProcessLost, WorkerError
from flowrl.controller.failures.recovery import Recovery
from flowrl.controller.failures.stacks import Stack, host_stack
from flowrl.controller.placement.plan import HostSet, Slot
from flowrl.data.batch.block import Ref

if TYPE_CHECKING:
    from flowrl.controller.calls.call_record import CallRecord

GRACE_S = 2.0
"""A lost connection says that another rank is gone; so long its own failure, or its end, may take to be known."""

ALIVE_EVERY_S = 1.0
"""How often a driver that waits asks which nodes and processes are alive."""


@dataclass
class _Suspicion:
    """Some rank of a host set lost the connection to another, and what happened there is not known yet."""

    record: "CallRecord"
    symptom: WorkerError
    probes: list[tuple[Slot, Ref]]
    until_s: float


class Failures:
    """The failures of every host set. The first of a set ends its processes, for peers may wait in a collective."""

    def __init__(self, backend: Backend, revivals: Recovery, deadlines: Deadlines, say: Callable[[str], None]) -> None:
        self._backend, self._revivals, self._deadlines, self._say = backend, revivals, deadlines, say
        self._sets: dict[str, HostSet] = {}
        self._broken: dict[str, FlowError] = {}
        self._suspicions: dict[str, _Suspicion] = {}
        self._late: dict[Slot, DeadlineError] = {}
        self._asked_s = 0.0

    def watch(self, hosts: HostSet) -> None:
        """Takes up a host set that was started."""
        self._sets |= {pool.name: hosts for pool in hosts.pools}

    def of(self, pool: str) -> FlowError | None:
        """Why the processes of a pool were ended; None while they work."""
        return self._broken.get(pool)

    def first(self) -> FlowError | None:
        """Why processes were ended before any others; None while all work."""
        return next(iter(self._broken.values()), None)

    def end(self, hosts: HostSet, error: FlowError) -> None:
        """Ends the processes of a set that has not failed, because of another's failure."""
        if hosts.pools[0].name not in self._broken:
            self._break(hosts, error)

    def forget(self, hosts: HostSet) -> None:
        """The processes of a set are started again."""
        for pool in hosts.pools:
            self._broken.pop(pool.name, None)
        for slot in hosts.slots:
            self._late.pop(slot, None)

    def judge(self, record: "CallRecord", error: WorkerError) -> FlowError | None:
        """What a call is told with whose own process has failed. None: it is a symptom, and the call stays open until
        its cause is known."""
        hosts = self._sets[record.slot.pool]
        if record.slot.pool in self._broken:
            return error
        replaced = self._revivals.brings_back(record.slot.pool)
        # A process that is replaced, perhaps until no more will be, is told with what it was ended for.
        late = self._late.get(record.slot) if isinstance(error, ProcessLost) else None
        if isinstance(error, ProcessLost) and error.comes_back and not record.resend and replaced:
            return error if late is None else _lost_as_late(error, late)
        if not error.symptom:
            self._break(hosts, late or error)
            return late or error
        record.symptom = error
        if hosts.name not in self._suspicions:
            probes = [(slot, self._backend.probe(slot)) for slot in hosts.slots]
            self._suspicions[hosts.name] = _Suspicion(record, error, probes, time.monotonic() + GRACE_S)
        return None

    def record_success(self, slot: Slot) -> None:
        """A call of a slot's process is done."""
        self._late.pop(slot, None)

    def _break(self, hosts: HostSet, error: FlowError) -> None:
        self._suspicions.pop(hosts.name, None)
        for pool in hosts.pools:
            self._broken[pool.name] = error
            self._backend.end_pool(pool.name)

    def look(self, now_s: float) -> None:
        """Resolves suspicions, and ends what is past its deadline or lost with its node."""
        for suspicion in list(self._suspicions.values()):
            self._resolve(suspicion, now_s)
        for record in self._deadlines.overdue(now_s):
            if record.slot.pool not in self._broken:
                self._end_late(record, now_s)
        if now_s - self._asked_s > ALIVE_EVERY_S:
            self._asked_s = now_s
            self._end_on_lost_nodes()
            self._tell_lost_processes()

    def _resolve(self, suspicion: _Suspicion, now_s: float) -> None:
        hosts = self._sets[suspicion.record.slot.pool]
        for slot, probe in suspicion.probes:
            if probe.done():
                try:
                    probe.get()
                except WorkerError as error:
                    return self._break(hosts, self._lost(slot, error.cause))
        if now_s > suspicion.until_s:
            self._break(hosts, suspicion.symptom)

    def _lost(self, slot: Slot, cause: str) -> ProcessLost:
        """A process's end, named by what ran there, or by the first role that lived there."""
        current = self._deadlines.current(slot.pool, slot.rank)
        if current is not None:
            return ProcessLost(current.role, current.rank, slot.node, current.method, cause)
        role, rank = self._revivals.first_role(slot)
        return ProcessLost(role, rank, slot.node, "", cause)

    def _end_on_lost_nodes(self) -> None:
        for node, name in self._backend.lost_nodes().items():
            for hosts in {hosts.name: hosts for hosts in self._sets.values()}.values():
                gone = [slot for slot in hosts.slots if slot.node == node and slot.pool not in self._broken]
                if gone:
                    self._break(hosts, self._lost(gone[0], f"its node ({name}) is gone"))

    def _tell_lost_processes(self) -> None:
        """Those that are replaced: their calls will only say that they were."""
        hosts = {hosts.name: hosts for hosts in self._sets.values()}.values()
        slots = [slot for each in hosts for slot in each.slots if slot.pool not in self._broken]
        for slot in self._backend.lost_processes([slot for slot in slots if self._revivals.brings_back(slot.pool)]):
            if slot in self._late:
                continue  # it was ended for that, which has been told
            lost = self._lost(slot, "its process has ended")
            doing = f"in {lost.method}" if lost.method else "between calls"
            self._say(
                f"{lost.role} on rank {lost.rank} (node {slot.node}) lost its process {doing}; another is started"
            )

    # Deadlines.

    def _end_late(self, record: "CallRecord", now_s: float) -> None:
        """Ends a call that is past its deadline: with all processes that may wait for it, or for a new one to do it."""
        replaceable = self._revivals.brings_back(record.slot.pool)
        peers = [record] if replaceable else self._running(record)
        dumps = self._backend.stacks([peer.slot for peer in peers])
        stacks = {peer.number: host_stack(dumps.get(peer.slot)) for peer in peers}
        if replaceable and self._is_starting(record, stacks[record.number], now_s):
            return
        waiting = [peer for peer in peers if stacks[peer.number].in_collective]
        silent = next((peer for peer in peers if peer not in waiting and stacks[peer.number].frames), None)
        late = record if silent is None or record not in waiting else silent
        error = _deadline_error(record, late, stacks[late.number], [peer.rank for peer in waiting if peer is not late])
        if not replaceable:
            return self._break(self._sets[record.slot.pool], error)
        self._say(f"{error.role}.{error.method} on rank {error.rank} was {error.cause}; its process is replaced")
        self._late[record.slot] = error
        record.running_since_s = record.starting_since_s = None
        self._backend.restart(record.slot)

    def _is_starting(self, record: "CallRecord", stack: Stack, now_s: float) -> bool:
        """Whether another process is taking the place of the call's, which has its own time: that of a constructor.

        Such a process is not there yet, loads what it needs to read its first call, makes its workers, or is younger
        than the call's clock, which then starts anew.
        """
        assert record.running_since_s is not None
        is_younger = stack.age_s < now_s - record.running_since_s
        if stack.frames and not stack.revives and not is_younger:
            if record.starting_since_s is None:
                return False
            # It has come to the call since the last look, which is when the call's own time began at the earliest.
            record.starting_since_s, record.running_since_s = None, now_s
            return True
        if record.starting_since_s is None:
            record.starting_since_s = now_s
        if record.start_timeout_s is not None and now_s - record.starting_since_s > record.start_timeout_s:
            return False
        record.running_since_s = now_s
        return True

    def _running(self, record: "CallRecord") -> "list[CallRecord]":
        """What the processes are at that a call may wait for, the call itself first."""
        slots = self._sets[record.slot.pool].slots
        current = [self._deadlines.current(slot.pool, slot.rank) for slot in slots]
        return [record, *(other for other in current if other is not None and other is not record)]


def _lost_as_late(error: ProcessLost, late: DeadlineError) -> ProcessLost:
    """The end of a process that was ended because a call was past its deadline."""
    cause = f"its process was ended, because {late.role}.{late.method} was {late.cause}"
    return ProcessLost(error.role, error.rank, error.node, error.method, cause, late.remote_traceback)


def _deadline_error(record: "CallRecord", late: "CallRecord", stack: Stack, waiting: Sequence[int]) -> DeadlineError:
    """`record` is past its deadline, and `late` is the call that it waits for, or itself."""
    where = f", in {stack.frames[0]}" if stack.frames else ""
    if (late.role, late.method) == (record.role, record.method):
        others = f"; rank {', '.join(map(str, waiting))} waits for it" if waiting else ""
        cause = f"not done after its deadline of {record.timeout_s:g} s{where}{others}"
    else:
        waits = f"{record.role}.{record.method} on rank {record.rank} waits for it past its deadline"
        cause = f"still running{where}, while {waits} of {record.timeout_s:g} s"
    lines = [f'  File "{frame.file}", line {frame.line}, in {frame.function}' for frame in reversed(stack.frames)]
    return DeadlineError(late.role, late.rank, late.slot.node, late.method, cause, "\n".join(lines))
