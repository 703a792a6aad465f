"""Implements `flowrl check`, which runs all checks of a config and prints a row per result."""

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from flowrl.checkpoints.resume import RunComplete
from flowrl.config import CheckFailed, RunConfig, UserError
from flowrl.controller.errors import FlowError
from flowrl.data.console import make_console
from flowrl.run.checks.check_list import ROWS, Check, CheckSkipped, Level, Need, find_missing, list_checks
from flowrl.run.checks.file_checks import InvalidPaths
from flowrl.run.checks.model_checks import LoadedRun
from flowrl.run.interrupt import Interrupted

_REQUIRED: dict[str, tuple[str, ...]] = {
    "models": ("files",),
    "tokenizer": ("files",),
    "data": ("functions", "files", "tokenizer"),
    "reward": ("functions", "data"),
    "memory": ("placement",),
    "step": ("recipe", "functions", "files", "models", "tokenizer", "data", "reward", "placement"),
}
"""Row -> rows whose checks must not fail, because the checks of the row depend on them."""

_FAILED = ("failed", "not run")
"""States of a row after which the checks of dependent rows (`_REQUIRED`) do not run."""


class ChecksFailed(UserError):
    """Raised after all checks if at least one failed. The message has one line per problem."""


def check_config(
    config: RunConfig,
    import_train: Callable[[], Callable[..., Any] | None],
    locate: Callable[[str], str] = str,
    console: Console | None = None,
) -> None:
    """Runs all checks. Prints a row when its checks end, and finally the scores of a few dataset rows. Writes nothing
    into the output folder.

    Args:
        config: the config of the run.
        import_train: imports and returns the training function of the recipe, which runs one small step. If it returns
            None, the rows `recipe` and `step` are skipped.
        locate: adds file and line to a message about a setting.
        console: receives the output. None prints to the terminal.
    Raises:
        ChecksFailed: at least one check failed. The message has one line per problem.
        Interrupted: Ctrl-C was pressed, or SIGTERM was received during the small step. The message names the row.
    """
    console = console or make_console()
    run, checks = LoadedRun(config, import_train), list_checks(Level.STEP)
    problems: list[str] = []
    failed: set[str] = set()
    for row in ROWS:
        with _name_row_on_interrupt(row), console.status(f"checking {row}"):
            if lacking := [other for other in _REQUIRED.get(row, ()) if other in failed]:
                state, text = "not run", f"needs {', '.join(lacking)}"
            else:
                state, text = _run_row([check for check in checks if check.row == row], run, problems)
        if state in _FAILED:
            failed.add(row)
        console.print(_format_result(row, state, text))
    if run.scores:
        _print_scores(run.scores, console)
    if problems:
        located = [locate(problem) for problem in dict.fromkeys(problems)]
        raise ChecksFailed(located[0] if len(located) == 1 else "\n  ".join([f"{len(located)} problems:", *located]))


@contextmanager
def _name_row_on_interrupt(row: str) -> Iterator[None]:
    """Replaces a KeyboardInterrupt of the block by `Interrupted`, whose message names the row."""
    try:
        yield
    except KeyboardInterrupt as error:
        number = error.exit_code - 128 if isinstance(error, Interrupted) else signal.SIGINT
        raise Interrupted(number, f"interrupted while checking {row}") from None


def _run_row(checks: Sequence[Check], run: LoadedRun, problems: list[str]) -> tuple[str, str]:
    """Runs the checks of a row until one fails or is skipped. Adds the problems of a failed check to `problems`.
    Returns the state of the row and a text.
    """
    missing = find_missing(run)
    texts: list[str] = []
    try:
        for check in checks:
            if check.needs & missing & Need.PLAN:
                return "skipped", str(run.missing_devices)
            if not check.needs & missing and (text := check.run(run)) is not None:
                texts.append(text)
    except (CheckSkipped, RunComplete) as ended:
        return "skipped" if isinstance(ended, CheckSkipped) else "ok", str(ended)
    except InvalidPaths as error:
        problems += error.problems
    except (UserError, FlowError, CheckFailed) as error:
        problems.append(str(error).strip())
    else:
        return "ok", "; ".join(texts)
    return "failed", "see below"


def _format_result(row: str, state: str, text: str) -> Table:
    """Formats the result of a row. On a narrow terminal, the text wraps within its column."""
    line = Table.grid(padding=(0, 2, 0, 0))
    for width in (max(map(len, ROWS)), max(map(len, ("skipped", *_FAILED)))):
        line.add_column(min_width=width, no_wrap=True)
    line.add_row(Text(row), Text(state), Text(text))
    return line


def _print_scores(scores: list[tuple[str, str, str, str]], console: Console) -> None:
    table = Table()
    for name in ("prompt", "answer", "score of the answer", "score of an empty response"):
        table.add_column(name)
    for row in scores:
        table.add_row(*map(Text, row))
    console.print(table)
