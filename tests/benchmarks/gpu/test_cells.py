"""Cells run independently, and every result is one line."""

import time
from pathlib import Path

import pytest
import torch

from tests.benchmarks.gpu.cells import Cell, CellSkipped, run_cells
from tests.benchmarks.gpu.engines import engine_cells


def fail() -> str:
    raise ValueError("two\nlines")


def skip() -> str:
    raise CellSkipped("no GPU")


def test_a_failed_cell_does_not_prevent_later_cells(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cells([Cell("first", fail, 0), Cell("second", lambda: "3 ms", 0)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2:] == ["FAILED first: ValueError: two lines", "* second: 3 ms"]


def test_a_skipped_cell_is_no_failure(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cells([Cell("first", skip, 0)]) == 0
    assert capsys.readouterr().out == "SKIPPED first: no GPU\n"


def test_a_cell_that_would_take_longer_than_the_rest_is_skipped(capsys: pytest.CaptureFixture[str]) -> None:
    cells = [Cell("first", fail, expected_s=1000), Cell("second", lambda: "3 ms", expected_s=400)]
    assert run_cells(cells, end_s=time.time() + 500) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("SKIPPED first: ") and second == "* second: 3 ms"


def test_no_cell_starts_after_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cells([Cell("first", fail, 0)], end_s=time.time() - 1) == 0
    assert capsys.readouterr().out.startswith("SKIPPED first: ")


def test_the_longest_measurement_of_the_engines_is_the_last_one(tmp_path: Path) -> None:
    durations_s = [cell.expected_s for cell in engine_cells(torch.device("cpu"), tmp_path)]
    assert max(durations_s[:-1]) < durations_s[-1]
