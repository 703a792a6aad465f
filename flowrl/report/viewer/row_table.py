"""A table that renders only its visible rows, so that its speed does not depend on the number of rows."""

from collections.abc import Sequence
from typing import Any, ClassVar

from rich.cells import cell_len, set_cell_size
from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Size
from textual.message import Message
from textual.reactive import reactive
from textual.scroll_view import ScrollView
from textual.strip import Strip

from flowrl.report.rollout_log import Row
from flowrl.report.viewer.table_columns import Column, fit_widths

_HEADER, _CURSOR, _BLURRED = Style(bold=True, underline=True), Style(reverse=True), Style(bold=True)


class RowTable(ScrollView, can_focus=True):
    """A table with a header, and a cursor that selects a row."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", "Up", show=False),
        Binding("down,j", "move(1)", "Down", show=False),
        Binding("pageup", "page(-1)", "Page up", show=False),
        Binding("pagedown,space", "page(1)", "Page down", show=False),
        Binding("home,g", "move_to(0)", "First", show=False),
        Binding("end,G", "move_to(-1)", "Last", show=False),
        Binding("enter", "choose", "Open", show=False),
    ]

    cursor: reactive[int] = reactive(0)
    """Index of the selected row."""

    class Moved(Message):
        """Posted when the user or `show` selects a different row."""

        def __init__(self, table: "RowTable", row: Row | None) -> None:
            super().__init__()
            self.table, self.row = table, row

        @property
        def control(self) -> "RowTable":
            return self.table

    class Chosen(Moved):
        """Posted when the user opens the selected row."""

    class HeaderClicked(Message):
        """Posted when the user clicks on the title of a column."""

        def __init__(self, column: Column) -> None:
            super().__init__()
            self.column = column

    def __init__(self, **options: Any) -> None:  # Any: the options of a widget
        super().__init__(**options)
        self.rows: Sequence[Row] = ()
        self.columns: Sequence[Column] = ()
        self.marks: dict[str, str] = {}
        """Title of a column -> mark after it, such as an arrow."""

    def show(self, columns: Sequence[Column], rows: Sequence[Row], *, cursor: int = 0) -> None:
        """Replaces the columns and the rows, and selects the row with the index `cursor`."""
        self.columns, self.rows = columns, rows
        self.virtual_size = Size(0, len(rows) + 1)
        self.set_reactive(RowTable.cursor, max(0, min(cursor, len(rows) - 1)))
        self._follow_cursor()
        self.refresh()
        self.post_message(self.Moved(self, self.row))

    @property
    def row(self) -> Row | None:
        """The selected row; None if the table is empty."""
        return self.rows[self.cursor] if self.cursor < len(self.rows) else None

    def validate_cursor(self, cursor: int) -> int:
        return max(0, min(cursor, len(self.rows) - 1))

    def watch_cursor(self) -> None:
        self._follow_cursor()
        self.refresh()
        self.post_message(self.Moved(self, self.row))

    @property
    def _num_visible(self) -> int:
        return max(1, self.scrollable_content_region.height - 1)

    def _follow_cursor(self) -> None:
        top = int(self.scroll_offset.y)
        if self.cursor < top:
            self.scroll_to(y=self.cursor, animate=False)
        elif self.cursor >= top + self._num_visible:
            self.scroll_to(y=self.cursor - self._num_visible + 1, animate=False)

    def on_resize(self) -> None:
        self._follow_cursor()

    def action_move(self, by: int) -> None:
        self.cursor += by

    def action_page(self, direction: int) -> None:
        self.cursor += direction * self._num_visible

    def action_move_to(self, index: int) -> None:
        self.cursor = index if index >= 0 else len(self.rows) + index

    def action_choose(self) -> None:
        if self.row is not None:
            self.post_message(self.Chosen(self, self.row))

    def on_click(self, event: events.Click) -> None:
        index = int(self.scroll_offset.y) + event.y - 1
        if event.y == 0:
            left = 0
            for column, width in fit_widths(self.columns, self.scrollable_content_region.width):
                if left <= event.x <= left + width:
                    self.post_message(self.HeaderClicked(column))
                left += width + 1
        elif index < len(self.rows):
            was_selected = index == self.cursor
            self.cursor = index
            if was_selected:
                self.action_choose()

    def render_line(self, y: int) -> Strip:
        width = self.scrollable_content_region.width
        columns = fit_widths(self.columns, width)
        base = self.rich_style
        if y == 0:
            titles = (f"{column.title}{self.marks.get(column.title, '')}" for column, _ in columns)
            return self._line(titles, columns, base + _HEADER, width)
        index = int(self.scroll_offset.y) + y - 1
        if index >= len(self.rows):
            return Strip.blank(width, base)
        row = self.rows[index]
        style = base + (_CURSOR if self.has_focus else _BLURRED) if index == self.cursor else base
        return self._line((column.text(row) for column, _ in columns), columns, style, width)

    def _line(self, cells: Any, columns: Sequence[tuple[Column, int]], style: Style, width: int) -> Strip:
        parts = [
            text.rjust(size) if column.is_right and len(text) <= size else _fit(text, size)
            for text, (column, size) in zip(cells, columns, strict=True)
        ]
        return Strip([Segment(" ".join(parts), style)]).adjust_cell_length(width, style)


def _fit(text: str, size: int) -> str:
    """Pads or truncates a text to `size` cells. A truncated text ends with an ellipsis."""
    return set_cell_size(text, size) if cell_len(text) <= size or size < 1 else f"{set_cell_size(text, size - 1)}…"
