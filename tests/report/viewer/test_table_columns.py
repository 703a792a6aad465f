"""Columns, widths and order of the table of rows."""

from flowrl.report.viewer.table_columns import MIN_TEXT_WIDTH, Column, fit_widths, make_columns, sort_rows
from tests.report.viewer.saved_rows import TOKENS, make_row

ROWS = [
    make_row(0, score=0.5, rewards={"format": 1.0, "task": 0.0}, advantage=-0.25, response="a\nb \x07", tokens=TOKENS),
    make_row(1, score=None, rewards={"format": 0.0, "task": 1.0}, staleness=2),
    make_row(2, score=0.25, rewards={"format": None, "task": 0.5}, finish_reason="length"),
]


def column(title: str) -> Column:
    return next(column for column in make_columns(ROWS) if column.title == title)


def test_the_columns_depend_on_the_rows() -> None:
    assert [column.title for column in make_columns(ROWS)] == [
        *("score", "adv", "format", "task", "len", "finish", "stale", " ", "prompt", "response")
    ]
    titles = [column.title for column in make_columns([make_row(0, rewards={"score": 0.5}, set="hard")])]
    assert titles == ["score", "adv", "len", "finish", "set", " ", "prompt", "response"]
    assert [column.title for column in make_columns(ROWS, with_step=True)][:2] == ["step", "score"]


def test_cells_are_one_line_without_control_characters() -> None:
    assert column("response").text(ROWS[0]) == "a b \\x07"
    row = make_row(0, finish_reason="\x9b", set="\x1b", rewards={"\u202e": 1.0, "a": 1.0})
    cells = {shown.title: shown.text(row) for shown in make_columns([row])}
    assert (cells["finish"], cells["set"], "\\u202e" in cells) == ("\\x9b", "\\x1b", True)
    assert [column("score").text(row) for row in ROWS] == ["0.500", "", "0.250"]
    assert [column("format").text(row) for row in ROWS] == ["1.000", "0.000", ""]
    assert [column(" ").text(row) for row in ROWS] == ["•", "", ""]


def test_rows_without_a_value_are_last() -> None:
    def order(title: str, *, descending: bool) -> list[int]:
        return [row["row"] for row in sort_rows(ROWS, column(title), descending=descending)]

    assert order("score", descending=False) == [2, 0, 1]
    assert order("score", descending=True) == [0, 2, 1]
    assert order("task", descending=True) == [1, 2, 0]
    assert order("prompt", descending=True) == [2, 1, 0]


def test_a_narrow_table_omits_the_optional_columns_first() -> None:
    columns = make_columns(ROWS)
    wide, narrow = fit_widths(columns, 160), fit_widths(columns, 64)
    assert [column for column, _ in wide] == columns
    assert not {"format", "task", "stale"} & {column.title for column, _ in narrow}
    for total, fitted in ((160, wide), (64, narrow)):
        assert sum(width for _, width in fitted) + len(fitted) - 1 == total
        assert min(width for column, width in fitted if column.width is None) >= MIN_TEXT_WIDTH
    assert all(width >= 0 for _, width in fit_widths(columns, 10))
