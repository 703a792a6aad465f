"""Findings over the steps of a run: when they begin, become worse, end and recur, and their state after a resume."""

import json
import random
import time
from pathlib import Path

import pytest

from flowrl.config import HealthConfig
from flowrl.config.base import parse
from flowrl.health import Finding, read_findings
from flowrl.health.measurement import RunFacts
from flowrl.health.monitor import FILE, HealthMonitor, format_findings

CONFIG = HealthConfig(steps=2, truncation=0.4)


def reported(monitor: HealthMonitor, shares: list[float], first_step: int = 1) -> list[int]:
    """Adds steps with these shares of truncated responses. Returns the steps in which a finding is reported."""
    steps = enumerate(shares, start=first_step)
    return [step for step, share in steps if monitor.add(step, {"truncated_fraction": share})]


def test_a_finding_is_reported_once() -> None:
    monitor = HealthMonitor(CONFIG, RunFacts())
    assert reported(monitor, [0.5] * 30) == [2]
    (finding,) = monitor.findings
    assert (finding.check, finding.step, finding.last_step, finding.value) == ("truncation", 2, 30, 0.5)
    assert finding.threshold == 0.4 and finding.setting == "rollout.max_response_tokens"
    assert "health.truncation" in finding.message and "50%" in finding.message


def test_a_finding_is_reported_again_if_it_becomes_clearly_worse() -> None:
    monitor = HealthMonitor(CONFIG, RunFacts())
    # The distance from 0.4 counts. It is first 0.1, less than half of the threshold, 0.2. Twice 0.2 is reached at 0.8.
    assert reported(monitor, [0.5, 0.5, 0.7, 0.7, 0.9, 0.9, 0.6]) == [2, 5]
    (finding,) = monitor.findings
    assert (finding.step, finding.last_step, finding.value) == (2, 7, 0.9)
    assert "80%" in finding.message


def test_a_short_recovery_continues_the_finding() -> None:
    monitor = HealthMonitor(CONFIG, RunFacts())
    assert reported(monitor, [0.5] * 3 + [0.1] * 2 + [0.5] * 4) == [2]
    assert [(finding.step, finding.last_step) for finding in monitor.findings] == [(2, 9)]


def test_a_problem_that_recurs_is_a_new_finding_after_ever_longer_recoveries() -> None:
    monitor = HealthMonitor(CONFIG, RunFacts())
    # A recovery must have 4 healthy steps, then 8. The step in which the median falls to 0.3 is healthy, too.
    shares = [0.5] * 3 + [0.1] * 4 + [0.5] * 3 + [0.1] * 4 + [0.5] * 3 + [0.1] * 8 + [0.5] * 3
    assert reported(monitor, shares) == [2, 9, 27]
    assert [finding.step for finding in monitor.findings] == [2, 9, 27]
    assert [finding.last_step for finding in monitor.findings] == [3, 17, 28]


def test_a_disabled_check_finds_nothing() -> None:
    monitor = HealthMonitor(HealthConfig(steps=2, truncation=None), RunFacts())
    assert reported(monitor, [1.0] * 10) == [] and monitor.findings == []


def noisy_records(num_steps: int) -> list[dict[str, float]]:
    """Returns records with problems at random steps, and values that are not finite."""
    generator = random.Random(0)
    records = []
    for step in range(num_steps):
        record = {
            "truncated_fraction": generator.choice([0.1, 0.9]),
            "actor/grad_norm": generator.lognormvariate(0, 1.5),
            "kl": generator.choice([0.1, 3.0, float("nan"), float("inf")]),
            "reward": generator.random() + step / num_steps,
            "actor/entropy": 1.0 / (step + 1),
        }
        records.append(record | ({"accuracy": generator.random()} if step % 5 == 0 else {}))
    return records


@pytest.mark.parametrize("resumed_at", [0, 1, 17, 40, 99])
def test_a_resumed_run_has_the_same_findings(resumed_at: int) -> None:
    """The records of a resumed run come from a JSON file, in which values that are not finite are null."""
    records = noisy_records(100)
    continuous, resumed = HealthMonitor(CONFIG, RunFacts()), HealthMonitor(CONFIG, RunFacts())
    for step, record in enumerate(records[:resumed_at]):
        continuous.add(step, record)
        text = json.dumps({name: value if value < float("inf") else None for name, value in record.items()})
        read = {name: float("nan") if value is None else value for name, value in json.loads(text).items()}
        resumed.add(step, read)
    for step, record in enumerate(records[resumed_at:], start=resumed_at):
        assert continuous.add(step, record) == resumed.add(step, record)
    assert continuous.findings == resumed.findings and len(continuous.findings) > 1


def test_findings_are_read_from_the_run_folder(tmp_path: Path) -> None:
    assert read_findings(tmp_path) == []
    monitor = HealthMonitor(CONFIG, RunFacts())
    reported(monitor, [0.5] * 3 + [0.1] * 4 + [0.5] * 3)
    text = format_findings(monitor.findings)
    (tmp_path / FILE).write_text(text)
    assert read_findings(tmp_path) == monitor.findings and len(monitor.findings) == 2
    keys = {"check", "step", "last_step", "value", "threshold", "message", "setting"}
    assert [json.loads(line).keys() for line in text.splitlines()] == [keys] * 2
    assert isinstance(monitor.findings[0], Finding)


def test_checks_take_little_time() -> None:
    """A resumed run adds all of its records again."""
    records = [record | {f"metric_{i}": 0.5 for i in range(50)} for record in noisy_records(500)]
    monitor = HealthMonitor(HealthConfig(), RunFacts())
    start_s = time.process_time()
    for step, record in enumerate(records):
        monitor.add(step, record)
    assert (time.process_time() - start_s) / len(records) < 0.005


@pytest.mark.parametrize("settings", [{"truncation": 0.0}, {"truncation": 1.5}, {"steps": 0}, {"stop_on": ["typo"]}])
def test_invalid_settings_are_rejected(settings: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        parse(HealthConfig, settings)
