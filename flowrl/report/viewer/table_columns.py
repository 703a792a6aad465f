"""Columns of the table of rows: their titles, widths, texts and sort keys."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from flowrl.data.console import printable
from flowrl.report.rollout_log import Row
from flowrl.report.viewer.row_filter import REWARD, read_number

_MAX_CHARACTERS = 500
"""Largest number of characters of a text in a table cell."""

MIN_TEXT_WIDTH = 16
"""Smallest width of a column of texts, in cells."""


@dataclass(frozen=True)
class Column:
    """A column of a table."""

    title: str
    width: int | None
    """Width in cells. Columns with None divide the remaining width equally."""
    text: Callable[[Row], str]
    key: Callable[[Row], Any]
    """Returns the value by which rows are sorted. Rows with None are last."""
    is_optional: bool = False
    """Whether a narrow table omits the column."""
    is_right: bool = False
    """Whether the text is right-aligned."""


def make_columns(rows: Sequence[Row], *, with_step: bool = False) -> list[Column]:
    """Returns the columns for rows of one step. With `with_step`, for rows of one prompt in several steps."""
    rewards = list(dict.fromkeys(name for row in rows for name in row["rewards"] or row["other_scores"] or {}))
    columns = [_integer("step", lambda row: row["step"])] if with_step else []
    columns += [_number("score", "score"), _number("advantage", "advantage", title="adv")]
    if len(rewards) > 1:
        columns += [_number(name, REWARD + name, is_optional=True) for name in rewards]
    columns += [
        _integer("len", lambda row: row["response_length"]),
        _text("finish_reason", title="finish", width=6),
    ]
    if any(row["staleness"] for row in rows):
        columns.append(_integer("stale", lambda row: row["staleness"], is_optional=True))
    if any(row["set"] is not None for row in rows):
        columns.append(_text("set", width=10, is_optional=True))
    columns.append(Column(" ", 1, lambda row: "•" if row["tokens"] else "", lambda row: row["tokens"] is not None))
    if not with_step:
        columns.append(_text("prompt"))
    columns.append(_text("response"))
    return columns


def _number(name: str, number: str, *, title: str | None = None, is_optional: bool = False) -> Column:
    def text(row: Row) -> str:
        value = read_number(row, number)
        return "" if value is None else f"{value:.3f}"

    title = printable(title or name)
    width = max(7, min(len(title) + 1, 12))
    return Column(title, width, text, lambda row: read_number(row, number), is_optional, is_right=True)


def step_columns() -> list[Column]:
    """Returns the columns of the list of saved steps, whose rows have `step` and `kind`."""
    kind = Column("rows", 5, lambda row: "eval" if row["kind"] == "evaluation" else "train", lambda row: row["kind"])
    return [Column("step", 6, lambda row: str(row["step"]), lambda row: row["step"], is_right=True), kind]


def _integer(title: str, read: Callable[[Row], int | None], *, is_optional: bool = False) -> Column:
    def text(row: Row) -> str:
        value = read(row)
        return "" if value is None else str(value)

    return Column(title, len(title) + 1, text, read, is_optional, is_right=True)


def _text(name: str, *, title: str | None = None, width: int | None = None, is_optional: bool = False) -> Column:
    def text(row: Row) -> str:
        return " ".join(printable(str(row[name] or "")[:_MAX_CHARACTERS]).split())

    return Column(title or name, width, text, lambda row: row[name], is_optional)


def sort_rows(rows: Sequence[Row], column: Column, *, descending: bool) -> list[Row]:
    """Returns rows in the order of a column. Rows without a value are last, and equal rows keep their order."""
    present = [row for row in rows if column.key(row) is not None]
    missing = [row for row in rows if column.key(row) is None]
    return sorted(present, key=column.key, reverse=descending) + missing


def fit_widths(columns: Sequence[Column], total: int) -> list[tuple[Column, int]]:
    """Returns the columns that fit in a table, and their widths in cells. One cell separates two columns.

    A table that is too narrow omits optional columns, starting with the last optional column.
    """
    chosen = list(columns)
    while True:
        fixed = sum(column.width or 0 for column in chosen) + len(chosen) - 1
        flexible = [column for column in chosen if column.width is None]
        optional = [column for column in chosen if column.is_optional]
        if not optional or total - fixed >= MIN_TEXT_WIDTH * len(flexible):
            break
        chosen.remove(optional[-1])
    share, rest = divmod(max(0, total - fixed), max(1, len(flexible)))
    sizes = {id(column): share + (1 if i < rest else 0) for i, column in enumerate(flexible)}
    return [(column, sizes[id(column)] if column.width is None else column.width) for column in chosen]
