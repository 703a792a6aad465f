"""Reads the state, the parent and the start time of processes of this machine."""

import os
from pathlib import Path
from typing import NamedTuple


class ProcessStat(NamedTuple):
    """Fields of `/proc/ID/stat`."""

    state: str
    """R (running), S (sleeping), T (stopped), Z (zombie) and others; X for an ended process."""

    parent_id: int
    started_s: float
    """Seconds since boot."""


def read_stat(process_id: int) -> ProcessStat:
    """Returns the fields of a process. The state of an ended process is X."""
    try:
        # The name of the program, in parentheses, may contain spaces. The state and further fields follow.
        state, *fields = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ProcessStat("X", 0, 0.0)
    return ProcessStat(state, int(fields[0]), int(fields[18]) / os.sysconf("SC_CLK_TCK"))


def read_start_time(process_id: int) -> float | None:
    """Returns the start time of a process of this machine, in seconds since boot, or None if it has ended or is a
    zombie.
    """
    stat = read_stat(process_id)
    return None if stat.state in "ZX" else stat.started_s
