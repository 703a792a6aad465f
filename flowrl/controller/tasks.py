"""Tasks: the worker that runs the pure functions of `Batch.apply` and `Batch.reduce` in its own process."""

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from flowrl.controller.dispatch import Future
from flowrl.controller.group import WorkerGroup
from flowrl.controller.register import Contract, Dispatch, register
from flowrl.controller.worker import Worker
from flowrl.data.batch.batch import Batch

if TYPE_CHECKING:
    from tensordict import TensorDict


class Tasks(Worker):
    """Runs functions in a process that no role uses, so that they do not wait for models."""

    stateless = True

    @register(Dispatch.RANK_ZERO, blocking=False)
    def prepare(self, modules: tuple[str, ...]) -> None:
        """Imports modules while the processes of the roles are still starting."""
        for module in modules:
            importlib.import_module(module)

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def apply(self, table: "TensorDict", fn: Callable, **kwargs: Any) -> "TensorDict":  # Any: the function's own
        """Runs a function that returns a table."""
        return fn(table, **kwargs)

    @register(Dispatch.RANK_ZERO, blocking=False)
    def reduce(self, table: "TensorDict", fn: Callable, **kwargs: Any) -> Any:  # Any: the function's own result
        """Runs a function that returns any value."""
        return fn(table, **kwargs)


class GroupTasks:
    """The cluster's `TaskRunner`, which sends functions to one rank of `Tasks`."""

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group
        group.tasks = self

    def apply(self, fn: Callable, batch: Batch, writes: tuple[str, ...], rows: str, kwargs: dict) -> Batch:
        """Submits `fn(table, **kwargs)` and returns its rows as a batch."""
        kind = "same" if rows == "same" else "unknown"
        contract = Contract(Dispatch.DP_COMPUTE_PROTO, blocking=False, writes=writes, rows=kind)
        result = self._group.submit("apply", contract, {"table": batch, "fn": fn, **kwargs})
        assert isinstance(result, Batch)
        return result

    def reduce(self, fn: Callable, batch: Batch, kwargs: dict) -> Future:
        """Submits `fn(table, **kwargs)` and returns its result as a future."""
        contract = Contract(Dispatch.RANK_ZERO, blocking=False)
        result = self._group.submit("reduce", contract, {"table": batch, "fn": fn, **kwargs})
        assert isinstance(result, Future)
        return result
