"""Failures: finds root causes, ends the processes that fail together, enforces deadlines, and stores replay logs."""

import math
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from flowrl.controller.backends.base import Backend
from flowrl.controller.errors import DeadlineError, FlowError, ProcessLost, WorkerError, WorkerUserError
from flowrl.controller.host.process_probe import Stack, parse_host_stack
from flowrl.controller.placement.plan import FailureGroup, Slot
from flowrl.controller.wire import Construction, RecoveryPlan, Report, Request
from flowrl.data.batch.block import Ref

SYMPTOM_GRACE_S = 2.0
"""Seconds to search for the cause of a lost connection. If none is found, the lost connection is raised."""

LIVENESS_INTERVAL_S = 1.0
"""Seconds between two liveness checks of nodes and processes."""


PING = "ping"
"""Method of pings, which show that a process without other calls is alive."""


@dataclass(eq=False)
class CallRecord:
    """State of a call on one rank, in the driver."""

    call_id: int
    report_ref: Ref
    role: str
    rank: int
    method: str
    slot: Slot
    device: str
    submitted_ns: int
    timeout_s: float | None
    inputs: tuple["CallRecord", ...] = ()
    """Calls whose results this call reads. Empty once this call is resolved."""
    running_since_s: float | None = None
    """Monotonic time when the process and all inputs became available; None before this time."""
    timeout_setting: str = "call_timeout_s"
    """Name of the setting that `timeout_s` comes from."""
    start_timeout_s: float | None = None
    """Timeout in seconds for the start of a replacement process."""
    starting_since_s: float | None = None
    """Monotonic time when the replacement process started; None if no replacement process is starting."""
    has_missed_deadline: bool = False
    """Whether the call has passed its deadline in an earlier process, so that its process was replaced."""
    resend: bool = True
    gives_state: bool = False
    """Whether later calls depend on state that this call sets (`replay` in its contract)."""
    is_isolated: bool = False
    """Whether an exception of the method affects no other call, because the worker is stateless and its ranks do not
    communicate.
    """
    symptom: WorkerError | None = None
    """Lost connection to a peer, if the cause is still unknown."""
    report: Report | None = None
    error: FlowError | None = None

    @property
    def is_resolved(self) -> bool:
        return self.report is not None or self.error is not None

    def has_exceeded_start(self, now_s: float) -> bool:
        """Whether a replacement process is still starting after `start_timeout_s`."""
        timeout_s, since_s = self.start_timeout_s, self.starting_since_s
        return timeout_s is not None and since_s is not None and now_s - since_s > timeout_s


class Deadlines:
    """Measures the run time of calls and detects overdue calls.

    A process runs calls in the order of submission. The clock of a call starts when the previous call of its process
    and all inputs are done. The driver polls, so the clock may start late.
    """

    def __init__(self) -> None:
        self._queues: defaultdict[tuple[str, int], deque[CallRecord]] = defaultdict(deque)

    def add(self, record: CallRecord) -> None:
        self._queues[record.slot.pool, record.slot.rank].append(record)

    def get_current(self, pool: str, rank: int) -> CallRecord | None:
        """Returns the oldest unresolved call of a process."""
        queue = self._queues[pool, rank]
        while queue and queue[0].is_resolved:
            queue.popleft()
        return queue[0] if queue else None

    def find_overdue(self, now_s: float) -> list[CallRecord]:
        """Starts the clocks of calls that can run at monotonic time `now_s`. Returns the calls past their deadline."""
        overdue = []
        for pool, rank in list(self._queues):
            record = self.get_current(pool, rank)
            if record is None or record.timeout_s is None or not all(source.is_resolved for source in record.inputs):
                continue
            if record.running_since_s is None:
                record.running_since_s = now_s
            elif now_s - record.running_since_s > record.timeout_s:
                overdue.append(record)
        return overdue

    def restart_clocks(self, slots: Mapping[Slot, float], now_s: float) -> None:
        """Restarts the deadlines of calls to processes outside of `slots`, because these calls may wait for `slots`.

        Args:
            slots: processes that are being replaced, with the monotonic times of their loss. `start_timeout_s` seconds
                after a loss, the deadlines are no longer restarted.
        """
        for pool, rank in list(self._queues):
            record = self.get_current(pool, rank)
            if record is None or record.running_since_s is None or record.slot in slots:
                continue
            limit_s = math.inf if record.start_timeout_s is None else record.start_timeout_s
            if any(now_s - lost_s <= limit_s for lost_s in slots.values()):
                record.running_since_s = now_s


_Key = tuple[str, str, int]
"""(role, method, index) of a call that sets state. The index counts the calls that set one state together."""


class Recovery:
    """Stores the recovery plans of all processes with stateless workers."""

    def __init__(self) -> None:
        self._constructions: defaultdict[Slot, list[Construction]] = defaultdict(list)
        self._replay_logs: defaultdict[Slot, dict[_Key, tuple[Request, tuple[Ref, ...]]]] = defaultdict(dict)
        self._unrecoverable: set[str] = set()
        self._plans: dict[Slot, RecoveryPlan] = {}
        """Cached plans. A new construction or replay log entry removes the plan."""
        self._attempt_start_id = 0

    def record_construction(self, slot: Slot, construction: Construction) -> None:
        """Records the construction of a worker in a process, and empties the worker's replay log.

        If the process had an earlier worker of the same role, removes the construction of the earlier worker.
        """
        role = construction.role
        self._constructions[slot] = [*(c for c in self._constructions[slot] if c.role != role), construction]
        log = self._replay_logs[slot]
        self._replay_logs[slot] = {key: entry for key, entry in log.items() if key[0] != role}
        self._plans.pop(slot, None)

    def record_call(self, slot: Slot, request: Request, refs: Sequence[Ref]) -> None:
        """Adds a call to the replay log if it sets state. The log keeps the call's inputs alive until a later call sets
        the state.
        """
        index_parameter = request.contract.replay
        if not index_parameter:
            return
        index = request.arguments.get(index_parameter, 0) if isinstance(index_parameter, str) else 0
        log, method = self._replay_logs[slot], (request.role, request.method)
        if index == 0:
            for key in [key for key in log if key[:2] == method]:
                del log[key]
        log[*method, index] = (request, tuple(refs))
        self._plans.pop(slot, None)

    def start_attempt(self, ended: Sequence[Slot], call_id: int) -> None:
        """Clears all replay logs and the constructions of ended processes. `call_id` is the id of the last call."""
        self._attempt_start_id = call_id
        self._replay_logs.clear()
        self._plans.clear()
        for slot in ended:
            self._constructions.pop(slot, None)
            self._unrecoverable.discard(slot.pool)

    def get_first_role(self, slot: Slot) -> tuple[str, int]:
        """Returns (role, rank) of the first recorded worker in a process.

        Returns (pool, rank in the pool) if the process has no worker.
        """
        for construction in self._constructions[slot][:1]:
            return construction.role, construction.rank
        return slot.pool, slot.rank

    def get_roles(self, slot: Slot) -> tuple[str, ...]:
        """Returns the roles that have a worker in a process."""
        return tuple(construction.role for construction in self._constructions[slot])

    def get_user_functions(self, slot: Slot, role: str) -> tuple[str, ...]:
        """Returns the names of the user functions of a role's worker."""
        own = (each for each in self._constructions[slot] if each.role == role)
        return next((each.cls.user_functions(*each.args, **each.kwargs) for each in own), ())

    def mark_unrecoverable(self, pools: Sequence[str]) -> None:
        self._unrecoverable.update(pools)

    def is_recoverable(self, pool: str) -> bool:
        """Returns whether lost processes of a pool are replaced."""
        return pool not in self._unrecoverable

    def get_plan(self, slot: Slot) -> RecoveryPlan | None:
        """Returns the recovery plan of a process; None if the process is not recoverable."""
        if not self.is_recoverable(slot.pool):
            return None
        if slot not in self._plans:
            constructions, log = tuple(self._constructions[slot]), tuple(self._replay_logs[slot].values())
            self._plans[slot] = RecoveryPlan(constructions, log, self._attempt_start_id)
        return self._plans[slot]


@dataclass
class _Suspicion:
    """A lost connection with an unknown cause."""

    record: CallRecord
    symptom: WorkerError
    probes: list[tuple[Slot, Ref]]
    until_s: float


class Failures:
    """Finds the first failure of each failure group, and ends all processes of the group.

    A failure group is a set of processes that fail together, because they may wait for each other in collectives.
    """

    def __init__(self, backend: Backend, recovery: Recovery, notify: Callable[[str], None]) -> None:
        self.deadlines = Deadlines()
        self._backend, self._recovery, self._notify = backend, recovery, notify
        self._groups: dict[str, FailureGroup] = {}
        """Pool -> failure group that contains the pool."""
        self._errors: dict[str, FlowError] = {}
        """Pool -> the failure that ended its processes."""
        self._suspicions: dict[str, _Suspicion] = {}
        self.user_error: WorkerUserError | None = None
        """The first error of invalid user input in an isolated call. No process ends, but new calls raise the error."""
        self._overdue: dict[Slot, DeadlineError] = {}
        """Slot -> error, for processes that are being replaced because of a missed deadline."""
        self._liveness_checked_s = 0.0
        self.serving: set[Slot] = set()
        """Processes whose workers serve other processes."""
        self._restorations: dict[Slot, tuple[Ref, float]] = {}
        """Lost process that serves others -> (result of `Backend.restore`, monotonic time when the loss was found)."""

    def add_failure_group(self, group: FailureGroup) -> None:
        self._groups |= {pool.name: group for pool in group.pools}

    def get_error(self, pool: str) -> FlowError | None:
        """Returns the failure that ended the processes of a pool; None if the pool has not failed."""
        return self._errors.get(pool)

    def get_first_error(self) -> FlowError | None:
        """Returns the first failure of the run; None without a failure."""
        return next(iter(self._errors.values()), self.user_error)

    def end(self, group: FailureGroup, error: FlowError) -> None:
        if group.pools[0].name not in self._errors:
            self._fail(group, error)

    def clear(self, group: FailureGroup) -> None:
        """Forgets the failure of a group, so that its processes can start again."""
        for pool in group.pools:
            self._errors.pop(pool.name, None)
        for slot in group.slots:
            self._overdue.pop(slot, None)

    def classify(self, record: CallRecord, error: WorkerError) -> FlowError | None:
        """Returns the error to raise for a call that failed in its own process.

        Ends the failure group, unless the failure affects only this call. For a lost connection to a peer, returns
        None, and the call stays unresolved until `check` has found the cause.
        """
        group = self._groups[record.slot.pool]
        if isinstance(error, ProcessLost):
            self.check_nodes()  # the end of a process may be a consequence
        if (first := self._errors.get(record.slot.pool)) is not None:
            # The end of the process is a consequence. Calls of other pools that read this result raise the same error.
            return first
        if isinstance(error, ProcessLost) and not error.is_sender_known:
            error.cause = self._describe_end(record.slot) or error.cause
        if record.is_isolated and isinstance(error, WorkerUserError):
            # The processes continue, so that the program can save the weights of colocated roles.
            self.user_error = self.user_error or error
            return error
        is_recoverable = self._recovery.is_recoverable(record.slot.pool)
        # If the process was ended at a deadline, the missed deadline is the root cause.
        overdue = self._overdue.get(record.slot) if isinstance(error, ProcessLost) else None
        if isinstance(error, ProcessLost) and error.is_replaceable and not record.resend and is_recoverable:
            return error if overdue is None else _add_deadline(error, overdue)
        if not error.symptom:
            self._fail(group, overdue or error)
            return overdue or error
        record.symptom = error
        if group.name not in self._suspicions:
            probes = [(slot, self._backend.probe(slot)) for slot in group.slots]
            until_s = self._backend.clock.monotonic() + SYMPTOM_GRACE_S
            self._suspicions[group.name] = _Suspicion(record, error, probes, until_s)
        return None

    def record_success(self, slot: Slot) -> None:
        """Forgets the missed deadline of a slot, because its replacement process has finished a call."""
        self._overdue.pop(slot, None)

    def _fail(self, group: FailureGroup, error: FlowError) -> None:
        self._suspicions.pop(group.name, None)
        for pool in group.pools:
            self._errors[pool.name] = error
            self._backend.end_pool(pool.name)

    def check(self, now_s: float) -> None:
        """Finds causes of lost connections, and handles missed deadlines, lost nodes and lost processes."""
        if self._suspicions:
            self.check_nodes()
        for suspicion in list(self._suspicions.values()):
            self._resolve(suspicion, now_s)
        self._restorations = {slot: each for slot, each in self._restorations.items() if not each[0].done()}
        if self._restorations:
            # Clients of a lost process wait for its replacement, which has a timeout of its own.
            self.deadlines.restart_clocks({slot: lost_s for slot, (_, lost_s) in self._restorations.items()}, now_s)
        for record in self.deadlines.find_overdue(now_s):
            if record.slot.pool not in self._errors:
                self._end_overdue(record, now_s)
        if now_s - self._liveness_checked_s > LIVENESS_INTERVAL_S:
            self._liveness_checked_s = now_s
            self.check_nodes()
            self._report_lost_processes(now_s)

    def _resolve(self, suspicion: _Suspicion, now_s: float) -> None:
        """Ends the failure group of a lost connection when the cause is known or the grace period has expired.

        If a probe shows that a process has ended, the error of the group is this lost process. Otherwise, the error is
        the lost connection.
        """
        group = self._groups[suspicion.record.slot.pool]
        for slot, probe in suspicion.probes:
            if probe.done():
                try:
                    probe.get()
                except WorkerError as error:
                    cause = self._describe_end(slot) or error.cause
                    return self._fail(group, self._make_process_lost(slot, cause))
        if now_s > suspicion.until_s:
            self._fail(group, suspicion.symptom)

    def _describe_end(self, slot: Slot) -> str | None:
        """Returns how a process ended, with the user's functions that the process may have run. None if the end of the
        process has no known cause.
        """
        end, current = self._backend.describe_end(slot), self.deadlines.get_current(slot.pool, slot.rank)
        roles = self._recovery.get_roles(slot) if current is None else (current.role,)
        calls = [(role, functions) for role in roles if (functions := self._recovery.get_user_functions(slot, role))]
        return end and "; ".join([end, *(f"{role} calls {' and '.join(functions)}" for role, functions in calls)])

    def _make_process_lost(self, slot: Slot, cause: str) -> ProcessLost:
        """Creates the error of a lost process. Names the process's current call, or its first role between calls."""
        current = self.deadlines.get_current(slot.pool, slot.rank)
        if current is not None and current.method != PING:
            return ProcessLost(current.role, current.rank, slot.node, current.method, cause)
        role, rank = self._recovery.get_first_role(slot)
        return ProcessLost(role, rank, slot.node, "", cause)

    def check_nodes(self) -> None:
        """Ends the failure groups with processes on lost nodes."""
        for node, cause in self._backend.lost_nodes().items():
            for group in {group.name: group for group in self._groups.values()}.values():
                lost = [slot for slot in group.slots if slot.node == node and slot.pool not in self._errors]
                if lost:
                    self._fail(group, self._make_process_lost(lost[0], cause))

    def _report_lost_processes(self, now_s: float) -> None:
        """Notifies the user of lost processes that are replaced, and restores those that serve other processes."""
        groups = {group.name: group for group in self._groups.values()}.values()
        slots = [slot for group in groups for slot in group.slots if slot.pool not in self._errors]
        for slot in self._backend.lost_processes([s for s in slots if self._recovery.is_recoverable(s.pool)]):
            if slot in self.serving and (plan := self._recovery.get_plan(slot)) is not None:
                self._restorations[slot] = (self._backend.restore(slot, plan), now_s)
            if slot in self._overdue:
                continue  # the missed deadline was already reported
            cause = self._describe_end(slot) or "its process has ended"
            lost = self._make_process_lost(slot, cause)
            # Without a method, the process ended between two calls, or its call has already been repeated.
            activity = f" in {lost.method}" if lost.method else ""
            self._notify(
                f"{lost.role} on rank {lost.rank} (node {slot.node}) failed{activity}: {cause}; replacing the process"
            )

    def _end_overdue(self, record: CallRecord, now_s: float) -> None:
        """Handles a call past its deadline: replaces a recoverable process, otherwise fails its group."""
        is_recoverable = self._recovery.is_recoverable(record.slot.pool)
        peers = [record] if is_recoverable else self._get_peer_calls(record)
        dumps = self._backend.stacks([peer.slot for peer in peers])
        stacks = {peer.call_id: parse_host_stack(dumps.get(peer.slot)) for peer in peers}
        if is_recoverable and is_starting(record, stacks[record.call_id], now_s):
            return
        waiting = [peer for peer in peers if stacks[peer.call_id].in_collective]
        # A stopped process is the cause, even if it waits in a collective.
        stopped = next((peer for peer in peers if stacks[peer.call_id].is_stopped), None)
        running = next((peer for peer in peers if peer not in waiting and stacks[peer.call_id].frames), None)
        late = stopped or (running if record in waiting else None) or record
        waiting_ranks = [peer.rank for peer in waiting if peer is not late]
        error = make_deadline_error(record, late, stacks[late.call_id], waiting_ranks, now_s)
        if not is_recoverable or record.has_missed_deadline:
            # A call that also hangs in a new process hangs every time.
            return self._fail(self._groups[record.slot.pool], error)
        record.has_missed_deadline = True
        self._notify(f"{error.role}.{error.method} on rank {error.rank} was {error.cause}; replacing its process")
        self._overdue[record.slot] = error
        record.running_since_s = record.starting_since_s = None
        dump = dumps.get(record.slot)
        self._backend.restart(record.slot, dump.process_id if dump else None)

    def _get_peer_calls(self, record: CallRecord) -> list[CallRecord]:
        slots = self._groups[record.slot.pool].slots
        current = [self.deadlines.get_current(slot.pool, slot.rank) for slot in slots]
        return [record, *(other for other in current if other is not None and other is not record)]


def is_starting(record: CallRecord, stack: Stack, now_s: float) -> bool:
    """Returns whether a replacement process is still starting, and has not exceeded `start_timeout_s`.

    Resets the clock of the call during the start. A process is starting until it has restored its state and runs
    the call.
    """
    assert record.running_since_s is not None
    if stack.is_stopped:
        return False  # it would never finish its start
    is_younger = stack.age_s < now_s - record.running_since_s
    if stack.is_missing and not is_younger:
        return False  # the call itself may have replaced the handler of the signal, or may never return
    if stack.frames and not stack.is_recovering:
        if record.starting_since_s is None and not is_younger:
            return False
        # The process started to run the call after the last check, so the clock of the call starts now.
        record.starting_since_s, record.running_since_s = None, now_s
        return True
    if record.starting_since_s is None:
        record.starting_since_s = now_s
    if record.has_exceeded_start(now_s):
        return False
    record.running_since_s = now_s
    return True


def _add_deadline(error: ProcessLost, overdue: DeadlineError) -> ProcessLost:
    cause = f"its process was ended, because {overdue.role}.{overdue.method} was {overdue.cause}; {overdue.advice}"
    return ProcessLost(error.role, error.rank, error.node, error.method, cause, overdue.remote_traceback)


def make_deadline_error(
    record: CallRecord, late: CallRecord, stack: Stack, waiting_ranks: Sequence[int], now_s: float
) -> DeadlineError:
    """Creates the error of a call past its deadline. `late` is the call itself, or a peer that it waits for."""
    timeout_s, setting = record.timeout_s, record.timeout_setting
    if record.has_exceeded_start(now_s):
        timeout_s, setting = record.start_timeout_s, "start_timeout_s"
    location = f", in {stack.frames[0]}" if stack.frames else ""
    location += "; a signal (SIGSTOP) has stopped its process" if stack.is_stopped else ""
    if (late.role, late.method) == (record.role, record.method):
        waits = f"; rank {', '.join(map(str, waiting_ranks))} waits for it" if waiting_ranks else ""
        cause = f"not done after its deadline of {timeout_s:g} s{location}{waits}"
    else:
        waits = f"{record.role}.{record.method} on rank {record.rank} waits for it past its deadline"
        cause = f"still running{location}, while {waits} of {timeout_s:g} s"
    lines = [f'  File "{frame.file}", line {frame.line}, in {frame.function}' for frame in reversed(stack.frames)]
    error = DeadlineError(late.role, late.rank, late.slot.node, late.method, cause, "\n".join(lines))
    if stack.is_stopped:
        error.advice = "find out what stopped it, for example a debugger or a job scheduler"
    else:
        error.advice = f"raise {setting} if it needs more time"
        error.advice += "; if it hangs, its stack shows where" if stack.frames else ""
    return error
