"""Profiles blocks of code with torch's profiler."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch


@contextmanager
def record_profile(path: Path, name: str) -> Iterator[None]:
    """Records the operations of a block on the CPU and on GPUs, and writes them to `path` in the Chrome trace format.

    If the block raises an exception, no file is written.

    Args:
        path: file that ends with `.json.gz`. Missing folders are created, and an existing file is replaced.
        name: name of the span of the block.
    """
    with torch.profiler.profile() as profiler, torch.profiler.record_function(name):
        yield
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}")
    profiler.export_chrome_trace(str(temporary))
    os.replace(temporary, path)
