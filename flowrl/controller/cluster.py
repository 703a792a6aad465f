"""Cluster: assigns devices to roles, starts the processes, and creates worker groups."""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Literal, ParamSpec, Self

from flowrl.config import Placement
from flowrl.controller.backends.base import Backend
from flowrl.controller.backends.inline_backend import InlineBackend
from flowrl.controller.calls.calls import Calls
from flowrl.controller.errors import ContractError
from flowrl.controller.group import DeviceEviction, DeviceOwnership, GroupTasks, Tasks, WorkerGroup
from flowrl.controller.placement.cpu_threads import divide_cpus, read_requested_threads, use_threads
from flowrl.controller.placement.plan import FailureGroup, Mesh, PlacementError, Plan, PoolPlan, RolePlan, Slot, plan
from flowrl.controller.wire import Construction
from flowrl.controller.worker import GroupType, Worker

_log = logging.getLogger("flowrl")

TASKS = "tasks"
"""Name of the role and pool of the task worker, which runs the functions of `Batch.apply`."""

_ABANDON_TIMEOUT_S = 60.0
"""Timeout in seconds for the calls in flight of processes that are kept across a program restart."""


Parameters = ParamSpec("Parameters")


@dataclass(frozen=True)
class ResourcePool:
    """Number of devices on each node of a pool. `ResourcePool((8, 8))` has two nodes with eight devices each."""

    devices_per_node: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.devices_per_node or min(self.devices_per_node) < 1:
            raise PlacementError(f"devices_per_node={list(self.devices_per_node)} must have at least 1 device per node")

    @staticmethod
    def of(pool: PoolPlan) -> "ResourcePool":
        nodes = sorted({slot.node for slot in pool.slots})
        return ResourcePool(tuple(sum(slot.node == node for slot in pool.slots) for node in nodes))

    @property
    def world_size(self) -> int:
        return sum(self.devices_per_node)


@dataclass(frozen=True)
class _GroupEntry:
    group: WorkerGroup
    cls: type[Worker]
    args: tuple
    kwargs: dict[str, Any]

    def matches(self, cls: type[Worker], args: tuple, kwargs: dict[str, Any]) -> bool:
        return (self.cls, self.args, self.kwargs) == (cls, args, kwargs)


class Cluster:
    """Starts the processes of a placement, creates worker groups on them, and ends them in `close`.

    Args:
        placement: pools and roles.
        backend: `ray` (one process per device), `inline` (all workers in this process), or a backend of your own.
        address: address of a Ray cluster to join; None starts Ray on this machine.
        devices: number of usable devices per node; None detects the number.
        planned: plan of the placement on the devices of this machine, if it is known; None plans it.
        roles: roles that the program uses; None means all roles of the placement.
        dedicated: roles whose engines cannot share a process. They get separate processes on the same devices.
        num_threads: torch CPU threads per process. None uses OMP_NUM_THREADS; without it, the usable CPUs of a node
            are divided among its processes.
        prepare: modules that worker processes import early: in the fork server, or else in the task worker.
        fork_workers: whether a fork server starts the processes of a local run. `auto`: if the placement is on CPUs.
        call_timeout_s: timeout in seconds of calls, unless the method sets `timeout_s`.
        start_timeout_s: timeout in seconds of constructors, and of the start of a replacement process.
        deterministic: whether all processes use only operations whose results are the same bit by bit in each run.
        restarts: maximum number of replacements of each lost process with stateless workers.
        notify: shows a message about a non-fatal event, such as a replaced process; None logs a warning.
    Raises:
        PlacementError: the placement does not fit the available devices.
        UserError: OMP_NUM_THREADS is needed and invalid.
    """

    def __init__(
        self,
        placement: Placement,
        *,
        backend: Literal["ray", "inline"] | Backend = "ray",
        address: str | None = None,
        devices: tuple[int, ...] | None = None,
        planned: Plan | None = None,
        roles: tuple[str, ...] | None = None,
        dedicated: tuple[str, ...] = (),
        num_threads: int | None = None,
        prepare: tuple[str, ...] = (),
        fork_workers: bool | Literal["auto"] = "auto",
        call_timeout_s: float | None = 1800.0,
        start_timeout_s: float | None = 1800.0,
        deterministic: bool = False,
        restarts: int = 3,
        notify: Callable[[str], None] | None = None,
    ) -> None:
        self._inline = backend == "inline"
        # Read before anything starts, because an invalid value is an error. None: usable CPUs are divided.
        self._num_threads = read_requested_threads() if num_threads is None else num_threads
        if TASKS in placement.pools or TASKS in placement.roles:
            raise PlacementError(f"placement: the name {TASKS!r} is reserved by flowrl; rename the pool or role")
        self.notify = notify or _log.warning
        """Shows the user a message. Programs with a progress display replace this function."""
        if backend == "ray":
            from flowrl.controller.backends.ray_backend import RayBackend  # noqa: PLC0415 (inline runs need no ray)

            backend = RayBackend(address, self._notify, prepare, fork_workers)
        self._backend: Backend = InlineBackend() if backend == "inline" else backend
        self.calls = Calls(self._backend, call_timeout_s, start_timeout_s, self._notify)
        self._failure_groups: dict[str, FailureGroup] = {}
        self._restarts = restarts
        self._deterministic = deterministic
        self._started: set[str] = set()
        self._joined: set[str] = set()
        self._groups: dict[str, _GroupEntry] = {}
        self._reusable: dict[str, _GroupEntry] = {}
        """Role -> group of the previous attempt at the program whose processes still run."""
        self._attempt = 0
        self._has_lost_nodes = False
        self._prepare = prepare
        with ExitStack() as on_error:
            on_error.callback(self.close)  # nobody has the cluster yet, so nobody else ends its processes
            if planned is None:
                planned = plan(placement, self._backend.inventory(placement.device, devices), roles, dedicated)
            self.plan: Plan = planned
            pools = list(self.plan.pools.values())
            slots = [slot for failure_group in self.plan.failure_groups() for slot in failure_group.slots]
            self._eviction = DeviceEviction(DeviceOwnership(slots), self._backend, self.calls, self.plan.kind)
            for failure_group in (*self.plan.failure_groups(), FailureGroup(TASKS, (_TASK_POOL,))):
                self.calls.failures.add_failure_group(failure_group)
                self._failure_groups |= {pool.name: failure_group for pool in failure_group.pools}
            self._backend.reserve(pools, self.plan.kind)
            self._threads_by_node = self._divide_threads()
            use_threads(self._threads_by_node[0])
            self._tasks = self._make_tasks()
            on_error.pop_all()

    def _notify(self, text: str) -> None:
        self.notify(text)  # reads the attribute at each call, because programs replace it

    def _make_tasks(self) -> GroupTasks:
        role_plan = RolePlan(TASKS, TASKS, _TASK_POOL.slots, Mesh(1, 1, 1, 1))
        return GroupTasks(self._make_group(role_plan, Tasks, (self._prepare,), {}))

    def group(
        self,
        role: str,
        cls: Callable[Parameters, Worker[GroupType]],
        /,
        *args: Parameters.args,
        **kwargs: Parameters.kwargs,
    ) -> GroupType:
        """Constructs a worker `cls(*args, **kwargs)` on every rank of a role, and returns their group without waiting.

        A type checker knows the methods of the group if the class names a group type, as the classes of
        `flowrl.workers` do.

        After `restart`, returns the existing group if its processes still run and class and arguments are equal. If a
        constructor fails, the next method call on the group raises the constructor's error. Arguments must not be
        futures.
        """
        if role in self._groups:
            raise ContractError(f"role {role!r} already has a group; make each role once")
        if role not in self.plan.roles:
            raise ContractError(f"role {role!r} is not in placement.roles ({', '.join(self.plan.roles)}); add it")
        role_plan = self.plan.roles[role]
        assert isinstance(cls, type) and issubclass(cls, Worker), f"{cls} is not a worker class"
        selected = cls.select_class(role_plan.mesh, *args, **kwargs)
        if self._inline and (selected.collective or selected.replicated):
            # One process cannot be several ranks of a process group. One rank gives the same results.
            role_plan = replace(role_plan, slots=role_plan.slots[:1], mesh=Mesh(1, 1, 1, 1))
        group: Any = self._reused_group(role, selected, args, kwargs)  # Any: no group has its type at run time
        return self._make_group(role_plan, selected, args, kwargs) if group is None else group

    def _reused_group(self, role: str, cls: type[Worker], args: tuple, kwargs: dict) -> WorkerGroup | None:
        reusable = self._reusable.pop(role, None)
        if reusable is None or not reusable.matches(cls, args, kwargs):
            return None
        self._groups[role] = reusable
        return reusable.group

    def _make_group(
        self, role_plan: RolePlan, cls: type[Worker], args: tuple, kwargs: dict
    ) -> Any:  # Any: no group has its type at run time
        role, slots = role_plan.role, role_plan.slots
        self.calls.raise_if_failed(slots[0].pool)
        failure_group = self._failure_groups[slots[0].pool]
        # The inline backend has no process groups. Its engines run without FSDP2.
        needs_process_group = not self._inline and cls.needs_process_group(role_plan.mesh, *args, **kwargs)
        is_recoverable = cls.stateless and not needs_process_group
        if failure_group.name not in self._started:
            self._started.add(failure_group.name)
            # Ray reports why a process ended only if restarts are disabled.
            self._backend.start_hosts(failure_group, self.plan.kind, restarts=self._restarts if is_recoverable else 0)
        if needs_process_group:
            self._open_process_group(role, slots)
        if not is_recoverable:
            self.calls.recovery.mark_unrecoverable([pool.name for pool in failure_group.pools])
        group = WorkerGroup(
            role,
            cls,
            slots,
            role_plan.mesh,
            self._backend,
            self.calls,
            self._eviction,
            self.plan.kind,
            constructor=(args, kwargs),
        )
        aligned_roles = frozenset(name for name, p in self.plan.roles.items() if name != role and p.slots == slots)
        for rank, slot in enumerate(slots):
            device = self._get_device(slot)
            construction = Construction(
                role,
                cls,
                args,
                kwargs,
                role_plan.mesh,
                rank,
                role_plan.local_rank(rank),
                slot.node,
                device,
                self._threads_by_node[slot.node],
                aligned_roles,
                role_plan.replica,
                self._eviction.ledger.is_shared(slot) and cls.can_offload_device(device, *args, **kwargs),
                self._attempt,
                self._deterministic,
            )
            self._construct(slot, construction, group)
        self._groups[role] = _GroupEntry(group, cls, args, kwargs)
        if role != TASKS:
            group.tasks = self._tasks
        return group

    def _construct(self, slot: Slot, construction: Construction, group: WorkerGroup) -> None:
        role, rank = construction.role, construction.rank
        with self.calls.lock:
            evictions = self._eviction.before_first(slot, can_offload=construction.can_offload)
            awaited = [eviction.carrier for eviction in evictions]
            plan = self.calls.recovery.get_plan(slot)
            report = self._backend.construct(slot, construction, plan, awaited)
            self.calls.recovery.record_construction(slot, construction)
            device = group.format_device(slot)
            self.calls.add(report, role, rank, "__init__", slot, device, inputs=evictions, is_start=True)

    def _open_process_group(self, role: str, slots: Sequence[Slot]) -> None:
        """Creates a role's process group.

        The role's failure group contains the processes that fail together with the role's processes. All processes of
        the failure group take part, because torch requires that all ranks call `new_group`. In the first call for a
        failure group, these processes first join a common process group.
        """
        failure_group = self._failure_groups[slots[0].pool]
        if failure_group.name not in self._joined:
            self._joined.add(failure_group.name)
            ranks = {slot: rank for rank, slot in enumerate(failure_group.slots)}
            for slot, report in self._backend.join(failure_group, self.plan.kind):
                name, device = failure_group.name, self._format_device(slot)
                self.calls.add(report, name, ranks[slot], "join", slot, device, is_start=True)
        ranks = [failure_group.slots.index(slot) for slot in slots]
        for rank, slot in enumerate(failure_group.slots):
            report = self._backend.open_group(slot, role, ranks, rank)
            self.calls.add(report, role, rank, "join", slot, self._format_device(slot), is_start=True)

    def _format_device(self, slot: Slot) -> str:
        return f"{self.plan.kind}:{slot.device}"

    def _get_device(self, slot: Slot) -> str:
        if self.plan.kind == "cpu" or slot.pool == TASKS:
            return "cpu"
        # A Ray process sees only its own device.
        return f"cuda:{slot.device}" if self._inline else "cuda:0"

    def _divide_threads(self) -> Mapping[int, int]:
        """Returns node index -> number of threads of each process. Node 0 always has an entry.

        The driver and the task worker, on node 0, do not count when the CPUs are divided.
        """
        num_processes = {0: 0} | self.plan.count_processes()
        if self._num_threads is not None:
            return dict.fromkeys(num_processes, self._num_threads)
        usable = self._backend.count_usable_cpus(num_processes)
        return {
            node: usable[node] if self._inline else divide_cpus(usable[node], count)
            for node, count in num_processes.items()
        }

    @property
    def groups(self) -> dict[str, WorkerGroup]:
        """Groups by role, without the task worker."""
        return {role: entry.group for role, entry in self._groups.items() if role != TASKS}

    def count_threads(self) -> dict[str, int]:
        """Returns role -> largest number of torch CPU threads of its processes."""
        return {role: max(self._threads_by_node[s.node] for s in group.slots) for role, group in self.groups.items()}

    def pool(self, name: str) -> ResourcePool:
        """Returns the number of devices of a pool on each node."""
        return ResourcePool.of(self.plan.pools[name])

    def wait_for_calls(self, timeout_s: float | None = None) -> None:
        """Waits for all calls in flight, except calls with `resend=False`. Raises the first failure."""
        self.calls.wait(self.calls.required(), timeout_s)

    def restart(self, *, can_retain: bool = True) -> tuple[str, ...]:
        """Prepares the cluster for another attempt at the program, after a failure.

        Keeps recoverable processes that have not failed and finish their calls in flight within a minute, unless
        `can_retain` is false. Ends all other processes. `group` starts ended processes again on the same devices.

        Returns: the roles whose processes are kept.
        """
        failures, recovery = self.calls.failures, self.calls.recovery
        cause = failures.get_first_error()
        assert cause is not None, "nothing has failed"
        groups = {failure_group.name: failure_group for failure_group in self._failure_groups.values()}
        started = [failure_group for name, failure_group in groups.items() if name in self._started]
        for failure_group in started:
            if not (can_retain and all(recovery.is_recoverable(pool.name) for pool in failure_group.pools)):
                failures.end(failure_group, cause)
        busy = self.calls.abandon_all(_ABANDON_TIMEOUT_S)
        for failure_group in started:
            if busy.intersection(pool.name for pool in failure_group.pools):
                failures.end(failure_group, cause)
        self._start_attempt([group for group in started if failures.get_error(group.pools[0].name)])
        return tuple(self._reusable)

    def _start_attempt(self, ended: Sequence[FailureGroup]) -> None:
        """Resets the records of ended processes, and keeps the groups of all other processes for reuse."""
        ended_slots = {slot for failure_group in ended for slot in failure_group.slots}
        self.calls.recovery.start_attempt(list(ended_slots), self.calls.next_call_id())
        for failure_group in ended:
            self.calls.failures.clear(failure_group)
            self._eviction.forget(failure_group.slots)
            self._started.discard(failure_group.name)
            self._joined.discard(failure_group.name)
        self._reusable = {
            role: entry for role, entry in self._groups.items() if ended_slots.isdisjoint(entry.group.slots)
        }
        self._groups = {TASKS: self._reusable.pop(TASKS)} if TASKS in self._reusable else {}
        self._attempt += 1
        if TASKS not in self._groups:
            self._tasks = self._make_tasks()

    def has_lost_nodes(self) -> bool:
        """Returns whether a node of this run is lost. The result of an open cluster stays the same after `close`."""
        self._has_lost_nodes = self._has_lost_nodes or bool(self._backend.lost_nodes())
        return self._has_lost_nodes

    def close(self) -> None:
        """Ends all processes of this cluster."""
        self.calls.close()
        self._backend.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


_TASK_POOL = PoolPlan(TASKS, (Slot(TASKS, 0, 0, 0, device=-1),))
