"""Implements the table of `flowrl checkpoints`."""

import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from flowrl.checkpoints.checkpoints import Checkpoint, Checkpoints
from flowrl.data.checksums import CheckpointError
from flowrl.data.console import make_console

_UNITS = ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))


def show_checkpoints(run: Path, console: Console | None = None) -> None:
    """Verifies all checkpoints of a run and prints a table of them. Raises CheckpointError if there are none."""
    checkpoints = Checkpoints(run)
    table = checkpoints_table([(step, *_verify(checkpoints, step)) for step in checkpoints.require_steps()])
    (console or make_console()).print(table, crop=False)


def _verify(checkpoints: Checkpoints, step: int) -> tuple[Checkpoint | None, str]:
    """Returns the checkpoint (None if unreadable) and an error message (empty if the checkpoint is complete)."""
    checkpoint = None
    try:
        checkpoint = checkpoints.read(step)
        checkpoint.check()
    except CheckpointError as error:
        problem = str(error).removeprefix(f"checkpoint {checkpoints.folder(step)} ")
        return checkpoint, problem.removeprefix("is corrupt: ")
    return checkpoint, ""


def checkpoints_table(rows: Sequence[tuple[int, Checkpoint | None, str]]) -> Table:
    """Returns a table with one row per checkpoint: step, score, size, age and state."""
    table = Table()
    for heading in ("step", "score", "value", "size", "age"):
        table.add_column(heading, justify="left" if heading == "score" else "right")
    table.add_column("state", overflow="fold")
    for step, checkpoint, problem in rows:
        manifest = checkpoint.manifest if checkpoint is not None else None
        score = manifest.score if manifest is not None else None
        table.add_row(
            str(step),
            "" if score is None else score.name,
            "" if score is None else f"{score.value:.4f}",
            "" if manifest is None else size(manifest.num_bytes),
            "" if manifest is None else age(time.time() - manifest.saved_at_s),
            Text(f"corrupt: {problem}" if problem else "complete"),
        )
    return table


def size(num_bytes: float) -> str:
    """Formats a number of bytes with a decimal unit."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} TB"


def age(seconds: float) -> str:
    """Formats a duration in its largest unit."""
    for length, unit in _UNITS:
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return "0 s"
