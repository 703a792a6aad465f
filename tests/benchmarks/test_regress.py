"""tests/benchmarks/regress.py: its counts, and its comparison with committed values."""

import json
from pathlib import Path

import pytest

from tests.benchmarks import regress

SOURCE = '''"""A module."""

import os  # one

VALUE = 1  # two
"""Documentation of a constant."""


def double(number: int) -> int:  # three
    """Returns twice the number."""
    if number:  # four
        return 2 * number  # five
    return os.EX_OK  # six
'''


def test_statements_exclude_docstrings(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/module.py").write_text(SOURCE)
    assert regress.count_statements(tmp_path) == 6


@pytest.mark.parametrize(
    ("kind", "value", "committed", "expected"),
    [
        ("ratios", 1.14, 1.0, False),
        ("ratios", 1.16, 1.0, True),
        ("ratios", 0.5, 1.0, False),
        ("counts", 104, 100, False),
        ("counts", 106, 100, True),
        ("counts", 106, None, True),
    ],
)
def test_tolerances(kind: str, value: float, committed: float | None, expected: bool) -> None:
    assert regress.is_too_large(kind, value, committed) is expected


@pytest.mark.parametrize(("measured", "expected"), [([1.3, 1.1], 1.1), ([1.3, 1.2], 1.2), ([1.1], 1.1)])
def test_a_ratio_that_is_too_large_is_measured_again(measured: list[float], expected: float) -> None:
    values = iter(measured)
    ratios = regress.measure_ratios([lambda: {"own / baseline": next(values)}], {"own / baseline": 1.0})
    assert dict(ratios) == {"own / baseline": expected}
    assert list(values) == []


def test_every_cost_has_a_committed_value() -> None:
    committed = json.loads(regress.COMMITTED.read_text())
    assert list(committed["ratios"]) == [name for names in regress.RATIOS.values() for name in names]
    assert {regress.name_of_files(schedule) for schedule in regress.SCHEDULES} <= committed["counts"].keys()


def test_statements_have_not_grown_without_a_changed_number() -> None:
    committed = json.loads(regress.COMMITTED.read_text())["counts"]
    counts = dict(regress.measure_counts([regress.STATEMENTS], []))
    assert counts.keys() <= committed.keys()
    too_large = {
        name: value for name, value in counts.items() if regress.is_too_large("counts", value, committed[name])
    }
    assert too_large == {}, "run python -m tests.benchmarks.regress --only statements --update"
