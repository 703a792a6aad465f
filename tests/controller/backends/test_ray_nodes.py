"""Plans on several nodes: a real Ray cluster of three, each with an address of the loopback network."""

import importlib.util
import json
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from typing import IO, Any

import pytest
import ray

from flowrl.controller.backends.ray_nodes import RayNodes, interface_of
from flowrl.controller.placement.cpu_threads import count_usable_cpus
from flowrl.controller.placement.plan import PlacementError, PoolPlan, Slot
from tests.engines.closeness import FLOAT32_RTOL
from tests.errors import missing_facts, rejects

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="a machine has one loopback address elsewhere"),
    pytest.mark.timeout(900),  # a driver imports torch and starts Ray, which takes minutes on a busy machine
]


HEALTH = {
    "RAY_health_check_initial_delay_ms": "0",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
}
"""Ray gives a silent node up after seconds instead of a minute."""


class Several:
    """The cluster of several_raylets.py."""

    def __init__(self) -> None:
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        self.environment = (
            os.environ | token | HEALTH | {"RAY_USAGE_STATS_ENABLED": "0", "RAY_IGNORE_UNHANDLED_ERRORS": "1"}
        )
        self._process = self.start("-m", "tests.controller.several_raylets")
        self.address = read_line(self._process)

    def start(self, *arguments: str) -> "subprocess.Popen[str]":
        pipe = subprocess.PIPE
        command = [sys.executable, *arguments]
        return subprocess.Popen(command, env=self.environment, stdin=pipe, stdout=pipe, stderr=pipe, text=True)

    def execute(self, command: str) -> None:
        write_line(self._process, command)
        assert read_line(self._process) == "done"

    def driver(self, name: str) -> "subprocess.Popen[str]":
        return self.start("-m", "tests.controller.placement_driver", name, self.address)

    def close(self) -> None:
        self._process.communicate(timeout=60)


def write_line(process: "subprocess.Popen[str]", line: str) -> None:
    stream: IO[str] = process.stdin  # pyright: ignore[reportAssignmentType] (a pipe)
    stream.write(f"{line}\n")
    stream.flush()


def read_line(process: "subprocess.Popen[str]") -> str:
    stream: IO[str] = process.stdout  # pyright: ignore[reportAssignmentType] (a pipe)
    line = stream.readline().strip()
    assert line, process.communicate()[1][-3000:]
    return line


def result_in(out: str) -> Any:
    """Returns the result that a driver of placement_driver.py prints, without the output of Ray."""
    return json.loads(next(line for line in out.splitlines() if line.startswith("result ")).removeprefix("result "))


@pytest.fixture(scope="module")
def several() -> Iterator[Several]:
    with closing(Several()) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def run_driver(several: Several) -> Callable[[str], Any]:
    """Returns a function that runs a driver of placement_driver.py and returns its result."""

    def run(name: str) -> Any:
        with several.driver(name) as process:
            out, errors = process.communicate(timeout=400)
        assert process.returncode == 0, errors[-3000:]
        return result_in(out)

    return run


@pytest.fixture(scope="module")
def layouts(run_driver: Callable[[str], Any]) -> dict[str, Any]:
    return run_driver("layouts")


PLANNED = {
    "three nodes": {"main": [(0, 0, 0), (1, 1, 0), (2, 0, 1), (3, 0, 2), (4, 1, 2), (5, 2, 2)]},
    "three pools": {
        "uneven": [(0, 0, 0), (1, 0, 1), (2, 1, 1)],
        "even": [(0, 0, 0), (1, 0, 1)],
        "one node": [(0, 0, 2), (1, 1, 2)],
    },
    "half": {"main": [(0, 0, 0), (1, 0, 1), (2, 1, 1), (3, 0, 2), (4, 1, 2)]},
    "stated": {"main": [(0, 0, 1), (1, 0, 2), (2, 1, 2)]},
}
"""Pool -> rank, local rank and node of each of its workers, on nodes of 2, 4 and 4 CPU slots."""


@pytest.mark.slow
@pytest.mark.parametrize("case", PLANNED)
def test_ranks_run_on_the_planned_devices(case: str, layouts: dict[str, Any]) -> None:
    ids, pools = layouts["ids"], layouts["cases"][case]
    assert {pool: [tuple(row[:3]) for row in rows] for pool, rows in pools.items()} == PLANNED[case]
    assert [row[3] for rows in pools.values() for row in rows] == [
        ids[row[2]] for rows in pools.values() for row in rows
    ]


@pytest.mark.slow
def test_nodes_are_numbered_from_the_driver_node_by_address_and_id(layouts: dict[str, Any]) -> None:
    ids = layouts["ids"]
    assert len(set(ids)) == 3
    assert ids == [layouts["own"], *sorted(ids[1:])]


@pytest.mark.slow
def test_the_usable_cpus_of_a_node_are_those_of_its_processes(
    several: Several, run_driver: Callable[[str], Any]
) -> None:
    several.execute("pinned 1 127.0.0.4")
    counts = run_driver("usable_cpus")
    several.execute("kill")
    assert counts == [[0, count_usable_cpus()], [3, 1]]


@pytest.mark.slow
def test_a_process_group_forms_across_nodes(run_driver: Callable[[str], Any]) -> None:
    assert run_driver("sums") == [60, 60, 60]  # (1 + 2 + 3) * 10


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs the extra vllm")
def test_the_stages_of_a_vllm_replica_are_on_two_nodes(run_driver: Callable[[str], Any]) -> None:
    found = run_driver("replica")
    assert max(found["errors"]) < FLOAT32_RTOL
    assert found["workers"] == {"127.0.0.2": 1, "127.0.0.3": 1}
    assert found["all end"], "a process of the replica outlived its worker on the other node"
    assert found["replaced"] < FLOAT32_RTOL, "the replacement has other weights"
    assert found["none outlives the cluster"]


@pytest.fixture(scope="module")
def gpus(run_driver: Callable[[str], Any]) -> dict[str, dict[str, list[tuple[int, list[str]]]]]:
    """Returns, per placement and role, node and GPUs of each rank."""
    cases = run_driver("gpus")
    ranks = [rank for roles in cases.values() for ranks in roles.values() for rank in ranks]
    for _, indices, visible, device in ranks:
        assert (indices, "cuda:0") == (visible.split(",")[: len(indices)], device)
    return {
        case: {role: [(rank[0], rank[2].split(",")) for rank in ranks] for role, ranks in roles.items()}
        for case, roles in cases.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize(("case", "nodes"), [("one node", [0, 0]), ("two nodes", [0, 0, 1, 1, 1])])
def test_processes_that_share_a_device_reserve_one_gpu(case: str, nodes: list[int], gpus: dict[str, Any]) -> None:
    actor = gpus[case]["actor"]
    assert gpus[case]["rollout"] == actor
    assert [node for node, _ in actor] == nodes
    check_apart(actor)


@pytest.mark.slow
def test_ranks_of_a_pool_that_only_some_roles_use_have_the_gpus_of_the_plan(gpus: dict[str, Any]) -> None:
    actor, rollout = gpus["a part of a pool"]["actor"], gpus["a part of a pool"]["rollout"]
    assert rollout[0] == actor[1]
    check_apart([*actor, rollout[1]])


@pytest.mark.slow
def test_a_leader_reserves_full_gpus_next_to_shared_ones(gpus: dict[str, Any]) -> None:
    for case in ("led", "shared and led"):
        actor, rollout = gpus[case]["actor"], gpus[case]["rollout"]
        assert len(rollout) == 1 and len(rollout[0][1]) == 2
        check_apart([*actor, *((0, [gpu]) for gpu in rollout[0][1])])
    assert gpus["shared and led"]["reward"] == [gpus["shared and led"]["actor"][1]]


@pytest.mark.slow
def test_leaders_see_all_gpus_of_their_replica_that_they_share(gpus: dict[str, Any]) -> None:
    actor, rollout = gpus["leaders on shared"]["actor"], gpus["leaders on shared"]["rollout"]
    check_apart(actor)
    assert rollout == [(0, [gpu for _, own in actor[first : first + 2] for gpu in own]) for first in (0, 2)]


@pytest.mark.slow
def test_separate_pools_have_separate_gpus(gpus: dict[str, Any]) -> None:
    check_apart([rank for ranks in gpus["nothing shared"].values() for rank in ranks])


def check_apart(ranks: list[tuple[int, list[str]]]) -> None:
    """Asserts that each rank has one GPU of its own."""
    assert all(len(indices) == 1 for _, indices in ranks)
    assert len({(node, indices[0]) for node, indices in ranks}) == len(ranks)


@pytest.mark.slow
def test_devices_that_the_cluster_does_not_have_are_rejected(layouts: dict[str, Any]) -> None:
    too_many, too_large, planned = layouts["rejected"]
    assert too_many.startswith("devices is [2, 4, 4, 1], ")
    assert "2 on 127.0.0.2, 4 on 127.0.0.3, 4 on 127.0.0.3" in too_many
    assert not missing_facts(too_many, 4, 3, "cpu")
    assert too_large.startswith("devices is [2, 5], ")
    assert not missing_facts(too_large, "node", 1, "127.0.0.3")
    assert planned.startswith("placement.pools.main is [3, 4], ")
    assert "[2, 4]" in planned


@pytest.mark.slow
def test_a_waiting_pool_reports_missing_devices_and_releases_its_reservation(run_driver: Callable[[str], Any]) -> None:
    waited = run_driver("waiting")
    shortage = ("3", "CPU", "node", "1", "127.0.0.3", "2", "4")
    [notice] = waited["words"]
    assert not missing_facts(notice, "second", *shortage, "1")
    assert not missing_facts(waited["error"], "placement.pools.second", "6", *shortage)


@pytest.mark.slow
@pytest.mark.parametrize("end", ["kill", "freeze"])
def test_a_node_that_dies_is_named(end: str, several: Several) -> None:
    several.execute("add 1 127.0.0.4")
    with several.driver("node_loss") as process:
        assert read_line(process) == "ready"
        several.execute(end)
        write_line(process, "done")
        out, errors = process.communicate(timeout=400)
    if end == "freeze":
        several.execute("kill")
    assert process.returncode == 0, errors[-3000:]
    assert result_in(out) == {"before": {}, "lost": {"3": "its node (127.0.0.4) is gone"}, "after": {}}


def test_a_node_whose_port_refuses_connections_is_lost_before_ray_reports_it(
    ray_session: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray lists a node as alive until it has missed its heartbeats."""
    nodes = RayNodes(None)
    nodes.connect(1)
    monkeypatch.setattr(nodes, "address", "127.0.0.1:1")  # nodes of a local Ray are not checked
    nodes.reserve(PoolPlan("main", (Slot("main", 0, 0, 0, 0),)), "cpu")
    try:
        assert nodes.lost() == {}
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            node = replace(nodes._nodes[0], address="127.0.0.1", port=unused.getsockname()[1])
            monkeypatch.setattr(nodes, "_nodes", [node])
            assert [alive["NodeID"] for alive in ray.nodes() if alive["Alive"]] == [node.id]
            assert nodes.lost() == {0: f"its node ({node.name}) is gone"}
    finally:
        nodes.release("main")


@pytest.mark.slow
def test_a_lost_node_is_reported_to_the_run(several: Several) -> None:
    several.execute("add 1 127.0.0.4")
    with several.driver("rank_loss") as process:
        assert read_line(process) == "ready"
        several.execute("kill")
        write_line(process, "done")
        out, errors = process.communicate(timeout=400)
    assert process.returncode == 0, errors[-3000:]
    *call, cause = result_in(out)
    assert call == ["actor", 1, 3, "stay"]
    assert cause.startswith("its node (")


@pytest.mark.slow
def test_the_stack_of_a_rank_on_another_node_is_dumped(run_driver: Callable[[str], Any]) -> None:
    node, rank, reported_node, cause = run_driver("deadline")
    assert (node, rank, reported_node) == (1, 0, 1)
    assert not missing_facts(cause, 2, "stay_briefly")


def test_a_run_without_address_has_one_node() -> None:
    with rejects("devices", 2, "address", error=PlacementError):
        RayNodes(None).inventory("cpu", (2, 2))


def test_get_interface_returns_the_interface_of_an_address() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.1") is None
