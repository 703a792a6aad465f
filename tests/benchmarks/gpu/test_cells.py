"""Cells run independently, and every result is one line."""

import time

import pytest

from tests.benchmarks.gpu.cells import Cell, CellSkipped, run_cells


def fail() -> str:
    raise ValueError("two\nlines")


def skip() -> str:
    raise CellSkipped("no GPU")


def test_a_failed_cell_does_not_prevent_later_cells(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cells([Cell("first", fail), Cell("second", lambda: "3 ms")]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2:] == ["FAILED first: ValueError: two lines", "* second: 3 ms"]


def test_a_skipped_cell_is_no_failure(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cells([Cell("first", skip)]) == 0
    assert capsys.readouterr().out == "SKIPPED first: no GPU\n"


def test_a_cell_that_would_take_longer_than_the_rest_is_skipped(capsys: pytest.CaptureFixture[str]) -> None:
    cells = [Cell("first", fail, expected_s=1000), Cell("second", lambda: "3 ms", expected_s=400)]
    assert run_cells(cells, end_s=time.time() + 500) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("SKIPPED first: ") and second == "* second: 3 ms"


def test_no_cell_starts_after_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cells([Cell("first", fail)], end_s=time.time() - 1) == 0
    assert capsys.readouterr().out.startswith("SKIPPED first: ")
