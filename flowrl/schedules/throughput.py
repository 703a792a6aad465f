"""Measures how busy rollout replicas are: stragglers, idle time, and whether it is enough for an evaluation."""

from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from flowrl.data.events import CallEvent

WEIGHT_CALLS = frozenset({"load_weights", "load_adapter", "load_broadcast", "load_ipc", "set_version"})
"""Rollout methods that change the weight version of a replica."""

EWMA_WEIGHT = 1 / 8
"""Smallest weight of the latest group in the moving average of a replica's seconds per group."""

STRAGGLER_RATIO = 2.0
"""A replica can be a straggler only if it is slower than the other replicas by more than this factor."""

RETRY_AFTER = 50.0
"""Delay before an idle straggler gets a group again, as a multiple of its seconds per group."""


@dataclass
class _ReplicaTiming:
    mean_s: float = 0.0
    num_completed: int = 0
    started_s: dict[int, float] = field(default_factory=dict)
    """Time of dispatch of each running group."""
    idle_since_s: float = 0.0


class ThroughputTracker:
    """Measures each replica's seconds per group to detect stragglers. Without `advance_clock`, none are detected."""

    def __init__(self, num_replicas: int) -> None:
        self._replicas = [_ReplicaTiming() for _ in range(num_replicas)]
        self._now_s: float | None = None

    def advance_clock(self, now_s: float) -> None:
        self._now_s = now_s

    def start_group(self, replica: int, group: int) -> None:
        if self._now_s is not None:
            self._replicas[replica].started_s[group] = self._now_s

    def cancel_group(self, replica: int, group: int) -> None:
        """Discards the measurement of a dropped group."""
        self._replicas[replica].started_s.pop(group, None)

    def complete_group(self, replica: int, group: int) -> None:
        """Adds the duration of a complete group to the replica's moving average."""
        timing = self._replicas[replica]
        started_s = timing.started_s.pop(group, None)
        if started_s is None or self._now_s is None:
            return
        timing.num_completed += 1
        timing.mean_s += (self._now_s - started_s - timing.mean_s) * max(EWMA_WEIGHT, 1 / timing.num_completed)
        timing.idle_since_s = self._now_s

    def reset_replica(self, replica: int) -> None:
        self._replicas[replica] = _ReplicaTiming()

    def seconds_per_group(self, replica: int) -> float | None:
        """Returns the moving average of a replica, or None before its first measurement.

        The oldest running group is included once its duration exceeds the average.
        """
        timing = self._replicas[replica]
        if self._now_s is None or not (timing.num_completed or timing.started_s):
            return None
        age_s = self._now_s - min(timing.started_s.values(), default=self._now_s)
        weight = max(EWMA_WEIGHT, 1 / (timing.num_completed + 1))
        return timing.mean_s + max(0.0, age_s - timing.mean_s) * weight

    def is_straggler(self, replica: int, others: Iterable[int], num_groups: float) -> bool:
        """Whether the replicas `others` complete `num_groups` groups before `replica` completes one group."""
        own_s, others_s = self.seconds_per_group(replica), [self.seconds_per_group(other) for other in others]
        measured_s = [seconds for seconds in others_s if seconds]
        if own_s is None or not measured_s or len(measured_s) < len(others_s):
            return False
        timing = self._replicas[replica]
        assert self._now_s is not None
        if not timing.started_s and self._now_s - timing.idle_since_s > RETRY_AFTER * own_s:
            return False
        groups_per_s = sum(1 / seconds for seconds in measured_s)
        return own_s > STRAGGLER_RATIO * len(measured_s) / groups_per_s and own_s > num_groups / groups_per_s


class StepFunction:
    """A number that changes at known times, such as that of waiting replicas, and its integral over time."""

    def __init__(self) -> None:
        self._changes: deque[tuple[int, float]] = deque()

    def set(self, now_ns: int, value: float) -> None:
        """Sets the value from `now_ns` on."""
        if not self._changes or self._changes[-1][1] != value:
            self._changes.append((now_ns, value))

    def integral_s(self, start_ns: int, end_ns: int) -> float:
        """Returns the integral over [start_ns, end_ns] in seconds. Discards changes before `start_ns`."""
        while len(self._changes) > 1 and self._changes[1][0] <= start_ns:
            self._changes.popleft()
        times = [at_ns for at_ns, _ in self._changes]
        pieces = zip(self._changes, [*times[1:], end_ns], strict=False)
        return sum(value * max(0, min(to_ns, end_ns) - max(at_ns, start_ns)) for (at_ns, value), to_ns in pieces) / 1e9


class IdleTime:
    """Idle and busy time of the replicas since the last evaluation, which decide whether the next one runs alongside
    training. Excludes the time in which training waits for an evaluation.
    """

    def __init__(self) -> None:
        self._since_s: float | None = None
        """Time until which idle and busy time are counted; None while they are not counted."""
        self._fraction = 0.0
        """Fraction of idle replicas since then."""
        self.reset()

    def reset(self) -> None:
        """Begins the time after an evaluation."""
        self._idle_s = self._busy_s = 0.0
        self._num_rows = 0

    def pause(self) -> None:
        """Excludes the time until `resume`, and the rows that are generated until then."""
        self._since_s = None

    def resume(self, now_s: float) -> None:
        if self._since_s is None:
            self._since_s = now_s

    def set(self, now_s: float, fraction: float) -> None:
        """Sets the fraction of the replicas that are idle from `now_s` on."""
        if self._since_s is not None:
            self._idle_s += (now_s - self._since_s) * self._fraction
            self._busy_s += (now_s - self._since_s) * (1 - self._fraction)
            self._since_s = now_s
        self._fraction = fraction

    def add_rows(self, count: int) -> None:
        """Adds generated rows."""
        self._num_rows += count if self._since_s is not None else 0

    def covers(self, num_rows: int) -> bool:
        """Returns whether the idle time is at least the time in which all replicas generate `num_rows` rows."""
        return self._idle_s * self._num_rows >= self._busy_s * num_rows


def measure_weight_wait_s(events: Iterable[CallEvent], role: str, start_ns: int, end_ns: int) -> float:
    """Returns how many seconds of [start_ns, end_ns] ranks were idle before weight updates, mean over ranks.

    `events` must include each rank's last call before `start_ns`.
    """
    calls_of: defaultdict[int, list[CallEvent]] = defaultdict(list)
    for event in events:
        if event.role == role:
            calls_of[event.rank].append(event)
    wait_ns = 0
    for calls in calls_of.values():
        calls.sort(key=lambda event: event.started_ns)
        idle_since_ns = start_ns
        for event in calls:
            if event.method in WEIGHT_CALLS:
                wait_ns += max(0, min(event.started_ns, end_ns) - max(idle_since_ns, start_ns))
            idle_since_ns = max(idle_since_ns, event.ended_ns)
    return wait_ns / 1e9 / max(1, len(calls_of))
