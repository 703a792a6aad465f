"""Metrics of a streaming schedule: groups per state, and the time in which replicas wait."""

from collections import deque

from flowrl.schedules.scheduler import GroupCounts


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


def group_metrics(counts: GroupCounts, previous: GroupCounts | None = None) -> dict[str, float]:
    """Returns the number of groups per state, and of groups admitted, trained and dropped since the previous step."""
    before = previous.dropped if previous else {}
    dropped = {reason: count - before.get(reason, 0) for reason, count in counts.dropped.items()}
    metrics = {
        "buffer_depth": counts.complete,
        "running_groups": counts.running,
        "waiting_groups": counts.waiting,
        "admitted_groups": counts.admitted - (previous.admitted if previous else 0),
        "trained_groups": counts.trained - (previous.trained if previous else 0),
        "dropped_groups": sum(dropped.values()),
    }
    metrics |= {f"dropped_{reason}": count for reason, count in dropped.items()}
    return {name: float(value) for name, value in metrics.items()}
