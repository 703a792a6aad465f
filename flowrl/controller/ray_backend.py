"""The Ray backend: one actor process per device. The only module that imports ray."""

import logging
import os
import socket
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from flowrl.config.base import Device
from flowrl.controller.errors import BackendError, FlowError, WorkerError
from flowrl.controller.host import Construction, Host, Report
from flowrl.controller.inventory import local_inventory
from flowrl.controller.plan import Inventory, PlacementError, PoolPlan, Slot
from flowrl.controller.wire import Request
from flowrl.data.block import Ref
from flowrl.data.payload import Payload

_LOOPBACK = "127.0.0.1"
_PLACEMENT_TIMEOUT_S = 120.0


class _RayHost(Host):
    """A host in a process of its own."""

    def __init__(self, loopback: bool) -> None:
        super().__init__()
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
        self._groups: dict[str, PlacementGroup] = {}
        # Failures reach the driver through the calls that made them; Ray's own print of each would say it twice.
        os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
        self._owns_ray = False
        self._address = address
        if address is not None:
            _check_reachable(address)
            self._connect(0)

    def inventory(self, device: Device, devices: Sequence[int] | None) -> Inventory:
        if self._address is None or devices is not None:
            return local_inventory(device, devices)
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        gpus = [int(node.get("GPU", 0)) for node in nodes]
        if device == "cuda" or (device == "auto" and sum(gpus)):
            return Inventory(tuple(count for count in gpus if count), "cuda")
        return Inventory(tuple(int(node.get("CPU", 0)) for node in nodes), "cpu")

    def _connect(self, num_slots: int) -> None:
        if not ray.is_initialized():
            self._owns_ray = True
            _start_ray(self._address, num_slots)

    def start_tasks(self, pool: PoolPlan) -> None:
        # Beside the driver, on whichever node Ray likes: it takes part of no device's time worth counting.
        actor = ray.remote(_RayHost).options(num_cpus=0)
        self._add_host(pool.slots[0], actor.remote(self._address is None))

    def _add_host(self, slot: Slot, host: Any) -> None:  # Any: ray.actor.ActorHandle
        self._hosts[slot.pool, slot.rank] = host
        self._methods[slot.pool, slot.rank] = host.call.options(num_returns=2)

    def start_pools(self, pools: Sequence[PoolPlan], kind: str) -> None:
        self._connect(sum(len(pool.slots) for pool in pools))
        for pool in pools:
            self._start_pool(pool, kind)

    def _start_pool(self, pool: PoolPlan, kind: str) -> None:
        counts = [sum(slot.node == node for slot in pool.slots) for node in sorted({slot.node for slot in pool.slots})]
        resource = "GPU" if kind == "cuda" else "CPU"
        strategy = "STRICT_SPREAD" if len(counts) > 1 else "PACK"
        group = placement_group([{resource: count} for count in counts], strategy=strategy)
        if not group.wait(_PLACEMENT_TIMEOUT_S):
            remove_placement_group(group)
            raise PlacementError(
                f"placement.pools.{pool.name} waited {_PLACEMENT_TIMEOUT_S:.0f} s for {counts} {resource} per node "
                f"and did not get them; the cluster has {ray.available_resources().get(resource, 0):g} free: "
                f"make the pool smaller"
            )
        self._groups[pool.name] = group
        nodes = sorted({slot.node for slot in pool.slots})
        actor = ray.remote(_RayHost)
        for slot in pool.slots:
            bundle = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=nodes.index(slot.node))
            devices = {"num_gpus": 1, "num_cpus": 0} if kind == "cuda" else {"num_cpus": 1}
            host = actor.options(scheduling_strategy=bundle, **devices).remote(self._address is None)
            self._add_host(slot, host)

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
        if name in self._groups:
            remove_placement_group(self._groups.pop(name))

    def close(self) -> None:
        for name in {pool for pool, _ in self._hosts} | set(self._groups):
            self.end_pool(name)
        if self._owns_ray:
            ray.shutdown()


def _object_ref(ref: Ref) -> ray.ObjectRef:
    assert isinstance(ref, RayRef), f"a {type(ref).__name__} cannot travel by reference"
    return ref.ref


def _start_ray(address: str | None, num_slots: int) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if address is not None:
        ray.init(address=address, logging_level=logging.WARNING, log_to_driver=False)
        return
    # Ray's own processes listen on every interface, whatever address a node is given: what keeps others out is Ray's
    # token, which is on unless the environment says otherwise.
    if os.environ.get("RAY_AUTH_MODE") == "disabled":
        raise BackendError("RAY_AUTH_MODE is disabled, so anyone on the network could run code in this run: unset it")
    ray.init(
        num_cpus=max(num_slots, os.cpu_count() or 1),
        include_dashboard=False,
        logging_level=logging.ERROR,
        log_to_driver=False,
    )


def _check_reachable(address: str) -> None:
    """Refuses an address that nothing answers at: Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if not port.isdecimal() or "://" in address:
        return  # `auto` and the addresses of Ray's client are Ray's to resolve
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except OSError as error:
        raise BackendError(
            f"address is {address}, where no Ray cluster answers ({error}): start one with ray start --head, "
            f"or remove address"
        ) from None
