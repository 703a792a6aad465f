"""The cost of a test, and the list of default tests above the limit."""

import pytest

from tests.costs import LISTED, MAX_LISTED, Reading, cost_between


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        (Reading(wall=13.0, cpu=2.5, waiting=5.0), 3.0),  # sleeps on an idle machine
        (Reading(wall=13.0, cpu=2.5, waiting=7.5), 0.5),  # waits for a core, as far as the machine can tell
        (Reading(wall=11.0, cpu=3.75, waiting=5.0), 1.75),  # computes in several processes
    ],
)
def test_the_cost_is_the_larger_of_cpu_time_and_wall_time_without_waiting(end: Reading, expected: float) -> None:
    assert cost_between(Reading(wall=10.0, cpu=2.0, waiting=5.0), end) == expected


def test_few_tests_are_listed_as_expensive() -> None:
    assert len(LISTED) <= MAX_LISTED
