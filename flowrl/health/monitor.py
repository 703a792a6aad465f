"""Applies the health checks to each step, keeps their findings, and reads and writes the file `health.jsonl`."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from flowrl.config import HealthConfig
from flowrl.config.source import parse_json, read_text
from flowrl.config.user_errors import UserError
from flowrl.health.health_checks import CHECKS, HELD_OUT
from flowrl.health.measurement import Check, Measurement, RunFacts, StepWindow

FILE = "health.jsonl"
"""Name of the file in the run folder."""


@dataclass(frozen=True)
class Finding:
    """A problem that a check has found, with its steps, its worst value and the threshold."""

    check: str
    """Name of the check, which is the setting `health.<check>`."""

    step: int
    """First step of the finding."""

    last_step: int
    """Last step of the finding so far. Steps between may be healthy, because a short recovery does not end a finding.
    """

    value: float
    """Worst value so far."""

    threshold: float

    message: str
    """Observation, meaning and remedy in the step in which the finding began or last became clearly worse."""

    setting: str
    """Setting to change first."""


def format_findings(findings: Iterable[Finding]) -> str:
    """Returns the content of `health.jsonl`: one JSON object per finding."""
    return "".join(json.dumps(asdict(finding), ensure_ascii=False) + "\n" for finding in findings)


def read_findings(run_folder: Path | str) -> list[Finding]:
    """Returns the findings of a run by their first step. Returns an empty list without `health.jsonl`.

    Findings that begin in the same step are ordered from cause to effect.
    """
    path = Path(run_folder) / FILE
    names = [field.name for field in fields(Finding)]
    lines = read_text(path, max_mb=None).split("\n") if path.exists() else []
    try:
        rows = [parse_json(line) for line in lines if line]
        return [Finding(**{name: row[name] for name in names}) for row in rows]
    except (ValueError, TypeError, LookupError) as error:
        raise UserError(f"{path} has a line that is not a finding ({error}): remove or restore the file") from error


@dataclass
class _CheckState:
    """State of one check."""

    finding: int | None = None
    """Index of the current finding in `HealthMonitor.findings`, or None."""
    num_findings: int = 0
    """Number of findings so far."""
    num_healthy: int = 0
    """Number of healthy measurements since the last measurement beyond the threshold."""
    reported: float = 0.0
    """Distance between value and threshold in the last message."""


class HealthMonitor:
    """Applies the checks to each log record. Its state depends only on the records and the settings.

    A resumed run adds the records up to its checkpoint again, which restores the findings.
    """

    def __init__(self, config: HealthConfig, facts: RunFacts) -> None:
        self._facts, self._window = facts, StepWindow(config.steps)
        settings = dict(config)
        self._checks = [(check, settings[check.name]) for check in CHECKS if settings[check.name] is not None]
        self._states = {check.name: _CheckState() for check, _ in self._checks}
        self.findings: list[Finding] = []
        """All findings by their first step. Findings of the same step have the order of `CHECKS`, causes before
        effects.
        """

    def add(self, step: int, record: Mapping[str, float]) -> list[Finding]:
        """Checks the record of a step. Returns the findings that begin or have become clearly worse in this step."""
        self._window.add(step, record, HELD_OUT)
        if not self._window.records:
            return []
        changed = [self._apply(check, threshold, step) for check, threshold in self._checks]
        return [finding for finding in changed if finding is not None]

    def _apply(self, check: Check, threshold: float, step: int) -> Finding | None:
        measurement, multiple = check.measure_or_extreme(threshold, self._window, self._facts)
        if measurement is None:
            return None
        state = self._states[check.name]
        distance = check.distance(measurement, threshold)
        if distance <= 0:
            state.num_healthy += 1
            # Each recurrence must follow a longer healthy period, which limits the number of messages of a long run.
            if state.num_healthy >= self._window.steps * 2 ** max(1, state.num_findings):
                state.finding = None
            return None
        state.num_healthy = 0
        if state.finding is None:
            state.finding, state.reported = len(self.findings), distance
            state.num_findings += 1
            self.findings.append(self._describe(check, measurement, threshold, multiple, step))
            return self.findings[-1]
        earlier = self.findings[state.finding]
        worst = (min if check.is_lower_bound else max)(earlier.value, measurement.value)
        self.findings[state.finding] = replace(earlier, last_step=step, value=worst)
        if distance < 2 * max(state.reported, abs(threshold) / 2, _MIN_DISTANCE):
            return None
        state.reported = distance
        described = self._describe(check, measurement, threshold, multiple, step)
        self.findings[state.finding] = replace(described, step=earlier.step)
        return self.findings[state.finding]

    def _describe(
        self, check: Check, measurement: Measurement, threshold: float, multiple: float, step: int
    ) -> Finding:
        bound = ("below" if check.is_lower_bound else "above") + f" {multiple:g} x" * (multiple != 1)
        limit = f"{measurement.value:.3g}, {bound} health.{check.name} {threshold:g}"
        meaning = measurement.meaning or check.meaning
        remedy = measurement.remedy or check.remedy or self._facts.gap_causes
        message = f"{measurement.observation} ({limit}): {meaning}; {remedy}"
        setting = check.setting(measurement, self._facts)
        return Finding(check.name, step, step, measurement.value, threshold, message, setting)


_MIN_DISTANCE = 0.1
"""Smallest distance that `2 *` is applied to: a finding becomes clearly worse at max(2 d, threshold, 2 x this value),
where d is the last reported distance. Limits messages of checks with a threshold near 0.
"""
