"""The nodes of a Ray cluster: starting one here or joining one, its devices, and the placement groups of pools."""

import logging
import os
import socket
from collections.abc import Sequence

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from flowrl.config.base import Device
from flowrl.controller.errors import BackendError
from flowrl.controller.inventory import local_inventory
from flowrl.controller.plan import Inventory, PlacementError, PoolPlan, Slot

_PLACEMENT_TIMEOUT_S = 120.0


class RayNodes:
    """A Ray of this run's own (no `address`), or the cluster that somebody started at `address`."""

    def __init__(self, address: str | None) -> None:
        self._groups: dict[str, PlacementGroup] = {}
        self._bundles: dict[str, list[int]] = {}
        self._owns_ray = False
        self.address = address
        # Failures reach the driver through the calls that made them; Ray's own print of each would say it twice.
        os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
        if address is not None:
            _check_reachable(address)
            self.connect(0)

    def inventory(self, device: Device, devices: Sequence[int] | None) -> Inventory:
        """The devices of the nodes, in the order in which plans number them."""
        if self.address is None or devices is not None:
            return local_inventory(device, devices)
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        gpus = [int(node.get("GPU", 0)) for node in nodes]
        if device == "cuda" or (device == "auto" and sum(gpus)):
            return Inventory(tuple(count for count in gpus if count), "cuda")
        return Inventory(tuple(int(node.get("CPU", 0)) for node in nodes), "cpu")

    def connect(self, num_slots: int) -> None:
        """Starts or joins Ray, if this process is not in it yet."""
        if not ray.is_initialized():
            self._owns_ray = True
            _start_ray(self.address, num_slots)

    def reserve(self, pool: PoolPlan, kind: str) -> None:
        """Takes a pool's devices. Raises `PlacementError` when they are not to be had."""
        nodes = sorted({slot.node for slot in pool.slots})
        counts = [sum(slot.node == node for slot in pool.slots) for node in nodes]
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
        self._groups[pool.name], self._bundles[pool.name] = group, nodes

    def bundle(self, slot: Slot) -> PlacementGroupSchedulingStrategy:
        """Where Ray is to start the process of a slot, whose pool is reserved."""
        index = self._bundles[slot.pool].index(slot.node)
        return PlacementGroupSchedulingStrategy(self._groups[slot.pool], placement_group_bundle_index=index)

    def release(self, pool: str) -> None:
        """Gives a pool's devices back, and ends what still runs on them."""
        if pool in self._groups:
            remove_placement_group(self._groups.pop(pool))

    def close(self) -> None:
        """Releases every pool, and ends the Ray that was started here."""
        for pool in list(self._groups):
            self.release(pool)
        if self._owns_ray:
            ray.shutdown()


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
