"""Cluster: a placement, planned and started. Where groups come from."""

import logging
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Literal, Self

from flowrl.config import Placement
from flowrl.controller.backends.base import Backend
from flowrl.controller.backends.inline_backend import InlineBackend
from flowrl.controller.calls.calls import Calls
from flowrl.controller.errors import ContractError
from flowrl.controller.group import WorkerGroup, submission
from flowrl.controller.host.host import Construction
from flowrl.controller.placement.device_ownership import DeviceEviction, DeviceOwnership
from flowrl.controller.placement.plan import HostSet, Mesh, PlacementError, Plan, PoolPlan, RolePlan, Slot, plan
from flowrl.controller.pool import ResourcePool
from flowrl.controller.tasks import GroupTasks, Tasks
from flowrl.controller.worker import Worker

_log = logging.getLogger("flowrl")

TASKS = "tasks"
"""Role and pool of the process that runs pure functions beside the data."""

_ABANDON_S = 60.0
"""What processes are at when another attempt begins, they may bring to its end for so long."""


@dataclass(frozen=True)
class _Made:
    """A group, and what `Cluster.group` was given for it."""

    group: WorkerGroup
    cls: type[Worker]
    args: tuple
    kwargs: dict[str, Any]

    def is_of(self, cls: type[Worker], args: tuple, kwargs: dict[str, Any]) -> bool:
        return (self.cls, self.args, self.kwargs) == (cls, args, kwargs)


class Cluster:
    """Starts the hosts of a placement, makes worker groups on them, and ends what it started.

    Args:
        placement: pools and roles.
        backend: `ray` (a process per device) or `inline` (this process).
        address: a Ray cluster to join; None starts one here.
        devices: devices per node that may be used; None asks the machine.
        roles: the roles that will be made; None is all that the placement names.
        apart: roles with processes of their own, because what they run takes a process for itself.
        num_threads: CPU threads of torch in the processes of roles whose ranks talk to each other; None shares the
            cores evenly among the processes of a node.
        prepare: modules that functions given to `Batch.apply` need, loaded early where those run.
    Raises:
        PlacementError: the placement does not fit, before anything starts.
    """

    def __init__(
        self,
        placement: Placement,
        *,
        backend: Literal["ray", "inline"] = "ray",
        address: str | None = None,
        devices: tuple[int, ...] | None = None,
        roles: tuple[str, ...] | None = None,
        apart: tuple[str, ...] = (),
        num_threads: int | None = None,
        prepare: tuple[str, ...] = (),
        call_timeout_s: float | None = 1800.0,
        restarts: int = 3,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self._inline = backend == "inline"
        self._num_threads = num_threads
        if TASKS in placement.pools or TASKS in placement.roles:
            raise PlacementError(f"placement names a pool or role {TASKS}, which is flowrl's own: choose another name")
        self.say = say or _log.warning
        """Tells the user what happened and did not end the run."""
        self._backend: Backend = InlineBackend() if self._inline else _ray_backend(address, self._say)
        self.calls = Calls(self._backend, call_timeout_s, self._say)
        self._sets: dict[str, HostSet] = {}
        self._restarts = restarts
        self._started: set[str] = set()
        self._joined: set[str] = set()
        self._groups: dict[str, _Made] = {}
        self._kept: dict[str, _Made] = {}
        """Those of an attempt before, whose processes still are there."""
        self._attempt = 0
        self._prepare = prepare
        try:
            inventory = self._backend.inventory(placement.device, devices)
            self.plan: Plan = plan(placement, inventory, roles, apart)
            pools = list(self.plan.pools.values())
            everyone = [slot for hosts in self.plan.host_sets() for slot in hosts.slots]
            self._handover = DeviceEviction(DeviceOwnership(everyone), self._backend, self.calls, self.plan.kind)
            for hosts in (*self.plan.host_sets(), HostSet(TASKS, (_TASK_POOL,))):
                self.calls.failures.watch(hosts)
                self._sets |= {pool.name: hosts for pool in hosts.pools}
            self._per_node = Counter(slot.node for slot in everyone)
            self._backend.reserve(pools, self.plan.kind)
            self._tasks = self._make_tasks()
        except BaseException:
            self.close()
            raise

    def _say(self, text: str) -> None:
        self.say(text)

    def _make_tasks(self) -> GroupTasks:
        tasks = self._make(RolePlan(TASKS, TASKS, _TASK_POOL.slots, Mesh(1, 1, 1, 1)), Tasks, (), {})
        if self._prepare:
            tasks.prepare.submit(self._prepare)
        return GroupTasks(tasks)

    def group(self, role: str, cls: type[Worker], /, *args: Any, **kwargs: Any) -> WorkerGroup:
        """Makes a role's workers, one `cls(*args, **kwargs)` per rank. Does not wait for their constructors.

        After `restart` a role whose processes have stayed has its workers already, where `cls` and arguments are
        the same as before.

        Futures are not taken as arguments. A constructor that raises is told at the group's next call.
        """
        if role in self._groups:
            raise ContractError(f"role {role!r} has its group already; a role is made once")
        if role not in self.plan.roles:
            raise ContractError(
                f"role {role!r} is not in the placement, which has {', '.join(self.plan.roles)}; add it to roles"
            )
        planned = self.plan.roles[role]
        cls = cls.on(planned.mesh, *args, **kwargs)
        if self._inline and (cls.collective or cls.replicated):
            # One process cannot hold several members of a process group; with one rank the numbers are the same.
            planned = replace(planned, slots=planned.slots[:1], mesh=Mesh(1, 1, 1, 1))
        kept = self._kept.pop(role, None)
        if kept is not None and kept.is_of(cls, args, kwargs):
            self._groups[role] = kept
            return kept.group
        return self._make(planned, cls, args, kwargs)

    def _make(self, planned: RolePlan, cls: type[Worker], args: tuple, kwargs: dict) -> WorkerGroup:
        role, slots = planned.role, planned.slots
        self.calls.check(slots[0].pool)
        hosts = self._sets[slots[0].pool]
        talks = cls.collective and len(slots) > 1
        replaceable = cls.stateless and not talks
        if hosts.name not in self._started:
            self._started.add(hosts.name)
            # Ray tells why a process ended only of those that it does not start again.
            self._backend.start_hosts(hosts, self.plan.kind, restarts=self._restarts if replaceable else 0)
        if talks:
            self._open_group(role, slots)
        if not replaceable:
            self.calls.revivals.rule_out([pool.name for pool in hosts.pools])
        group = WorkerGroup(role, cls, slots, planned.mesh, self._backend, self.calls, self._handover, self.plan.kind)
        twins = frozenset(other for other, plan in self.plan.roles.items() if other != role and plan.slots == slots)
        for rank, slot in enumerate(slots):
            device = self._device(slot)
            made = Construction(
                role,
                cls,
                args,
                kwargs,
                planned.mesh,
                rank,
                planned.local_rank(rank),
                slot.node,
                device,
                self._threads(slot),
                twins,
                planned.leads,
                self._handover.ledger.is_shared(slot) and cls.can_offload_device(device, *args, **kwargs),
                self._attempt,
            )
            self._construct(slot, made, group)
        self._groups[role] = _Made(group, cls, args, kwargs)
        if role != TASKS:
            group.tasks = self._tasks
        return group

    def _construct(self, slot: Slot, made: Construction, group: WorkerGroup) -> None:
        with submission:
            rooms = self._handover.before_first(slot, yields=made.yields)
            awaited = [room.carrier for room in rooms]
            report = self._backend.construct(slot, made, self.calls.revivals.of(slot), awaited)
            self.calls.revivals.constructed(slot, made)
            self.calls.add(report, made.role, made.rank, "__init__", slot, group.device_name(slot), inputs=rooms)

    def _open_group(self, role: str, slots: Sequence[Slot]) -> None:
        """Gives a role a communicator. Every process of its host set takes part, in the order of `group` calls."""
        hosts = self._sets[slots[0].pool]
        if hosts.name not in self._joined:
            self._joined.add(hosts.name)
            ranks = {slot: rank for rank, slot in enumerate(hosts.slots)}
            for slot, report in self._backend.join(hosts, self.plan.kind):
                self.calls.add(report, hosts.name, ranks[slot], "join", slot, self._device_name(slot))
        ranks = [hosts.slots.index(slot) for slot in slots]
        for rank, slot in enumerate(hosts.slots):
            report = self._backend.open_group(slot, role, ranks, rank)
            self.calls.add(report, role, rank, "join", slot, self._device_name(slot))

    def _device_name(self, slot: Slot) -> str:
        return f"{self.plan.kind}:{slot.device}"

    def _device(self, slot: Slot) -> str:
        if self.plan.kind == "cpu" or slot.pool == TASKS:
            return "cpu"
        # Ray shows a process only the device that it was given.
        return f"cuda:{slot.device}" if self._inline else "cuda:0"

    def _threads(self, slot: Slot) -> int:
        cores = os.cpu_count() or 1
        if self._num_threads is not None:
            return self._num_threads
        return cores if self._inline else max(1, cores // max(1, self._per_node[slot.node]))

    def pool(self, name: str) -> ResourcePool:
        """A pool of the placement."""
        return ResourcePool.of(self.plan.pools[name])

    def settle(self, timeout_s: float | None = None) -> None:
        """Waits for every call in flight that is made again where its process is lost. Raises the first failure."""
        self.calls.settle(self.calls.expected(), timeout_s)

    def restart(self) -> tuple[str, ...]:
        """Makes ready for another attempt at the program that made the groups, after a failure of some.

        Processes stay where another could take a lost one's place, if they have not failed: what they hold is given
        to them anew. All others are ended, and start on the same devices when `group` next asks for a role of theirs.
        What those that stay are at is waited for, a minute at most.

        Returns: the roles whose processes stay.
        """
        failures, revivals = self.calls.failures, self.calls.revivals
        cause = failures.first()
        assert cause is not None, "nothing has failed"
        started = list({hosts.name: hosts for hosts in self._sets.values() if hosts.name in self._started}.values())
        for hosts in started:
            if not all(revivals.brings_back(pool.name) for pool in hosts.pools):
                failures.end(hosts, cause)
        busy = self.calls.abandon(_ABANDON_S)
        for hosts in started:
            if busy.intersection(pool.name for pool in hosts.pools):
                failures.end(hosts, cause)
        self._forget([hosts for hosts in started if failures.of(hosts.pools[0].name)])
        return tuple(self._kept)

    def _forget(self, ended: Sequence[HostSet]) -> None:
        """Takes host sets whose processes have ended to where they were never started, and all groups apart."""
        self.calls.revivals.begin_again([slot for hosts in ended for slot in hosts.slots], self.calls.next_number())
        for hosts in ended:
            self.calls.failures.forget(hosts)
            self._handover.ledger.forget(hosts.slots)
            self._started.discard(hosts.name)
            self._joined.discard(hosts.name)
        gone = {slot for hosts in ended for slot in hosts.slots}
        self._kept = {role: made for role, made in self._groups.items() if gone.isdisjoint(made.group.slots)}
        self._groups = {TASKS: self._kept.pop(TASKS)} if TASKS in self._kept else {}
        self._attempt += 1
        if TASKS not in self._groups:
            self._tasks = self._make_tasks()

    def has_lost_nodes(self) -> bool:
        """Whether a node that the plan uses is gone."""
        return bool(self._backend.lost_nodes())

    def close(self) -> None:
        """Ends every process that this cluster started."""
        self.calls.close()
        self._backend.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


_TASK_POOL = PoolPlan(TASKS, (Slot(TASKS, 0, 0, 0, device=-1),))


def _ray_backend(address: str | None, say: Callable[[str], None]) -> Backend:
    from flowrl.controller.backends.ray_backend import RayBackend  # noqa: PLC0415 (the one lazy import: inline runs need no ray)

    return RayBackend(address, say)
