"""Progress of a run: metrics file, progress bar and result tables."""

import errno
import json
import math
import os
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Self, overload

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from flowrl.checkpoints.run_folder import naming_full_disk, replacing
from flowrl.data.console import make_console, printable
from flowrl.data.metric import FAILED_AS_BEST, FAILED_AS_WORST, FAILED_FRACTION, NUM_FAILED, finite
from flowrl.report.rollout_log import Row
from flowrl.report.run_observer import RunObserver

SHOWN = {
    "reward": "reward {:.3f}",
    "loss": "loss {:.4f}",
    "actor/loss": "loss {:.4f}",
    "accuracy": "accuracy {:.3f}",
    FAILED_FRACTION: "{:.0%} of held-out rewards failed",
    "validation_loss": "validation loss {:.4f}",
    "kl": "KL {:.4f}",
    "actor/kl": "KL {:.4f}",
    "response_length": "response length {:.1f}",
    "staleness": "staleness {:.1f}",
    "buffer_depth": "buffer {:.0f}",
    "tokens_per_s": "{:,.0f} tokens/s",
}
"""Metrics of the progress bar, in order, with their formats."""

_OPTIONAL_COLUMNS = ("before", "answer", "score")

RECENT_STEPS = 20
"""Number of recent steps from which the ETA is estimated."""

LINE_INTERVAL_S = 10.0
"""Smallest time between two progress lines, except before the last line."""


class History(Sequence[dict[str, float]]):
    """The log records of a run, stored in 8 bytes per value, because a run may have very many steps."""

    def __init__(self) -> None:
        self._records: list[tuple[tuple[str, ...], array[float]]] = []
        self._names: dict[tuple[str, ...], tuple[str, ...]] = {}
        """Tuples of value names, each shared by all records with these names."""

    def append(self, record: Mapping[str, float]) -> None:
        names = tuple(record)
        self._records.append((self._names.setdefault(names, names), array("d", record.values())))

    def __len__(self) -> int:
        return len(self._records)

    @overload
    def __getitem__(self, index: int) -> dict[str, float]: ...
    @overload
    def __getitem__(self, index: slice) -> list[dict[str, float]]: ...
    def __getitem__(self, index: int | slice) -> dict[str, float] | list[dict[str, float]]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        names, values = self._records[index]
        record = dict(zip(names, values, strict=True))
        return record | {"step": int(record["step"])}


class MetricsLog(RunObserver):
    """Writes the metrics of each step immediately, so that they remain if the run is killed."""

    def __init__(
        self,
        folder: Path,
        last_step: int = -1,
        *,
        notify: Callable[[str], None] | None = None,
    ) -> None:
        """Opens `metrics.jsonl`, and removes invalid lines and lines of steps after `last_step`.

        If steps up to `last_step` have no valid line, `notify` receives a message that names them.
        """
        self.history = History()
        """One record per step, with `step` and the step's metrics."""
        for record in _read(folder / "metrics.jsonl", last_step):
            self.history.append(record)
        lost = sorted(set(range(1, last_step + 1)).difference(record["step"] for record in self.history))
        if lost and notify is not None:
            notify(
                f"{folder / 'metrics.jsonl'} lacks the records of {len(lost)} of {last_step} steps ({_ranges(lost)}), "
                f"because their lines are missing or invalid: curves and tables will omit these steps"
            )
        with replacing(folder / "metrics.jsonl") as temporary:
            temporary.write_text("".join(map(_line, self.history)), encoding="utf-8")
        self._path = folder / "metrics.jsonl"
        self._lines = self._path.open("a", encoding="utf-8")

    def step_done(self, step: int, values: Mapping[str, float]) -> None:
        """Appends the metrics of a step. Values that are not finite become null. Steps must be in ascending order.

        Raises FileNotFoundError if the folder no longer exists, because writing to the open file would not fail. Raises
        OSError with the name of the file if the disk is full.
        """
        if not self._path.exists():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self._path))
        assert not self.history or step > self.history[-1]["step"], f"step {step} was written before"
        row = {"step": step, **{name: float(value) for name, value in values.items()}}
        self.history.append(row)
        with naming_full_disk(self._path):
            self._lines.write(_line(row))
            self._lines.flush()

    def saved(self, step: int) -> None:
        """Flushes `metrics.jsonl` to disk (fsync), because a checkpoint is complete only with the records before it."""
        with naming_full_disk(self._path):
            os.fsync(self._lines.fileno())

    def close(self) -> None:
        """Closes `metrics.jsonl`. Is idempotent."""
        with naming_full_disk(self._path):
            self._lines.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _line(row: Mapping[str, float]) -> str:
    return json.dumps(finite(row), allow_nan=False) + "\n"


def _read(path: Path, last_step: int) -> Iterator[dict[str, float]]:
    """Yields the rows up to `last_step`, in ascending order of their steps.

    Skips lines that are not a row, for example after a crash, and steps that do not ascend.
    """
    previous = -1
    for line in path.read_bytes().split(b"\n") if path.exists() else ():
        try:
            values = json.loads(line)
            row = {name: math.nan if value is None else float(value) for name, value in values.items()}
            step = int(values["step"])
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            continue
        if previous < step <= last_step:
            previous = step
            yield row


def _ranges(numbers: Sequence[int]) -> str:
    """Returns ascending numbers as text, such as `1, 3 to 6, 9`. Omits numbers after the first ten ranges."""
    groups = [
        [number for _, number in group] for _, group in groupby(enumerate(numbers), lambda item: item[1] - item[0])
    ]
    texts = [f"{g[0]} to {g[-1]}" if len(g) > 2 else ", ".join(map(str, g)) for g in groups]
    return ", ".join(texts[:10]) + (", ..." if len(texts) > 10 else "")


class LiveProgress(RunObserver):
    """Shows the progress of a run: a progress bar on a terminal, otherwise lines.

    A step that takes 10 seconds (`LINE_INTERVAL_S`) or more has its own line. Faster steps have a line per 10 seconds.
    The first and the last step always have a line.
    """

    def __init__(
        self,
        num_steps: int,
        *,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Creates the display, which is shown after the first step.

        Args:
            num_steps: total number of steps of the run.
            console: output console; None selects standard output.
            clock: returns the current time in seconds.
        """
        self.console = console or make_console()
        self._num_steps, self._clock = num_steps, clock
        self._latest: dict[str, tuple[int, float]] = {}
        """Metric -> its newest value, as (step, value)."""
        self._seconds: deque[float] = deque(maxlen=RECENT_STEPS)
        self._updated_s = clock()
        self._bar: Progress | None = None
        self._unshown: Text | None = None
        self._shown_s = -math.inf
        """Time of the last line."""
        if self.console.is_terminal:
            self._bar = Progress(
                TextColumn("[bold]{task.description}"),
                BarColumn(bar_width=12),
                MofNCompleteColumn(),
                TextColumn("{task.fields[line]}", markup=False),
                console=self.console,
            )
            self._task = self._bar.add_task("training", total=num_steps, line="")

    def add_values(self, step: int, values: Mapping[str, float]) -> None:
        """Adds values of a step to the next line, for example metrics of an evaluation that ends in a later step."""
        shown = {name: (step, value) for name, value in values.items() if name in SHOWN and not math.isnan(value)}
        self._latest.update(shown)

    def evaluated(
        self, step: int, values: Mapping[str, float], rows: Sequence[Row] = (), num_examples: int = 0
    ) -> None:
        """Adds the metrics of an evaluation to the next line. Shows those of the initial model (step 0) at once."""
        if step:
            self.add_values(step, {FAILED_FRACTION: 0.0, **values})
        elif values:
            self.notify("initial model: " + ", ".join(f"{name} {value:.3f}" for name, value in values.items()))

    def calls_done(self, step: int, values: Mapping[str, float]) -> None:
        """Shows the metrics of a step."""
        now_s = self._clock()
        # The time before the first update includes startup, so the step's own duration is preferred.
        self._seconds.append(values.get("seconds", now_s - self._updated_s))
        self._updated_s = now_s
        self.add_values(step, values)
        names = [name for name in SHOWN if name in self._latest]
        parts = [self._part(name, step) for name in names if name != FAILED_FRACTION or self._latest[name][1]]
        seconds_left = max(0, self._num_steps - step) * sum(self._seconds) / len(self._seconds)
        line = self._fitted([*parts, f"ETA {format_clock(seconds_left)}"])
        if self._bar is not None:
            self._bar.start()
            self._bar.update(self._task, completed=step, line=line)
            return
        self._unshown = Text(f"training {step}/{self._num_steps}  {line}")
        if now_s - self._shown_s >= LINE_INTERVAL_S or step == self._num_steps:
            self._shown_s = now_s
            self._show()

    def _part(self, name: str, step: int) -> str:
        measured_at, value = self._latest[name]
        text = SHOWN[name].format(value)
        return text if measured_at == step else f"{text} (step {measured_at})"

    def _show(self) -> None:
        if self._unshown is not None:
            self.console.print(self._unshown, soft_wrap=True)
            self._unshown = None

    def _fitted(self, parts: list[str]) -> str:
        """Joins the parts. On a narrow terminal, drops metrics from the end but keeps the ETA."""
        max_width = self.console.width - len("training") - 2 * len(str(self._num_steps)) - 18
        while self._bar is not None and len(parts) > 2 and len("  ".join(parts)) > max_width:
            del parts[-2]
        return "  ".join(parts)

    def notify(self, text: str) -> None:
        self.console.print(Text(text))

    def close(self) -> None:
        """Stops the progress bar and shows the last step. Is idempotent."""
        if self._bar is not None:
            self._bar.stop()
        self._show()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def format_clock(seconds: float) -> str:
    """Formats seconds as m:ss or h:mm:ss."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def result_table(
    first: Mapping[str, float], last: Mapping[str, float], titles: Mapping[str, str] | None = None
) -> Table:
    """Returns a table of the metrics of the first and the last evaluation. `titles` replace the default titles.

    Omits metrics that only one evaluation has, except for metrics of failed rewards.
    """
    known = _TITLES | dict(titles or {})
    names = [name for name in first if name in last or name.startswith(NUM_FAILED)]
    names += [name for name in last if name not in first and name.startswith(NUM_FAILED)]
    return before_after_table(
        [(known.get(name, name.replace("_", " ")), first.get(name), last.get(name)) for name in names]
    )


_TITLES = {
    "accuracy": "held-out accuracy",
    "evaluation/accuracy_low": "lower end of its 95 % interval",
    "evaluation/accuracy_high": "upper end of its 95 % interval",
    "evaluation/response_length": "response length (tokens)",
    NUM_FAILED: "responses whose reward failed",
    FAILED_FRACTION: "share of these responses",
    FAILED_AS_WORST: "held-out accuracy with the worst score for them",
    FAILED_AS_BEST: "held-out accuracy with the best score for them",
}


def before_after_table(rows: Sequence[tuple[str, float | None, float | None]]) -> Table:
    """Returns a table of metrics before and after training. Each row is (name, before, after). None: no value."""
    table = Table(title="Before and after training", title_justify="left")
    table.add_column("")
    for heading in ("before", "after", "change"):
        table.add_column(heading, justify="right")
    for name, before, after in rows:
        cells = ["" if value is None else f"{value:.3f}" for value in (before, after)]
        table.add_row(Text(name), *cells, "" if before is None or after is None else f"{after - before:+.3f}")
    return table


def completions_table(samples: Sequence[Mapping[str, Any]]) -> Table:
    """Returns a table of responses.

    `samples` have `prompt`, `response`, and optionally `before`, `answer` and `score`. Missing values may be None.
    """
    has_lines = any("\n" in str(sample["response"]) for sample in samples)
    table = Table(title="Sample completions", title_justify="left", show_lines=has_lines)
    table.add_column("prompt")
    has_before, has_answer, has_score = (
        any(sample.get(key) is not None for sample in samples) for key in _OPTIONAL_COLUMNS
    )
    if has_before:
        table.add_column("before training")
    table.add_column("after training" if has_before else "response")
    if has_answer:
        table.add_column("answer")
    if has_score:
        table.add_column("score", justify="right")
    for sample in samples:
        cells = [_cell(sample["prompt"])]
        if has_before:
            cells.append(_cell(sample.get("before")))
        cells.append(_cell(sample["response"]))
        if has_answer:
            cells.append(_cell(sample.get("answer")))
        if has_score:
            score = sample.get("score")
            cells.append(_cell(None if score is None else f"{score:.2f}"))
        table.add_row(*cells)
    return table


def _cell(value: object) -> Text:
    # Generated text may contain console markup and terminal codes.
    return Text("" if value is None else printable(str(value)))
