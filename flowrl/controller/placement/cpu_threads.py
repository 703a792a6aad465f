"""Number of torch CPU threads of a process: limited by OMP_NUM_THREADS, the CPU affinity and the CPU quota.

Imports no torch.
"""

import math
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from flowrl.config import UserError

_VARIABLE = "OMP_NUM_THREADS"


def read_requested_threads(environment: Mapping[str, str] = os.environ) -> int | None:
    """Returns the number of threads in OMP_NUM_THREADS; None if it is not set. Raises UserError if it is invalid.

    Only the driver reads it, because Ray and the fork server set it in worker processes.
    """
    text = environment.get(_VARIABLE, "").strip()
    if not text:
        return None
    outermost = text.partition(",")[0].strip()  # a list has a number for each level of nested parallelism
    if not (outermost.isdecimal() and int(outermost) > 0):
        raise UserError(
            f"the environment variable {_VARIABLE} is {text!r}, but must be an integer above 0: correct or unset it"
        )
    return int(outermost)


def default_threads() -> int:
    """Returns OMP_NUM_THREADS, or else the number of usable CPUs, for a process that shares them with no other one of
    flowrl. Raises UserError if the variable is invalid.
    """
    return read_requested_threads() or count_usable_cpus()


def divide_cpus(usable_cpus: int, num_processes: int) -> int:
    """Returns the number of threads per process if `num_processes` processes share the usable CPUs of a node."""
    return max(1, usable_cpus // max(1, num_processes))


def use_threads(num_threads: int) -> None:
    """Sets the number of torch CPU threads of this process, if torch is loaded."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(num_threads)


def count_usable_cpus() -> int:
    """Returns the number of CPUs that this process may use."""
    # A job scheduler may restrict a process to some CPUs, and a container may have a quota.
    affine = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return limit_by_quota(affine, read_cpu_quota())


def limit_by_quota(num_cpus: int, quota: float | None) -> int:
    """Returns the largest number of CPUs up to `num_cpus` that can run all the time with a quota, at least 1.

    `quota` is the CPU time per second, and None without a limit. With more threads than the quota, the kernel stops all
    threads of the process for a part of every period.
    """
    return num_cpus if quota is None else max(1, min(num_cpus, math.floor(quota)))


def read_cpu_quota(root: Path = Path("/")) -> float | None:
    """Returns the smallest CPU quota of this process's cgroup and of its parents, in CPUs. None without a quota.

    Reads cgroup versions 1 and 2. `root` has the folders `proc` and `sys`.
    """
    return min(_read_quotas(root), default=None)


def _read_quotas(root: Path) -> Iterator[float]:
    try:
        # Names may have any bytes except that of the end of a line.
        groups, mounts = (
            os.fsdecode((root / "proc/self" / name).read_bytes()).split("\n") for name in ("cgroup", "mountinfo")
        )
    except OSError:  # no Linux
        return
    names = {group[1]: group[2] for group in (line.split(":", 2) for line in groups) if len(group) == 3}
    for line in mounts:
        point, system = (part.split(" ") for part in line.partition(" - ")[::2])
        if len(point) < 5 or len(system) < 2:
            continue
        mounted, target = map(_decode_escapes, point[3:5])
        kind, controllers = system[0], system[-1]
        if kind not in ("cgroup", "cgroup2") or (kind == "cgroup" and "cpu" not in controllers.split(",")):
            continue
        name = next((name for key, name in names.items() if _is_hierarchy(kind, key)), "/")
        # In a container, the name may be that of the host, although the mount begins at the container's own cgroup.
        path = Path(name).relative_to(mounted) if Path(name).is_relative_to(mounted) else Path()
        folder = root / target.lstrip("/")
        for group in (path, *path.parents):
            quota = _read_quota(folder / group, kind)
            if quota is not None:
                yield quota


def _decode_escapes(path: str) -> str:
    """Returns a path of /proc/self/mountinfo, in which the kernel escapes white space and backslashes."""
    return re.sub(r"\\([0-7]{3})", lambda escape: chr(int(escape[1], 8)), path)


def _is_hierarchy(kind: str, controllers: str) -> bool:
    """Returns whether a line of /proc/self/cgroup with these controllers belongs to the mounted hierarchy."""
    return not controllers if kind == "cgroup2" else "cpu" in controllers.split(",")


def _read_quota(group: Path, kind: str) -> float | None:
    """Returns the quota of one cgroup. None if it has no quota or no files."""
    try:
        if kind == "cgroup2":
            quota, period = (group / "cpu.max").read_text().split()
        else:
            quota, period = ((group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return int(quota) / int(period) if int(quota) > 0 else None
    except (OSError, ValueError):  # `max` is not a number
        return None
