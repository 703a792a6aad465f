"""What a person asks of a run's checkpoints: which there are, and one of them as a model that transformers loads."""

import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from flowrl.checkpoints.checkpoints import Checkpoint, Checkpoints
from flowrl.data.checksums import CheckpointError

_UNITS = ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))


def show_checkpoints(run: Path, console: Console | None = None) -> None:
    """Prints a table of all checkpoints of a run. Reads every file of them. Raises CheckpointError without any."""
    checkpoints = Checkpoints(run)
    steps = checkpoints.some_steps()
    table = checkpoints_table([(step, *_looked_at(checkpoints, step)) for step in steps])
    (console or Console()).print(table, crop=False)


def _looked_at(checkpoints: Checkpoints, step: int) -> tuple[Checkpoint | None, str]:
    """The checkpoint, where it can be read, and what is wrong with it; empty if nothing is."""
    checkpoint = None
    try:
        checkpoint = checkpoints.read(step)
        checkpoint.check()
    except CheckpointError as error:
        problem = str(error).removeprefix(f"checkpoint {checkpoints.folder(step)} ")
        return checkpoint, problem.removeprefix("is damaged: ")
    return checkpoint, ""


def checkpoints_table(rows: Sequence[tuple[int, Checkpoint | None, str]]) -> Table:
    """A row per checkpoint: step, score, size, age, and what is wrong with it."""
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
            Text(f"damaged: {problem}" if problem else "whole"),
        )
    return table


def size(num_bytes: float) -> str:
    """Bytes with a unit of thousands."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} TB"


def age(seconds: float) -> str:
    """A length of time in its largest whole unit."""
    for length, unit in _UNITS:
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return "0 s"
