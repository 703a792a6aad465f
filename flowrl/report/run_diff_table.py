"""Renders the differences of two runs as tables for a terminal."""

import json
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from flowrl.data.console import printable, round_pair
from flowrl.report.run_diff import CommonScores, RunDiff

_MAX_ROWS, _MAX_TEXT = 12, 60


def print_diff(diff: RunDiff, console: Console) -> None:
    """Prints the differences, the first divergence, and why a comparison is missing."""
    for name, title, entries in (
        ("settings", "Settings", diff.settings),
        ("inputs", "Inputs (size and CRC-32)", diff.inputs),
        ("versions", "Versions", diff.versions),
    ):
        if entries:
            console.print(_table(title, diff.names, entries, num_shown=len(entries)))
        elif name not in diff.missing:
            console.print(f"{title}: equal")
    for name, reason in diff.missing.items():
        console.print(Text(f"{name.capitalize()}: not compared, because {reason}"))
    if diff.num_steps:
        console.print(f"Metrics: {diff.num_equal_steps} of {diff.num_steps} common steps are equal")
    for scores in diff.evaluations:
        console.print(Text(_describe_scores(scores)))
    if diff.divergence is None:
        if diff.num_steps:
            console.print("No step diverges.")
        return
    title = f"First divergence: step {diff.divergence.step}, {diff.divergence.call}"
    console.print(_table(title, diff.names, diff.divergence.values, num_shown=_MAX_ROWS))
    console.print(_table("Last common step, largest differences", diff.names, diff.results, num_shown=_MAX_ROWS))


def _describe_scores(scores: CommonScores) -> str:
    name = f" of the set {scores.name}" if scores.name else ""
    one, other = scores.means
    return (
        f"Evaluation{name} in step {scores.step}: rewards failed. Mean score of the {scores.num_scored} of "
        f"{scores.num_rows} responses with a score in both runs: {one:.3f} and {other:.3f}"
    )


def _table(title: str, names: tuple[str, str], entries: Sequence[tuple[str, Any, Any]], *, num_shown: int) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for name in names:
        table.add_column(Text(printable(name)), overflow="fold")
    for name, first, second in entries[:num_shown]:
        table.add_row(Text(printable(name)), *map(_cell, round_pair(first, second)))
    if len(entries) > num_shown:
        table.add_row(f"{len(entries) - num_shown} more", "", "")
    return table


def _cell(value: Any) -> Text:  # Any: a value of JSON
    if value is None:
        return Text("none", style="dim")
    text = value if isinstance(value, str) else json.dumps(value)
    return Text(printable(text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}..."))
