"""Differences of recorded and replayed values are found and named."""

from pathlib import Path

import pytest
import torch

from flowrl.data.batch.tensordicts import make_tensordict
from flowrl.run.replay.comparison import BOUND, changed_metrics, compare_tables, first_difference
from flowrl.run.replay.table_files import write_table


@pytest.mark.parametrize(
    ("recorded", "replayed", "facts"),
    [
        ({"a": 1.0}, {"a": 1.0}, []),
        ({"a": float("nan")}, {"a": float("nan")}, []),
        ({"a": 1, "b": [1, 2]}, {"a": 1, "b": [1, 3]}, ["b", "1", "2", "3"]),
        ({"a": 1}, {}, ["a", "missing"]),
        ({}, {"a": 1}, ["a", "missing"]),
        (1, 1.0, ["1", "1.0"]),
        (True, 1, ["true", "1"]),
    ],
)
def test_the_first_difference_is_named(recorded: object, replayed: object, facts: list[str]) -> None:
    difference = first_difference(recorded, replayed)
    assert bool(difference) == bool(facts) and all(fact in difference for fact in facts)


def test_rounding_is_accepted_only_up_to_the_bound() -> None:
    near, far = {"norm": 1.0 + BOUND / 2, "crc32": 1}, {"norm": 1.0 + BOUND * 2, "crc32": 1}
    recorded = {"norm": 1.0, "crc32": 2}
    assert first_difference(recorded, near, is_exact=False) == ""
    assert "norm" in first_difference(recorded, far, is_exact=False)
    assert first_difference(recorded, near) != ""


def test_changed_metrics_have_both_values() -> None:
    recorded = {"same": 1.0, "near": 1.0, "far": 1.0, "old": 2.0, "nan": float("nan")}
    replayed = {"same": 1.0, "near": 1.0 + BOUND / 2, "far": 1.1, "new": 3.0, "nan": float("nan")}
    inexact = {"far": (1.0, 1.1), "old": (2.0, None), "new": (None, 3.0)}
    assert changed_metrics(recorded, replayed, is_exact=False) == inexact
    assert changed_metrics(recorded, replayed, is_exact=True) == inexact | {"near": (1.0, 1.0 + BOUND / 2)}


def test_columns_are_compared_bitwise_or_by_their_norm(tmp_path: Path) -> None:
    base = torch.tensor([1.0, 2.0, float("-0.0")])
    columns = {"base": base, "zero": base.abs(), "near": base + 1e-5, "far": base + 0.1}
    for name, column in columns.items():
        write_table(make_tensordict({"x": column, "y": ["a", "b", "c"]}), tmp_path / name)
    assert compare_tables(tmp_path / "base", tmp_path / "base", is_exact=True) == ""
    assert compare_tables(tmp_path / "base", tmp_path / "zero", is_exact=True) != ""
    assert compare_tables(tmp_path / "base", tmp_path / "near", is_exact=False) == ""
    difference = compare_tables(tmp_path / "base", tmp_path / "far", is_exact=False)
    assert "column x" in difference and "3 of 3" in difference and "0.1" in difference


def test_missing_and_new_columns_are_named(tmp_path: Path) -> None:
    write_table(make_tensordict({"x": torch.ones(1)}), tmp_path / "one")
    write_table(make_tensordict({"x": torch.ones(1), "z": torch.ones(1)}), tmp_path / "two")
    assert "z is new" in compare_tables(tmp_path / "one", tmp_path / "two", is_exact=True)
    assert "z is missing" in compare_tables(tmp_path / "two", tmp_path / "one", is_exact=True)
