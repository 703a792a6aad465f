"""Trace records: the timing of calls, which the controller writes and flowrl/report displays, and counters over time."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CallEvent:
    """Timing of one call of a worker method on one rank. Times are nanoseconds since the epoch."""

    number: int
    """Call id, in order of submission. Every rank of a call has its own id."""

    inputs: tuple[int, ...]
    """Ids of the calls whose results this call reads."""

    role: str
    rank: int
    node: int | str
    device: str
    pool: str
    method: str
    submitted_ns: int
    """The driver submitted the call."""
    arrived_ns: int
    """The worker process had received all arguments."""
    started_ns: int
    """The method started."""
    ended_ns: int
    """The method returned."""
    finished_ns: int
    """The result was stored."""

    @property
    def device_label(self) -> str:
        """Name of the device that is unique in the cluster, such as `node0/cuda:1`."""
        return f"node{self.node}/{self.device}" if isinstance(self.node, int) else f"{self.node}/{self.device}"

    @property
    def duration_s(self) -> float:
        """Seconds that the method ran."""
        return (self.ended_ns - self.started_ns) / 1e9


@dataclass(frozen=True, slots=True)
class Counted:
    """Values of named counters at one time, such as the number of groups in each state."""

    at_ns: int
    """Nanoseconds since the epoch."""
    values: Mapping[str, float]
