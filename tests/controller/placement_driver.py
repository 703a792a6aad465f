"""Drivers that join the Ray cluster at an address and print their results as a line of JSON."""

import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import ray

from flowrl import Cluster, Dispatch, Placement, Worker, register
from flowrl.controller.backends import ray_nodes
from flowrl.controller.backends.ray_nodes import RayNodes
from flowrl.controller.errors import WorkerError
from flowrl.controller.placement.plan import PlacementError, PoolPlan, Slot

Row = tuple[int, int, int, str]

WAIT_S = 60.0
"""Upper bound on the time until a change in the cluster is visible."""


class Placed(Worker):
    """Reports rank, local rank, planned node, and the id of its actual Ray node."""

    @register(Dispatch.ONE_TO_ALL)
    def where(self) -> Row:
        return self.rank, self.context.local_rank, self.context.node, ray.get_runtime_context().get_node_id()

    @register(Dispatch.ONE_TO_ALL)
    def devices(self) -> tuple[int, list[str], str, str]:
        """Returns its node, its GPUs according to Ray and to CUDA, and its own name for the first."""
        indices = [str(index) for index in ray.get_gpu_ids()]
        return self.context.node, indices, os.environ["CUDA_VISIBLE_DEVICES"], self.context.device

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def stay(self, seconds: float) -> None:
        time.sleep(seconds)

    @register(Dispatch.ONE_TO_ALL, blocking=False, timeout_s=2)
    def stay_briefly(self, seconds: float) -> None:
        time.sleep(seconds)


def layout(
    address: str, pools: dict[str, Sequence[int] | str], devices: tuple[int, ...] | None = None
) -> dict[str, list[Row]]:
    """Returns the workers of each pool in the order of their ranks."""
    placement = Placement(device="cpu", pools=pools, roles={pool: pool for pool in pools})
    with Cluster(placement, address=address, devices=devices, num_threads=1) as cluster:
        return {pool: cluster.group(pool, Placed).where() for pool in pools}


def layouts(address: str) -> object:
    """Returns all layouts of the test, and the node ids in the order of the plan."""
    ray.init(address=address, log_to_driver=False)
    ids = [node.id for node in RayNodes(address)._nodes]
    own = ray.get_runtime_context().get_node_id()
    cases = {
        "three nodes": layout(address, {"main": [2, 1, 3]}),
        "three pools": layout(address, {"uneven": [1, 2], "even": [1, 1], "one node": [2]}),
        "half": layout(address, {"main": "1/2"}),
        "stated": layout(address, {"main": "all"}, devices=(0, 1, 2)),
    }
    stated = {(2, 4, 4, 1): [1], (2, 5): [1], (2, 4): [3, 4]}
    rejections = [rejection(address, pool, devices) for devices, pool in stated.items()]
    return {"ids": ids, "own": own, "cases": cases, "rejected": rejections}


def usable_cpus(address: str) -> object:
    """Returns the numbers of usable CPUs of the first and the last node."""
    nodes = RayNodes(address)
    return sorted(nodes.count_usable_cpus([0, len(nodes._nodes) - 1]).items())


def sums(address: str) -> object:
    """Returns the all-reduced sum of three ranks on two nodes."""
    from tests.controller.workers import Summing  # noqa: PLC0415 (the other drivers do without torch)

    placement = Placement(device="cpu", pools={"main": [1, 2]}, roles={"sum": "main"})
    with Cluster(placement, address=address, num_threads=1) as cluster:
        return cluster.group("sum", Summing, 10).total(1).get()


GPU_PLACEMENTS: dict[str, dict[str, Any]] = {
    "one node": {"pools": {"main": [2]}, "roles": {"actor": "main", "rollout": "main"}},
    "two nodes": {"pools": {"main": [2, 3]}, "roles": {"actor": "main", "rollout": "main"}},
    "a part of a pool": {"pools": {"main": [4]}, "roles": {"actor": "main[0:3]", "rollout": "main[1:2]+main[3:]"}},
    "led": {"pools": {"main": [4]}, "roles": {"actor": "main[0:2]", "rollout": {"pool": "main[2:4]", "tp": 2}}},
    "shared and led": {
        "pools": {"main": [4]},
        "roles": {"actor": "main[0:2]", "reward": "main[1:2]", "rollout": {"pool": "main[2:4]", "tp": 2}},
    },
    "leaders on shared": {
        "pools": {"main": [4]},
        "roles": {"actor": "main", "rollout": {"pool": "main", "tp": 2}},
    },
    "nothing shared": {"pools": {"main": [2], "makers": [2]}, "roles": {"actor": "main", "rollout": "makers"}},
}
"""Rollouts and rewards have processes of their own."""


def gpus(address: str) -> object:
    """Returns, per placement and role, node and GPUs of each rank."""
    results = {}
    for case, placed in GPU_PLACEMENTS.items():
        placement, dedicated = Placement(device="cuda", **placed), ("rollout", "reward")
        with Cluster(placement, address=address, num_threads=1, dedicated=dedicated) as cluster:
            groups = {role: cluster.group(role, Placed) for role in placement.roles}
            results[case] = {role: group.devices() for role, group in groups.items()}
    return results


def replica(address: str) -> object:
    """Returns what a vLLM replica with a stage on each of two nodes does, as described by `several_nodes.results`."""
    from tests.engines.rollout.vllm import several_nodes  # noqa: PLC0415 (the other drivers do without vLLM)

    return several_nodes.results(address)


def rejection(address: str, pool: list[int], devices: tuple[int, ...]) -> str:
    try:
        layout(address, {"main": pool}, devices)
    except PlacementError as error:
        return str(error)
    raise AssertionError(f"{pool} of {devices} was not rejected")


def waiting(address: str) -> object:
    """Returns the notices and the error of a pool whose devices another pool uses. Waits until all are free again.

    On a virtual clock, which advances by a second per reading, the notice is due after 5 s and the timeout is 6 s.
    """
    words: list[str] = []
    nodes = RayNodes(address, notify=words.append, wait_limit_s=6)
    before = free_cpus()
    nodes.reserve(pool_of("first", 0, 2, 1), "cpu")
    seconds = itertools.count()
    try:
        with patch.object(ray_nodes, "time", SimpleNamespace(monotonic=lambda: float(next(seconds)))):
            nodes.reserve(pool_of("second", 0, 3, 3), "cpu")
    except PlacementError as error:
        nodes.release("first")
        until(lambda: free_cpus() == before)
        return {"words": words, "error": str(error)}
    raise AssertionError("devices were assigned twice")


def pool_of(name: str, *counts: int) -> PoolPlan:
    """Returns the plan of a pool with a number of devices per node."""
    devices = [(node, index) for node, count in enumerate(counts) for index in range(count)]
    return PoolPlan(name, tuple(Slot(name, rank, node, index, index) for rank, (node, index) in enumerate(devices)))


def free_cpus() -> float:
    return ray.available_resources().get("CPU", 0)


def until(condition: Callable[[], bool]) -> None:
    """Waits until the condition holds, for at most `WAIT_S` seconds."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def node_loss(address: str) -> object:
    """Returns the lost nodes before and after the last node, which a pool uses, ends.

    Prints `ready` when the node may be ended, and then reads a line, which reports that it has ended.
    """
    nodes = RayNodes(address)
    last = len(nodes._nodes) - 1
    nodes.reserve(pool_of("main", 1, *[0] * (last - 1), 1), "cpu")
    before = nodes.lost()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.readline()
    until(lambda: bool(nodes.lost()))
    lost = nodes.lost()
    nodes.release("main")
    return {"before": before, "lost": lost, "after": nodes.lost()}


def rank_loss(address: str) -> object:
    """Returns the error of a call whose rank 1 runs on a node that ends. Reads and prints as `node_loss` does."""
    placement = Placement(device="cpu", pools={"main": [1, 1]}, roles={"actor": "main"})
    last = len(RayNodes(address)._nodes) - 1
    with Cluster(placement, address=address, devices=(1, *[0] * (last - 1), 1), num_threads=1) as cluster:
        group = cluster.group("actor", Placed)
        assert [row[2] for row in group.where()] == [0, last]
        waiting = group.stay(600.0)
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        sys.stdin.readline()
        try:
            waiting.get(WAIT_S)
        except WorkerError as error:
            return [error.role, error.rank, error.node, error.method, error.cause]
    raise AssertionError("the call did not fail with its node")


def deadline(address: str) -> object:
    """Returns the error of a call on another node that exceeds its deadline."""
    placement = Placement(device="cpu", pools={"main": [1]}, roles={"actor": "main"})
    with Cluster(placement, address=address, devices=(0, 1), num_threads=1) as cluster:
        group = cluster.group("actor", Placed)
        node = group.where()[0][2]
        try:
            group.stay_briefly(600.0).get()
        except WorkerError as error:
            return [node, error.rank, error.node, error.cause]
    raise AssertionError("the call did not fail at its deadline")


DRIVERS = {
    driver.__name__: driver
    for driver in (layouts, usable_cpus, sums, gpus, replica, waiting, node_loss, rank_loss, deadline)
}

if __name__ == "__main__":
    sys.stdout.write(f"result {json.dumps(DRIVERS[sys.argv[1]](sys.argv[2]))}\n")
