"""PinnedEvaluation: generates held-out responses on one replica with fixed weights, while training continues."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence

from flowrl.controller.calls.calls import Calls
from flowrl.controller.dispatch import Future
from flowrl.controller.group import WorkerGroup
from flowrl.data.batch.batch import Batch
from flowrl.schedules.rewards import HeldOutResponses
from flowrl.schedules.scheduler import Scheduler
from flowrl.weight_sync.transfer import WeightSnapshot

MAX_POLLS = 2
"""Number of polls in flight. The replica runs the second poll while the driver reads the first result."""


class PinnedEvaluation:
    """Generates the held-out responses of one weight version on one replica.

    The replica is pinned to the version from the first request until all responses are generated. Meanwhile, it also
    generates training groups, unless they would exceed the staleness bound. Other replicas load newer versions. If the
    process of the replica is lost, its replacement loads the pinned version and generates the unfinished requests
    again.

    All methods except `submit` run under the driver lock.
    """

    def __init__(self, calls: Calls, scheduler: Scheduler, replicas: Sequence[WorkerGroup], poll_s: float) -> None:
        self._calls, self._scheduler, self._replicas, self._poll_s = calls, scheduler, replicas, poll_s
        self._requests: deque[HeldOutResponses] = deque()
        """Requests without responses, oldest first. The replica generates the first one."""
        self.version: int | None = None
        """Weight version of the requests; None without requests."""
        self._rank = 0
        """Rank of the pinned replica, if there are requests."""
        self._newest: WeightSnapshot | None = None
        """Newest exported snapshot, or None before the first weight sync."""
        self._snapshot: WeightSnapshot | None = None
        """Snapshot of the pinned version. None if it is not exported yet, or if the version has the initial weights."""
        self._start: Future | None = None
        """Call that starts the first request on the replica; None if it is not submitted."""
        self._polls: deque[Batch] = deque()

    def submit(
        self,
        prompts: Batch,
        temperature: float,
        score: Sequence[str],
        finish: Callable[[Batch], Batch],
        version: int,
    ) -> HeldOutResponses:
        """Queues held-out prompts for a weight version, the newest one. Returns their pending responses.

        First waits until the requests of an earlier version are generated. `HeldOutResponses` describes the arguments.
        """
        request = HeldOutResponses(prompts, temperature, score, finish, self._calls)
        self._calls.wait_until(lambda: self.version in (None, version))
        with self._calls.lock:
            if self.version is None:
                self.version, self._rank = version, self._scheduler.pin_replica(version)
                newest = self._newest
                self._snapshot = newest if newest is not None and newest.version == version else None
            self._requests.append(request)
        return request

    def add_snapshot(self, snapshot: WeightSnapshot) -> None:
        """Replaces the newest exported snapshot. Keeps the snapshot for the replica if its version is pinned."""
        self._newest = snapshot
        if snapshot.version == self.version:
            self._snapshot = snapshot

    def find_snapshot(self, rank: int, version: int) -> WeightSnapshot | None:
        """Returns the snapshot of `version` if the replica `rank` is pinned to it, or None."""
        return self._snapshot if rank == self._rank and version == self.version else None

    def restart(self, rank: int) -> None:
        """Discards the calls of a lost process, so that its replacement generates the first request again."""
        if self.version is not None and rank == self._rank:
            self._start = None
            self._polls.clear()

    @property
    def rank(self) -> int | None:
        """Rank of the pinned replica, or None."""
        return None if self.version is None else self._rank

    def run_once(self) -> Iterable[Batch]:
        """Reads finished responses, and submits the next calls. Raises the error of a failed call.

        Returns the pending results after which the method must run again.
        """
        if self.version is None:
            return ()
        self._read_results()
        while self._requests and self._scheduler.replica_version(self._rank) == self.version:
            replica, request = self._replicas[self._rank], self._requests[0]
            score = {"score": request.score} if request.score else {}
            if self._start is None:
                self._start = replica.start_evaluation.submit(request.prompts, request.temperature, **score)
            if len(self._polls) == MAX_POLLS:
                break
            self._polls.append(replica.poll_evaluation.submit(self._poll_s, **score))
        return list(self._polls)[:1]

    def _read_results(self) -> None:
        while self._polls and self._polls[0].done() and self._start is not None and self._start.done():
            self._start.get()  # raises the error of invalid prompts
            responses = self._polls.popleft()
            if responses.num_rows:
                self._requests.popleft().set_responses(responses)
                # Later polls of this request return no rows, so their results are not needed.
                self._start = None
                self._polls.clear()
        if not self._requests:
            self._scheduler.unpin_replica(self._rank)
            self.version = self._snapshot = None
