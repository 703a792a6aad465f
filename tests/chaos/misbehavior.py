"""The reward function, which misbehaves on request. It runs in scoring processes, which start fast because this module
imports no workers.

The option `folder` of the function names a folder. If it has the file `reward`, the next call of `score` misbehaves as
the file specifies.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from recipes.quickstart import task


def hang() -> float:
    while True:
        time.sleep(0.1)


def interrupt() -> float:
    raise KeyboardInterrupt


def fail() -> float:
    raise RuntimeError("the reward server refused 10 connections")


def print_megabytes() -> None:
    for _ in range(64):
        sys.stdout.write("spam " * 20_000 + "\n")
        sys.stderr.write("spam " * 20_000 + "\n")


MISBEHAVIOR: dict[str, Callable[[], Any]] = {  # Any: not always a number
    "raises": fail,
    "nan": lambda: float("nan"),
    "string": lambda: "0.5 points",
    "hangs": hang,
    "hangs_always": hang,
    "sys_exit": lambda: sys.exit("no reward today"),
    "os_exit": lambda: os._exit(3),
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "interrupt": interrupt,
    "huge": lambda: 1e308,
    "prints": print_megabytes,
}
"""Kind -> what the reward function does once (`hangs_always`: in every call until the file is removed)."""


def score(prompt: str, response: str, answer: str, folder: str, **columns: object) -> float:
    """The quickstart's score, unless the records' folder requests a misbehavior."""
    value = _misbehave(Path(folder))
    return task.score(prompt, response, answer, **columns) if value is None else value


def _misbehave(folder: Path) -> Any:  # Any: not always a number
    request, accepted = folder / "reward", folder / f"reward-{os.getpid()}"
    if not request.exists():
        return None
    kind = request.read_text()
    if not kind.endswith("always"):
        try:
            request.rename(accepted)
        except FileNotFoundError:
            return None  # another process misbehaves
    if not (folder / "misbehaved").exists():
        (folder / "misbehaved.new").write_text(f"{time.monotonic()} {os.getpid()}")
        (folder / "misbehaved.new").rename(folder / "misbehaved")
    return MISBEHAVIOR[kind]()
