"""Future: a result that is not a batch and perhaps not computed yet. Other groups take it as an argument."""

from collections.abc import Callable, Sequence
from typing import Any

from flowrl.controller.dispatch import Gather
from flowrl.controller.placement.plan import Mesh
from flowrl.data.batch.block import Ref

Fetch = Callable[[Sequence[Ref], float | None], list[Any]]
"""Waits for the calls behind references, at most so many seconds, and reads them together."""


class Future:
    """The result of a call on every rank. Made by `group.method.submit(...)` and by methods that do not block."""

    def __init__(self, refs: Sequence[Ref], gather: Gather, mesh: Mesh, fetch: Fetch) -> None:
        self.refs = tuple(refs)
        self.gather = gather
        self.mesh = mesh
        self._fetch = fetch

    def get(self, timeout_s: float | None = None) -> Any:  # Any: whatever the method returns
        """The value; waits for it.

        Raises:
            WorkerError: the first failure of the run, naming role, rank, node and method.
            TimeoutError: it took longer than `timeout_s` seconds.
        """
        return self.gather(self.mesh, self._fetch(self.refs, timeout_s))

    def done(self) -> bool:
        """Whether the value is there (or the call has failed)."""
        return all(ref.done() for ref in self.refs)
