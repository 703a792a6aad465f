"""Trace records: the timing of calls, and counters over time."""

from collections.abc import Mapping
from dataclasses import dataclass, field

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
    """Time at which the arguments were unpacked. A switch of roles on the device, and the method, follow."""
    ended_ns: int
    """Time at which the method returned."""
    finished_ns: int
    """Time at which the result was packed."""
    usage: Mapping[str, float] = field(default_factory=dict, compare=False, kw_only=True)
    """What the rank has used and done in the call, by name. A name is missing if it does not apply.

    - `tokens`: tokens of the rows of forward and backward passes, or sampled tokens, as the share of one device
    - `flops`: model FLOPs, as the share of one device; `peak_flops`: peak FLOP/s of the device, if it is known
    - `allocated`, `reserved`, `free`: bytes of device memory (`MemoryUsage`): the peak, and both others after the call
    - `memory_fraction`: fraction of a GPU's memory that was in use at the peak
    - `seconds/ROLE/PHASE`: seconds in which memory of a role moved, in a switch between roles that share a device
    - `weight_bytes`: bytes of weights that were exported or loaded
    - `responses`, `preemptions`: finished responses, and interruptions of responses because the KV cache was full
    """

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
