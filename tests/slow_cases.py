"""Marks single cases of a parametrized test as slow."""

from typing import Any

import pytest


def slow(*values: Any) -> Any:
    """Returns the values of one case, marked as slow: another case of the test covers its code, or most of it."""
    return pytest.param(*values, marks=pytest.mark.slow)


def one_of(*values: Any) -> list[Any]:
    """Returns the cases of a test with one argument; all but the first are slow."""
    first, *others = values
    return [first, *map(slow, others)]
