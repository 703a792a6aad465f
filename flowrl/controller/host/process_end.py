"""Describes how a process ended: its exit code, or its signal and the signal's sender."""

import signal
from pathlib import Path

_OOM_WINDOW_S = 10.0
"""Maximum age, in seconds, of an increase of the out-of-memory counter that can explain a SIGKILL.

It is above zero because the driver learns of the end of a process late.
"""


class ProcessEnds:
    """Describes the ends of processes. The description of a process never changes.

    An increase of the number of out-of-memory kills explains only the SIGKILLs that are described soon afterwards. So
    `record_oom_kills` must be called regularly, for example once per second.
    """

    def __init__(self, num_oom_kills: int | None) -> None:
        self._num_oom_kills = num_oom_kills
        self._increased_s: float | None = None
        self._causes: dict[tuple[str, int], str] = {}

    def record_oom_kills(self, count: int | None, now_s: float) -> None:
        """Records the result of `count_oom_kills` at monotonic time `now_s`."""
        if count is not None and self._num_oom_kills is not None and count > self._num_oom_kills:
            self._increased_s = now_s
        self._num_oom_kills = count

    def describe(self, process: tuple[str, int], exit_code: int, *, now_s: float, is_own_kill: bool = False) -> str:
        """Returns how a process (name and id) ended. `exit_code` and `is_own_kill` are those of `describe_end`.

        Later calls for the same process return the first description.
        """
        if process not in self._causes:
            has_oom_kill = self._has_oom_kill(now_s)
            self._causes[process] = describe_end(exit_code, is_own_kill=is_own_kill, has_oom_kill=has_oom_kill)
        return self._causes[process]

    def _has_oom_kill(self, now_s: float) -> bool | None:
        if self._increased_s is None:
            return None if self._num_oom_kills is None else False
        # An earlier kill may be that of another process, or of a process whose end is noticed late.
        return True if now_s - self._increased_s <= _OOM_WINDOW_S else None


def describe_end(exit_code: int, *, is_own_kill: bool, has_oom_kill: bool | None) -> str:
    """Returns how a process ended, as the cause of an error.

    Args:
        exit_code: exit code of the process; the negative number of the signal that ended it.
        is_own_kill: whether flowrl has killed the process.
        has_oom_kill: whether the kernel's out-of-memory killer has ended a process; None if it is unknown.
    """
    if exit_code >= 0:
        return f"its process ended with exit code {exit_code} (os._exit, or a library)"
    number = -exit_code
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
            count = parse_oom_kills(path.read_text())
        except (OSError, ValueError):
            continue
        if count is not None:
            return count
    return None


def parse_oom_kills(text: str) -> int | None:
    """Returns the number of out-of-memory kills in a file of the kernel; None if the file has no such counter.

    The file is `memory.events` (cgroup version 2), `memory.oom_control` (version 1) or `/proc/vmstat`.
    """
    fields = [line.split() for line in text.splitlines()]
    return next((int(values[0]) for name, *values in filter(None, fields) if name == "oom_kill" and values), None)


def _memory_events() -> list[Path]:
    """Returns the files that may contain the out-of-memory counter of this process's cgroup (version 1 or 2)."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    files = []
    for line in lines:
        _, controllers, group = line.split(":", 2)
        # In a container, the path may be that of the host, although the container's cgroup is mounted at the root.
        for name in (group.strip("/"), ""):
            if not controllers:
                files.append(Path("/sys/fs/cgroup", name, "memory.events"))
            elif "memory" in controllers.split(","):
                files.append(Path("/sys/fs/cgroup/memory", name, "memory.oom_control"))
    return files
