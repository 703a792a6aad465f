"""Builds log records and windows for the tests of health checks."""

from collections.abc import Mapping, Sequence

from flowrl.config import HealthConfig
from flowrl.health.health_checks import CHECKS, HELD_OUT
from flowrl.health.measurement import Measurement, RunFacts, StepWindow
from flowrl.health.monitor import Finding, HealthMonitor

STEPS = 4
"""Number of steps of a median in these tests."""

NO_FACTS = RunFacts()


def records(**columns: Sequence[float | None]) -> list[dict[str, float]]:
    """Returns one record per value. The name `a__b` stands for the metric `a/b`; None omits a value."""
    rows = zip(*columns.values(), strict=True)
    names = [name.replace("__", "/") for name in columns]
    return [{name: value for name, value in zip(names, row, strict=True) if value is not None} for row in rows]


def measure(
    check: str,
    rows: Sequence[Mapping[str, float]],
    facts: RunFacts = NO_FACTS,
    initial: Mapping[str, float] | None = None,
) -> Measurement | None:
    """Returns the measurement of a check after the records of steps 1, 2, ..., and `initial` of step 0."""
    window = StepWindow(STEPS)
    for step, row in enumerate([initial or {}, *rows]):
        window.add(step, row, HELD_OUT)
    (function,) = (known.measure for known in CHECKS if known.name == check)
    return function(window, facts)


def find(
    config: HealthConfig,
    rows: Sequence[Mapping[str, float]],
    facts: RunFacts = NO_FACTS,
    initial: Mapping[str, float] | None = None,
) -> list[Finding]:
    """Returns the findings after the records of steps 1, 2, ..., and `initial` of step 0."""
    monitor = HealthMonitor(config, facts)
    for step, row in enumerate([initial or {}, *rows]):
        monitor.add(step, row)
    return monitor.findings
