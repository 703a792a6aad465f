"""Rows that reasoning-gym generates, as JSON lines."""

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from flowrl.config import DataFile
from flowrl.data.messages import DataError

_PROGRAM = Path(__file__).with_name("generate_rows.py")


def generate_lines(source: DataFile, num_rows: int | None = None) -> Iterator[bytes]:
    """Yields the rows of a source as JSON lines. The rows depend only on the settings and the package's version.

    Args:
        source: a source with `reasoning_gym`.
        num_rows: number of rows, from the start. If None, all rows.
    Raises:
        DataError: the package is missing, or a task or its options are invalid.
    """
    if problem := find_generator_problem():
        raise DataError(f"{source.source} cannot be generated: {problem}")
    num_rows = source.rows if num_rows is None else min(num_rows, source.rows)
    # The order of Python's sets depends on the hash seed of the process, and some tasks draw from a set.
    environment = os.environ | {"PYTHONHASHSEED": "0"}
    with tempfile.TemporaryFile() as errors, tempfile.TemporaryFile() as settings:
        settings.write(json.dumps(_generator_settings(source)).encode())
        settings.seek(0)
        command = [sys.executable, "-P", str(_PROGRAM)]
        process = subprocess.Popen(command, stdin=settings, stdout=subprocess.PIPE, stderr=errors, env=environment)
        assert process.stdout is not None
        try:
            count = 0
            for count, line in enumerate(islice(process.stdout, num_rows), start=1):  # noqa: B007 (read below)
                yield line.rstrip(b"\n")
            if count < num_rows:
                process.wait()
                errors.seek(0)
                last_line = next(reversed(errors.read().decode(errors="replace").strip().splitlines()), "")
                raise DataError(last_line or f"{source.source}: the process that generates rows ended")
        finally:
            process.kill()
            process.wait()
            process.stdout.close()


def _generator_settings(source: DataFile) -> dict[str, Any]:
    """Returns the settings of the program, as JSON values."""
    tasks = source.reasoning_gym or {}
    total = sum(task.weight for task in tasks.values())
    return {
        "tasks": {name: {"weight": task.weight / total, "options": dict(task.options)} for name, task in tasks.items()},
        "rows": source.rows,
        "seed": source.first_seed,
        "system": source.system,
    }


def find_generator_problem() -> str | None:
    """Returns the reason for which no rows can be generated, or None."""
    if importlib.util.find_spec("reasoning_gym") is None:
        return "the library reasoning-gym is not installed: pip install 'flowrl[rewards]'"
    return None


def generator_version() -> str | None:
    """Returns the installed version of reasoning-gym, or None. Other versions may generate other rows."""
    try:
        return importlib.metadata.version("reasoning-gym")
    except importlib.metadata.PackageNotFoundError:
        return None
