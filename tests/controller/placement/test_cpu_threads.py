"""Number of threads per process. Quotas are read from folders with the files that the kernel writes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flowrl.config import UserError
from flowrl.controller.placement.cpu_threads import (
    divide_cpus,
    limit_by_quota,
    read_cpu_quota,
    read_requested_threads,
)

V2_MOUNT = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNT = "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:9 - cgroup cgroup rw,cpu,cpuacct\n"


def machine(root: Path, cgroup: str, mount: str) -> Path:
    """Creates the files of a process in /proc. Returns the root folder."""
    folder = root / "proc/self"
    folder.mkdir(parents=True)
    (folder / "cgroup").write_bytes(os.fsencode(cgroup))
    (folder / "mountinfo").write_bytes(os.fsencode(f"22 29 0:21 / /proc rw,nosuid - proc proc rw\n{mount}"))
    return root


def write(root: Path, path: str, text: str) -> None:
    """Writes a file of a cgroup."""
    file = root / "sys/fs/cgroup" / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


@pytest.mark.parametrize(
    ("num_cpus", "quota", "usable"),
    [(8, None, 8), (8, 4.0, 4), (8, 1.5, 1), (8, 0.5, 1), (8, 16.0, 8), (1, 2.0, 1), (4, 3.99, 3)],
)
def test_a_quota_limits_the_usable_cpus(num_cpus: int, quota: float | None, usable: int) -> None:
    assert limit_by_quota(num_cpus, quota) == usable


@pytest.mark.parametrize(("usable", "processes", "threads"), [(8, 1, 8), (8, 3, 2), (8, 9, 1), (1, 1, 1), (8, 0, 8)])
def test_processes_share_the_usable_cpus(usable: int, processes: int, threads: int) -> None:
    assert divide_cpus(usable, processes) == threads


@pytest.mark.parametrize(("text", "threads"), [("3", 3), (" 2 ", 2), ("4,2", 4), ("", None)])
def test_the_environment_requests_a_number_of_threads(text: str, threads: int | None) -> None:
    assert read_requested_threads({"OMP_NUM_THREADS": text}) == threads


def test_an_environment_without_the_variable_requests_nothing() -> None:
    assert read_requested_threads({}) is None


@pytest.mark.parametrize("text", ["0", "-2", "many", "1.5"])
def test_an_invalid_number_of_threads_is_rejected(text: str) -> None:
    with pytest.raises(UserError, match="OMP_NUM_THREADS") as caught:
        read_requested_threads({"OMP_NUM_THREADS": text})
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "quota"), [("150000 100000\n", 1.5), ("max 100000\n", None), ("25000 50000\n", 0.5), ("", None)]
)
def test_cgroup_version_2(tmp_path: Path, text: str, quota: float | None) -> None:
    root = machine(tmp_path, "0::/user.slice/job\n", V2_MOUNT)
    write(root, "user.slice/job/cpu.max", text)
    assert read_cpu_quota(root) == quota


def test_the_smallest_quota_of_the_parents_applies(tmp_path: Path) -> None:
    root = machine(tmp_path, "0::/pods/pod/container\n", V2_MOUNT)
    write(root, "pods/cpu.max", "800000 100000\n")
    write(root, "pods/pod/cpu.max", "200000 100000\n")
    write(root, "pods/pod/container/cpu.max", "400000 100000\n")
    assert read_cpu_quota(root) == 2.0


def test_a_container_with_a_namespace_has_its_quota_at_the_root(tmp_path: Path) -> None:
    root = machine(tmp_path, "0::/\n", V2_MOUNT)
    write(root, "cpu.max", "300000 100000\n")
    assert read_cpu_quota(root) == 3.0


@pytest.mark.parametrize(("quota_us", "quota"), [("250000\n", 2.5), ("-1\n", None)])
def test_cgroup_version_1(tmp_path: Path, quota_us: str, quota: float | None) -> None:
    root = machine(tmp_path, "4:memory:/other\n2:cpu,cpuacct:/jobs/7\n0::/\n", V1_MOUNT)
    write(root, "cpu,cpuacct/jobs/7/cpu.cfs_quota_us", quota_us)
    write(root, "cpu,cpuacct/jobs/7/cpu.cfs_period_us", "100000\n")
    assert read_cpu_quota(root) == quota


def test_a_container_without_a_namespace_mounts_its_own_cgroup(tmp_path: Path) -> None:
    """The kernel then reports the cgroup's name on the host, and the mount point is the container's cgroup."""
    mount = "32 31 0:29 /docker/abc /sys/fs/cgroup/cpu ro,relatime master:9 - cgroup cgroup rw,cpu\n"
    root = machine(tmp_path, "2:cpu:/docker/abc\n", mount)
    write(root, "cpu/cpu.cfs_quota_us", "50000\n")
    write(root, "cpu/cpu.cfs_period_us", "100000\n")
    assert read_cpu_quota(root) == 0.5


@pytest.mark.parametrize(
    ("escaped", "name"),
    [(r"my\040jobs", "my jobs"), (r"a\134040", r"a\040"), ("\udcff", "\udcff"), ("a\x85b\u00a0c", "a\x85b\u00a0c")],
    ids=["space", "backslash", "not UTF-8", "Unicode white space"],
)
def test_names_of_cgroups_may_have_any_bytes(tmp_path: Path, escaped: str, name: str) -> None:
    mount = f"30 23 0:26 /{escaped} /sys/fs/cgroup/{escaped} rw,nosuid - cgroup2 cgroup2 rw\n"
    root = machine(tmp_path, f"0::/{name}/job\n", mount)
    write(root, f"{name}/job/cpu.max", "150000 100000\n")
    assert read_cpu_quota(root) == 1.5


@pytest.mark.parametrize("line", ["\n", "31 23 0:27 /\n", "31 23 0:27 / /mnt rw - tmpfs\n", "31 23 0:27 / /mnt rw\n"])
def test_incomplete_lines_are_ignored(tmp_path: Path, line: str) -> None:
    root = machine(tmp_path, "\n0::/\n", f"{line}{V2_MOUNT}")
    write(root, "cpu.max", "300000 100000\n")
    assert read_cpu_quota(root) == 3.0


def test_the_quota_of_another_group_does_not_apply(tmp_path: Path) -> None:
    root = machine(tmp_path, "0::/a\n", V2_MOUNT)
    write(root, "b/cpu.max", "100000 100000\n")
    write(root, "a/cpu.max", "max 100000\n")
    assert read_cpu_quota(root) is None


def test_a_system_without_cgroups_has_no_quota(tmp_path: Path) -> None:
    assert read_cpu_quota(tmp_path) is None


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="Linux")
def test_the_affinity_limits_the_usable_cpus() -> None:
    """The process restricts itself to one CPU."""
    program = (
        "import os; os.sched_setaffinity(0, list(os.sched_getaffinity(0))[:1]);"
        "from flowrl.controller.placement.cpu_threads import count_usable_cpus; print(count_usable_cpus())"
    )
    root = Path(__file__).parents[3]
    assert subprocess.check_output([sys.executable, "-c", program], text=True, cwd=root).strip() == "1"
