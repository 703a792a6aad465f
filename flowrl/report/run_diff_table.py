"""Renders the differences of two runs as tables for a terminal."""

import json
import math
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from flowrl.data.console import printable
from flowrl.report.run_diff import RunDiff

_MAX_ROWS, _MAX_TEXT = 12, 60
_MIN_DIGITS, _MAX_DIGITS = 4, 17
"""Smallest number of significant digits of a float, and the number that distinguishes all floats."""


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
    if diff.divergence is None:
        if diff.num_steps:
            console.print("No step diverges.")
        return
    title = f"First divergence: step {diff.divergence.step}, {diff.divergence.call}"
    console.print(_table(title, diff.names, diff.divergence.values, num_shown=_MAX_ROWS))
    console.print(_table("Last common step, largest differences", diff.names, diff.results, num_shown=_MAX_ROWS))


def _table(title: str, names: tuple[str, str], entries: Sequence[tuple[str, Any, Any]], *, num_shown: int) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for name in names:
        table.add_column(Text(printable(name)), overflow="fold")
    for name, first, second in entries[:num_shown]:
        table.add_row(Text(printable(name)), *map(_cell, _round_pair(first, second)))
    if len(entries) > num_shown:
        table.add_row(f"{len(entries) - num_shown} more", "", "")
    return table


def _round_pair(first: Any, second: Any) -> tuple[Any, Any]:  # Any: values of JSON
    """Returns two values whose floats have the fewest significant digits, at least 4, that distinguish them.

    Floats in lists and objects are rounded in pairs. Digits before the decimal point are kept.
    """
    if isinstance(first, list) and isinstance(second, list):
        pairs = [_round_pair(*pair) for pair in zip_longest(first, second)]
        return [one for one, _ in pairs][: len(first)], [other for _, other in pairs][: len(second)]
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        pairs = {key: _round_pair(first.get(key), second.get(key)) for key in (*first, *second)}
        return {key: pairs[key][0] for key in first}, {key: pairs[key][1] for key in second}
    for digits in range(_MIN_DIGITS, _MAX_DIGITS):
        rounded = _round(first, digits), _round(second, digits)
        if rounded[0] != rounded[1]:
            return rounded
    return (first, second) if first != second else (_round(first, _MIN_DIGITS), _round(second, _MIN_DIGITS))


def _round(value: Any, digits: int) -> Any:  # Any: a value of JSON
    """Returns a float with this number of significant digits, or with those before the decimal point if they are more.

    Rounds the floats in lists and objects too. Other values are unchanged.
    """
    if isinstance(value, list):
        return [_round(item, digits) for item in value]
    if isinstance(value, Mapping):
        return {key: _round(item, digits) for key, item in value.items()}
    if not isinstance(value, float) or not math.isfinite(value):
        return value
    return float(f"{value:.{max(digits, math.ceil(math.log10(abs(value) + 1)))}g}")


def _cell(value: Any) -> Text:  # Any: a value of JSON
    if value is None:
        return Text("none", style="dim")
    text = value if isinstance(value, str) else json.dumps(value)
    return Text(printable(text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}..."))
