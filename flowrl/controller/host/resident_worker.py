"""Whose turn it is on a device: before a worker is called, the others of its process make room.

Calls of one process come one after another, so at any moment one worker needs the device, and those whose weights it
uses. Who has nothing to move ignores it.
"""

from collections.abc import Mapping

from flowrl.controller.worker import Worker


class ResidentWorker:
    """The workers of one process, and which of them was called last."""

    def __init__(self, workers: Mapping[str, Worker]) -> None:
        """`workers` may grow later."""
        self._workers = workers
        self._last: str | None = None
        self._here: frozenset[str] | None = None
        """Parts of its memory that are there; None is all."""

    def take(self, role: str, parts: tuple[str, ...] | None = None) -> None:
        """Gives the device to a worker that is about to be called: others leave before it enters, or parts of it."""
        stays = self._last == role
        if stays and (self._here is None or (parts is not None and self._here.issuperset(parts))):
            return
        here = self._here if stays and self._here else frozenset()
        self._last = None  # until all have moved
        worker = self._workers[role]
        if not stays:
            self._enter(worker)
        if parts is None:
            worker.onload()
        else:
            worker.onload_parts(parts)
        self._last, self._here = role, None if parts is None else here.union(parts)

    def _enter(self, worker: Worker) -> None:
        weight_owners = worker.weight_owners
        for other in self._workers.values():
            if other is not worker:
                other.offload(keep_weights=other in weight_owners)
        for lender in weight_owners:
            lender.onload()

    def clear(self) -> None:
        """Has all make room: for a worker that is about to be made, or for another process."""
        self._last = None
        for worker in self._workers.values():
            worker.offload(keep_weights=False)
