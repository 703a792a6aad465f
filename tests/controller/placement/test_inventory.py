"""The devices of several nodes keep the numbers of their nodes."""

import re
from pathlib import Path

import psutil
import pytest

from flowrl.config import Placement
from flowrl.config.base import Device
from flowrl.controller.placement.inventory import (
    cluster_inventory,
    find_ipc_problem,
    local_capability,
    local_gpu_names,
    local_memory,
)
from flowrl.controller.placement.plan import Inventory, PlacementError, plan
from tests.errors import rejects

NODES = {"names": ("head", "a", "b"), "cpus": (4, 64, 64), "gpus": (0, 8, 4)}


@pytest.mark.parametrize(("device", "nodes"), [("auto", (0, 8, 4)), ("cuda", (0, 8, 4)), ("cpu", (4, 64, 64))])
def test_every_node_has_its_entry(device: Device, nodes: tuple[int, ...]) -> None:
    kind = "cpu" if device == "cpu" else "cuda"
    assert cluster_inventory(device, None, **NODES) == Inventory(nodes, kind)


def test_nodes_without_gpus_have_cpu_slots() -> None:
    assert cluster_inventory("auto", None, names=("a",), cpus=(3,), gpus=(0,)) == Inventory((3,), "cpu")


@pytest.mark.parametrize(("pool", "nodes"), [([2], {1}), ([8, 4], {1, 2}), ("1/2", {1, 2}), ([0, 1], {1})])
def test_pools_skip_nodes_without_gpus(pool: list[int] | str, nodes: set[int]) -> None:
    placement = Placement(pools={"main": pool}, roles={"actor": "main"})
    planned = plan(placement, cluster_inventory("cuda", None, **NODES))
    assert {slot.node for slot in planned.slots("actor")} == nodes


def test_stated_devices_are_those_of_the_first_nodes() -> None:
    assert cluster_inventory("cuda", (0, 6), **NODES) == Inventory((0, 6), "cuda")


def test_more_entries_than_nodes_are_rejected() -> None:
    with rejects("devices", 4, 3, "cuda", "head", "a", "b", error=PlacementError) as caught:
        cluster_inventory("cuda", (0, 8, 4, 8), **NODES)
    assert str(caught.value).startswith("devices ") and "[0, 8, 4, 8]" in str(caught.value)
    assert re.search(r"\b0 \w+ head, 8 \w+ a, 4 \w+ b\b", str(caught.value))


def test_more_devices_than_a_node_has_are_rejected() -> None:
    with rejects("devices", "node", 0, "head", "cuda", error=PlacementError) as caught:
        cluster_inventory("auto", (8, 4), **NODES)
    assert str(caught.value).startswith("devices ") and "[8, 4]" in str(caught.value)
    assert re.search(r"\b0 \w+ head, 8 \w+ a, 4 \w+ b\b", str(caught.value))


def test_the_memory_of_cpu_slots_is_at_most_that_of_the_machine() -> None:
    found = local_memory("cpu")
    assert found is not None and 0 < found <= psutil.virtual_memory().total


def driver(folder: Path, answer: str, exit_code: int = 0) -> None:
    """Installs a program that replaces nvidia-smi."""
    path = folder / "nvidia-smi"
    path.write_text(f"#!/bin/sh\nprintf '{answer}'\nexit {exit_code}\n")
    path.chmod(0o755)


def test_the_memory_of_gpus_is_that_of_the_smallest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert local_memory("cuda") is None
    driver(tmp_path, r"81559\n40960\n")
    assert local_memory("cuda") == 40960 * 2**20


def test_a_gpu_without_reported_memory_has_unknown_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    driver(tmp_path, r"[N/A]\n")
    assert local_memory("cuda") is None


def test_the_capability_of_gpus_is_that_of_the_oldest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert local_capability() is None
    driver(tmp_path, r"9.0\n7.5\n10.0\n")
    assert local_capability() == (7, 5)
    driver(tmp_path, r"[N/A]\n")
    assert local_capability() is None


def test_each_kind_of_gpu_is_named_once_in_the_order_of_the_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert local_gpu_names() == []
    driver(tmp_path, r"NVIDIA L4\nNVIDIA H100 80GB HBM3\nNVIDIA L4\n")
    assert local_gpu_names() == ["NVIDIA L4", "NVIDIA H100 80GB HBM3"]
    driver(tmp_path, r"\n")
    assert local_gpu_names() == []


def test_a_driver_that_fails_names_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    driver(tmp_path, r"NVIDIA L4\n", exit_code=9)
    assert local_gpu_names() == []


@pytest.mark.parametrize(
    ("variables", "is_problem"),
    [
        ({}, False),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, True),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:512, expandable_segments: True"}, True),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}, False),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "PYTORCH_ALLOC_CONF": "backend:native"}, False),
    ],
)
def test_expandable_segments_prevent_cuda_ipc(variables: dict[str, str], is_problem: bool, tmp_path: Path) -> None:
    problem = find_ipc_problem(variables, tmp_path / "missing")
    assert (problem is not None) == is_problem
    assert problem is None or all(name in problem[0] and name in problem[1] for name in variables)


@pytest.mark.parametrize(
    ("version", "is_problem"),
    [("Linux version 5.15.153.1-microsoft-standard-WSL2", True), ("Linux version 6.8.0-45-generic", False)],
)
def test_wsl_has_no_cuda_ipc(version: str, is_problem: bool, tmp_path: Path) -> None:
    (tmp_path / "version").write_text(version)
    assert (find_ipc_problem({}, tmp_path / "version") is not None) == is_problem
