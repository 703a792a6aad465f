"""FaultyBackend: runs worker processes in this process under a virtual clock, with a schedule of faults.

Hosts, workers, dispatch and recovery are the real ones. Only processes, their ends and the time are simulated.
"""

import copy
import itertools
import signal
import threading
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from flowrl.config.base import Device
from flowrl.controller.errors import FlowError, ProcessLost, WorkerError, describe_unpicklable
from flowrl.controller.host.host import ReplaceableHost
from flowrl.controller.host.process_end import describe_end
from flowrl.controller.host.process_probe import StackDump
from flowrl.controller.placement.cpu_threads import count_usable_cpus
from flowrl.controller.placement.inventory import local_inventory
from flowrl.controller.placement.plan import FailureGroup, Inventory, PoolPlan, Slot
from flowrl.controller.wire import Construction, RecoveryPlan, Report, Request
from flowrl.data.batch.block import Ref
from flowrl.data.batch.payload import Payload
from flowrl.schedules.simulation import VirtualClock

START_S = 3.0
"""Duration of the start of a replacement process."""

LIMIT_S = 100_000.0
"""Virtual time at which a wait that never ends fails."""


@dataclass(frozen=True)
class CallFault:
    """A fault of a method on one rank: of `times` calls, after `num_before` calls. `__init__` is the constructor.

    - slow: the call takes `after_s` longer.
    - exit: the process ends, `after_s` after the start of the call.
    - hang: the call does not return.
    - stop: a signal (SIGSTOP) stops the process.
    - lose: the call does not arrive, and the process stays idle.
    - disconnect: the call raises a lost connection to a peer, after `after_s`.
    """

    kind: Literal["slow", "exit", "hang", "stop", "lose", "disconnect"]
    role: str
    method: str
    rank: int = 0
    after_s: float = 0.0
    exit_code: int = -signal.SIGKILL
    times: int = 1
    num_before: int = 0


@dataclass(frozen=True)
class ProcessFault:
    """At a time, a process ends (with an exit code), or a signal (SIGSTOP) stops it."""

    at_s: float
    pool: str
    rank: int = 0
    kind: Literal["exit", "stop"] = "exit"
    exit_code: int = -signal.SIGKILL


@dataclass(frozen=True)
class NodeLoss:
    """At a time, all processes of a node end, and the backend knows the cause."""

    at_s: float
    node: int
    cause: str


Fault = CallFault | ProcessFault | NodeLoss

_Key = tuple[str, int]
"""(pool, rank in the pool) of a process."""


class FaultClock(VirtualClock):
    """The virtual clock of a simulation as the clock of a backend."""

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float, /) -> None:
        end_s = self.call_at(round(self.now_s + seconds, 6))  # rounded, so that intervals of 0.1 s add up
        while self.now_s < end_s:
            self.advance()


@dataclass(eq=False)
class _Result:
    """Reference to a result or a report. Each read returns a copy."""

    backend: "FaultyBackend"
    value: Any = None  # Any: a payload, a report or a method's own result
    error: FlowError | None = None
    is_resolved: bool = False

    @property
    def carrier(self) -> "_Result":
        return self

    def get(self) -> Any:
        self.backend.wait([self], 1, LIMIT_S)
        assert self.is_resolved, "the result never arrives"
        if self.error is not None:
            raise self.error
        return copy.deepcopy(self.value)

    def get_with(self, others: Sequence[Ref]) -> list[Any]:
        return [ref.get() for ref in (self, *others)]

    def done(self) -> bool:
        self.backend.run()
        return self.is_resolved

    def resolve(self, value: Any) -> None:
        self.value, self.is_resolved = value, True

    def fail(self, error: FlowError) -> None:
        self.error, self.is_resolved = error, True


@dataclass(eq=False)
class _Task:
    """A message to a process, and its results."""

    role: str
    rank: int
    node: int
    method: str
    run: Callable[[ReplaceableHost, list[Any]], tuple[Any, Any]]
    value: _Result
    report: _Result
    inputs: Sequence[Ref] = ()
    plan: RecoveryPlan | None = None
    is_retried: bool = False
    """Whether a replacement process receives the message again."""
    frames: tuple[str, ...] = ()
    """Functions that the host runs, innermost first; empty if it does not run the task."""

    def fail(self, error: FlowError) -> None:
        self.value.fail(error)
        self.report.fail(error)


@dataclass(eq=False)
class _Process:
    slot: Slot
    process_id: int
    starts_s: float
    num_restarts_left: int
    host: ReplaceableHost = field(default_factory=lambda: ReplaceableHost(_read))
    queue: deque[_Task] = field(default_factory=deque)
    current: _Task | None = None
    is_stopped: bool = False
    has_ended: bool = False

    def is_ready(self, now_s: float) -> bool:
        """Returns whether the process can run its next task."""
        is_idle = self.current is None and not self.is_stopped and not self.has_ended and now_s >= self.starts_s
        return is_idle and bool(self.queue) and all(ref.is_resolved for ref in map(_result, self.queue[0].inputs))


class FaultyBackend:
    """Runs the hosts of all slots in this process, and injects faults. Waiting advances the clock.

    A call takes no time, unless a fault delays it. Each process runs its calls in the order of submission.

    Args:
        faults: the schedule of faults.
        collectives: methods in which the ranks of a role wait for each other. If a process of the role ends, the
            waiting ranks raise a lost connection.
    """

    is_remote = True

    def __init__(self, *faults: Fault, collectives: Collection[str] = ()) -> None:
        self.clock = FaultClock()
        self._lock = threading.RLock()
        self._collectives = collectives
        self._call_faults = [fault for fault in faults if isinstance(fault, CallFault)]
        self._num_calls: Counter[tuple[str, str, int]] = Counter()
        """(role, method, rank) -> number of calls that have begun."""
        self._processes: dict[_Key, _Process] = {}
        self._process_ids = itertools.count(1)
        self._ranks: dict[str, set[Slot]] = {}
        """Role -> the slots of its ranks."""
        self._waiting: dict[tuple[str, str], list[tuple[_Process, _Task]]] = {}
        """(role, method) -> ranks that wait in a collective."""
        self._ends: dict[_Key, str] = {}
        self._unreported: set[_Key] = set()
        """Processes that have ended since the last call of `lost_processes`."""
        self._lost_nodes: dict[int, str] = {}
        for fault in faults:
            if not isinstance(fault, CallFault):
                self.inject(fault)

    def inject(self, fault: ProcessFault | NodeLoss) -> None:
        """Adds a fault to the schedule."""
        self.clock.call_at(fault.at_s, lambda: self._commit(fault))

    def inventory(self, device: Device, devices: Sequence[int] | None) -> Inventory:
        return local_inventory(device, devices)

    def count_usable_cpus(self, nodes: Collection[int]) -> Mapping[int, int]:
        return dict.fromkeys(nodes, count_usable_cpus())

    def reserve(self, pools: Sequence[PoolPlan], kind: str) -> None:
        """Does nothing: a simulated process needs no device."""

    def start_hosts(self, group: FailureGroup, kind: str, *, restarts: int) -> None:
        for slot in group.slots:
            self._unreported.discard((slot.pool, slot.rank))
            self._start_process(slot, self.clock.now_s, restarts)

    def _start_process(self, slot: Slot, starts_s: float, restarts: int) -> _Process:
        process = _Process(slot, next(self._process_ids), starts_s, restarts)
        self._processes[slot.pool, slot.rank] = process
        self.clock.call_at(starts_s)
        return process

    def join(self, group: FailureGroup, kind: str) -> list[tuple[Slot, Ref]]:
        """Does nothing: simulated processes have no process group. See `collectives`."""
        return [(slot, self._resolved(Report(0, 0, 0, 0))) for slot in group.slots]

    def open_group(self, slot: Slot, role: str, ranks: Sequence[int], rank: int) -> Ref:
        return self._resolved(Report(0, 0, 0, 0))

    def construct(
        self, slot: Slot, construction: Construction, plan: RecoveryPlan | None, after: Sequence[Ref] = ()
    ) -> Ref:
        self._ranks.setdefault(construction.role, set()).add(slot)
        construction = copy.deepcopy(construction)
        _, report = self._submit(
            slot,
            (construction.role, construction.rank, "__init__"),
            lambda host, inputs: host.construct_once(construction, *inputs),
            inputs=after,
            is_retried=plan is not None,
        )
        return report

    def evict(self, slot: Slot, role: str, rank: int, *, replaceable: bool) -> Ref:
        name = (role, rank, "evict")
        return self._submit(slot, name, lambda host, _: host.evict(role, rank, slot.node), is_retried=replaceable)[1]

    def call(self, slot: Slot, request: Request, refs: Sequence[Ref], plan: RecoveryPlan | None) -> tuple[Ref, Ref]:
        request = copy.deepcopy(request)
        return self._submit(
            slot,
            (request.role, request.rank, request.method),
            lambda host, inputs: host.call_after_recovery(request, plan, *inputs),
            inputs=refs,
            plan=plan,
            is_retried=plan is not None and request.contract.resend,
        )

    def _submit(
        self, slot: Slot, name: tuple[str, int, str], run: Callable, is_first: bool = False, **settings: Any
    ) -> tuple[_Result, _Result]:
        role, rank, method = name
        task = _Task(role, rank, slot.node, method, run, _Result(self), _Result(self), **settings)
        with self._lock:
            process = self._processes.get((slot.pool, slot.rank))
            if process is None or process.has_ended:
                task.fail(ProcessLost(role, rank, slot.node, method, self._ends[slot.pool, slot.rank]))
            elif is_first:
                process.queue.appendleft(task)
            else:
                process.queue.append(task)
        return task.value, task.report

    def share(self, payload: Payload) -> Ref:
        return self._resolved(copy.deepcopy(payload))

    def _resolved(self, value: Any) -> _Result:
        return _Result(self, value, is_resolved=True)

    def wait(self, refs: Sequence[Ref], count: int, timeout_s: float) -> list[Ref]:
        with self._lock:
            end_s = self.clock.call_at(round(self.clock.now_s + timeout_s, 6))
            while True:
                self.run()
                resolved = [ref for ref in refs if _result(ref).is_resolved]
                if len(resolved) >= count or self.clock.now_s >= end_s:
                    return resolved
                assert self.clock.now_s < LIMIT_S, "the driver waits for ever"
                self.clock.advance()

    def get(self, refs: Sequence[Ref]) -> list[Any]:
        return [ref.get() for ref in refs]

    def probe(self, slot: Slot) -> Ref:
        return self._submit(slot, (slot.pool, slot.rank, "live"), lambda host, _: (None, None))[0]

    def stacks(self, slots: Sequence[Slot]) -> Mapping[Slot, StackDump]:
        dumps = {}
        for slot in slots:
            process = self._processes[slot.pool, slot.rank]
            if not process.has_ended and process.starts_s <= self.clock.now_s:
                frames = process.current.frames if process.current is not None else ()
                text = "" if process.is_stopped else "\n".join(["Thread 0x1 (most recent call first):", *frames])
                age_s = self.clock.now_s - process.starts_s
                dumps[slot] = StackDump(age_s, text, process.is_stopped, process.process_id)
        return dumps

    def restart(self, slot: Slot, process_id: int | None) -> None:
        process = self._processes[slot.pool, slot.rank]
        if process_id in (None, process.process_id):
            self._end_process(process, -signal.SIGKILL, is_own_kill=True)

    def restore(self, slot: Slot, plan: RecoveryPlan) -> Ref:
        name = (slot.pool, slot.rank, "restore")
        settings = {"is_first": True, "plan": plan, "is_retried": True}
        return self._submit(slot, name, lambda host, _: (host.restore(plan), None), **settings)[0]

    def describe_end(self, slot: Slot) -> str | None:
        return self._ends.get((slot.pool, slot.rank))

    def lost_processes(self, slots: Sequence[Slot]) -> list[Slot]:
        lost = [slot for slot in slots if (slot.pool, slot.rank) in self._unreported]
        self._unreported -= {(slot.pool, slot.rank) for slot in lost}
        return lost

    def lost_nodes(self) -> Mapping[int, str]:
        return self._lost_nodes

    def end_pool(self, name: str) -> None:
        for process in [process for process in self._processes.values() if process.slot.pool == name]:
            process.num_restarts_left = 0
            self._end_process(process, -signal.SIGKILL, is_own_kill=True)
            process.host.close()

    def close(self) -> None:
        for name in {pool for pool, _ in self._processes}:
            self.end_pool(name)

    def run(self) -> None:
        """Runs all tasks that can run at the current time."""
        with self._lock:
            while process := next((p for p in self._processes.values() if p.is_ready(self.clock.now_s)), None):
                process.current = process.queue.popleft()
                self._begin(process, process.current)

    def _begin(self, process: _Process, task: _Task) -> None:
        """Runs a task, unless a fault ends or delays it."""
        missing = [c for c in (task.plan.constructions if task.plan else ()) if process.host.lacks([c])]
        steps = [*((c.role, "__init__", c.rank) for c in missing), (task.role, task.method, task.rank)]
        delay_s = 0.0
        for step in steps:
            if (fault := self._find_fault(step)) is None:
                continue
            task.frames = _format_frames(step[1], is_recovering=step is not steps[-1])
            fault_s = self.clock.now_s + delay_s + fault.after_s
            match fault.kind:
                case "slow":
                    delay_s += fault.after_s
                    continue
                case "exit":
                    self.clock.call_at(fault_s, lambda: self._end_process(process, fault.exit_code))
                case "stop":
                    process.is_stopped = True
                case "lose":
                    task.frames = ()
                case "disconnect":
                    self.clock.call_at(fault_s, lambda: self._disconnect(process, task))
            return
        if delay_s:
            self.clock.call_at(self.clock.now_s + delay_s, lambda: self._continue(process, task))
        else:
            self._continue(process, task)

    def _find_fault(self, step: tuple[str, str, int]) -> CallFault | None:
        """Counts a call, and returns its fault."""
        index = self._num_calls[step]
        self._num_calls[step] += 1
        for fault in self._call_faults:
            begin = fault.num_before
            if (fault.role, fault.method, fault.rank) == step and begin <= index < begin + fault.times:
                return fault
        return None

    def _continue(self, process: _Process, task: _Task) -> None:
        """Runs a task. In a collective, the last rank runs the tasks of all ranks."""
        if process.current is not task or process.is_stopped or process.has_ended:
            return
        ranks = self._ranks.get(task.role, set())
        if task.method not in self._collectives or len(ranks) == 1:
            return self._finish(process, task)
        if any(self._processes[slot.pool, slot.rank].has_ended for slot in ranks):
            return self._disconnect(process, task)
        task.frames = _format_frames(task.method, in_collective=True)
        waiting = self._waiting.setdefault((task.role, task.method), [])
        waiting.append((process, task))
        if len(waiting) == len(ranks):
            for each in self._waiting.pop((task.role, task.method)):
                self._finish(*each)
        return None

    def _finish(self, process: _Process, task: _Task) -> None:
        process.current = None
        try:
            value, report = task.run(process.host, _read(task.inputs))
        except FlowError as error:
            return task.fail(error)
        try:
            task.value.resolve(copy.deepcopy(value))
        except TypeError as error:
            return task.fail(WorkerError(task.role, task.rank, task.node, task.method, describe_unpicklable(error)))
        return task.report.resolve(report)

    def _disconnect(self, process: _Process, task: _Task) -> None:
        if process.current is task and not process.has_ended:
            process.current = None
            cause = "RuntimeError: Connection closed by peer"
            task.fail(WorkerError(task.role, task.rank, task.node, task.method, cause, symptom=True))

    def _commit(self, fault: ProcessFault | NodeLoss) -> None:
        if isinstance(fault, NodeLoss):
            self._lost_nodes[fault.node] = fault.cause
            for process in [process for process in self._processes.values() if process.slot.node == fault.node]:
                process.num_restarts_left = 0
                self._end_process(process, -signal.SIGKILL)
        elif fault.kind == "stop":
            self._processes[fault.pool, fault.rank].is_stopped = True
        else:
            self._end_process(self._processes[fault.pool, fault.rank], fault.exit_code)

    def _end_process(self, process: _Process, exit_code: int, *, is_own_kill: bool = False) -> None:
        """Ends a process, and starts a replacement if it may be replaced. The replacement runs the retried calls."""
        if process.has_ended:
            return
        slot, tasks = process.slot, [task for task in (process.current, *process.queue) if task is not None]
        process.has_ended, process.current = True, None
        process.queue.clear()
        cause = describe_end(exit_code, is_own_kill=is_own_kill, has_oom_kill=None)
        self._ends[slot.pool, slot.rank] = cause
        self._unreported.add((slot.pool, slot.rank))
        is_replaced = process.num_restarts_left > 0
        if is_replaced:
            replacement = self._start_process(slot, self.clock.now_s + START_S, process.num_restarts_left - 1)
            replacement.queue.extend(task for task in tasks if task.is_retried)
            tasks = [task for task in tasks if not task.is_retried]
        for task in tasks:
            lost = ProcessLost(task.role, task.rank, task.node, task.method, "its process was killed or crashed")
            lost.is_replaceable = is_replaced
            task.fail(lost)
        for role, method in [name for name in self._waiting if slot in self._ranks[name[0]]]:
            for peer in self._waiting.pop((role, method)):
                self._disconnect(*peer)


def _result(ref: Ref) -> _Result:
    assert isinstance(ref, _Result), f"a {type(ref).__name__} is not a reference of this backend"
    return ref


def _read(refs: Sequence[Ref]) -> list[Any]:
    return [ref.get() for ref in refs]


def _format_frames(method: str, *, is_recovering: bool = False, in_collective: bool = False) -> tuple[str, ...]:
    """Returns a stack in the format of `faulthandler`."""
    frames = [("torch/distributed/distributed_c10d.py", "all_reduce")] if in_collective else []
    frames += [("worker.py", method), ("/flowrl/controller/host/host.py", "call")]
    frames += [("/flowrl/controller/host/host.py", "recover")] if is_recovering else []
    return tuple(f'  File "{file}", line 7 in {function}' for file, function in frames)
