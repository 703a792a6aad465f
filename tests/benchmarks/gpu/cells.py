"""Runs cells. A cell is a named measurement that returns one line of figures, or raises."""

import math
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_TRACEBACK_LINES = 12


class CellSkipped(Exception):
    """Raised by a cell that cannot run on this machine. The message is the reason."""


@dataclass(frozen=True)
class Cell:
    """A measurement."""

    name: str
    measure: Callable[[], str]
    """Returns the figures in one line, after lines that it has printed itself."""
    expected_s: float
    """Estimated duration on an H100, rounded up. The cell is skipped if less time remains."""


def run_cells(cells: Sequence[Cell], *, end_s: float = math.inf) -> int:
    """Runs cells in turn and prints one line per cell as soon as it ends. Returns 1 if a cell failed, otherwise 0.

    The lines begin with `* ` for figures, or with SKIPPED or FAILED. A failed cell does not prevent later cells. Cells
    that would end after the Unix time `end_s` are skipped.
    """
    status = 0
    for cell in cells:
        remaining_s = end_s - time.time()
        if remaining_s < cell.expected_s:
            print_line(f"SKIPPED {cell.name}: {remaining_s:.0f} s remain, and it may take {cell.expected_s:g} s")
            continue
        try:
            print_line(f"* {cell.name}: {cell.measure()}")
        except CellSkipped as skipped:
            print_line(f"SKIPPED {cell.name}: {skipped}")
        except Exception as error:  # noqa: BLE001 (reported here and by the exit code; later cells must still run)
            status = 1
            lines = traceback.format_exc().splitlines()[-_TRACEBACK_LINES:]
            message = " ".join(f"{type(error).__name__}: {error}".split())
            print_line("\n".join([*lines, f"FAILED {cell.name}: {message[:300]}"]))
    return status


def print_line(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
