"""`flowrl show`: opens a terminal viewer, or prints plain text if the output is not a terminal."""

import argparse
import os
import sys
from pathlib import Path

from flowrl.cli.number_types import natural, row_count
from flowrl.data.console import write_printable
from flowrl.report.rollout_text import show_rows

_NUM_SHOWN_ROWS = 10
"""Number of rows that are printed as plain text without `--worst` and `--best`."""


def add_show(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command to the parser of `flowrl`."""
    parser = commands.add_parser(
        "show",
        help="show saved responses of a run, with their prompts and scores",
        description="In a terminal, opens a viewer (press ? for its keys). Otherwise, prints plain text.",
    )
    parser.add_argument("run_folder", type=Path, metavar="RUN", help="the output folder of a run")
    parser.add_argument("--step", type=natural, metavar="N", help="training step; default: the latest saved step")
    parser.add_argument("--evaluation", action="store_true", help="show evaluation rows instead of training rows")
    order = parser.add_mutually_exclusive_group()
    order.add_argument("--worst", type=row_count, metavar="N", help="print the N rows with the lowest scores")
    order.add_argument("--best", type=row_count, metavar="N", help="print the N rows with the highest scores")
    parser.add_argument("--plain", action="store_true", help="print plain text, even in a terminal")
    parser.set_defaults(run=_show)


def _show(arguments: argparse.Namespace) -> None:
    order = "worst" if arguments.worst else "best" if arguments.best else "row"
    kind = "evaluation" if arguments.evaluation else "training"
    if not arguments.plain and order == "row" and _is_interactive():
        from flowrl.report.viewer.viewer_app import view_run  # noqa: PLC0415 (textual only for the viewer)

        view_run(arguments.run_folder, step=arguments.step, kind=kind)
        return
    count = arguments.worst or arguments.best or _NUM_SHOWN_ROWS
    text = show_rows(arguments.run_folder, step=arguments.step, kind=kind, order=order, count=count)
    write_printable(text)


def _is_interactive() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
