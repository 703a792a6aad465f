"""Curves of the report: the metrics of a run per step, reduced to a bounded number of points."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from flowrl.checkpoints.run_files import Record
from flowrl.report.page.downsampling import bucket_starts, envelope, rounded

MAX_BUCKETS = 1_500
"""Largest number of points of a curve. A longer curve has the mean and the range of buckets of steps."""


def curve_data(records: Sequence[Record], max_buckets: int = MAX_BUCKETS) -> dict[str, Any]:
    """Returns the curves of all metrics.

    Metrics that have values at the same steps share an entry of `groups`. An entry has the x values `step`, `time`
    (seconds) and `tokens` (response tokens since the start), and `metrics` with a list per metric. If a point stands
    for several steps, the lists are means, and `low` and `high` have the smallest and the largest values.
    """
    steps = np.array([record["step"] for record in records], dtype=float)
    elapsed = _column(records, "elapsed_s")
    tokens = np.cumsum(np.nan_to_num(_column(records, "response_tokens")))
    names = sorted({name for record in records for name in record} - {"step", "elapsed_s"})
    columns: defaultdict[bytes, dict[str, np.ndarray]] = defaultdict(dict)
    for name in names:
        values = _column(records, name)
        columns[np.isfinite(values).tobytes()][name] = values
    groups = []
    for mask, metrics in columns.items():
        indices = np.flatnonzero(np.frombuffer(mask, dtype=bool))
        if len(indices):
            starts = bucket_starts(len(indices), max_buckets)
            group: dict[str, Any] = {"step": rounded(envelope(steps[indices], starts).mean)}
            if np.isfinite(elapsed).any():
                group["time"] = rounded(envelope(_filled(steps, elapsed)[indices], starts).mean)
            if tokens[-1] > 0:
                group["tokens"] = rounded(envelope(tokens[indices], starts).mean)
            groups.append(group | _group_metrics(metrics, indices, starts))
    return {"groups": groups, "num_records": len(records)}


def _group_metrics(metrics: Mapping[str, np.ndarray], indices: np.ndarray, starts: np.ndarray) -> dict[str, Any]:
    curves = {name: envelope(values[indices], starts) for name, values in metrics.items()}
    entry: dict[str, Any] = {"metrics": {name: rounded(curve.mean) for name, curve in curves.items()}}
    if len(starts) < len(indices):
        entry["low"] = {name: rounded(curve.min) for name, curve in curves.items()}
        entry["high"] = {name: rounded(curve.max) for name, curve in curves.items()}
    return entry


def _column(records: Sequence[Record], name: str) -> np.ndarray:
    return np.array([record.get(name, math.nan) for record in records], dtype=float)


def _filled(steps: np.ndarray, elapsed: np.ndarray) -> np.ndarray:
    """Returns the times with interpolated values at steps without a time, such as the evaluation before training."""
    known = np.isfinite(elapsed)
    filled = np.interp(steps, steps[known], elapsed[known])
    return np.where((steps == 0) & ~known, 0.0, filled)
