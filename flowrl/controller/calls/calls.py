"""Calls: tracks the calls in flight, waits for them, and runs idle callbacks."""

import itertools
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from flowrl.controller.backends.base import Backend
from flowrl.controller.calls.event_pump import EventPump
from flowrl.controller.calls.failures import PING, CallRecord, Failures, Recovery
from flowrl.controller.calls.profiled_step import ProfiledStep
from flowrl.controller.dispatch import Future
from flowrl.controller.errors import FlowError, ProcessLost, WorkerError
from flowrl.controller.placement.plan import Slot
from flowrl.controller.wire import Report
from flowrl.controller.worker import Contract, Dispatch
from flowrl.data.batch.batch import Batch
from flowrl.data.batch.block import Description, LocalRef, Ref
from flowrl.data.events import CallEvent

MAX_EVENTS = 200_000
"""Maximum number of finished calls in the trace (about 34 MB)."""

POLL_INTERVAL_S = 0.1
"""Seconds between two checks of the calls in flight for failures and deadlines."""

PING_INTERVAL_S = 1.0
"""Smallest time in seconds between two pings of a process."""

PING_TIMEOUT_S = 60.0
"""Largest timeout of a ping in seconds, after which a process that runs no other call is replaced."""

IdleCallback = Callable[[], Iterable[Future | Batch]]
"""A non-blocking function that the driver runs repeatedly. Completion of a returned result triggers its next run."""

_DEFAULT_CONTRACT = Contract(Dispatch.ONE_TO_ALL)
"""Contract of constructors, process group setup and evictions, which are not registered methods."""


@dataclass(eq=False)
class CallRef:
    """Reference to the result of a call, or to the description of the result. `get` waits for the call."""

    carrier: Ref
    """The backend's reference, which is sent to workers."""
    record: CallRecord
    calls: "Calls"
    is_description: bool = False

    def get(self) -> Any:  # Any: a payload, a description or a method's own result
        """Waits for the call and returns its value. Raises `FlowError` if the call failed."""
        self.calls.wait([self.record], None)
        if self.is_description:
            return self.description
        self.calls.raise_if_closed()
        return self.carrier.get()

    def get_with(self, others: Sequence[Ref]) -> list[Any]:
        """Waits for this call and the calls of `others`. Returns all values, fetched in one request."""
        refs = [self, *(other for other in others if isinstance(other, CallRef))]
        self.calls.wait([ref.record for ref in refs], None)
        if self.is_description:
            return [ref.description for ref in refs]
        return self.calls.fetch(refs)

    @property
    def description(self) -> Description | None:
        """Metadata of the result (number of rows, lengths, columns); None before the call is resolved."""
        return self.record.report.description if self.record.report else None

    def done(self) -> bool:
        return self.record.is_resolved or self.record.report_ref.done()


def find_records(result: Future | Batch) -> list[CallRecord]:
    """Returns the records of the calls that compute a result."""
    if isinstance(result, Future):
        refs = result.refs
    else:
        blocks = {result.column(name).block for name in result.columns}
        refs = [shard.description for block in blocks for shard in block.shards]
    return [ref.record for ref in refs if isinstance(ref, CallRef)]


@dataclass(eq=False)
class _Ping:
    """Pings of a process."""

    slot: Slot
    send: Callable[[], CallRecord]
    record: CallRecord | None = None
    """The last ping."""


@dataclass(eq=False)
class Calls:
    """The calls in flight of a driver, and the trace events of finished calls."""

    backend: Backend
    timeout_s: float | None = None
    """Timeout of a call in seconds, unless its method sets `timeout_s`; None means no timeout."""
    start_timeout_s: float | None = None
    """Timeout in seconds of constructors, and of the start of a replacement process; None means no timeout."""
    notify: Callable[[str], None] = lambda text: None
    """Shows the user a message about a non-fatal event, such as a replaced process."""
    profiled: ProfiledStep | None = None
    """Step of which later calls record profiles; None disables profiles."""
    events: deque[CallEvent] = field(default_factory=lambda: deque(maxlen=MAX_EVENTS))
    """Timing of the most recent finished calls."""
    recovery: Recovery = field(default_factory=Recovery)
    on_submit: Callable[..., None] | None = None
    """Function that the driver calls after each submitted call of a method, with the group, the method, its arguments
    and its result.
    """
    num_lost_replicas: int = 0
    """Number of rollout replicas that streaming has lost, over all attempts of the program."""
    _closed: FlowError | None = None
    _ids: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    lock: threading.RLock = field(default_factory=threading.RLock)
    """The driver lock. It guards the records and the state that idle callbacks use. It is held while a call is
    submitted to its ranks, because all ranks must execute collectives in the same order. A waiting call does not hold
    it, except in a callback or if the caller holds it.
    """
    _in_flight: dict[int, CallRecord] = field(default_factory=dict)
    _pings: list[_Ping] = field(default_factory=list)
    _pinged_s: float = 0.0
    """Monotonic time of the last pings."""
    _stored_rows: WeakKeyDictionary[LocalRef, Ref] = field(default_factory=WeakKeyDictionary)
    _num_replacements: Counter[Slot] = field(default_factory=Counter)
    _failed_state_calls: dict[tuple[Slot, str], CallRecord] = field(default_factory=dict)
    """(slot, role) -> the failed call, for workers whose last call that sets state has failed."""

    def __post_init__(self) -> None:
        self.failures = Failures(self.backend, self.recovery, self.notify)
        self._pump = EventPump(self.lock, self._collect_events, has_thread=self.backend.is_remote)

    def add(
        self,
        report: Ref,
        role: str,
        rank: int,
        method: str,
        slot: Slot,
        device: str,
        *,
        call_id: int | None = None,
        submitted_ns: int | None = None,
        inputs: Sequence[Ref] = (),
        contract: Contract = _DEFAULT_CONTRACT,
        is_isolated: bool = False,
        is_start: bool = False,
    ) -> CallRecord:
        """Starts to track a submitted call. `inputs` are the references that the call reads.

        `is_start` marks constructors and the setup of process groups. Their timeout is `start_timeout_s`.
        """
        sources = {id(ref.record): ref.record for ref in inputs if isinstance(ref, CallRef)}
        if is_start:
            timeout_s, setting = self.start_timeout_s, "start_timeout_s"
        elif contract.timeout_s is not None:
            timeout_s, setting = contract.timeout_s, f"timeout_s in the @register of {role}.{method}"
        else:
            timeout_s, setting = self.timeout_s, "call_timeout_s"
        with self.lock:
            record = CallRecord(
                call_id or self.next_call_id(),
                report,
                role,
                rank,
                method,
                slot,
                device,
                submitted_ns or time.time_ns(),
                timeout_s,
                tuple(sources.values()),
                timeout_setting=setting,
                start_timeout_s=self.start_timeout_s,
                resend=contract.resend,
                gives_state=bool(contract.replay),
                is_isolated=is_isolated,
            )
            self._in_flight[record.call_id] = record
            self.failures.deadlines.add(record)
        return record

    def next_call_id(self) -> int:
        """Returns a new call id. Every rank of a call has its own id."""
        return next(self._ids)

    def put_once(self, rows: LocalRef) -> Ref:
        """Stores rows that the driver created in the object store. Repeated calls return the same reference."""
        if rows not in self._stored_rows:
            self._stored_rows[rows] = self.backend.share(rows.value)
        return self._stored_rows[rows]

    def in_flight(self) -> list[CallRecord]:
        """Returns the unresolved calls, in the order of submission."""
        with self.lock:
            return list(self._in_flight.values())

    def required(self) -> list[CallRecord]:
        """Returns the calls in flight, except calls registered with `resend=False`."""
        return [record for record in self.in_flight() if record.resend]

    def get_num_replacements(self, slot: Slot) -> int:
        """Returns how many times the process of a slot was replaced.

        A change between two calls shows that state outside the replay log is lost, even if neither call failed.
        """
        return self._num_replacements[slot]

    def get_error(self, slot: Slot) -> FlowError | None:
        """Returns the failure that has ended the process of a slot; None if it runs or is replaced."""
        return self.failures.get_error(slot.pool)

    def add_idle_callback(self, callback: IdleCallback) -> Callable[[], None]:
        """Registers a function that the driver runs repeatedly: while a call waits, once at the end of each wait, and
        on a thread while the driver computes. With the inline backend, there is no thread.

        The function returns futures or batches. The driver runs the function again when the call of one of these
        results is done, or after `POLL_INTERVAL_S`. The function runs under the driver lock, never nested or
        concurrently. A waiting call raises the function's exceptions. If the function raises on the thread, or a
        process fails, the thread ends, and the driver's next call raises the error.

        Returns: a function that removes the callback. The thread ends with the last callback.
        """
        return self._pump.add(lambda: [record for result in callback() for record in find_records(result)])

    def add_ping(self, slot: Slot, send: Callable[[], CallRecord]) -> None:
        """Registers a function that sends a ping to a process. While the driver waits, it calls the function about once
        per second, after the previous ping is done.
        """
        with self.lock:
            self.failures.serving.add(slot)
            self._pings = [*(ping for ping in self._pings if ping.slot != slot), _Ping(slot, send)]

    def _send_pings(self, now_s: float) -> None:
        if now_s - self._pinged_s < PING_INTERVAL_S:
            return
        self._pinged_s = now_s
        for ping in self._pings:
            is_done = ping.record is None or ping.record.is_resolved
            if is_done and self.recovery.is_recoverable(ping.slot.pool):
                with suppress(FlowError):  # the pool has failed; the driver's next call raises the failure
                    ping.record = ping.send()

    def close(self) -> None:
        """Fails all calls in flight and rejects new ones."""
        self._pings.clear()
        self._pump.clear()
        self._closed = FlowError("the cluster is closed and its processes have ended; read results before closing it")
        for record in self.in_flight():
            record.error = self._closed
        with self.lock:
            self._in_flight.clear()

    def abandon_all(self, timeout_s: float, *, keeps_events: bool = False) -> set[str]:
        """Waits up to `timeout_s` seconds for the calls in flight. Then drops these calls, all idle callbacks and,
        unless `keeps_events`, the recorded events. Ignores failures of these calls and invalid user input, so that new
        calls can be submitted.

        Returns: the pools whose processes are still busy after `timeout_s` seconds.
        """
        self._pings.clear()
        self.failures.serving.clear()
        self._pump.clear()
        self._wait(lambda: not self._in_flight, (), timeout_s)
        late = self.in_flight()
        for record in late:
            record.error = FlowError("the program restarted, and this call belongs to the previous attempt")
        with self.lock:
            self._in_flight.clear()
            self._failed_state_calls.clear()
        self.failures.user_error = None
        if not keeps_events:
            self.events.clear()
        return {record.slot.pool for record in late}

    def raise_if_closed(self) -> None:
        if self._closed is not None:
            raise self._closed

    def raise_if_failed(self, pool: str) -> None:
        """Resolves finished calls. Raises `FlowError` if the cluster is closed or the pool has failed, or the exception
        of an idle callback on the thread.
        """
        self.raise_if_closed()
        self._pump.raise_error()
        if self._in_flight:
            self._poll()
        if error := self.failures.get_error(pool) or self.failures.user_error:
            raise error

    def wait(self, records: Sequence[CallRecord], timeout_s: float | None) -> None:
        """Waits until all calls in `records` are resolved.

        Raises:
            FlowError: a call failed. The error is the root cause, possibly the failure of another call.
            TimeoutError: a call is not resolved after `timeout_s` seconds.
        """
        if not self._wait(lambda: all(record.is_resolved for record in records), records, timeout_s):
            late = next(record for record in records if not record.is_resolved)
            raise TimeoutError(f"{late.role}.{late.method} on rank {late.rank} is not done after {timeout_s:g} s")
        for record in records:
            if record.error is not None:
                raise self.failures.get_error(record.slot.pool) or record.error

    def wait_until(self, condition: Callable[[], bool], timeout_s: float | None = None) -> None:
        """Waits until `condition()` is true. Runs idle callbacks and resolves calls during the wait.

        Evaluates the condition under the driver lock.

        Raises:
            FlowError: a process failed, or the cluster is closed.
            TimeoutError: the condition is not true after `timeout_s` seconds.
        """

        def is_over() -> bool:
            with self.lock:
                if condition():
                    return True
            self.raise_if_closed()
            if error := self.failures.get_first_error():
                raise error
            return False

        if not self._wait(is_over, (), timeout_s):
            raise TimeoutError(f"the awaited condition does not hold after {timeout_s:g} s")

    def _wait(self, is_over: Callable[[], bool], records: Sequence[CallRecord], timeout_s: float | None) -> bool:
        """Runs idle callbacks and resolves calls until `is_over()` is true. Returns False on timeout."""
        self._pump.raise_error()
        if is_over():
            return True
        deadline = None if timeout_s is None else self.backend.clock.monotonic() + timeout_s
        has_waited = False
        with self._pump.waiting_call():
            while not is_over():
                left_s = POLL_INTERVAL_S if deadline is None else deadline - self.backend.clock.monotonic()
                if has_waited and left_s <= 0:
                    return False
                triggers = self._pump.run()
                if not is_over():
                    self._wait_once(records, triggers, min(max(left_s, 0.0), POLL_INTERVAL_S))
                has_waited = True
                self._pump.raise_error()
            if has_waited:
                self._pump.run()
        return True

    def _collect_events(self, triggers: Sequence[CallRecord], timeout_s: float) -> None:
        """Waits for any of `triggers`, and resolves finished calls. Raises the first failure of the run."""
        self._wait_once((), triggers, timeout_s)
        if error := self.failures.get_first_error():
            raise error

    def _wait_once(self, records: Sequence[CallRecord], triggers: Sequence[CallRecord], timeout_s: float) -> None:
        """Waits for all `records`, or for any of `triggers`, for at most `timeout_s` seconds."""
        unresolved = [record for record in records if not record.is_resolved]
        if any(record.is_resolved for record in triggers):
            timeout_s = 0.0  # resolved while the callbacks ran, so they must run again
        self._collect([*unresolved, *triggers], timeout_s, 1 if triggers else len(unresolved))
        if not records or any(not record.is_resolved for record in unresolved):
            # A failure of another call may block these calls, so all calls are polled.
            self._poll()

    def fetch(self, refs: Sequence[Ref]) -> list[Any]:  # Any: the methods' own results
        self.raise_if_closed()
        try:
            return self.backend.get([ref.carrier for ref in refs])
        except ProcessLost:
            with self.lock:
                self.failures.check_nodes()  # so that the program restarts
            raise

    def _poll(self) -> None:
        """Resolves finished calls, and ends processes that failed or passed a deadline."""
        records = self.in_flight()
        self._collect(records, 0.0, len(records))
        with self.lock:
            now_s = self.backend.clock.monotonic()
            self.failures.check(now_s)
            for record in self.in_flight():
                if record.symptom is not None and (error := self._get_first_cause(record)):
                    self._in_flight.pop(record.call_id)
                    record.error = error
            self._send_pings(now_s)

    def _collect(self, records: Sequence[CallRecord], timeout_s: float, count: int) -> None:
        """Waits until `count` of the calls are done, or until the timeout. Resolves done calls in submission order."""
        by_ref = {id(r.report_ref): r for r in records if r.symptom is None and not r.is_resolved}
        if not by_ref:
            if not any(record.is_resolved for record in records):  # another thread may have resolved all of them
                # The process of every remaining call is unreachable. `Failures` finds out why, in its next check.
                self.backend.clock.sleep(timeout_s)
            return
        refs = [record.report_ref for record in by_ref.values()]
        ready = self.backend.wait(refs, min(count, len(refs)), timeout_s)
        results: list[Report | FlowError]
        try:
            results = self.backend.get(ready)
        except FlowError:
            results = [_report_or_error(ref) for ref in ready]
        reports = dict(zip(map(id, ready), results, strict=True))
        in_flight = self.in_flight()
        has_failed = any(isinstance(report, FlowError) for report in reports.values())
        if has_failed and (list(records) != in_flight or count < len(in_flight)):
            # The failure of an earlier call may be the cause, so read all available reports first.
            with self.lock:
                in_flight = self.in_flight()
                return self._collect(in_flight, 0.0, len(in_flight))
        with self.lock:
            for key, record in by_ref.items():
                if key in reports and record.call_id in self._in_flight:
                    self._resolve(record, reports[key])

    def _resolve(self, record: CallRecord, report: Report | FlowError) -> None:
        """Resolves a call with a report or an error, unless the error is a lost connection with unknown cause."""
        if isinstance(report, FlowError):
            state = self._failed_state_calls.get((record.slot, record.role))
            if record.gives_state:
                self._failed_state_calls[record.slot, record.role] = record
            record.error = self._find_cause(record, report, state)
            if record.error is None:
                return
        else:
            if record.gives_state:
                self._failed_state_calls.pop((record.slot, record.role), None)
            record.report = report
            self.failures.record_success(record.slot)
            if record.method != PING:
                self.events.append(_make_event(record, report))
            if report.is_replacement:
                self._num_replacements[record.slot] += 1
                self.notify(f"{record.role} on rank {record.rank} lost its process; the replacement has taken over")
        del self._in_flight[record.call_id]
        record.inputs = ()  # otherwise each record keeps all earlier records alive

    def _get_first_cause(self, record: CallRecord) -> FlowError | None:
        """Returns the failure of the call's pool or of an input; None while it is unknown."""
        errors = (source.error for source in record.inputs if source.error is not None)
        return self.failures.get_error(record.slot.pool) or next(errors, None)

    def _find_cause(self, record: CallRecord, error: FlowError, state: CallRecord | None) -> FlowError | None:
        """Returns the root cause of a failed call; None while the cause is unknown. `state` is the earlier call that
        failed to set the worker's state; None if no such call failed.
        """
        if state is not None:
            record.inputs = (*record.inputs, state)
        for source in record.inputs:
            if source.error is not None:
                return source.error
            if source.symptom is not None and isinstance(error, WorkerError):
                record.symptom = error
                return None
        if isinstance(error, WorkerError) and _failed_in_own_process(record, error):
            return self.failures.classify(record, error)
        return error


def _failed_in_own_process(record: CallRecord, error: WorkerError) -> bool:
    """Returns whether a call failed in its own process. If False, the error comes from an input, and the process of the
    call is not affected.
    """
    failed = error.role, error.method
    return failed == (record.role, record.method) or failed not in {(s.role, s.method) for s in record.inputs}


def _make_event(record: CallRecord, report: Report) -> CallEvent:
    slot = record.slot
    return CallEvent(
        number=record.call_id,
        inputs=tuple(source.call_id for source in record.inputs),
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
        usage=report.usage,
    )


def _report_or_error(ref: Ref) -> Report | FlowError:
    try:
        return ref.get()
    except FlowError as error:
        return error
