"""What devices a run may use, found without loading torch. The one place where CUDA_VISIBLE_DEVICES is read."""

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import psutil

from flowrl.config.base import Device
from flowrl.controller.placement.plan import Inventory, PlacementError


def local_inventory(device: Device, devices: Sequence[int] | None = None) -> Inventory:
    """The devices of a run on this machine alone.

    `device` `auto` is cuda where there are GPUs. `devices` states a count per node instead of asking the machine; CPU
    slots that nobody stated are as many as there are cores, and a placement may ask for more of them.
    """
    gpus = _num_gpus() if device == "auto" or (device == "cuda" and devices is None) else 0
    kind = "cuda" if device == "cuda" or gpus else "cpu"
    if devices is not None:
        return Inventory(tuple(devices), kind)
    if kind == "cuda":
        return Inventory((gpus,), kind)
    return Inventory((_num_cores(),), kind, bounded=False)


def cluster_inventory(
    device: Device, devices: Sequence[int] | None, *, names: Sequence[str], cpus: Sequence[int], gpus: Sequence[int]
) -> Inventory:
    """The devices of a run on the nodes `names`, which have so many `cpus` and `gpus`.

    A node without a device of the run's kind counts with zero, so that every node keeps its number. `devices` takes
    fewer from each node, in their order. Raises: PlacementError, where it states more than there is.
    """
    kind = "cuda" if device == "cuda" or (device == "auto" and sum(gpus)) else "cpu"
    present = tuple(gpus if kind == "cuda" else cpus)
    if devices is None:
        return Inventory(present, kind)
    has = ", ".join(f"{count} on {name}" for count, name in zip(present, names, strict=True))
    if len(devices) > len(present):
        raise PlacementError(
            f"devices is {list(devices)}, a count for each of {len(devices)} nodes, but the cluster has "
            f"{len(present)}: {kind} devices {has}; remove entries, or start Ray on more hosts"
        )
    for node, (count, there) in enumerate(zip(devices, present, strict=False)):
        if count > there:
            raise PlacementError(
                f"devices is {list(devices)}, more than node {node} ({names[node]}) has: the cluster's {kind} devices "
                f"are {has}; state at most these, in this order"
            )
    return Inventory(tuple(devices), kind)


def local_memory(kind: Literal["cpu", "cuda"]) -> int | None:
    """Bytes of this machine's memory, which its CPU slots share, or of its smallest GPU; None where none answers."""
    return _host_memory() if kind == "cpu" else _gpu_memory()


def _host_memory() -> int:
    total = psutil.virtual_memory().total
    # A container may be given less than the machine has.
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.is_file() else ""
    return min(total, int(text)) if text.isdecimal() else total


def _gpu_memory() -> int | None:
    listing = _ask_driver("--query-gpu=memory.total", "--format=csv,noheader,nounits")
    mebibytes = [int(line) for line in listing.split() if line.isdecimal()]
    return min(mebibytes) * 2**20 if mebibytes else None


def _num_cores() -> int:
    # A container or a job scheduler may give this process fewer cores than the machine has.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _num_gpus() -> int:
    """GPUs that a CUDA program started now would see."""
    present = sum(line.startswith("GPU ") for line in _ask_driver("-L").splitlines())
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or not present:
        return present
    return _num_visible(visible, present)


def _ask_driver(*options: str) -> str:
    """What nvidia-smi answers; nothing on a machine without a GPU."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return ""
    try:
        found = subprocess.run([command, *options], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return found.stdout if found.returncode == 0 else ""


def _num_visible(visible: str, present: int) -> int:
    """Devices that CUDA takes from `visible`: it stops at the first index that does not exist."""
    count = 0
    for name in visible.split(","):
        name = name.strip()
        if not name or (name.lstrip("-").isdigit() and not 0 <= int(name) < present):
            break
        count += 1
    return count
