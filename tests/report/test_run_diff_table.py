"""The numbers in the tables of `flowrl diff`."""

from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from flowrl.report.run_diff import Divergence, RunDiff
from flowrl.report.run_diff_table import print_diff


def printed_cells(first: Any, second: Any) -> list[str]:  # Any: values of JSON
    """Returns the printed values of a metric that differs."""
    entries = [("reward", first, second)]
    diff = RunDiff(("a", "b"), divergence=Divergence(1, "actor.update", entries), num_steps=1, results=entries)
    console = Console(file=StringIO(), width=200)
    print_diff(diff, console)
    assert isinstance(console.file, StringIO)
    line = next(line for line in console.file.getvalue().splitlines() if "reward" in line)
    return [cell.strip() for cell in line.strip("│").split("│")][1:]


@pytest.mark.parametrize(
    ("first", "second", "cells"),
    [
        (0.1 + 0.2, 0.7000000000000001, ["0.3", "0.7"]),
        (1 / 3, 2 / 3, ["0.3333", "0.6667"]),
        (0.123451, 0.123452, ["0.123451", "0.123452"]),
        (0.3, 0.1 + 0.2, ["0.3", "0.30000000000000004"]),
        (1.0, 1 + 2**-52, ["1.0", "1.0000000000000002"]),
        (1.2345678e-7, 2e-7, ["1.235e-07", "2e-07"]),
        (20481.25, 20999.75, ["20481.0", "21000.0"]),
        (1234567.0, 1234568.0, ["1234567.0", "1234568.0"]),
        (123456789, 123456780, ["123456789", "123456780"]),
        (1 / 3, None, ["0.3333", "none"]),
        (float("nan"), 1 / 3, ["NaN", "0.3333"]),
        (float("inf"), 1 / 3, ["Infinity", "0.3333"]),
        (1, 1 + 1e-9, ["1", "1.000000001"]),
        ("0.30000000000000004", "0.1", ["0.30000000000000004", "0.1"]),
        ({"a": 1 / 3, "b": 1 / 7}, {"a": 1 / 3, "b": 1 / 7 + 1e-7}, ['{"a": 0.3333, "b": 0.1428571}', None]),
        ([1 / 3, 0.5], [1 / 7], ["[0.3333, 0.5]", "[0.1429]"]),
    ],
)
def test_numbers_have_the_digits_that_distinguish_the_runs(first: Any, second: Any, cells: list[str | None]) -> None:
    shown = printed_cells(first, second)
    assert shown[0] == cells[0] and cells[1] in (shown[1], None)
    assert shown[0] != shown[1]
