"""Renders the differences of two runs as tables for a terminal."""

import json
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from flowrl.report.rollout_text import printable
from flowrl.report.run_diff import RunDiff

_MAX_ROWS, _MAX_TEXT = 12, 60


def print_diff(diff: RunDiff, console: Console) -> None:
    """Prints the differences, the first divergence, and what could not be compared."""
    for title, entries in (
        ("Settings", diff.settings),
        ("Inputs (size and CRC-32)", diff.inputs),
        ("Versions", diff.versions),
    ):
        if entries:
            console.print(_table(title, diff.names, entries, num_shown=len(entries)))
        elif not any(title.lower().startswith(reason.split(":")[0].split()[-1]) for reason in diff.missing):
            console.print(f"{title}: equal")
    for reason in diff.missing:
        console.print(Text(f"not compared - {reason}"))
    if diff.num_steps:
        console.print(f"Metrics: {diff.num_equal_steps} of {diff.num_steps} common steps are equal")
    if diff.divergence is None:
        if diff.num_steps:
            console.print("No step diverges.")
        return
    found = diff.divergence
    title = f"First divergence: step {found.step}, {found.call}"
    console.print(_table(title, diff.names, found.values, num_shown=_MAX_ROWS))
    console.print(_table("Last common step, largest differences", diff.names, diff.results, num_shown=_MAX_ROWS))


def _table(title: str, names: tuple[str, str], entries: Sequence[tuple[str, Any, Any]], *, num_shown: int) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for name in names:
        table.add_column(name, overflow="fold")
    for name, first, second in entries[:num_shown]:
        table.add_row(name, _cell(first), _cell(second))
    if len(entries) > num_shown:
        table.add_row(f"{len(entries) - num_shown} more", "", "")
    return table


def _cell(value: Any) -> Text:  # Any: a value of JSON
    if value is None:
        return Text("none", style="dim")
    text = value if isinstance(value, str) else json.dumps(value)
    return Text(printable(text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}..."))
