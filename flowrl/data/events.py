"""What happened when: the record of one call on one rank, which the controller makes and `run/` draws and explains; and
how much there was of something."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CallEvent:
    """One call of a worker method on one rank.

    Times are nanoseconds since the epoch, so that those of several processes can be compared. In order: the driver
    submitted the call, the process had its arguments, the method began, the method returned, its result was packed.
    """

    number: int
    """Counts the calls of a run, each rank's on its own, in the order of submission."""

    inputs: tuple[int, ...]
    """Numbers of the calls whose results it reads."""

    role: str
    rank: int
    node: int | str
    device: str
    pool: str
    method: str
    submitted_ns: int
    arrived_ns: int
    started_ns: int
    ended_ns: int
    finished_ns: int

    @property
    def device_label(self) -> str:
        """Names a device among those of all nodes, such as `node0/cuda:1`."""
        return f"node{self.node}/{self.device}" if isinstance(self.node, int) else f"{self.node}/{self.device}"

    @property
    def duration_s(self) -> float:
        return (self.ended_ns - self.started_ns) / 1e9


@dataclass(frozen=True, slots=True)
class Counted:
    """How many groups of samples were where, at one time."""

    at_ns: int
    """Since the epoch."""
    values: Mapping[str, float]
