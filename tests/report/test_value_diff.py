"""Differences of two values are found and named, with and without a tolerance."""

import pytest

from flowrl.report.value_diff import Tolerance, changed_values, compare_settings, first_difference, flatten_settings

BOUND = Tolerance(relative=1e-3, floor=1e-3)


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
    difference = first_difference(recorded, replayed, None)
    assert bool(difference) == bool(facts) and all(fact in difference for fact in facts)


def test_rounding_is_accepted_only_up_to_the_bound() -> None:
    near, far = {"norm": 1.0 + BOUND.relative / 2, "crc32": 1}, {"norm": 1.0 + BOUND.relative * 2, "crc32": 1}
    recorded = {"norm": 1.0, "crc32": 2}
    assert first_difference(recorded, near, BOUND) == ""
    assert "norm" in first_difference(recorded, far, BOUND)
    assert first_difference(recorded, near, None) != ""


def test_changed_values_have_both_values() -> None:
    first = {"same": 1.0, "near": 1.0, "far": 1.0, "old": 2.0, "nan": float("nan")}
    second = {"same": 1.0, "near": 1.0 + BOUND.relative / 2, "far": 1.1, "new": 3.0, "nan": float("nan")}
    changes = [("far", 1.0, 1.1), ("old", 2.0, None), ("new", None, 3.0)]
    assert changed_values(first, second, BOUND) == changes
    assert changed_values(first, second, None) == [("near", 1.0, 1.0 + BOUND.relative / 2), *changes]


@pytest.mark.parametrize(("other", "is_same"), [(0.0, True), (0.0999, True), (0.1001, False)])
def test_small_numbers_differ_by_the_tolerance_of_the_floor(other: float, is_same: bool) -> None:
    """The limit is 0.05 times the floor 2, not 0.05 times the larger magnitude."""
    assert (first_difference(0.0, other, Tolerance(0.05, floor=2.0)) == "") == is_same


def test_settings_have_dotted_keys() -> None:
    config = {"steps": 3, "actor": {"optimizer": {"lr": 0.1}, "lora": None, "options": {}}, "devices": [1, 2]}
    assert flatten_settings(config) == {
        "steps": 3,
        "actor.optimizer.lr": 0.1,
        "actor.lora": None,
        "actor.options": {},
        "devices": [1, 2],
    }


def test_differences_include_absent_settings() -> None:
    entries = {entry["key"]: entry for entry in compare_settings([{"a": 1, "b": {"c": "x"}}, {"a": 1, "d": None}])}
    assert entries["a"] == {"key": "a", "values": ["1", "1"], "differs": False}
    assert entries["b.c"] == {"key": "b.c", "values": ["x", None], "differs": True}
    assert entries["d"] == {"key": "d", "values": [None, "null"], "differs": True}
