"""Device memory within one process: before a call, offloads idle workers and loads the called worker."""

from collections.abc import Mapping

from flowrl.controller.worker import Worker


class ResidentWorker:
    """Tracks which worker of a process is on the device. Only the called worker and its weight owners are loaded."""

    def __init__(self, workers: Mapping[str, Worker]) -> None:
        self._workers = workers
        self._resident: str | None = None
        self._resident_parts: frozenset[str] | None = None
        """Memory parts of the resident worker that are loaded. None means all parts."""

    def activate(self, role: str, parts: tuple[str, ...] | None = None) -> None:
        """Offloads the other workers, and loads the worker of `role`, or only `parts` of its memory."""
        is_resident = self._resident == role
        if is_resident and (
            self._resident_parts is None or (parts is not None and self._resident_parts.issuperset(parts))
        ):
            return
        onloaded = self._resident_parts if is_resident and self._resident_parts else frozenset()
        self._resident = None  # stays None if a transfer fails
        worker = self._workers[role]
        if not is_resident:
            self._offload_others(worker)
        if parts is None:
            worker.onload()
        else:
            worker.onload_parts(parts)
        self._resident, self._resident_parts = role, None if parts is None else onloaded.union(parts)

    def _offload_others(self, worker: Worker) -> None:
        weight_owners = worker.weight_owners
        for other in self._workers.values():
            if other is not worker:
                other.offload(keep_weights=other in weight_owners)
        for owner in weight_owners:
            owner.onload()

    def offload_all(self) -> None:
        self._resident = None
        for worker in self._workers.values():
            worker.offload(keep_weights=False)
