"""The Ray backend: one actor process per device. The only module that imports ray."""

import logging
import os
import warnings
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from flowrl.config.base import Device
from flowrl.controller.errors import FlowError, WorkerError
from flowrl.controller.host import Construction, Host
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
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

    def open_rendezvous(self, world_size: int, device: str) -> tuple[str, int] | None:
        """Opens the pool's rendezvous on this host, its first rank."""
        return self.join((self._interface, 0), 0, world_size, device)


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
        except RayActorError as error:
            raise self._failure(error) from None
        except RayError as error:
            raise self._failure(error) from None

    def done(self) -> bool:
        return bool(ray.wait([self.ref], timeout=0, fetch_local=False)[0])

    def _failure(self, error: Exception) -> WorkerError:
        role, rank, node, method = self._what
        return WorkerError(role, rank, node, method, f"{type(error).__name__}: {error}")


class RayBackend:
    """Hosts as Ray actors, on a Ray of this run's own or on the cluster at `address`."""

    def __init__(self, address: str | None, num_slots: int) -> None:
        self._hosts: dict[tuple[str, int], Any] = {}  # Any: ray.actor.ActorHandle, whose methods Ray does not type
        self._groups: dict[str, PlacementGroup] = {}
        # Failures reach the driver through the calls that made them; Ray's own print of each would say it twice.
        os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
        self._owns_ray = not ray.is_initialized()
        self._loopback = address is None
        if self._owns_ray:
            _start_ray(address, num_slots)

    def start_pool(self, pool: PoolPlan, kind: str) -> None:
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
            self._hosts[pool.name, slot.rank] = actor.options(scheduling_strategy=bundle, **devices).remote(
                self._loopback
            )

    def join(self, pool: PoolPlan, kind: str) -> None:
        size = len(pool.slots)
        first = self._hosts[pool.name, 0]
        address = first.open_rendezvous.remote(size, kind)
        for slot in pool.slots:
            self._hosts[pool.name, slot.rank].join.remote(address, slot.rank, size, kind)

    def construct(self, slot: Slot, construction: Construction) -> Ref:
        method = self._hosts[slot.pool, slot.rank].construct
        _, report = method.options(num_returns=2).remote(construction)
        return RayRef(report, (construction.role, slot.rank, slot.node, "__init__"))

    def call(self, slot: Slot, request: Request, refs: Sequence[Ref]) -> tuple[Ref, Ref]:
        objects = [_object_ref(ref) for ref in refs]
        method = self._hosts[slot.pool, slot.rank].call
        value, report = method.options(num_returns=2).remote(request, *objects)
        what = (request.role, slot.rank, slot.node, request.method)
        return RayRef(value, what), RayRef(report, what)

    def share(self, payload: Payload) -> Ref:
        return RayRef(ray.put(payload), ("driver", 0, 0, "put"))

    def wait(self, refs: Sequence[Ref], timeout_s: float | None) -> list[Ref]:
        by_object = {_object_ref(ref): ref for ref in refs}
        ready, _ = ray.wait(list(by_object), num_returns=1, timeout=timeout_s, fetch_local=False)
        if ready:
            ready, _ = ray.wait(list(by_object), num_returns=len(by_object), timeout=0, fetch_local=False)
        return [by_object[ref] for ref in ready]

    def end_pool(self, name: str) -> None:
        for key in [key for key in self._hosts if key[0] == name]:
            ray.kill(self._hosts.pop(key), no_restart=True)
        if name in self._groups:
            remove_placement_group(self._groups.pop(name))

    def close(self) -> None:
        for name in list(self._groups):
            self.end_pool(name)
        if self._owns_ray:
            ray.shutdown()


def cluster_inventory(address: str, device: Device) -> Inventory:
    """The devices of the Ray cluster at an address, which this process joins."""
    if not ray.is_initialized():
        _start_ray(address, 0)
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    gpus = [int(node.get("GPU", 0)) for node in nodes]
    if device == "cuda" or (device == "auto" and sum(gpus)):
        return Inventory(tuple(count for count in gpus if count), "cuda")
    return Inventory(tuple(int(node.get("CPU", 0)) for node in nodes), "cpu")


def _object_ref(ref: Ref) -> ray.ObjectRef:
    assert isinstance(ref, RayRef), f"a {type(ref).__name__} cannot travel by reference"
    return ref.ref


def _start_ray(address: str | None, num_slots: int) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if address is not None:
        ray.init(address=address, logging_level=logging.WARNING, log_to_driver=False)
        return
    ray.init(
        num_cpus=max(num_slots, os.cpu_count() or 1),
        include_dashboard=False,
        _node_ip_address=_LOOPBACK,
        logging_level=logging.ERROR,
        log_to_driver=False,
    )
