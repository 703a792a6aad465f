"""Runs test functions on several ranks, in processes that start without importing torch again."""

import multiprocessing
from collections.abc import Callable
from typing import Any

from torch.multiprocessing.spawn import start_processes

PRELOADED = ("torch", "transformers", "peft", "flowrl.workers", "flowrl.engines.checkpoint.export")
"""Modules that the fork server imports once per pytest process. Each rank is forked from this server."""


def run_ranks(function: Callable[..., None], arguments: tuple[Any, ...], num_ranks: int) -> None:
    """Calls `function(rank, *arguments)` in `num_ranks` new processes, and raises if one of them fails."""
    multiprocessing.set_forkserver_preload(list(PRELOADED))
    start_processes(function, arguments, nprocs=num_ranks, start_method="forkserver")
