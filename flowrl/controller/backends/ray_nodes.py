"""Starts or joins Ray, assigns an index to each node, and reserves the devices of pools with placement groups."""

import errno
import ipaddress
import logging
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass

import grpc
import ray
from ray._private import services
from ray._private.authentication.authentication_utils import is_token_auth_enabled
from ray._private.grpc_utils import init_grpc_channel
from ray.exceptions import AuthenticationError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from flowrl.config.base import Device
from flowrl.controller.backends.local_ray import RAY_SETTINGS, LocalRay, find_local_end
from flowrl.controller.errors import BackendError
from flowrl.controller.host.process_end import ProcessEnds
from flowrl.controller.placement.cpu_threads import count_usable_cpus
from flowrl.controller.placement.inventory import check_one_node, cluster_inventory, local_inventory
from flowrl.controller.placement.plan import Inventory, PlacementError, PoolPlan, Slot

_logger = logging.getLogger("flowrl")
_WAIT_LIMIT_S = 120.0
_FIRST_NOTICE_S, _NOTICE_INTERVAL_S = 5.0, 30.0
_PROBE_TIMEOUT_S = 0.2
_RESPONSE_TIMEOUT_S = 5.0
_CLUSTER_ID_METHOD = "/ray.rpc.NodeInfoGcsService/GetClusterId"
"""Method that each process calls first to join a cluster. Ray has no public function that calls it with a deadline."""


@dataclass(frozen=True)
class _Node:
    id: str
    name: str
    address: str
    port: int
    """Port of the raylet."""
    devices: Mapping[str, int]
    """Number of devices of each Ray resource, CPU and GPU."""


@dataclass(frozen=True)
class _Demand:
    pool: str
    resource: str
    counts: Mapping[int, int]
    """Node index -> number of devices."""


@dataclass(frozen=True)
class _Bundle:
    """A bundle of a placement group: all exclusive devices of a pool on one node, or one shared device."""

    node: int
    device: int | None = None
    """Index of the shared device; None for exclusive devices."""


class RayNodes:
    """The nodes of a local Ray, or of the cluster at `address`.

    The driver's node has index 0. The other nodes are sorted by address and id. Nodes that join later are ignored.

    Args:
        address: address of the cluster to join. None starts a local Ray.
        notify: called with a message while a pool waits for devices.
        wait_limit_s: timeout in seconds for a pool whose devices are in use.
        ends: describes the ends of Ray's own processes on a local Ray.
    Raises:
        BackendError: no Ray cluster at `address` responds and accepts this process.
    """

    def __init__(
        self,
        address: str | None,
        *,
        notify: Callable[[str], None] = _logger.warning,
        wait_limit_s: float = _WAIT_LIMIT_S,
        ends: ProcessEnds | None = None,
    ) -> None:
        self._groups: dict[str, PlacementGroup] = {}
        self._bundles: dict[str, list[_Bundle]] = {}
        self._nodes: list[_Node] = []
        self._owns_ray = False
        self._local_ray: LocalRay | None = None
        self._notify, self._wait_limit_s, self._ends = notify, wait_limit_s, ends
        for name, value in RAY_SETTINGS.items():
            os.environ.setdefault(name, value)
        self.address = None if address is None else _resolve_auto(address)
        if self.address is not None:
            check_cluster(self.address)
            self.connect(0)

    def inventory(self, device: Device, devices: Sequence[int] | None) -> Inventory:
        """Returns the devices of the nodes, by node index. Raises `PlacementError` if `devices` is too large."""
        if self.address is not None:
            names = [node.name for node in self._nodes]
            cpus, gpus = ([node.devices[resource] for node in self._nodes] for resource in ("CPU", "GPU"))
            return cluster_inventory(device, devices, names=names, cpus=cpus, gpus=gpus)
        check_one_node(devices)
        return local_inventory(device, devices)

    def connect(self, num_slots: int) -> None:
        """Starts or joins Ray, unless this process is already connected, and lists the nodes."""
        if not ray.is_initialized():
            self._owns_ray = True
            if self.address is None:
                self._local_ray = LocalRay(max(num_slots, count_usable_cpus()), self._ends)
            else:
                _join_ray(self.address)
        self._nodes = _nodes_in_order()

    def reserve(self, pool: PoolPlan, kind: str) -> None:
        """Reserves the devices of a pool on the planned nodes. Raises `PlacementError` if they are not available."""
        counts = Counter(slot.node for slot in pool.slots)
        demand = _Demand(pool.name, "GPU" if kind == "cuda" else "CPU", dict(sorted(counts.items())))
        for node, count in demand.counts.items():
            if count > self._nodes[node].devices[demand.resource]:
                raise PlacementError(
                    f"placement.pools.{pool.name} needs {count} {demand.resource} on {self._describe_node(node)}, "
                    f"which has {self._nodes[node].devices[demand.resource]}: make the pool smaller"
                )
        bundles = _bundles(pool, kind)
        group = placement_group(
            [{demand.resource: count} for count in bundles.values()],
            bundle_label_selector=[{"ray.io/node-id": self._nodes[bundle.node].id} for bundle in bundles],
        )
        self._groups[pool.name], self._bundles[pool.name] = group, list(bundles)
        with ExitStack() as on_error:
            on_error.callback(self.release, pool.name)  # otherwise, an interrupt would leave devices reserved
            self._wait(group, demand)
            on_error.pop_all()

    def _wait(self, group: PlacementGroup, demand: _Demand) -> None:
        started, next_notice_s = time.monotonic(), _FIRST_NOTICE_S
        while not group.wait(0.5):
            waited_s = time.monotonic() - started
            lost = self._lost(demand.counts)
            if lost:
                raise PlacementError(
                    f"placement.pools.{demand.pool} needs {self._describe_node(min(lost))}, but {lost[min(lost)]}: "
                    f"restart that node, or make the pool smaller"
                )
            if waited_s >= self._wait_limit_s:
                raise PlacementError(
                    f"placement.pools.{demand.pool} waited {waited_s:.0f} s for {self._shortage(demand)}: "
                    f"end the program that uses them, or make the pool smaller"
                )
            if waited_s >= next_notice_s:
                next_notice_s += _NOTICE_INTERVAL_S
                left_s = self._wait_limit_s - waited_s
                self._notify(f"pool {demand.pool} waits for {self._shortage(demand)}; gives up in {left_s:.0f} s")

    def _shortage(self, demand: _Demand) -> str:
        """Returns a message with the requested and reserved devices of each node with too few free devices.

        Lists all requested nodes if none is short, because Ray does not report usage outside placement groups by node.
        """
        reserved = _reserved(demand.resource)
        total = {node: self._nodes[node].devices[demand.resource] for node in demand.counts}
        in_use = {node: reserved[self._nodes[node].id] for node in demand.counts}
        short = [node for node, count in demand.counts.items() if total[node] - in_use[node] < count] or list(
            demand.counts
        )
        return ", and ".join(
            f"{demand.counts[node]} {demand.resource} on {self._describe_node(node)}, where pools hold "
            f"{in_use[node]} of {total[node]}"
            for node in short
        )

    def _describe_node(self, node: int) -> str:
        return f"node {node} ({self._nodes[node].name})"

    def bundle(self, slot: Slot) -> PlacementGroupSchedulingStrategy:
        """Returns the scheduling strategy that starts a slot's process on the slot's device."""
        bundles, own = self._bundles[slot.owner], _Bundle(slot.node, slot.device)
        index = bundles.index(own if own in bundles else _Bundle(slot.node))
        return PlacementGroupSchedulingStrategy(self._groups[slot.owner], placement_group_bundle_index=index)

    def count_usable_cpus(self, nodes: Collection[int]) -> dict[int, int]:
        """Returns node index -> number of CPUs that processes may use. Raises `PlacementError` if a node does not
        respond.
        """
        if self.address is None:
            return dict.fromkeys(nodes, count_usable_cpus())
        # Counted by a task on each node, because processes inherit the affinity and the quota of the node's raylet.
        counting = ray.remote(num_cpus=0)(count_usable_cpus)
        counts = {
            node: counting.options(
                scheduling_strategy=NodeAffinitySchedulingStrategy(self._nodes[node].id, soft=False)
            ).remote()
            for node in nodes
        }
        try:
            return dict(zip(counts, ray.get(list(counts.values()), timeout=self._wait_limit_s), strict=True))
        except RayError as error:
            names = ", ".join(map(self._describe_node, nodes))
            raise PlacementError(
                f"the number of usable CPUs of {names} is unknown ({error}): set threads, or restart the nodes that do "
                f"not respond"
            ) from error

    def id_of(self, slot: Slot) -> str:
        return self._nodes[slot.node].id

    def on_driver_node(self) -> NodeAffinitySchedulingStrategy:
        return NodeAffinitySchedulingStrategy(self._nodes[0].id, soft=False)

    def lost(self) -> dict[int, str]:
        """Returns node index -> cause of the loss, for the lost nodes that a pool uses."""
        return self._lost({bundle.node for bundles in self._bundles.values() for bundle in bundles})

    def _lost(self, nodes: Collection[int]) -> dict[int, str]:
        if self.address is None:
            end = find_local_end()
            return {} if end is None else dict.fromkeys(nodes, end)
        # Ray reports a dead node only after missed heartbeats. A refused connection shows it earlier.
        lost = [node for node in nodes if _refuses(self._nodes[node])]
        if nodes and not lost:
            alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
            lost = [node for node in nodes if self._nodes[node].id not in alive]
        return {node: f"its node ({self._nodes[node].name}) is gone" for node in sorted(lost)}

    def release(self, pool: str) -> None:
        """Releases the devices of a pool, which ends all processes on these devices."""
        if pool in self._groups:
            del self._bundles[pool]
            remove_placement_group(self._groups.pop(pool))

    @property
    def is_local(self) -> bool:
        return self._owns_ray and self.address is None

    def close(self) -> None:
        """Stops a local Ray. On a cluster, releases all pools and disconnects."""
        # The shutdown of a local Ray ends all processes. A release would hang if a signal has killed parts of Ray.
        if not self.is_local:
            for pool in list(self._groups):
                self.release(pool)
        if self._local_ray is not None:
            self._local_ray.stop()
        elif self._owns_ray:
            ray.shutdown()


def _bundles(pool: PoolPlan, kind: str) -> Counter[_Bundle]:
    """Returns bundle -> number of devices for the placement group of a pool.

    One bundle per node is fastest. Ray assigns fractions of a GPU to any GPU of a bundle, so each shared GPU gets its
    own bundle. CPU slots share a bundle, because they are interchangeable.
    """
    shared = [slot for slot in pool.slots if kind == "cuda" and slot.num_devices < 1]
    return Counter(_Bundle(slot.node, slot.device if slot in shared else None) for slot in pool.slots)


def _reserved(resource: str) -> Counter[str]:
    """Returns node id -> number of reserved devices, over the placement groups of all Ray jobs."""
    held: Counter[str] = Counter()
    for group in placement_group_table().values():
        if group["state"] == "CREATED":
            for index, node in group["bundles_to_node_id"].items():
                held[node] += int(group["bundles"][index].get(resource, 0))
    return held


def _nodes_in_order() -> list[_Node]:
    own = ray.get_runtime_context().get_node_id()
    nodes = [_read_node(node) for node in ray.nodes() if node["Alive"]]
    return sorted(nodes, key=lambda node: (node.id != own, _address_key(node.address), node.id))


def _read_node(node: Mapping) -> _Node:
    address, name = node["NodeManagerAddress"], node["NodeName"]
    devices = {resource: int(node["Resources"].get(resource, 0)) for resource in ("CPU", "GPU")}
    text = address if name in ("", address) else f"{name}, {address}"
    return _Node(node["NodeID"], text, address, node["NodeManagerPort"], devices)


def _address_key(address: str) -> tuple[int, bytes]:
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return 9, address.encode()
    return parsed.version, parsed.packed


def _refuses(node: _Node) -> bool:
    """Returns whether the raylet's port refuses connections. False on a timeout."""
    try:
        socket.create_connection((node.address, node.port), timeout=_PROBE_TIMEOUT_S).close()
    except OSError as error:
        return error.errno == errno.ECONNREFUSED
    return False


def interface_of(address: str) -> str | None:
    """Returns the name of the network interface with this address; None if there is none."""
    import psutil  # noqa: PLC0415 (Ray has a copy of psutil, which can be imported after ray)

    interfaces = psutil.net_if_addrs().items()
    return next((name for name, own in interfaces if any(one.address == address for one in own)), None)


def _join_ray(address: str) -> None:
    try:
        ray.init(address=address, logging_level=logging.WARNING, log_to_driver=False)
    except (AuthenticationError, ConnectionError, RuntimeError) as error:
        # Ray reports the cause as the text of a traceback.
        last = str(error.__cause__ or error).strip().rpartition("\n")[2]
        raise BackendError(
            f"the Ray cluster at address {address} cannot be joined ({last}): start the run on one of its nodes, with "
            f"the Ray version of the cluster"
        ) from None


def _resolve_auto(address: str) -> str:
    """Returns HOST:PORT of the cluster on this machine for `auto`, and other addresses unchanged. Raises `BackendError`
    if no cluster runs on this machine.
    """
    if address != "auto":
        return address
    try:
        resolved = services.canonicalize_bootstrap_address(address)
    except ConnectionError:
        resolved = None
    if resolved is None:
        raise BackendError(
            "address is auto, but no Ray cluster runs on this machine: start one with ray start --head, or remove "
            "address"
        )
    return resolved


def check_cluster(address: str, timeout_s: float = _RESPONSE_TIMEOUT_S) -> None:
    """Raises `BackendError` if no Ray cluster at `address` accepts this process's token within `timeout_s` seconds.

    Ray itself would retry for 40 s or more, and print each failure.
    """
    host, _, port = address.rpartition(":")
    if not host.strip() or not port.isdecimal() or "://" in address:
        raise BackendError(f"address is {address!r}: set it to auto, or to HOST:PORT of a Ray cluster")
    advice = "start one with ray start --head, or remove address"
    deadline = time.monotonic() + timeout_s
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s).close()
    except (OSError, OverflowError, UnicodeError) as error:
        raise BackendError(f"no Ray cluster responds at address {address} ({error}): {advice}") from None
    try:
        with closing(init_grpc_channel(address, options=[("grpc.enable_http_proxy", 0)])) as channel:
            channel.unary_unary(_CLUSTER_ID_METHOD)(b"", timeout=max(0.0, deadline - time.monotonic()))
    except AuthenticationError as error:
        raise BackendError(
            f"RAY_AUTH_MODE is token, but no token is readable ({str(error).partition('. ')[0]}): set "
            f"RAY_AUTH_TOKEN_PATH to a file with the token of the cluster's nodes"
        ) from None
    except grpc.RpcError as error:
        raise BackendError(_describe_rejection(address, error.code(), timeout_s, advice)) from None  # pyright: ignore[reportAttributeAccessIssue] (calls have a code)


def _describe_rejection(address: str, code: grpc.StatusCode, timeout_s: float, advice: str) -> str:
    if code == grpc.StatusCode.UNAUTHENTICATED and is_token_auth_enabled():
        return (
            f"the Ray cluster at address {address} rejects the token of this process: set RAY_AUTH_TOKEN_PATH to a "
            f"file with the token of its nodes, and unset RAY_AUTH_TOKEN"
        )
    if code == grpc.StatusCode.UNAUTHENTICATED:
        return (
            f"the Ray cluster at address {address} requires a token: set RAY_AUTH_MODE=token, and "
            f"RAY_AUTH_TOKEN_PATH to a file with the token of its nodes"
        )
    if code == grpc.StatusCode.DEADLINE_EXCEEDED:
        return f"the program at address {address} does not respond like Ray within {timeout_s:g} s: {advice}"
    return f"the program at address {address} is not the head of a Ray cluster ({code.name}): {advice}"
