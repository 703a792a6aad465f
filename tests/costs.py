"""Measures each default test and reports those that cost more than a default test may.

The cost of a test is the time that it needs alone, without fixtures that other tests share. On a busy machine, wall
time includes time in which the test waits for a core. The cost therefore is the larger of two lower bounds:

- CPU seconds of this process and of its ended children
- wall time, less the time in which any process of the machine waited for a core (/proc/pressure/cpu)

The second bound finds tests that sleep or wait for processes of Ray, and only on a machine that is nearly idle.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

LIMIT_S = 2.0
"""Seconds that a default test may cost."""

MARGIN = 1.5
"""Factor of the limit above which the session fails, because the speed of machines differs."""

LISTED: dict[str, str] = {}
"""Default test -> reason for its cost above the limit."""

MAX_LISTED = 25

_PRESSURE = Path("/proc/pressure/cpu")


@dataclass(frozen=True)
class Reading:
    """Clocks at one moment, in seconds."""

    wall: float
    cpu: float
    """CPU time of this process and of its ended children."""
    waiting: float
    """Time in which at least one process of the machine waited for a core; 0 if the system does not measure it."""


def read_clocks() -> Reading:
    """Returns the current values of all clocks."""
    times = os.times()
    cpu = times.user + times.system + times.children_user + times.children_system
    try:
        waiting = int(_PRESSURE.read_text().split("total=", 1)[1].split()[0]) / 1e6
    except OSError:
        waiting = 0.0
    return Reading(time.perf_counter(), cpu, waiting)


def cost_between(start: Reading, end: Reading) -> float:
    """Returns a lower bound for the seconds that the work between two readings takes on an idle machine."""
    return max(end.cpu - start.cpu, (end.wall - start.wall) - (end.waiting - start.waiting))


class Costs:
    """A plugin that measures tests, adds their cost to their reports, and reports expensive ones at the end."""

    def __init__(self) -> None:
        self._cost = 0.0
        self._is_shared = False
        self._expensive: dict[str, float] = {}

    @contextmanager
    def _measure(self, sign: int) -> Iterator[None]:
        start = read_clocks()
        try:
            yield
        finally:
            self._cost += sign * cost_between(start, read_clocks())

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self) -> Iterator[None]:
        self._cost = 0.0
        with self._measure(1):
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Iterator[object]:
        """Subtracts fixtures that other tests share."""
        if fixturedef.scope == "function" or self._is_shared:
            return (yield)
        self._is_shared = True
        try:
            with self._measure(-1):
                return (yield)
        finally:
            self._is_shared = False

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        try:
            with self._measure(1):
                return (yield)
        finally:
            item.user_properties.append(("cost_s", self._cost))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        cost = dict(report.user_properties).get("cost_s", 0.0)
        if report.when == "teardown" and "slow" not in report.keywords and isinstance(cost, float) and cost > LIMIT_S:
            self._expensive[report.nodeid] = cost

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        unlisted = {test: cost for test, cost in self._expensive.items() if test not in LISTED}
        if not unlisted:
            return
        terminalreporter.section(f"default tests that cost more than {LIMIT_S:.0f} s and are not listed in {__name__}")
        for test, cost in sorted(unlisted.items(), key=lambda pair: -pair[1]):
            terminalreporter.line(f"{cost:6.1f} s  {test}")
