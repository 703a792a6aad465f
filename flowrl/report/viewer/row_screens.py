"""Screens that open over the table of rows: one row, the responses to one prompt in all steps, and the help."""

from collections.abc import Sequence
from typing import ClassVar

from rich.text import Text
from textual import on, work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.screen import Screen
from textual.widgets import Footer, Input, Static
from textual.worker import get_current_worker

from flowrl.data.console import printable
from flowrl.report.rollout_log import Row
from flowrl.report.viewer.row_table import RowTable
from flowrl.report.viewer.table_columns import make_columns
from flowrl.report.viewer.text_store import TextStore
from flowrl.report.viewer.text_view import TextView

HELP = """\
Steps and rows
  Tab, left, right  switch between the list of steps and the table of rows
  arrows, j, k      move; PgUp, PgDn, Home and End move further
  Enter             open a row
  s, S              sort by the next column; reverse the order
                    (or click on the title of a column)
  /                 search prompts, responses and answers
  n, N              next, previous row with the text
  f                 filter the rows; an empty filter shows all rows
  c                 compare the responses to the same prompt in all steps
  m                 color the tokens of the preview by the next metric
  r                 reload; new steps of an active run appear automatically

Filters: terms are separated by spaces; a row must satisfy all terms
  score<0.5         also: length advantage staleness version sample prompt_id
                    row environment, with < <= > >= = !=
  reward.NAME<1     a reward or another score
  text:abc          the prompt, the response or the answer contains abc;
                    also: prompt: response: answer: finish: set:
  failed            a reward failed
  tokens            the row has values per token
  abc, "two words"  the same as text:abc
  !text:abc         a ! before a term negates it

One row
  left, right       select a token; the lowest line has its values
  m                 color tokens by advantage, ratio, gap of the
                    log-probabilities, mask or version
                    blue: below the center, orange: above the center
                    without colors: underlined and reversed
  ], [              next, previous row
  /, n, N           search a text; next, previous line that contains it
  c                 compare the responses to the same prompt in all steps
  Escape, q         back

In all screens: ? help, q back or quit, Ctrl-Q quit
"""


class HelpScreen(Screen[None]):
    """The keys and the filter expressions."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q,question_mark", "dismiss", "Back")]

    def compose(self) -> ComposeResult:
        with VerticalScroll():
            yield Static(HELP, id="help", markup=False)
        yield Footer()


class DetailScreen(Screen[int]):
    """Shows one row with its response. The result of the screen is the index of the row that was shown last."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q", "close", "Back"),
        Binding("m", "metric", "Metric"),
        Binding("left_square_bracket", "move_row(-1)", "Prev row", key_display="["),
        Binding("right_square_bracket", "move_row(1)", "Next row", key_display="]"),
        Binding("slash", "search", "Search", key_display="/"),
        Binding("n", "find(1)", "Next", show=False),
        Binding("N", "find(-1)", "Previous", show=False),
        Binding("c", "compare", "Compare"),
        Binding("question_mark", "app.help", "Help", key_display="?"),
    ]

    def __init__(self, store: TextStore, rows: Sequence[Row], index: int, query: str = "") -> None:
        super().__init__()
        self._store, self._rows, self._index, self._query = store, rows, index, query

    def compose(self) -> ComposeResult:
        yield Static(id="heading", classes="heading", markup=False)
        yield TextView(id="text")
        yield Input(id="search", placeholder="text in this row", classes="hidden", compact=True, select_on_focus=False)
        yield Static(id="legend", classes="line", markup=False)
        yield Static(id="value", markup=False)
        yield Footer()

    def on_mount(self) -> None:
        self._view.query_text = self._query.lower()
        self._show()
        self._view.focus()

    @property
    def _view(self) -> TextView:
        return self.query_one("#text", TextView)

    def _show(self) -> None:
        row = self._rows[self._index]
        position = f"row {row['row']} ({self._index + 1} of {len(self._rows)})"
        self.query_one("#heading", Static).update(f"step {row['step']}  {row['kind']}  {position}")
        self._view.show(row)

    @on(TextView.Changed)
    def _update_lines(self) -> None:
        self.query_one("#legend", Static).update(self._view.legend())
        self.query_one("#value", Static).update(self._view.value_line())

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        # While the input line is open, keys are characters of its text, not commands.
        return action not in ("search", "find") or not self.query_one("#search").has_focus

    def action_close(self) -> None:
        self.dismiss(self._index)

    def action_metric(self) -> None:
        self._view.next_metric()

    def action_move_row(self, by: int) -> None:
        self._index = max(0, min(self._index + by, len(self._rows) - 1))
        self._show()

    def action_compare(self) -> None:
        self.app.push_screen(CompareScreen(self._store, self._rows[self._index]))

    def action_search(self) -> None:
        box = self.query_one("#search", Input)
        box.remove_class("hidden")
        box.focus()

    @on(Input.Submitted)
    def _find(self, event: Input.Submitted) -> None:
        self._query = event.value
        self.query_one("#search", Input).add_class("hidden")
        self._view.focus()
        self.action_find(1)

    def action_find(self, direction: int) -> None:
        if not self._view.find(self._query, direction) and self._query:
            self.notify(f"the row does not contain {self._query!r}", severity="warning", markup=False)

    def key_escape(self) -> None:
        box = self.query_one("#search", Input)
        if box.has_focus:
            box.add_class("hidden")
            self._view.focus()
        else:
            self.action_close()


class CompareScreen(Screen[None]):
    """Shows the responses to one prompt in all saved steps."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q", "dismiss", "Back"),
        Binding("m", "metric", "Metric"),
        Binding("question_mark", "app.help", "Help", key_display="?"),
    ]

    def __init__(self, store: TextStore, row: Row) -> None:
        super().__init__()
        self._store, self._row = store, row
        self._rows: list[Row] = []

    def compose(self) -> ComposeResult:
        prompt = " ".join(printable(str(self._row["prompt"])).split())
        yield Static(Text(f"prompt: {prompt}", no_wrap=True, overflow="ellipsis"), classes="heading")
        with Vertical():
            yield RowTable(id="compared")
            yield TextView(id="preview")
        yield Footer()

    def on_mount(self) -> None:
        self.query_one(RowTable).focus()
        self._read()

    @work(thread=True)
    def _read(self) -> None:
        worker = get_current_worker()
        rows = list(self._store.rows_of_prompt(self._row)) or [self._row]
        if not worker.is_cancelled:
            self.app.call_from_thread(self._show, rows)

    def _show(self, rows: list[Row]) -> None:
        keys = [(row["step"], row["row"]) for row in rows]
        own = (self._row["step"], self._row["row"])
        table = self.query_one(RowTable)
        table.show(make_columns(rows, with_step=True), rows, cursor=keys.index(own) if own in keys else 0)

    @on(RowTable.Moved)
    def _preview(self, event: RowTable.Moved) -> None:
        self.query_one(TextView).show(event.row)

    @on(RowTable.Chosen)
    def _open(self, event: RowTable.Chosen) -> None:
        table = event.table

        def move(index: int | None) -> None:
            table.cursor = table.cursor if index is None else index

        self.app.push_screen(DetailScreen(self._store, table.rows, table.cursor), move)

    def action_metric(self) -> None:
        self.query_one(TextView).next_metric()
