"""Calls in flight: where every call is settled, timed, held to its deadline, and its failure becomes the run's."""

import itertools
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from flowrl.controller.backends.base import Backend
from flowrl.controller.calls.call_record import CallRecord
from flowrl.controller.calls.deadlines import Deadlines
from flowrl.controller.calls.idle_callbacks import Attend, IdleCallbacks
from flowrl.controller.errors import FlowError, WorkerError
from flowrl.controller.failures.failures import Failures
from flowrl.controller.failures.recovery import Recovery
from flowrl.controller.future import Future
from flowrl.controller.host.host import Report
from flowrl.controller.placement.plan import Slot
from flowrl.controller.register import Contract, Dispatch
from flowrl.data.batch.batch import Batch
from flowrl.data.batch.block import Description, LocalRef, Ref
from flowrl.data.events import CallEvent

KEPT_EVENTS = 200_000
"""Calls that a driver remembers for its trace: about 34 MB, whatever the length of the run."""

_CONTRACT = Contract(Dispatch.ONE_TO_ALL)
"""Of what is no method's call: constructors, joining and leaving."""

LOOK_AROUND_S = 0.1
"""While a driver waits for some calls, it looks this often whether others have failed or are late."""


@dataclass(eq=False)
class Tracked:
    """A reference to a call's result or description whose `get` first settles the call."""

    carrier: Ref
    """What travels in its place."""
    record: CallRecord
    calls: "Calls"
    describes: bool = False

    def get(self) -> Any:  # Any: a payload, a description or a method's own result
        self.calls.settle([self.record], None)
        if self.describes:
            return self.description
        self.calls.check_open()
        return self.carrier.get()

    def get_with(self, others: Sequence[Ref]) -> list[Any]:
        tracked = [self, *(other for other in others if isinstance(other, Tracked))]
        self.calls.settle([ref.record for ref in tracked], None)
        if self.describes:
            return [ref.description for ref in tracked]
        return self.calls.fetch(tracked)

    @property
    def description(self) -> Description | None:
        return self.record.report.description if self.record.report else None

    def done(self) -> bool:
        return self.record.settled or self.record.report_ref.done()


def records_of(result: Future | Batch) -> list[CallRecord]:
    """The calls that compute a result, those that the driver still holds."""
    if isinstance(result, Future):
        refs = result.refs
    else:
        blocks = {result.column(name).block for name in result.columns}
        refs = [shard.description for block in blocks for shard in block.shards]
    return [ref.record for ref in refs if isinstance(ref, Tracked)]


@dataclass(eq=False)
class Calls:
    """Every call that the driver has submitted and not yet settled, and the events of those it has."""

    backend: Backend
    timeout_s: float | None = None
    """Seconds that a call may run, where its method does not say."""
    say: Callable[[str], None] = lambda text: None
    """Tells the user what happened and did not end the run."""
    events: deque[CallEvent] = field(default_factory=lambda: deque(maxlen=KEPT_EVENTS))
    """The calls that ended last, in the order in which the driver heard of them."""
    revivals: Recovery = field(default_factory=Recovery)
    _closed: FlowError | None = None
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    _bookkeeping: threading.RLock = field(default_factory=threading.RLock)
    """Several threads of a driver may wait at once; each call is settled by one of them."""
    _pending: dict[int, CallRecord] = field(default_factory=dict)
    _deadlines: Deadlines = field(default_factory=Deadlines)
    _shared: WeakKeyDictionary[LocalRef, Ref] = field(default_factory=WeakKeyDictionary)
    _replaced: Counter[Slot] = field(default_factory=Counter)
    _not_given: dict[tuple[Slot, str], FlowError] = field(default_factory=dict)
    """Process and role -> why the last call that was to give it a state has failed."""
    _attendants: IdleCallbacks = field(default_factory=lambda: IdleCallbacks(records_of))

    def __post_init__(self) -> None:
        self.failures = Failures(self.backend, self.revivals, self._deadlines, self.say)

    def add(
        self,
        report: Ref,
        role: str,
        rank: int,
        method: str,
        slot: Slot,
        device: str,
        *,
        number: int | None = None,
        submitted_ns: int | None = None,
        inputs: Sequence[Ref] = (),
        contract: Contract = _CONTRACT,
    ) -> CallRecord:
        """Takes up a call that was submitted: `inputs` are the references that it reads."""
        sources = {id(ref.record): ref.record for ref in inputs if isinstance(ref, Tracked)}
        with self._bookkeeping:
            record = CallRecord(
                number or self.next_number(),
                report,
                role,
                rank,
                method,
                slot,
                device,
                submitted_ns or time.time_ns(),
                contract.timeout_s or self.timeout_s,
                tuple(sources.values()),
                start_timeout_s=self.timeout_s,
                resend=contract.resend,
                gives_state=bool(contract.replay),
            )
            self._pending[record.number] = record
            self._deadlines.add(record)
        return record

    def next_number(self) -> int:
        """Counts the calls of a run, each rank's on its own."""
        return next(self._numbers)

    def share(self, rows: LocalRef) -> Ref:
        """Rows of the driver where every host can read them: put there once, while some batch holds them."""
        if rows not in self._shared:
            self._shared[rows] = self.backend.share(rows.value)
        return self._shared[rows]

    def pending(self) -> list[CallRecord]:
        """What is in flight now, in the order of submission."""
        with self._bookkeeping:
            return list(self._pending.values())

    def expected(self) -> list[CallRecord]:
        """Those of them that must end well for the run to go on: of a call that is not made again, whoever asks for its
        result is told alone."""
        return [record for record in self.pending() if record.resend]

    def replacements(self, slot: Slot) -> int:
        """How often a process is known to have taken a lost one's place in a slot. A process that was lost between two
        calls is known by this alone: the second is answered, by one that has forgotten what it was given before."""
        return self._replaced[slot]

    def attend(self, attend: Attend) -> Callable[[], None]:
        """Has a function called again and again while the driver waits for anything, and whenever such a wait ends.

        The thread that waits calls it, never nested and never two at once; what it raises is raised there. It does not
        wait itself, and returns results that are in flight: the end of one of them brings the next call, or
        `LOOK_AROUND_S` do.

        Returns: what ends that.
        """
        return self._attendants.add(attend)

    def close(self) -> None:
        """Ends the taking of calls; those in flight have failed, as their processes are gone."""
        self._closed = FlowError("the cluster is closed and its processes have ended; read results before it closes")
        for record in self.pending():
            record.error = self._closed
        with self._bookkeeping:
            self._pending.clear()
        self._attendants.clear()

    def abandon(self, timeout_s: float) -> set[str]:
        """Lets go of every call and of what attends, for another attempt at the program.

        Calls in flight are waited for at most so long, and how they end is nobody's concern any more.

        Returns: the pools whose processes were not done.
        """
        self._attendants.clear()
        self._wait(lambda: not self._pending, (), timeout_s)
        late = self.pending()
        for record in late:
            record.error = FlowError("the program was begun again, and this call belongs to the attempt before")
        with self._bookkeeping:
            self._pending.clear()
            self._not_given.clear()
        self.events.clear()
        return {record.slot.pool for record in late}

    def check_open(self) -> None:
        """Raises the sentence of `close` once it was called."""
        if self._closed is not None:
            raise self._closed

    def check(self, pool: str) -> None:
        """Reads the reports that are there, without waiting. Raises this pool's failure, even one nobody asked for."""
        self.check_open()
        if self._pending:
            self._look_around()
        if error := self.failures.of(pool):
            raise error

    def settle(self, records: Sequence[CallRecord], timeout_s: float | None) -> None:
        """Waits until these calls are done.

        Raises:
            FlowError: one of them failed; the error is the first failure of its host set, which may be another call's.
            TimeoutError: after `timeout_s` seconds, naming a call that is not done.
        """
        if not self._wait(lambda: all(record.settled for record in records), records, timeout_s):
            late = next(record for record in records if not record.settled)
            raise TimeoutError(f"{late.role}.{late.method} on rank {late.rank} is not done after {timeout_s:g} s")
        for record in records:
            if record.error is not None:
                raise self.failures.of(record.slot.pool) or record.error

    def wait_until(self, condition: Callable[[], bool], timeout_s: float | None = None) -> None:
        """Waits until a condition holds that `attend` or the calls in flight bring about.

        Raises:
            FlowError: the first failure that is known, of whichever host set.
            TimeoutError: after `timeout_s` seconds.
        """

        def is_over() -> bool:
            if condition():
                return True
            self.check_open()
            if error := self.failures.first():
                raise error
            return False

        if not self._wait(is_over, (), timeout_s):
            raise TimeoutError(f"what the driver waits for has not come after {timeout_s:g} s")

    def _wait(self, is_over: Callable[[], bool], records: Sequence[CallRecord], timeout_s: float | None) -> bool:
        """Waits until it is over, for these calls above all; whether it was in time."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        waited = False
        while not is_over():
            left = LOOK_AROUND_S if deadline is None else deadline - time.monotonic()
            if waited and left <= 0:
                return False
            wakes = self._attendants.call()
            if not is_over():
                self._wait_once(records, wakes, min(max(left, 0.0), LOOK_AROUND_S))
            waited = True
        if waited:
            self._attendants.call()
        return True

    def _wait_once(self, records: Sequence[CallRecord], wakes: Sequence[CallRecord], timeout_s: float) -> None:
        """Waits for all of these calls, or for one of those that attendants look after, at most so long."""
        waiting = [record for record in records if not record.settled]
        if any(record.settled for record in wakes):
            timeout_s = 0.0  # while they were called; they are to look again
        self._collect([*waiting, *wakes], timeout_s, 1 if wakes else len(waiting))
        if not records or any(not record.settled for record in waiting):
            # What is waited for may hang because of a failure elsewhere, which ends it once it is known.
            self._look_around()

    def fetch(self, refs: Sequence[Ref]) -> list[Any]:  # Any: the methods' own results
        """The values behind references to settled calls, read together."""
        self.check_open()
        return self.backend.get([ref.carrier for ref in refs])

    def _look_around(self) -> None:
        """Settles what is done, resolves what is doubtful, and ends what is late."""
        every = self.pending()
        self._collect(every, 0.0, len(every))
        with self._bookkeeping:
            self.failures.look(time.monotonic())
            for record in self.pending():
                if record.symptom is not None and (error := self.failures.of(record.slot.pool)):
                    self._pending.pop(record.number)
                    record.error = error

    def _collect(self, records: Sequence[CallRecord], timeout_s: float, count: int) -> None:
        """Settles, in the order of submission, those that are done when so many are, or after at most this wait."""
        by_ref = {id(r.report_ref): r for r in records if r.symptom is None and not r.settled}
        if not by_ref:
            # All that is waited for lost its peers: why, will show.
            return time.sleep(timeout_s)
        refs = [record.report_ref for record in by_ref.values()]
        ready = self.backend.wait(refs, min(count, len(refs)), timeout_s)
        reports = dict(zip(map(id, ready), self._reports(ready), strict=True))
        every = self.pending()
        failed = any(isinstance(report, FlowError) for report in reports.values())
        if failed and (list(records) != every or count < len(every)):
            # The cause may be an earlier call's failure, which nobody has asked for yet.
            return self._collect(every, 0.0, len(every))
        with self._bookkeeping:
            for key, record in by_ref.items():
                if key in reports and record.number in self._pending:
                    self._settle_one(record, reports[key])

    def _reports(self, ready: Sequence[Ref]) -> list[Report | FlowError]:
        try:
            return self.backend.get(ready)
        except FlowError:
            return [_report_or_error(ref) for ref in ready]

    def _settle_one(self, record: CallRecord, report: Report | FlowError) -> None:
        if isinstance(report, FlowError):
            record.error = self._told(record, report)
            if record.error is None:
                return
            if record.gives_state:
                self._not_given[record.slot, record.role] = record.error
        else:
            if record.gives_state:
                self._not_given.pop((record.slot, record.role), None)
            record.report = report
            self.failures.record_success(record.slot)
            self.events.append(_event(record, report))
            if report.revived:
                self._replaced[record.slot] += 1
                self.say(f"{record.role} on rank {record.rank} lost its process; another took its place and goes on")
        del self._pending[record.number]
        record.inputs = ()  # or every call would keep all calls before it

    def _told(self, record: CallRecord, error: FlowError) -> FlowError | None:
        """What a call that has failed is told with; None while that is not known."""
        for source in record.inputs:
            if source.error is not None:
                return source.error
        if (missing := self._not_given.get((record.slot, record.role))) is not None:
            return missing  # its worker has not the state that it was to see
        if isinstance(error, WorkerError) and _is_own(record, error):
            return self.failures.judge(record, error)
        return error


def _is_own(record: CallRecord, error: WorkerError) -> bool:
    """Whether a call failed in its own process, and not because what it reads did: then its processes are sound."""
    named = error.role, error.method
    return named == (record.role, record.method) or named not in {(s.role, s.method) for s in record.inputs}


def _event(record: CallRecord, report: Report) -> CallEvent:
    slot = record.slot
    return CallEvent(
        number=record.number,
        inputs=tuple(source.number for source in record.inputs),
        role=record.role,
        rank=record.rank,
        node=slot.node,
        device=record.device,
        pool=slot.pool,
        method=record.method,
        submitted_ns=record.submitted_ns,
        arrived_ns=report.arrived_ns,
        started_ns=report.started_ns,
        ended_ns=report.ended_ns,
        finished_ns=report.finished_ns,
    )


def _report_or_error(ref: Ref) -> Report | FlowError:
    try:
        return ref.get()
    except FlowError as error:
        return error
