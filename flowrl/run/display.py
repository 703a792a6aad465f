"""What a person at the terminal sees: live progress, and the tables at the end."""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from math import isnan
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

SHOWN = {
    "reward": "reward {:.3f}",
    "loss": "loss {:.4f}",
    "accuracy": "accuracy {:.3f}",
    "kl": "KL {:.4f}",
    "response_length": "length {:.1f}",
    "tokens_per_s": "{:,.0f} tokens/s",
}
"""Metrics in the progress line, in order, and how each is written."""

RECENT_STEPS = 20
"""The time left is told from so many of the last steps."""


class LiveProgress:
    """Shows how a run goes: a bar that lives on a terminal, one plain line per `every` steps anywhere else."""

    def __init__(
        self,
        num_steps: int,
        *,
        title: str = "training",
        every: int = 10,
        shown: Mapping[str, str] = SHOWN,
        console: Console | None = None,
    ) -> None:
        """Shows nothing before the first `update`.

        Args:
            num_steps: steps of the whole run; the first is step 1.
            title: the word before the bar.
            every: steps per line where the output is not a terminal; the last step is always shown.
            shown: metric name -> format of its value. A metric keeps its last value until a new one comes.
            console: where to write; the standard output unless stated.
        """
        self.console = console or Console()
        self._num_steps, self._title, self._every, self._shown = num_steps, title, every, shown
        self._latest: dict[str, float] = {}
        self._ends_s: deque[float] = deque([time.monotonic()], maxlen=RECENT_STEPS + 1)
        self._bar: Progress | None = None
        if self.console.is_terminal:
            self._bar = Progress(
                TextColumn("[bold]{task.description}"),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TextColumn("{task.fields[line]}", markup=False),
                console=self.console,
            )
            self._task = self._bar.add_task(title, total=num_steps, line="")

    def update(self, step: int, values: Mapping[str, float]) -> None:
        """Shows a finished step with its metrics."""
        self._ends_s.append(time.monotonic())
        self._latest.update({name: value for name, value in values.items() if name in self._shown and not isnan(value)})
        parts = [form.format(self._latest[name]) for name, form in self._shown.items() if name in self._latest]
        parts.append(f"{clock(self._seconds_left(step))} left")
        line = "  ".join(parts)
        if self._bar is not None:
            self._bar.start()
            self._bar.update(self._task, completed=step, line=line)
        elif step % self._every == 0 or step == self._num_steps:
            self.console.print(Text(f"{self._title} {step}/{self._num_steps}  {line}"), soft_wrap=True)

    def _seconds_left(self, step: int) -> float:
        seconds_per_step = (self._ends_s[-1] - self._ends_s[0]) / (len(self._ends_s) - 1)
        return max(0, self._num_steps - step) * seconds_per_step

    def close(self) -> None:
        """Leaves the last line where it is. Closing twice is fine."""
        if self._bar is not None:
            self._bar.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def clock(seconds: float) -> str:
    """Seconds as m:ss, or h:mm:ss from an hour on."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def before_after_table(rows: Sequence[tuple[str, float, float]], *, title: str = "Before and after training") -> Table:
    """A table of figures before and after a run; each row is (name, before, after)."""
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for heading in ("before", "after", "change"):
        table.add_column(heading, justify="right")
    for name, before, after in rows:
        table.add_row(Text(name), f"{before:.3f}", f"{after:.3f}", f"{after - before:+.3f}")
    return table


def completions_table(samples: Sequence[Mapping[str, Any]], *, title: str = "Sample completions") -> Table:
    """A table of what a model wrote. Each sample has `prompt` and `response`, and may have `answer` and `score`."""
    table = Table(title=title, title_justify="left", show_lines=any("\n" in str(s["response"]) for s in samples))
    table.add_column("prompt")
    table.add_column("response")
    answers = any("answer" in sample for sample in samples)
    scores = any("score" in sample for sample in samples)
    if answers:
        table.add_column("answer")
    if scores:
        table.add_column("score", justify="right")
    for sample in samples:
        # Text, not str: what a model writes may look like console markup.
        cells = [Text(str(sample["prompt"])), Text(str(sample["response"]))]
        if answers:
            cells.append(Text(str(sample.get("answer", ""))))
        if scores:
            cells.append(Text(f"{sample['score']:.2f}" if "score" in sample else ""))
        table.add_row(*cells)
    return table
