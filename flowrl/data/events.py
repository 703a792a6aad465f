"""Trace records: the timing of calls, and counters over time."""

from collections.abc import Mapping
from dataclasses import dataclass

MAX_COUNTS = 5_000
"""Number of most recent samples of group counts in `trace.json`."""


@dataclass(frozen=True, slots=True)
class CallEvent:
    """Timing of one call of a worker method on one rank. Times are in nanoseconds since the epoch."""

    number: int
    """Id of the call, in submission order. If several ranks execute a call, each rank has its own id."""

    inputs: tuple[int, ...]
    """Ids of the calls whose results are inputs of this call."""

    role: str
    rank: int
    node: int | str
    device: str
    pool: str
    method: str
    submitted_ns: int
    """Time at which the driver submitted the call."""
    arrived_ns: int
    """Time at which the worker process had received all arguments."""
    started_ns: int
    """Time at which the method started."""
    ended_ns: int
    """Time at which the method returned."""
    finished_ns: int
    """Time at which the result was stored."""

    @property
    def device_label(self) -> str:
        """Name of the device, unique in the cluster, such as `node0/cuda:1`."""
        return f"node{self.node}/{self.device}" if isinstance(self.node, int) else f"{self.node}/{self.device}"

    @property
    def duration_s(self) -> float:
        return (self.ended_ns - self.started_ns) / 1e9


@dataclass(frozen=True, slots=True)
class Counted:
    """Values of named counters at one point in time."""

    at_ns: int
    """Time in nanoseconds since the epoch."""
    values: Mapping[str, float]
