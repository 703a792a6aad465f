"""The nodes of a Ray cluster: starting one here or joining one, its devices, and the placement groups of pools."""

import errno
import ipaddress
import logging
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import psutil
import ray
from ray.exceptions import AuthenticationError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from flowrl.config.base import Device
from flowrl.controller.errors import BackendError
from flowrl.controller.placement.inventory import cluster_inventory, local_inventory
from flowrl.controller.placement.plan import Inventory, PlacementError, PoolPlan, Slot

_logger = logging.getLogger("flowrl")
_WAIT_LIMIT_S = 120.0
_FIRST_WORD_S, _NEXT_WORDS_S = 5.0, 30.0
_PROBE_TIMEOUT_S = 0.2

RAY_SETTINGS = {
    # Failures reach the driver through the calls that made them; Ray's own print of each would say it twice.
    "RAY_IGNORE_UNHANDLED_ERRORS": "1",
    # Or whatever the driver has put would stay for as long as any result that was ever computed from it. Calls are made
    # again without it; only results that are lost with a whole node would need it.
    "RAY_lineage_pinning_enabled": "0",
    # Ray gives its workers niceness 15: anything else that the machine runs, the driver too, would starve them.
    "RAY_worker_niceness": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Workers that Ray starts in advance would not be those of a run, which are forked.
    "RAY_prestart_worker_first_driver": "0",
}
"""The environment in which a run starts its Ray, where that says nothing else; nodes of a cluster have their own."""


@dataclass(frozen=True)
class _Node:
    """A Ray node as it was when this run started or joined Ray."""

    id: str
    name: str
    address: str
    port: int
    """Where its raylet listens."""
    devices: Mapping[str, int]
    """CPU and GPU -> how many it has."""


@dataclass(frozen=True)
class _Wanted:
    """The devices that a pool asks for: plan node -> how many."""

    pool: str
    resource: str
    counts: Mapping[int, int]


@dataclass(frozen=True)
class _Bundle:
    """What Ray keeps together of a pool: all whole devices of a node, or one that processes share."""

    node: int
    device: int | None = None
    """The one that processes share."""


class RayNodes:
    """A Ray of this run's own (no `address`), or the cluster that somebody started at `address`.

    Plans number its nodes in an order that is fixed here, once: the driver's own, then by address and id. Nodes that
    join later are not used.

    Args:
        address: the cluster to join.
        say: is told, every so often, what a pool waits for.
        wait_limit_s: for how long a pool waits for devices that others use.
    Raises:
        BackendError: nothing answers at `address`.
    """

    def __init__(
        self,
        address: str | None,
        *,
        say: Callable[[str], None] = _logger.warning,
        wait_limit_s: float = _WAIT_LIMIT_S,
    ) -> None:
        self._groups: dict[str, PlacementGroup] = {}
        self._bundles: dict[str, list[_Bundle]] = {}
        self._nodes: list[_Node] = []
        self._owns_ray = False
        self._say, self._wait_limit_s = say, wait_limit_s
        self.address = address
        for name, value in RAY_SETTINGS.items():
            os.environ.setdefault(name, value)
        if address is not None:
            _check_reachable(address)
            self.connect(0)

    def inventory(self, device: Device, devices: Sequence[int] | None) -> Inventory:
        """The devices of the nodes, in the order in which plans number them. Raises `PlacementError`."""
        if self.address is not None:
            names = [node.name for node in self._nodes]
            cpus, gpus = ([node.devices[resource] for node in self._nodes] for resource in ("CPU", "GPU"))
            return cluster_inventory(device, devices, names=names, cpus=cpus, gpus=gpus)
        if devices is not None and len(devices) > 1:
            raise PlacementError(
                f"devices is {list(devices)}, a count for each of {len(devices)} nodes, but a run without address has "
                f"one node, this machine: state one count, or set address"
            )
        return local_inventory(device, devices)

    def connect(self, num_slots: int) -> None:
        """Starts or joins Ray, if this process is not in it yet, and fixes the order of its nodes."""
        if not ray.is_initialized():
            self._owns_ray = True
            _start_ray(self.address, num_slots)
        self._nodes = _nodes_in_order()

    def reserve(self, pool: PoolPlan, kind: str) -> None:
        """Takes a pool's devices, each on its planned node. Raises `PlacementError` when they are not to be had."""
        counts = Counter(slot.node for slot in pool.slots)
        wanted = _Wanted(pool.name, "GPU" if kind == "cuda" else "CPU", dict(sorted(counts.items())))
        for node, count in wanted.counts.items():
            if count > self._nodes[node].devices[wanted.resource]:
                raise PlacementError(
                    f"placement.pools.{pool.name} needs {count} {wanted.resource} on {self._named(node)}, which has "
                    f"{self._nodes[node].devices[wanted.resource]}: make the pool smaller"
                )
        bundles = _bundles(pool, kind)
        group = placement_group(
            [{wanted.resource: count} for count in bundles.values()],
            bundle_label_selector=[{"ray.io/node-id": self._nodes[bundle.node].id} for bundle in bundles],
        )
        self._groups[pool.name], self._bundles[pool.name] = group, list(bundles)
        try:
            self._wait(group, wanted)
        except BaseException:
            self.release(pool.name)
            raise

    def _wait(self, group: PlacementGroup, wanted: _Wanted) -> None:
        started, next_word_s = time.monotonic(), _FIRST_WORD_S
        while not group.wait(0.5):
            waited_s = time.monotonic() - started
            gone = self._gone(wanted.counts)
            if gone:
                raise PlacementError(
                    f"placement.pools.{wanted.pool} needs {self._named(min(gone))}, which has left the cluster: "
                    f"bring it back, or make the pool smaller"
                )
            if waited_s >= self._wait_limit_s:
                raise PlacementError(
                    f"placement.pools.{wanted.pool} waited {waited_s:.0f} s for {self._shortage(wanted)}: "
                    f"end what uses them, or make the pool smaller"
                )
            if waited_s >= next_word_s:
                next_word_s += _NEXT_WORDS_S
                left_s = self._wait_limit_s - waited_s
                self._say(f"pool {wanted.pool} waits for {self._shortage(wanted)}; gives up in {left_s:.0f} s")

    def _shortage(self, wanted: _Wanted) -> str:
        """What is asked of which nodes and what pools have taken there; only those with too little, where that tells.

        What others use without a placement group, Ray counts for the whole cluster only.
        """
        taken = _taken(wanted.resource)
        has = {node: self._nodes[node].devices[wanted.resource] for node in wanted.counts}
        held = {node: taken[self._nodes[node].id] for node in wanted.counts}
        short = [node for node, count in wanted.counts.items() if has[node] - held[node] < count] or list(wanted.counts)
        return ", and ".join(
            f"{wanted.counts[node]} {wanted.resource} on {self._named(node)}, where pools hold "
            f"{held[node]} of {has[node]}"
            for node in short
        )

    def _named(self, node: int) -> str:
        return f"node {node} ({self._nodes[node].name})"

    def bundle(self, slot: Slot) -> PlacementGroupSchedulingStrategy:
        """Where Ray is to start the process of a slot, whose pool is reserved."""
        bundles, own = self._bundles[slot.owner], _Bundle(slot.node, slot.device)
        index = bundles.index(own if own in bundles else _Bundle(slot.node))
        return PlacementGroupSchedulingStrategy(self._groups[slot.owner], placement_group_bundle_index=index)

    def id_of(self, slot: Slot) -> str:
        """Ray's name for the node of a slot."""
        return self._nodes[slot.node].id

    def beside_driver(self) -> NodeAffinitySchedulingStrategy:
        """Where Ray is to start a process that takes no device: left alone it picks any node."""
        return NodeAffinitySchedulingStrategy(self._nodes[0].id, soft=False)

    def lost(self) -> dict[int, str]:
        """Plan node -> name of every node that a pool is on and that is no longer alive.

        Costs a connection to each such node and, when all of them answer, one request to Ray.
        """
        on_cluster = self._bundles.values() if self.address is not None else ()
        used = {bundle.node for bundles in on_cluster for bundle in bundles}
        return {node: self._nodes[node].name for node in sorted(self._gone(used))}

    def _gone(self, nodes: Collection[int]) -> set[int]:
        # Ray calls a node dead after a quarter of a minute without a sign of it; a port that nobody holds any more
        # tells at once that its raylet has ended.
        refusing = {node for node in nodes if _refuses(self._nodes[node])}
        if refusing or not nodes:
            return refusing
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        return {node for node in nodes if self._nodes[node].id not in alive}

    def release(self, pool: str) -> None:
        """Gives a pool's devices back, and ends what still runs on them."""
        if pool in self._groups:
            del self._bundles[pool]
            remove_placement_group(self._groups.pop(pool))

    @property
    def end_with_run(self) -> bool:
        """Whether the nodes are this run's own: their end takes everything with it, and nothing is to be released
        first. Parts of them may be gone already, where a scheduler signals every process, and then that would wait."""
        return self._owns_ray and self.address is None

    def close(self) -> None:
        """Releases every pool, and ends the Ray that was started here."""
        if not self.end_with_run:
            for pool in list(self._groups):
                self.release(pool)
        if self._owns_ray:
            ray.shutdown()


def _bundles(pool: PoolPlan, kind: str) -> Counter[_Bundle]:
    """How many devices each bundle of a pool has.

    One bundle for a node is what Ray makes fastest, and from it Ray gives whole devices to one process each. Parts of
    devices it puts wherever they fit best, whatever the plan says, so a GPU that processes share has a bundle alone.
    CPU slots have nothing that tells one from another.
    """
    parted = [slot for slot in pool.slots if kind == "cuda" and slot.devices < 1]
    return Counter(_Bundle(slot.node, slot.device if slot in parted else None) for slot in pool.slots)


def _taken(resource: str) -> Counter[str]:
    """Node id -> how much of a resource the placement groups of all jobs hold there."""
    held: Counter[str] = Counter()
    for group in placement_group_table().values():
        if group["state"] == "CREATED":
            for index, node in group["bundles_to_node_id"].items():
                held[node] += int(group["bundles"][index].get(resource, 0))
    return held


def _nodes_in_order() -> list[_Node]:
    own = ray.get_runtime_context().get_node_id()
    nodes = [_read_node(node) for node in ray.nodes() if node["Alive"]]
    return sorted(nodes, key=lambda node: (node.id != own, _numerical(node.address), node.id))


def _read_node(node: Mapping) -> _Node:
    address, name = node["NodeManagerAddress"], node["NodeName"]
    devices = {resource: int(node["Resources"].get(resource, 0)) for resource in ("CPU", "GPU")}
    text = address if name in ("", address) else f"{name}, {address}"
    return _Node(node["NodeID"], text, address, node["NodeManagerPort"], devices)


def _numerical(address: str) -> tuple[int, bytes]:
    """A key that puts 10.0.0.9 before 10.0.0.10, and names that are no addresses last."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return 9, address.encode()
    return parsed.version, parsed.packed


def _refuses(node: _Node) -> bool:
    """Whether the node's machine says that nothing listens where its raylet did; silence is no answer."""
    try:
        socket.create_connection((node.address, node.port), timeout=_PROBE_TIMEOUT_S).close()
    except OSError as error:
        return error.errno == errno.ECONNREFUSED
    return False


def interface_of(address: str) -> str | None:
    """The name of this machine's network interface that has `address`."""
    interfaces = psutil.net_if_addrs().items()
    return next((name for name, found in interfaces if any(one.address == address for one in found)), None)


def _start_ray(address: str | None, num_slots: int) -> None:
    if address is not None:
        _join_ray(address)
        return
    # Ray's own processes listen on every interface, whatever address a node is given: what keeps others out is Ray's
    # token, which is on unless the environment says otherwise.
    if os.environ.get("RAY_AUTH_MODE") == "disabled":
        raise BackendError("RAY_AUTH_MODE is disabled, so anyone on the network could run code in this run: unset it")
    ray.init(
        address="local",  # not a cluster that somebody else has left running on this machine
        num_cpus=max(num_slots, os.cpu_count() or 1),
        include_dashboard=False,
        logging_level=logging.ERROR,
        log_to_driver=False,
    )


def _join_ray(address: str) -> None:
    try:
        ray.init(address=address, logging_level=logging.WARNING, log_to_driver=False)
    except (ConnectionError, AuthenticationError) as error:
        # Ray's own cause is a traceback as text.
        cause = str(error.__cause__ or error)
        if isinstance(error, AuthenticationError) or AuthenticationError.__name__ in cause:
            raise BackendError(
                f"the Ray cluster at address {address} asks for its token, which this process does not give: set "
                f"RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN_PATH to a file with the token of its nodes"
            ) from None
        last = cause.strip().rpartition("\n")[2]
        raise BackendError(
            f"the Ray cluster at address {address} cannot be joined ({last}): see that Ray runs there, and start the "
            f"run on one of its nodes"
        ) from None


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
