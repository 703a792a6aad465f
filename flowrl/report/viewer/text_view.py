"""A view of one row. It wraps the text once per width, and renders only the visible lines."""

from bisect import bisect_left
from typing import Any, ClassVar

from rich.cells import cell_len
from rich.color import Color as RichColor
from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual.binding import Binding, BindingType
from textual.geometry import Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

from flowrl.data.console import printable
from flowrl.report.rollout_log import Row
from flowrl.report.token_values import (
    LISTS,
    METRICS,
    ColorScale,
    available_metrics,
    blend,
    color_scale,
    token_values,
)
from flowrl.report.viewer.row_document import Line, Piece, describe_token, make_document, wrap_pieces

_STYLES = {
    "text": Style(),
    "value": Style(),
    "label": Style(bold=True),
    "failed": Style(bold=True, reverse=True),
    "environment": Style(italic=True, dim=True),
}
_MATCH, _CURSOR = Style(underline=True, bold=True), Style(reverse=True, bold=True)

_STRONG = 0.3
"""Distance from the center of the color scale (0 to 1) above which a terminal without colors marks a token."""

_LIGHT = 140
"""Brightness of a background, 0 to 255, above which the text on it is black."""


class TextView(ScrollView, can_focus=True):
    """Shows a row. Tokens are colored by a metric, and a cursor selects one token."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move_line(-1)", "Up", show=False),
        Binding("down,j", "move_line(1)", "Down", show=False),
        Binding("left,h", "move_token(-1)", "Previous token", show=False),
        Binding("right,l", "move_token(1)", "Next token", show=False),
        Binding("pageup", "page(-1)", "Page up", show=False),
        Binding("pagedown,space", "page(1)", "Page down", show=False),
        Binding("home,g", "scroll_home", "Start", show=False),
        Binding("end,G", "scroll_end", "End", show=False),
    ]

    class Changed(Message):
        """Posted when the row, the selected token or the metric changes."""

    def __init__(self, **options: Any) -> None:  # Any: the options of a widget
        super().__init__(**options)
        self.row: Row | None = None
        self.metric: str | None = None
        """Metric that determines the colors of tokens; None if the row has no values per token."""
        self.token: int | None = None
        """Index of the selected token; None if the row has no values per token."""
        self.query_text = ""
        """Text to highlight, in lower case."""
        self._pieces: list[Piece] = []
        self._lines: list[Line] = []
        self._lines_of_tokens: list[tuple[int, int]] = []
        """(token, index of its first line) of each visible token, in order."""
        self._values: list[float | None] = []
        self._scale = ColorScale(0.0, 0.0, 0.0)
        self._wrapped_width = 0

    def show(self, row: Row | None) -> None:
        """Replaces the shown row, and scrolls to its start. None shows no row."""
        metrics = [] if row is None else available_metrics(row)
        self.row, self._pieces = row, [] if row is None else make_document(row)
        if self.metric not in metrics:
            self.metric = metrics[0] if metrics else None
        self.token = 0 if metrics else None
        self._set_values()
        self._wrap()
        self.scroll_to(y=0, animate=False)
        self._report()

    def _set_values(self) -> None:
        if self.row is not None and self.metric is not None:
            self._values = token_values(self.row, self.metric)
            self._scale = color_scale(self.metric, self._values)

    def _wrap(self) -> None:
        self._wrapped_width = self.scrollable_content_region.width
        is_shown = self._pieces and self._wrapped_width > 0  # otherwise, `on_resize` follows
        self._lines = wrap_pieces(self._pieces, self._wrapped_width) if is_shown else []
        first_lines: dict[int, int] = {}
        for number, line in enumerate(self._lines):
            for piece in line:
                if piece.token is not None:
                    first_lines.setdefault(piece.token, number)
        self._lines_of_tokens = sorted(first_lines.items())
        self.virtual_size = Size(0, len(self._lines))
        self.refresh()

    def on_resize(self) -> None:
        if self.scrollable_content_region.width != self._wrapped_width:
            self._wrap()

    def _report(self) -> None:
        self.refresh()
        self.post_message(self.Changed())

    # Metric and legend.

    def next_metric(self) -> None:
        """Colors the tokens by the next available metric."""
        metrics = [] if self.row is None else available_metrics(self.row)
        if self.metric in metrics:
            self.metric = metrics[(metrics.index(self.metric) + 1) % len(metrics)]
            self._set_values()
            self._report()

    def legend(self) -> Text:
        """Returns the name of the metric, the range of its values, and the colors of this range."""
        if self.metric is None:
            return Text("no values per token: only report.rollouts.token_rows training rows of a step have them", "dim")
        metric, scale = METRICS[self.metric], self._scale
        text = Text(f"color: {metric.title}  ")
        text.append(f"{scale.low:.4g} ")
        steps = range(-4, 5) if metric.scale == "diverging" else range(5)
        for step in steps:
            text.append(" ▪", self._color(step / 4))
        text.append(f"  {scale.high:.4g}")
        text.append(f"  {metric.meaning}", style="dim")
        return text

    def value_line(self) -> str:
        """Returns the values of the selected token, or an empty string."""
        if self.row is None or self.token is None:
            return ""
        shown = printable(self.row["tokens"]["text"][self.token]).replace("\n", "↵")
        return f"{shown!r}  {describe_token(self.row, self.token, LISTS.get(self.metric or ''))}"

    def _color(self, position: float) -> Style:
        if self.app.no_color:
            return Style(underline=position <= -_STRONG, reverse=position >= _STRONG)
        background = self.background_colors[1].rgb
        rgb = blend(position, background)
        brightness = 0.3 * rgb[0] + 0.59 * rgb[1] + 0.11 * rgb[2]
        text = (0, 0, 0) if brightness > _LIGHT else (255, 255, 255)
        return Style(color=RichColor.from_rgb(*text), bgcolor=RichColor.from_rgb(*rgb))

    # Movement.

    @property
    def _height(self) -> int:
        return max(1, self.scrollable_content_region.height)

    def _line_of_token(self) -> int | None:
        index = bisect_left(self._lines_of_tokens, (self.token or 0, 0))
        return self._lines_of_tokens[index][1] if index < len(self._lines_of_tokens) else None

    def _is_visible(self, line: int) -> bool:
        top = int(self.scroll_offset.y)
        return top <= line < top + self._height

    def _select(self, token: int) -> None:
        self.token = token
        line = self._line_of_token()
        if line is not None and not self._is_visible(line):
            self.scroll_to(y=max(0, line - self._height // 2), animate=False)
        self._report()

    def action_move_token(self, by: int) -> None:
        if self.row is not None and self.token is not None:
            self._select(max(0, min(self.token + by, len(self.row["tokens"]["ids"]) - 1)))

    def action_move_line(self, by: int) -> None:
        """Selects a token in the line that is `by` lines below. Scrolls if that line has no token, or if the selected
        token is not visible.
        """
        line = None if self.token is None else self._line_of_token()
        if line is not None and self._is_visible(line):
            tokens = [piece.token for piece in self._line(line + by) if piece.token is not None]
            if tokens:
                self._select(tokens[min(self._column(line), len(tokens) - 1)])
                return
        self.scroll_relative(y=by, animate=False)

    def _line(self, number: int) -> Line:
        return self._lines[number] if 0 <= number < len(self._lines) else []

    def _column(self, line: int) -> int:
        tokens = [piece.token for piece in self._line(line) if piece.token is not None]
        return tokens.index(self.token) if self.token in tokens else 0

    def action_page(self, direction: int) -> None:
        self.scroll_relative(y=direction * self._height, animate=False)

    def find(self, text: str, direction: int = 1) -> bool:
        """Highlights a text and scrolls to the next line that contains it. Returns whether a line contains it."""
        self.query_text = text.lower()
        self.refresh()
        if not text:
            return False
        top, count = int(self.scroll_offset.y), len(self._lines)
        for distance in range(1, count + 1):
            number = (top + direction * distance) % count
            if self.query_text in "".join(piece.text for piece in self._lines[number]).lower():
                self.scroll_to(y=number, animate=False)
                return True
        return False

    # Rendering.

    def render_line(self, y: int) -> Strip:
        number, width, base = int(self.scroll_offset.y) + y, self.scrollable_content_region.width, self.rich_style
        if number >= len(self._lines):
            return Strip.blank(width, base)
        segments: list[Segment] = []
        for piece in self._lines[number]:
            segments.append(Segment(piece.text, base + self._style(piece)))
        if self.query_text:
            segments = _highlight(segments, self.query_text)
        return Strip(segments, sum(cell_len(segment.text) for segment in segments)).adjust_cell_length(width, base)

    def _style(self, piece: Piece) -> Style:
        style = _STYLES[piece.style]
        if piece.token is None:
            return style
        value = self._values[piece.token] if piece.token < len(self._values) else None
        if value is not None:
            style += self._color(self._scale.position(value))
        return style + _CURSOR if piece.token == self.token and self.has_focus else style


def _highlight(segments: list[Segment], query: str) -> list[Segment]:
    """Highlights all matches of a search in a line. A match may span several segments."""
    line = "".join(segment.text for segment in segments).lower()
    marked: set[int] = set()
    start = line.find(query)
    while start >= 0:
        marked.update(range(start, start + len(query)))
        start = line.find(query, start + len(query))
    if not marked:
        return segments
    result, position = [], 0
    for segment in segments:
        for character in segment.text:
            style = segment.style + _MATCH if position in marked and segment.style is not None else segment.style
            result.append(Segment(character, style))
            position += 1
    return list(Segment.simplify(result))
