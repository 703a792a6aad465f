"""Describes how a process ended: its exit code, or its signal and the signal's sender."""

import os
import signal
from pathlib import Path


def describe_end(status: int, *, is_own_kill: bool, has_oom_kill: bool | None) -> str:
    """Returns how a process ended, as the cause of an error.

    Args:
        status: wait status of the process.
        is_own_kill: whether flowrl has killed the process.
        has_oom_kill: whether the kernel's out-of-memory killer has ended a process; None if it is unknown.
    """
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"its process ended with exit code {code} (os._exit, or a library)"
    number = -code
    if number != signal.SIGKILL:
        names = {each.value: each.name for each in signal.Signals}
        return f"its process was killed by {names.get(number, f'signal {number}')} ({signal.strsignal(number)})"
    if is_own_kill:
        return "flowrl killed its process (SIGKILL)"
    if has_oom_kill:
        return "its process was killed by the kernel's out-of-memory killer (SIGKILL): use less memory"
    reason = "" if has_oom_kill is None else "; not the kernel's out-of-memory killer"
    return f"its process was killed (SIGKILL, sender unknown{reason})"


def count_oom_kills() -> int | None:
    """Returns how many processes of this cgroup the kernel's out-of-memory killer has ended; None if it is unknown."""
    for path in (*_memory_events(), Path("/proc/vmstat")):
        try:
            counts = dict(line.split() for line in path.read_text().splitlines())
            return int(counts["oom_kill"])
        except (OSError, ValueError, KeyError):
            continue
    return None


def _memory_events() -> list[Path]:
    """Returns the files with the memory events of this process's cgroup, of cgroup version 2 and 1."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    files = []
    for line in lines:
        _, controllers, group = line.split(":", 2)
        # A container may see its own cgroup as the root, but its path from outside.
        for name in (group.strip("/"), ""):
            if not controllers:
                files.append(Path("/sys/fs/cgroup", name, "memory.events"))
            elif "memory" in controllers.split(","):
                files.append(Path("/sys/fs/cgroup/memory", name, "memory.oom_control"))
    return files
