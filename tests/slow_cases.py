"""Marks single cases of a parametrized test as slow, and finds the cases that a test session runs."""

from collections.abc import Collection
from typing import Any

import pytest


def slow(*values: Any) -> Any:
    """Returns the values of one case, marked as slow: another case of the test covers its code, or most of it."""
    return pytest.param(*values, marks=pytest.mark.slow)


def one_of(*values: Any) -> list[Any]:
    """Returns the cases of a test with one argument; all but the first are slow."""
    first, *others = values
    return [first, *map(slow, others)]


INLINE_BY_DEFAULT = pytest.mark.parametrize("backend", one_of("inline", "ray"), indirect=True)
"""For tests on both backends: the case on Ray is slow, because another default test covers the difference."""


def as_parameters(cases: Collection[str], *fast: str) -> list[Any]:
    """Returns parameters by name; cases that are not named as fast are slow."""
    return [name if name in fast else slow(name) for name in cases]


def selected_values(request: pytest.FixtureRequest, argument: str) -> set[Any]:
    """Returns the values of a parametrized argument in the selected tests of the fixture's file.

    A fixture that computes the results of all cases together needs only these, because slow cases are often left out.
    """
    tests = [test for test in request.session.items if test.path == request.path and isinstance(test, pytest.Function)]
    parameters = [test.callspec.params for test in tests if hasattr(test, "callspec")]
    return {values[argument] for values in parameters if argument in values}
