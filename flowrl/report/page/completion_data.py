"""Section `Completions` of the report: the rows of `rollouts/` as columns, and the tokens of a sample of rows."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

from flowrl.config import UserError
from flowrl.report.page.downsampling import evenly_kept, longest_fitting
from flowrl.report.rollout_log import Kind, MissingStepError, RolloutLogError, Row, count_rows, read_rows, saved_steps
from flowrl.report.token_values import METRICS, ColorScale, available_metrics, color_scale, token_values

MAX_ROWS = 20_000
"""Largest number of rows per run in the report. If a run has more, the report has only rows of evenly spaced steps."""

MAX_CHARACTERS = 30_000_000
"""Largest number of characters of a run's texts: prompts, responses, segments, answers and causes of failed rewards.

Longer texts are truncated.
"""

MAX_TOKENS = 400_000
"""Largest number of tokens per run with values in the report. If a run has more, only evenly spaced rows have values.
"""

_NUMBERS = (
    "step",
    "row",
    "prompt_id",
    "sample",
    "score",
    "advantage",
    "response_length",
    "environment_length",
    "version",
    "newest_version",
    "staleness",
)
_NAMES = ("kind", "set", "finish_reason")
_NESTED_SCORES = ("rewards", "other_scores")

Segments = Sequence[tuple[str, str]]
"""Kind and text of each segment of a row."""


def completion_data(
    folder: Path, *, row_limit: int = MAX_ROWS, max_characters: int = MAX_CHARACTERS, max_tokens: int = MAX_TOKENS
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the rows saved in `folder` (`RunFolder.rollouts`), and the tokens of the rows that have values per token.

    Rows are returned as columns of equal length. A repeated text or name is stored once, and columns have its index.
    Tokens map the index of a row to its values per token. Raises UserError if a file is corrupt.
    """
    shards = [(step, kind) for kind in get_args(Kind) for step in saved_steps(folder, kind)]
    shards.sort(key=lambda shard: (shard[0], shard[1] == "training"))
    sizes = [count_rows(folder, kind, step) for step, kind in shards]
    kept = [shards[i] for i in evenly_kept(sizes, row_limit)]
    rows = [row for step, kind in kept for row in _read(folder, step, kind)][-row_limit:]
    segments = [_segments(row) for row in rows]
    lengths = [len(text) for row, own in zip(rows, segments, strict=True) for text in _texts(row, own)]
    limit = longest_fitting(lengths, max_characters)
    tokens = _tokens(rows, max_tokens)
    data = _columns(rows, segments, limit) | {
        "num_saved": sum(sizes),
        "num_cut": sum(length > limit for length in lengths),
        "max_characters": limit,
        "has_tokens": list(tokens),
        "num_token_rows": len(tokens),
        "num_saved_token_rows": sum(1 for row in rows if row.get("tokens")),
    }
    return data, {"rows": tokens} if tokens else {}


def _read(folder: Path, step: int, kind: Kind) -> list[Row]:
    try:
        return read_rows(folder, kind, step)
    except MissingStepError:  # `report.rollouts.max_mb` of an active run has removed the file
        return []
    except RolloutLogError as error:
        raise UserError(f"{str(error).split(': ')[0]}: remove this file of the run, or restore it") from error


def _columns(rows: Sequence[Row], segments: Sequence[Segments], limit: int) -> dict[str, Any]:
    texts: dict[str | None, int] = {None: -1}
    data: dict[str, Any] = {"num_rows": len(rows)}
    data |= {name: [_short(row.get(name)) for row in rows] for name in _NUMBERS}
    for name in _NAMES:
        names: dict[Any, int] = {None: -1}  # Any: a value of JSON
        data[name] = {"index": [_number(row.get(name), names) for row in rows], "values": list(names)[1:]}
    for name in ("prompt", "answer"):
        data[name] = [_number(None if row[name] is None else str(row[name])[:limit], texts) for row in rows]
    data["texts"] = list(texts)[1:]
    data["response"] = [None if row["response"] is None else str(row["response"])[:limit] for row in rows]
    data["scores"] = {
        name: [_short((row.get(column) or {}).get(name)) for row in rows]
        for column in _NESTED_SCORES
        for name in sorted({name for row in rows for name in row.get(column) or {}})
    }
    data["failures"] = {
        i: {name: cause[:limit] for name, cause in row["reward_failures"].items()}
        for i, row in enumerate(rows)
        if row["reward_failures"]
    }
    data["segments"] = {i: [[kind, text[:limit]] for kind, text in own] for i, own in enumerate(segments) if own}
    return data


def _texts(row: Row, segments: Segments) -> list[str]:
    """Returns the texts of a row that are in the report, including its segments, but not the texts of tokens."""
    texts = [str(row[name]) for name in ("prompt", "response", "answer") if row[name] is not None]
    texts += [text for _, text in segments]
    return [*texts, *(row["reward_failures"] or {}).values()]


def _segments(row: Row) -> Segments:
    """Returns the segments of a row. Empty if the row has only one."""
    segments = row.get("segments") or []
    return [(str(segment["kind"]), str(segment["text"])) for segment in segments] if len(segments) > 1 else []


def _number(value: Any, numbers: dict[Any, int]) -> int:  # Any: a value of JSON
    """Returns the number of a value, from 0 in the order of the first occurrences. `numbers` begins with {None: -1}."""
    return numbers.setdefault(value, len(numbers) - 1)


def _short(value: Any) -> Any:  # Any: a value of JSON
    """Returns a number with 5 significant digits. Values of other types are unchanged."""
    return float(f"{value:.5g}") if isinstance(value, float) else value


def _tokens(rows: Sequence[Row], max_tokens: int) -> dict[int, dict[str, Any]]:
    """Returns index of a row -> its tokens: their texts, and the values and color scale of each metric. Omits rows
    without values per token, and rows that exceed `max_tokens`.
    """
    indices = [i for i, row in enumerate(rows) if row.get("tokens")]
    kept = [indices[k] for k in evenly_kept([len(rows[i]["tokens"]["text"]) for i in indices], max_tokens)]
    scales = {}
    for name in _COMMON_SCALES:
        own = [token_values(rows[i], name) for i in kept if name in available_metrics(rows[i])]
        scales[name] = color_scale(name, [value for values in own for value in values])
    return {i: _row_tokens(rows[i], scales) for i in kept}


_COMMON_SCALES = ("advantage", "version")
"""Metrics with one color scale for all rows, because their values are often equal for all tokens of a row."""


def _row_tokens(row: Row, scales: Mapping[str, ColorScale]) -> dict[str, Any]:
    metrics = {}
    for name in available_metrics(row):
        values = token_values(row, name)
        metrics[name] = {
            "title": METRICS[name].title,
            "meaning": METRICS[name].meaning,
            "scale": asdict(scales.get(name) or color_scale(name, values)),
            "values": [_short(value) for value in values],
        }
    tokens = row["tokens"]
    is_environment = [int(not mask) for mask in tokens.get("mask") or [1] * len(tokens["text"])]
    return {"text": tokens["text"], "environment": is_environment, "metrics": metrics}
