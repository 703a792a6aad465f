"""Runs pytest on a copy of the repository, in processes that are forked from one that has imported the libraries."""

import multiprocessing
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest

LIBRARIES = ["torch", "transformers", "tensordict", "pydantic", "yaml", "psutil", "safetensors.torch", __name__]
"""Modules that most tests need, and whose import takes longer than most tests."""


@dataclass(frozen=True)
class Result:
    """The end of a pytest process."""

    exit_code: int | None
    """None after the time limit."""

    output: str


def make_context() -> ForkServerContext:
    """Returns a context whose processes have imported `LIBRARIES`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(LIBRARIES)
    return context


def run_pytest(context: ForkServerContext, copy: Path, arguments: Sequence[str], limit_s: float) -> Result:
    """Runs pytest in the folder `copy`, whose packages take precedence over the installed ones."""
    with tempfile.NamedTemporaryFile(prefix="pytest-output-") as output:
        process = context.Process(target=_run, args=(copy, list(arguments), output.name))
        process.start()
        process.join(limit_s)
        exit_code = process.exitcode
        if exit_code is None:
            process.kill()
            process.join()
        return Result(exit_code, Path(output.name).read_text(encoding="utf-8", errors="replace"))


def _run(copy: Path, arguments: list[str], output: str) -> None:
    opened = os.open(output, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(opened, stream)
    os.chdir(copy)
    sys.path.insert(0, str(copy))
    os.environ["PYTHONPATH"] = str(copy)  # of processes that tests start in other folders
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]  # imported from the repository
    assert "flowrl" not in sys.modules, "the process would test the code of the repository"
    # The libraries have imported modules of plugins, whose assertions are then not rewritten.
    sys.exit(pytest.main(["-W", "ignore::pytest.PytestAssertRewriteWarning", *arguments]))
