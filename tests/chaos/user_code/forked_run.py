"""A run in a forked process, which needs no imports, and a record of what is left in the process afterwards."""

import gc
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from flowrl.cli import run_recipe
from recipes.grpo.config import GRPOConfig
from recipes.grpo.train import train
from tests.chaos.program import end_processes_in, temporary_entries
from tests.chaos.workers import FOLDER

FORK = multiprocessing.get_context("fork")
"""The parent must not compute with torch, because its threads do not exist in the forked process."""


@dataclass(frozen=True)
class ForkedRun:
    """The end of a run."""

    exit_code: int | None
    """None: the process did not end in time."""
    seconds: float
    descriptors: list[str]
    """Open descriptors of the process after the run, as their targets."""
    leftovers: list[str]
    error: str
    """The error that the run printed, or an empty text."""


CLOSING_POLLS = 20
"""Number of times that the open descriptors are counted. The smallest number is recorded."""


def call_in_fork(function: Callable[..., object], *arguments: object) -> None:
    """Calls a function that computes with torch in a forked process."""
    process = FORK.Process(target=function, args=arguments)
    process.start()
    process.join()
    assert process.exitcode == 0


def run_forked(folder: Path, config: Path, limit_s: float) -> ForkedRun:
    """Runs a config and returns its end. `folder` receives the output and the temporary files."""
    temporary = folder / "t"
    temporary.mkdir()
    process = FORK.Process(target=_run, args=(folder, config))
    started_s = time.monotonic()
    process.start()
    process.join(limit_s)
    code = process.exitcode
    if code is None:
        process.kill()
        process.join()
    left = end_processes_in(temporary) + sorted(temporary_entries(temporary))
    record = {"seconds": time.monotonic() - started_s, "descriptors": [], "children": []}
    with suppress(FileNotFoundError):
        record = json.loads((folder / "after.json").read_text())
    left += [f"child {name}" for name in record["children"]]
    lines = (folder / "output.log").read_text(errors="replace").splitlines()
    error = next((line for line in lines if line.startswith("error")), "")
    return ForkedRun(code, record["seconds"], record["descriptors"], left, error)


def _run(folder: Path, config: Path) -> None:
    """Runs the recipe as its own program would, and writes the record of the process."""
    os.setsid()
    os.environ.update({FOLDER: str(folder), "TMPDIR": str(folder / "t"), "COLUMNS": "4000"})
    tempfile.tempdir = None
    output = os.open(folder / "output.log", os.O_WRONLY | os.O_CREAT)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    started_s = time.monotonic()
    code = run_recipe(GRPOConfig, train, [str(config)])
    seconds = time.monotonic() - started_s
    gc.collect()
    descriptors = _open_descriptors()
    for _ in range(CLOSING_POLLS):  # threads of connections close their sockets after the run
        time.sleep(0.1)
        descriptors = min(descriptors, _open_descriptors(), key=len)
    children = [" ".join(child.cmdline()[:3]) for child in psutil.Process().children(recursive=True)]
    record = {"seconds": seconds, "descriptors": sorted(descriptors), "children": children}
    (folder / "after.json").write_text(json.dumps(record))
    sys.stdout.flush()
    sys.exit(code)


def _open_descriptors() -> list[str]:
    return [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
