"""Whose turn it is on a device: before a worker is called, the others of its process make room.

Calls of one process come one after another, so at any moment one worker needs the device, and those whose weights it
uses. Who has nothing to move ignores it.
"""

from collections.abc import Mapping

from flowrl.controller.worker import Worker


class Turns:
    """The workers of one process, and which of them was called last."""

    def __init__(self, workers: Mapping[str, Worker]) -> None:
        """`workers` may grow later."""
        self._workers = workers
        self._last: str | None = None

    def take(self, role: str) -> None:
        """Gives the device to a worker that is about to be called: others leave before it enters."""
        if self._last == role:
            return
        self._last = None  # until all have moved
        worker = self._workers[role]
        lenders = worker.lenders
        for other in self._workers.values():
            if other is not worker:
                other.offload(keep_weights=other in lenders)
        for needed in (*lenders, worker):
            needed.onload()
        self._last = role

    def clear(self) -> None:
        """Has all make room for a worker that is about to be made."""
        self._last = None
        for worker in self._workers.values():
            worker.offload(keep_weights=False)
