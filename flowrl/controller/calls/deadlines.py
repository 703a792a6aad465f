"""Which call each process is at, since when, and for how long it may be."""

from collections import defaultdict, deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flowrl.controller.calls.call_record import CallRecord


class Deadlines:
    """A call's clock starts when the driver knows that nothing is before it.

    Processes run their calls in the order of submission, so that is when the call before it on its process and the
    calls whose results it reads are done. A driver that looks rarely lets calls run longer, never shorter.
    """

    def __init__(self) -> None:
        self._queues: defaultdict[tuple[str, int], deque[CallRecord]] = defaultdict(deque)

    def add(self, record: "CallRecord") -> None:
        """A call was submitted."""
        self._queues[record.slot.pool, record.slot.rank].append(record)

    def current(self, pool: str, rank: int) -> "CallRecord | None":
        """The oldest call of a process that is not settled."""
        queue = self._queues[pool, rank]
        while queue and queue[0].settled:
            queue.popleft()
        return queue[0] if queue else None

    def overdue(self, now_s: float) -> "list[CallRecord]":
        """Calls that have run longer than they may, at `now_s` of a monotonic clock."""
        late = []
        for pool, rank in list(self._queues):
            record = self.current(pool, rank)
            if record is None or record.timeout_s is None or not all(source.settled for source in record.inputs):
                continue
            if record.running_since_s is None:
                record.running_since_s = now_s
            elif now_s - record.running_since_s > record.timeout_s:
                late.append(record)
        return late
