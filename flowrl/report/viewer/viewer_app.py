"""The viewer's main screen: the saved steps of a run and the table of the rows of one step."""

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

from rich.text import Text
from textual import on, work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.screen import Screen
from textual.widgets import Footer, Input, Static
from textual.worker import get_current_worker

from flowrl.report.rollout_log import Kind, RolloutLogError, Row
from flowrl.report.rollout_text import find_rollouts
from flowrl.report.viewer.row_filter import FilterError, parse_filter
from flowrl.report.viewer.row_screens import CompareScreen, DetailScreen, HelpScreen
from flowrl.report.viewer.row_table import RowTable
from flowrl.report.viewer.table_columns import Column, make_columns, sort_rows, step_columns
from flowrl.report.viewer.text_store import Shard, TextStore
from flowrl.report.viewer.text_view import TextView

_POLL_S = 3.0
"""Seconds between two checks for new steps."""

_MIN_PREVIEW_HEIGHT = 30
"""Smallest height of a terminal in which the main screen also shows the selected row."""


def view_run(run_folder: Path, *, step: int | None = None, kind: Kind = "training") -> None:
    """Opens the viewer and blocks until the user closes it. SIGTERM and SIGHUP close the viewer, and then end the
    program.

    Args:
        run_folder: output folder of a run.
        step: training step that is selected first; None selects the latest saved step.
        kind: whether training rows or evaluation rows are selected first.
    Raises:
        RolloutLogError: the run has no saved rows, or none of the step.
    """
    app = ViewerApp(run_folder, step=step, kind=kind)
    app.run()
    if app.ended_by is not None:
        signal.raise_signal(app.ended_by)  # the default handler is back, because the event loop is closed


class ViewerApp(App[None]):
    """The application: the main screen, and the screens that open over it."""

    TITLE = "flowrl show"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [Binding("question_mark", "help", "Help", key_display="?", show=False)]
    CSS = """
    RowTable, TextView { background: $background; scrollbar-size-vertical: 1; scrollbar-size-horizontal: 0; }
    #steps { width: 14; border-right: solid $primary-darken-2; }
    #preview { height: 2fr; border-top: solid $primary-darken-2; }
    #rows, #compared { height: 1fr; }
    #text { height: 1fr; padding: 0 1; }
    .heading { height: 1; background: $primary-darken-2; color: $text; padding: 0 1; }
    .line { height: 1; padding: 0 1; }
    .hidden { display: none; }
    #search, #input-line { height: 1; padding: 0 1; background: $surface; }
    #label { width: auto; text-style: bold; }
    #input { width: 1fr; }
    #value { height: 2; padding: 0 1; }
    #problem { height: auto; max-height: 4; padding: 0 1; background: $error; color: $text; }
    #help { padding: 0 1; }
    """

    def __init__(self, run_folder: Path, *, step: int | None = None, kind: Kind = "training") -> None:
        super().__init__()
        find_rollouts(run_folder)
        self.store = TextStore(run_folder)
        shard = _first_shard(self.store, step, kind)
        self.store.load(shard)  # an error is reported before the terminal changes
        self._start = MainScreen(self.store, shard)
        self.ended_by: signal.Signals | None = None
        """The signal that closed the viewer, or None."""

    def on_mount(self) -> None:
        # The exception of a Python handler would be lost in a task of Textual, which would continue without a terminal.
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # such as SIGHUP after nohup
                asyncio.get_running_loop().add_signal_handler(number, self._end, number)
        self.push_screen(self._start)

    def _end(self, number: signal.Signals) -> None:
        self.ended_by = number
        self.exit()

    def action_help(self) -> None:
        if not isinstance(self.screen, HelpScreen):
            self.push_screen(HelpScreen())


def _first_shard(store: TextStore, step: int | None, kind: Kind) -> Shard:
    """Returns the shard to show first. Without `step`: the latest of `kind`, or else of the other kind."""
    if step is not None:
        return Shard(step, kind)
    shards = store.shards()
    return next((shard for shard in reversed(shards) if shard.kind == kind), shards[-1] if shards else Shard(0, kind))


class MainScreen(Screen[None]):
    """The list of steps, and the rows of the selected step."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "app.quit", "Quit"),
        Binding("slash", "open_input('search')", "Search", key_display="/"),
        Binding("f", "open_input('filter')", "Filter"),
        Binding("s", "sort", "Sort"),
        Binding("S", "reverse", "Reverse", show=False),
        Binding("c", "compare", "Compare"),
        Binding("n", "find(1)", "Next", show=False),
        Binding("N", "find(-1)", "Previous", show=False),
        Binding("m", "metric", "Metric", show=False),
        Binding("r", "reload", "Reload", show=False),
        Binding("left", "focus_table('steps')", "Steps", show=False),
        Binding("right", "focus_table('rows')", "Rows", show=False),
        Binding("question_mark", "app.help", "Help", key_display="?"),
    ]

    def __init__(self, store: TextStore, shard: Shard) -> None:
        super().__init__()
        self._store, self._shard = store, shard
        self._changed_ns = 0
        self._rows: list[Row] = []
        """All rows of the step, in the order of the batch."""
        self._sorted_by: str | None = None
        """Title of the column by which rows are sorted; None for the order of the batch."""
        self._is_descending = False
        self._filter_text, self._search_text = "", ""
        self._predicate: Callable[[Row], bool] = parse_filter("")
        self._input_use = ""
        """Use of the input line: `search` or `filter`."""

    def compose(self) -> ComposeResult:
        yield Static(id="heading", classes="heading", markup=False)
        with Horizontal():
            yield RowTable(id="steps")
            with Vertical():
                yield RowTable(id="rows")
                yield TextView(id="preview")
        with Horizontal(id="input-line", classes="hidden"):
            yield Static(id="label", markup=False)
            yield Input(id="input", compact=True, select_on_focus=False)
        yield Static(id="problem", classes="hidden", markup=False)
        yield Footer()

    def on_mount(self) -> None:
        self._list_steps()
        self._table.focus()
        self.set_interval(_POLL_S, self._poll)

    def on_resize(self) -> None:
        self.query_one("#preview").set_class(self.size.height < _MIN_PREVIEW_HEIGHT, "hidden")

    @property
    def _table(self) -> RowTable:
        return self.query_one("#rows", RowTable)

    @property
    def _steps(self) -> RowTable:
        return self.query_one("#steps", RowTable)

    # Steps.

    def _list_steps(self) -> None:
        steps = [shard._asdict() for shard in self._store.shards()]
        selected = self._shard._asdict()
        self._steps.show(step_columns(), steps, cursor=steps.index(selected) if selected in steps else len(steps) - 1)

    def _poll(self) -> None:
        """Lists new steps of an active run. If there are none, reloads the selected step if its shard has changed."""
        if [shard._asdict() for shard in self._store.shards()] != self._steps.rows:
            self._list_steps()
        elif self._store.changed_ns(self._shard) != self._changed_ns:
            self._load(self._shard)

    def action_reload(self) -> None:
        self._list_steps()
        self._load(self._shard)

    @on(RowTable.Moved, "#steps")
    def _select_step(self, event: RowTable.Moved) -> None:
        if event.row is not None:
            shard = Shard(event.row["step"], event.row["kind"])
            if shard != self._shard or not self._rows:
                self._load(shard)

    @work(thread=True, exclusive=True)
    def _load(self, shard: Shard) -> None:
        worker = get_current_worker()
        changed_ns = self._store.changed_ns(shard)
        try:
            rows = self._store.load(shard)
        except RolloutLogError as error:
            self.app.call_from_thread(self.notify, str(error), severity="error", markup=False)
            return
        if not worker.is_cancelled:  # a cancelled worker would replace a step that was selected later
            self.app.call_from_thread(self._show_step, shard, rows, changed_ns)

    def _show_step(self, shard: Shard, rows: list[Row], changed_ns: int) -> None:
        is_same = shard == self._shard
        self._shard, self._rows, self._changed_ns = shard, rows, changed_ns
        self._show_rows(keep=self._table.row if is_same else None)

    # Rows.

    def _columns(self) -> list[Column]:
        return make_columns(self._rows)

    def _show_rows(self, keep: Row | None = None) -> None:
        """Shows the filtered and sorted rows. The cursor stays on the row `keep`, if it is shown."""
        columns, rows = self._columns(), [row for row in self._rows if self._predicate(row)]
        column = next((column for column in columns if column.title == self._sorted_by), None)
        if column is not None:
            rows = sort_rows(rows, column, descending=self._is_descending)
        self._table.marks = {} if column is None else {column.title: "▼" if self._is_descending else "▲"}
        kept = [i for i, row in enumerate(rows) if keep is not None and row["row"] == keep["row"]]
        self._table.show(columns, rows, cursor=kept[0] if kept else 0)
        self._update_heading()

    def _update_heading(self) -> None:
        rows = self._table.rows
        scores = [row["score"] for row in rows if row["score"] is not None]
        parts = [
            str(Path(*self._store.run_folder.resolve().parts[-2:])),  # a longer path would hide the other parts
            f"step {self._shard.step} {self._shard.kind}",
            f"{len(rows)} rows" if len(rows) == len(self._rows) else f"{len(rows)} of {len(self._rows)} rows",
            *([f"mean score {sum(scores) / len(scores):.3f}"] if scores else []),
            *([f"filter {self._filter_text}"] if self._filter_text else []),
            *([f"search {self._search_text}"] if self._search_text else []),
        ]
        self.query_one("#heading", Static).update(Text("  ".join(parts), no_wrap=True, overflow="ellipsis"))

    @on(RowTable.Moved, "#rows")
    def _preview(self, event: RowTable.Moved) -> None:
        self.query_one("#preview", TextView).show(event.row)

    @on(RowTable.Chosen, "#steps")
    def _enter_step(self) -> None:
        self._table.focus()

    @on(RowTable.Chosen, "#rows")
    def _open(self) -> None:
        def move(index: int | None) -> None:
            self._table.cursor = self._table.cursor if index is None else index

        table = self._table
        self.app.push_screen(DetailScreen(self._store, table.rows, table.cursor, self._search_text), move)

    def action_focus_table(self, name: str) -> None:
        self.query_one(f"#{name}").focus()

    def action_compare(self) -> None:
        if self._table.row is not None:
            self.app.push_screen(CompareScreen(self._store, self._table.row))

    def action_metric(self) -> None:
        self.query_one("#preview", TextView).next_metric()

    # Order.

    def action_sort(self) -> None:
        titles = [None, *(column.title for column in self._columns() if column.title.strip())]
        index = titles.index(self._sorted_by) if self._sorted_by in titles else 0
        self._sorted_by, self._is_descending = titles[(index + 1) % len(titles)], False
        self._show_rows()

    def action_reverse(self) -> None:
        self._is_descending = not self._is_descending
        self._show_rows()

    @on(RowTable.HeaderClicked)
    def _sort_by(self, event: RowTable.HeaderClicked) -> None:
        is_same = event.column.title == self._sorted_by
        self._sorted_by, self._is_descending = event.column.title, is_same and not self._is_descending
        self._show_rows()

    # Search and filter.

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        # While the input line is open, keys are characters of its text, not commands.
        return action != "open_input" or not self.query_one("#input").has_focus

    def action_open_input(self, use: str) -> None:
        """Opens the input line. `use` is `search` or `filter`."""
        self._input_use = use
        self.query_one("#label", Static).update(f"{use}: ")
        box = self.query_one("#input", Input)
        box.placeholder = "a text" if use == "search" else "such as score<0.5 length>10 text:abc"
        box.value = self._filter_text if use == "filter" else self._search_text
        self.query_one("#input-line").remove_class("hidden")
        box.focus()

    @on(Input.Submitted)
    def _apply(self, event: Input.Submitted) -> None:
        if self._input_use == "search":
            self._search_text = event.value
            self._close_input()
            self._update_heading()
            self.action_find(1, from_cursor=True)
            return
        try:
            self._predicate = parse_filter(event.value)
        except FilterError as error:
            problem = self.query_one("#problem", Static)
            problem.update(str(error))
            problem.remove_class("hidden")
            return
        self._filter_text = event.value.strip()
        self._close_input()
        self._show_rows(keep=self._table.row)

    def _close_input(self) -> None:
        self.query_one("#input-line").add_class("hidden")
        self.query_one("#problem").add_class("hidden")
        self._table.focus()

    def key_escape(self) -> None:
        self._close_input()

    def action_find(self, direction: int, from_cursor: bool = False) -> None:
        """Moves the cursor to the next row that contains the text of the search."""
        rows, text = self._table.rows, self._search_text.lower()
        if not text or not rows:
            return
        for distance in range(0 if from_cursor else 1, len(rows) + 1):
            index = (self._table.cursor + direction * distance) % len(rows)
            row = rows[index]
            if any(text in str(row[name]).lower() for name in ("prompt", "response", "answer") if row[name]):
                self._table.cursor = index
                return
        self.notify(f"no row of this step contains {self._search_text!r}", severity="warning", markup=False)
