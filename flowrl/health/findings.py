"""Findings of health checks, and the file `health.jsonl` that contains them."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from flowrl.config.source import parse_json, read_text
from flowrl.config.user_errors import UserError

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
