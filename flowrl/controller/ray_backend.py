"""The Ray backend: one actor process per device. With ray_nodes.py the only module that imports ray."""

import os
import signal
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from flowrl.config.base import Device
from flowrl.controller.errors import FlowError, WorkerError
from flowrl.controller.host import Construction, Host, Report
from flowrl.controller.plan import Inventory, PoolPlan, Slot
from flowrl.controller.ray_nodes import RayNodes
from flowrl.controller.wire import Request
from flowrl.data.block import Ref
from flowrl.data.payload import Payload

_LOOPBACK = "127.0.0.1"


class _RayHost(Host):
    """A host in a process of its own."""

    def __init__(self, loopback: bool) -> None:
        super().__init__()
        # A terminal sends Ctrl-C to every process in it; how a run ends is for its driver to say.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # Objects are read from shared memory that is not writable; `Host` checks that no method writes, so torch need
        # not say.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        self._interface = _LOOPBACK if loopback else ray.util.get_node_ip_address()
        if loopback:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")

    def open_rendezvous(self, slot: Slot, world_size: int, kind: str) -> tuple[Any, Report]:
        """Opens the pool's rendezvous on this host, its first rank."""
        return self.join((self._interface, 0), slot, world_size, kind)


class RayRef:
    """A reference into the object store."""

    def __init__(self, ref: ray.ObjectRef, what: tuple[str, int, int, str]) -> None:
        self.ref = ref
        self._what = what

    @property
    def carrier(self) -> "RayRef":
        return self

    def get(self) -> Any:  # Any: whatever the method returned
        try:
            return ray.get(self.ref)
        except RayTaskError as error:
            cause = error.cause
            raise (cause if isinstance(cause, FlowError) else self._failure(error)) from None
        except RayError as error:
            raise self._failure(error) from None

    def done(self) -> bool:
        return bool(ray.wait([self.ref], timeout=0, fetch_local=False)[0])

    def _failure(self, error: Exception) -> WorkerError:
        role, rank, node, method = self._what
        if isinstance(error, RayActorError):
            # Which call it was that met the dead process says nothing of why it died.
            return WorkerError(role, rank, node, method, f"its process has ended ({type(error).__name__})", str(error))
        return WorkerError(role, rank, node, method, f"{type(error).__name__}: {error}")


class RayBackend:
    """Hosts as Ray actors, on a Ray of this run's own or on the cluster at `address`."""

    def __init__(self, address: str | None) -> None:
        self._hosts: dict[tuple[str, int], Any] = {}  # Any: ray.actor.ActorHandle, whose methods Ray does not type
        self._methods: dict[tuple[str, int], Any] = {}  # Any: as above; each costs as much as a call
        self._nodes = RayNodes(address)

    def inventory(self, device: Device, devices: Sequence[int] | None) -> Inventory:
        return self._nodes.inventory(device, devices)

    def start_tasks(self, pool: PoolPlan) -> None:
        # Beside the driver, on whichever node Ray likes: it takes part of no device's time worth counting.
        actor = ray.remote(_RayHost).options(num_cpus=0)
        self._add_host(pool.slots[0], actor.remote(self._nodes.address is None))

    def _add_host(self, slot: Slot, host: Any) -> None:  # Any: ray.actor.ActorHandle
        self._hosts[slot.pool, slot.rank] = host
        self._methods[slot.pool, slot.rank] = host.call.options(num_returns=2)

    def start_pools(self, pools: Sequence[PoolPlan], kind: str) -> None:
        self._nodes.connect(sum(len(pool.slots) for pool in pools))
        actor = ray.remote(_RayHost)
        devices = {"num_gpus": 1, "num_cpus": 0} if kind == "cuda" else {"num_cpus": 1}
        for pool in pools:
            self._nodes.reserve(pool, kind)
            for slot in pool.slots:
                options = actor.options(scheduling_strategy=self._nodes.bundle(slot), **devices)
                self._add_host(slot, options.remote(self._nodes.address is None))

    def join(self, pool: PoolPlan, kind: str) -> list[Ref]:
        size, reports = len(pool.slots), []
        first = self._hosts[pool.name, 0].open_rendezvous.options(num_returns=2)
        address, opened = first.remote(pool.slots[0], size, kind)
        reports.append(RayRef(opened, (pool.name, 0, pool.slots[0].node, "join")))
        for slot in pool.slots:
            _, report = self._hosts[pool.name, slot.rank].join.options(num_returns=2).remote(address, slot, size, kind)
            reports.append(RayRef(report, (pool.name, slot.rank, slot.node, "join")))
        return reports

    def construct(self, slot: Slot, construction: Construction) -> Ref:
        method = self._hosts[slot.pool, slot.rank].construct
        _, report = method.options(num_returns=2).remote(construction)
        return RayRef(report, (construction.role, slot.rank, slot.node, "__init__"))

    def call(self, slot: Slot, request: Request, refs: Sequence[Ref]) -> tuple[Ref, Ref]:
        objects = [_object_ref(ref) for ref in refs]
        value, report = self._methods[slot.pool, slot.rank].remote(request, *objects)
        what = (request.role, slot.rank, slot.node, request.method)
        return RayRef(value, what), RayRef(report, what)

    def share(self, payload: Payload) -> Ref:
        return RayRef(ray.put(payload), ("driver", 0, 0, "put"))

    def wait(self, refs: Sequence[Ref], timeout_s: float) -> list[Ref]:
        by_object = {_object_ref(ref): ref for ref in refs}
        ready, _ = ray.wait(list(by_object), num_returns=len(by_object), timeout=timeout_s, fetch_local=False)
        return [by_object[ref] for ref in ready]

    def get(self, refs: Sequence[Ref]) -> list[Any]:
        try:
            return ray.get([_object_ref(ref) for ref in refs])
        except RayError:
            return [ref.get() for ref in refs]

    def end_pool(self, name: str) -> None:
        for key in [key for key in self._hosts if key[0] == name]:
            del self._methods[key]
            ray.kill(self._hosts.pop(key), no_restart=True)
        self._nodes.release(name)

    def close(self) -> None:
        for name in {pool for pool, _ in self._hosts}:
            self.end_pool(name)
        self._nodes.close()


def _object_ref(ref: Ref) -> ray.ObjectRef:
    assert isinstance(ref, RayRef), f"a {type(ref).__name__} cannot travel by reference"
    return ref.ref
