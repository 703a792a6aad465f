"""Cluster: a placement, planned and started. Where groups come from."""

import os
import time
from collections import Counter
from types import TracebackType
from typing import Any, Literal, Self

from flowrl.config import Placement
from flowrl.controller.backend import Backend
from flowrl.controller.calls import Calls
from flowrl.controller.errors import ContractError
from flowrl.controller.group import WorkerGroup
from flowrl.controller.host import Construction
from flowrl.controller.inline_backend import InlineBackend
from flowrl.controller.plan import Mesh, PlacementError, Plan, PoolPlan, Slot, plan
from flowrl.controller.pool import ResourcePool
from flowrl.controller.tasks import GroupTasks, Tasks
from flowrl.controller.worker import Worker

TASKS = "tasks"
"""Role and pool of the process that runs pure functions beside the data."""


class Cluster:
    """Starts the hosts of a placement, makes worker groups on them, and ends what it started.

    Args:
        placement: pools and roles.
        backend: `ray` (a process per device) or `inline` (this process).
        address: a Ray cluster to join; None starts one here.
        devices: devices per node that may be used; None asks the machine.
        roles: the roles that will be made; None is all that the placement names.
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
        num_threads: int | None = None,
        prepare: tuple[str, ...] = (),
    ) -> None:
        self._inline = backend == "inline"
        self._num_threads = num_threads
        if TASKS in placement.pools or TASKS in placement.roles:
            raise PlacementError(f"placement names a pool or role {TASKS}, which is flowrl's own: choose another name")
        self._backend: Backend = InlineBackend() if self._inline else _ray_backend(address)
        self.calls = Calls(self._backend)
        self._joined: set[str] = set()
        self._groups: dict[str, WorkerGroup] = {}
        try:
            self.plan: Plan = plan(placement, self._backend.inventory(placement.device, devices), roles)
            pools = list(self.plan.pools.values())
            self._per_node = Counter(slot.node for pool in pools for slot in pool.slots)
            self._backend.start_pools(pools, self.plan.kind)
            self._backend.start_tasks(_TASK_POOL)
            tasks = self._make(TASKS, Tasks, _TASK_POOL, Mesh(1, 1, 1, 1), (), {})
            if prepare:
                tasks.prepare.submit(prepare)
        except BaseException:
            self.close()
            raise
        self._tasks = GroupTasks(tasks)

    def group(self, role: str, cls: type[Worker], /, *args: Any, **kwargs: Any) -> WorkerGroup:
        """Makes a role's workers, one `cls(*args, **kwargs)` per rank. Does not wait for their constructors.

        Futures are not taken as arguments. A constructor that raises is told at the group's next call.
        """
        if role in self._groups:
            raise ContractError(f"role {role!r} has its group already; a role is made once")
        if role not in self.plan.roles:
            raise ContractError(
                f"role {role!r} is not in the placement, which has {', '.join(self.plan.roles)}; add it to roles"
            )
        planned = self.plan.roles[role]
        pool, mesh = self.plan.pools[planned.pool], planned.mesh
        if cls.collective and self._inline:
            # One process cannot hold several members of a process group; with one rank the numbers are the same.
            pool, mesh = PoolPlan(pool.name, pool.slots[:1]), Mesh(1, 1, 1, 1)
        return self._make(role, cls, pool, mesh, args, kwargs)

    def _make(self, role: str, cls: type[Worker], pool: PoolPlan, mesh: Mesh, args: tuple, kwargs: dict) -> WorkerGroup:
        if cls.collective and len(pool.slots) > 1 and pool.name not in self._joined:
            self._join(pool)
        self.calls.check(pool.name)
        group = WorkerGroup(role, cls, pool.slots, mesh, self._backend, self.calls, self.plan.kind)
        for slot in pool.slots:
            device = self._device(slot, pool.name)
            made = Construction(role, cls, args, kwargs, mesh, slot, device, self._threads(slot))
            report = self._backend.construct(slot, made)
            self.calls.add(report, role, "__init__", slot, group.device_name(slot), time.time_ns())
        self._groups[role] = group
        if role != TASKS:
            group.tasks = self._tasks
        return group

    def _join(self, pool: PoolPlan) -> None:
        self._joined.add(pool.name)
        reports = self._backend.join(pool, self.plan.kind)
        # The first rank is called twice: it opens the rendezvous before it joins like the others.
        for slot, report in zip((pool.slots[0], *pool.slots), reports, strict=True):
            self.calls.add(report, pool.name, "join", slot, f"{self.plan.kind}:{slot.device}", time.time_ns())

    def _device(self, slot: Slot, pool: str) -> str:
        if self.plan.kind == "cpu" or pool == TASKS:
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
        """Waits for every call in flight. Raises the first failure."""
        self.calls.settle(self.calls.pending(), timeout_s)

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


def _ray_backend(address: str | None) -> Backend:
    from flowrl.controller.ray_backend import RayBackend  # noqa: PLC0415 (the one lazy import: inline runs need no ray)

    return RayBackend(address)
