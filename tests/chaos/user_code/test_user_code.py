"""Misbehaving rewards, environments and tools cost only their rows, and the page has the measured table.

`python -m tests.chaos.user_code` runs all kinds (docs/failures.md).
"""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from tests.chaos.user_code.measurement import Measurement, Result
from tests.chaos.user_code.misbehavior_kinds import HARMLESS, KINDS
from tests.chaos.user_code.misbehavior_table import BEGIN, END, PAGE, read_results, render_table


def measure(folder: Path, name: str) -> Result:
    return Measurement(folder).measure(KINDS[name])


def test_there_are_kinds_of_each_code() -> None:
    numbers = {source: sum(kind.source == source for kind in KINDS.values()) for source in ("reward", "environment")}
    assert numbers["reward"] >= 15 and numbers["environment"] >= 8
    assert sum(kind.source == "tool" for kind in KINDS.values()) >= 6
    assert all(not kind.costs_row for kind in KINDS.values() if kind.name in HARMLESS)


def test_the_page_has_the_table_of_the_results() -> None:
    table = PAGE.read_text().partition(BEGIN)[2].partition(END)[0].strip()
    assert table == render_table(read_results())
    assert len(read_results()) >= 20


def test_the_results_have_the_columns_of_a_result() -> None:
    assert all(row.keys() == Result.__annotations__.keys() for row in read_results())


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["reward-hang", "environment-kill", "tool-wait"])
def test_a_kind_costs_only_its_rows(tmp_path: Path, name: str) -> None:
    # A measurement forks its process, which must not have computed with torch. Earlier tests may have.
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        result = process.submit(measure, tmp_path, name).result()
    assert result.problems == [] and result.calls > 0
