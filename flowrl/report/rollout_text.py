"""Selects saved rows of generated text and renders them as plain text (`flowrl show`) or Markdown (TensorBoard)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from flowrl.checkpoints.run_folder import RunFolder
from flowrl.data.console import printable
from flowrl.report.rollout_log import Kind, RolloutLogError, Row, read_rows, saved_steps

Order = Literal["row", "worst", "best"]

_TEXTS = ("prompt", "response", "answer")
"""Columns that are printed below the heading of a row, each with a label."""

_NUMBERS = {"score": ".3f", "advantage": ".3f", "version": "d", "finish_reason": "s", "response_length": "d"}
"""Columns of the heading and their formats."""

_NUM_MARKDOWN_ROWS = 3
"""Number of rows per step in TensorBoard."""


def show_rows(run_folder: Path, *, step: int | None, kind: Kind, order: Order, count: int) -> str:
    """Returns the text of `flowrl show`.

    Args:
        run_folder: output folder of a run.
        step: training step; None selects the latest saved step.
        kind: training rows or evaluation rows.
        order: `row` keeps the order of the batch. `worst` and `best` sort by ascending and descending scores.
        count: largest number of rows.
    Raises:
        RolloutLogError: the folder, its `rollouts/`, the step or the scores do not exist.
    """
    folder = find_rollouts(run_folder)
    if step is None:
        step = max(saved_steps(folder, kind), default=0)
    rows = read_rows(folder, kind, step)
    selected = select_rows(rows, order, count)
    shown = f"{len(selected)} of {len(rows)} {kind} rows" + ("" if order == "row" else f", {order} scores first")
    scores = [row["score"] for row in rows if row["score"] is not None]
    mean = f", mean score {sum(scores) / len(scores):.3f}" if scores else ""
    return "\n\n".join([f"{run_folder}, step {step}: {shown}{mean}", *map(render_row, selected)]) + "\n"


def find_rollouts(run_folder: Path) -> Path:
    """Returns the folder of the saved rows of a run. Raises RolloutLogError if it does not exist."""
    folder = RunFolder(run_folder).rollouts
    if not run_folder.is_dir():
        problem = "is not a folder" if run_folder.exists() else "does not exist"
        raise RolloutLogError(f"{run_folder} {problem}: name the output folder of a run")
    if not folder.is_dir():
        raise RolloutLogError(
            f"{run_folder} has no saved rollouts: name the output folder of a run that generates responses and whose "
            f"report.rollouts is not null"
        )
    return folder


def select_rows(rows: Sequence[Row], order: Order, count: int) -> list[Row]:
    """Returns the first `count` rows in an order. Rows with equal scores keep their order. Rows without a score,
    because a reward failed, are last.

    Raises RolloutLogError if the order is by score and no row has a score.
    """
    if order == "row":
        return list(rows[:count])
    scored = [row for row in rows if row["score"] is not None]
    if rows and not scored:
        raise RolloutLogError(f"step {rows[0]['step']} has no row with a score: show it without --worst and --best")
    sign = 1 if order == "worst" else -1
    others = [row for row in rows if row["score"] is None]
    return [*sorted(scored, key=lambda row: sign * row["score"]), *others][:count]


def render_row(row: Row) -> str:
    """Returns a row as plain text, without control characters. Lines of multi-line text are indented."""
    values = [f"{name} {format(row[name], form)}" for name, form in _NUMBERS.items() if row[name] is not None]
    other_scores = row["other_scores"] or {}
    values += [f"{_one_line(name)} {value:.3f}" for name, value in other_scores.items() if value is not None]
    lines = [f"row {row['row']}: {', '.join(values)}"]
    for name in _TEXTS:
        if row[name] is not None:
            text = str(row[name])
            lines.append(f"  {name}:" + (_indent(text) if "\n" in text else f" {text}"))
    for name, message in (row["reward_failures"] or {}).items():
        lines.append(f"  {_one_line(f'failed reward {name}: {message}')}")
    return printable("\n".join(lines))


def _one_line(text: str) -> str:
    return " ".join(text.split())


def render_markdown(rows: Sequence[Row]) -> str:
    """Returns the first rows as a code block of Markdown, so that Markdown in responses is not rendered."""
    return "\n".join(_indent(render_row(row)) for row in rows[:_NUM_MARKDOWN_ROWS]).lstrip("\n")


def _indent(text: str) -> str:
    return "".join(f"\n    {line}" for line in text.split("\n"))
