"""Detects the available devices without importing torch."""

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from flowrl.config.base import Device, DeviceKind
from flowrl.controller.placement.cpu_threads import count_usable_cpus
from flowrl.controller.placement.plan import Inventory, PlacementError

_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Environment variables with the settings of torch's allocator. The first one that is set counts."""


def local_inventory(device: Device, devices: Sequence[int] | None = None) -> Inventory:
    """Returns the devices of this machine. `auto` selects cuda if the machine has GPUs.

    `devices` replaces the detected number. Without it, a machine without GPUs has one slot per usable CPU, and a
    placement may use more slots.
    """
    gpus = _num_gpus() if device == "auto" or (device == "cuda" and devices is None) else 0
    kind = "cuda" if device == "cuda" or gpus else "cpu"
    if devices is not None:
        return Inventory(tuple(devices), kind)
    if kind == "cuda":
        return Inventory((gpus,), kind)
    return Inventory((count_usable_cpus(),), kind, bounded=False)


def check_one_node(devices: Sequence[int] | None) -> None:
    """Raises `PlacementError` if `devices` has counts for several nodes, because these require a cluster."""
    if devices is not None and len(devices) > 1:
        raise PlacementError(
            f"devices is {list(devices)}, with counts for {len(devices)} nodes, but a run without address uses only "
            f"this machine: set one count, or set address"
        )


def cluster_inventory(
    device: Device, devices: Sequence[int] | None, *, names: Sequence[str], cpus: Sequence[int], gpus: Sequence[int]
) -> Inventory:
    """Returns the devices of a cluster. `names`, `cpus` and `gpus` have one entry per node.

    `devices` limits the devices per node, and excludes nodes without an entry. Raises `PlacementError` if a limit
    exceeds the devices of its node, or if there are more limits than nodes.
    """
    kind = "cuda" if device == "cuda" or (device == "auto" and sum(gpus)) else "cpu"
    present = tuple(gpus if kind == "cuda" else cpus)
    if devices is None:
        return Inventory(present, kind)
    has = ", ".join(f"{count} on {name}" for count, name in zip(present, names, strict=True))
    if len(devices) > len(present):
        raise PlacementError(
            f"devices is {list(devices)}, with counts for {len(devices)} nodes, but the cluster has {len(present)} "
            f"({kind} devices: {has}); remove entries, or start Ray on more hosts"
        )
    for node, (count, available) in enumerate(zip(devices, present, strict=False)):
        if count > available:
            raise PlacementError(
                f"devices is {list(devices)}, which exceeds node {node} ({names[node]}); the cluster's {kind} devices "
                f"are {has}, in this order; lower the counts"
            )
    return Inventory(tuple(devices), kind)


def local_memory(kind: DeviceKind) -> int | None:
    """Returns the bytes of host memory (cpu) or of the smallest GPU (cuda); None without a GPU."""
    if kind == "cpu":
        return _host_memory()
    listing = _run_nvidia_smi("--query-gpu=memory.total", "--format=csv,noheader,nounits")
    mebibytes = [int(line) for line in listing.split() if line.isdecimal()]
    return min(mebibytes) * 2**20 if mebibytes else None


def _host_memory() -> int:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    # The memory limit of a container may be lower.
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.is_file() else ""
    return min(total, int(text)) if text.isdecimal() else total


def local_gpu_names() -> list[str]:
    """Returns the distinct names of this machine's GPUs, in device order. Does not create a CUDA context."""
    lines = _run_nvidia_smi("--query-gpu=name", "--format=csv,noheader").splitlines()
    return list(dict.fromkeys(name for line in lines if (name := line.strip())))


def local_capability() -> tuple[int, int] | None:
    """Returns the lowest CUDA compute capability of this machine's GPUs; None without a GPU."""
    listing = _run_nvidia_smi("--query-gpu=compute_cap", "--format=csv,noheader").split()
    versions = [tuple(map(int, version.split("."))) for version in listing if re.fullmatch(r"\d+\.\d+", version)]
    return min(((major, minor) for major, minor in versions), default=None)


def find_ipc_problem(
    environment: Mapping[str, str] = os.environ, kernel: Path = Path("/proc/version")
) -> tuple[str, str] | None:
    """Returns (reason, fix) if the processes of this machine cannot share GPU memory through CUDA IPC; otherwise None.
    The fix is a change of a setting, or empty if there is none.
    """
    variable = next((name for name in _ALLOCATOR_VARIABLES if environment.get(name)), None)
    if variable is not None and "expandable_segments:True" in environment[variable].replace(" ", "").split(","):
        reason = "torch shares expandable segments with the system call pidfd_getfd, which a kernel may forbid"
        return f"{variable} is {environment[variable]}, and {reason}", f"remove expandable_segments from {variable}"
    # The driver of WSL has no legacy CUDA IPC (docs.nvidia.com/cuda/wsl-user-guide).
    if kernel.is_file() and "microsoft" in kernel.read_text().lower():
        return "this machine runs WSL, which does not support it", ""
    return None


def _num_gpus() -> int:
    """Returns the number of GPUs in CUDA_VISIBLE_DEVICES (default: all GPUs)."""
    present = sum(line.startswith("GPU ") for line in _run_nvidia_smi("-L").splitlines())
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or not present:
        return present
    return _num_visible(visible, present)


def _run_nvidia_smi(*options: str) -> str:
    command = shutil.which("nvidia-smi")
    if command is None:
        return ""
    try:
        completed = subprocess.run([command, *options], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return completed.stdout if completed.returncode == 0 else ""


def _num_visible(visible: str, present: int) -> int:
    """Counts the entries of CUDA_VISIBLE_DEVICES up to the first invalid index, as CUDA does."""
    count = 0
    for name in visible.split(","):
        name = name.strip()
        if not name or (name.lstrip("-").isdigit() and not 0 <= int(name) < present):
            break
        count += 1
    return count
