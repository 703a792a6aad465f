"""`flowrl report`: writes the HTML report of runs."""

import argparse
from pathlib import Path
from typing import Any

from flowrl.data.console import write_printable

Commands = Any  # argparse's type of sub-commands is private


def add_report(commands: Commands) -> None:
    """Adds `report` to the parser of the `flowrl` command."""
    parser = commands.add_parser(
        "report",
        help="write one HTML file with curves, timeline, placement, completions and settings of runs",
    )
    parser.add_argument("run_folders", nargs="+", type=Path, metavar="RUN", help="the output folder of a run")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE.html",
        help="default: report.html in the folder of the run, or in the working folder for several runs",
    )
    parser.set_defaults(run=_report)


def _report(arguments: argparse.Namespace) -> None:
    from flowrl.report.page.write_report import write_report  # noqa: PLC0415 (numpy and rich only for a report)

    path = write_report(arguments.run_folders, arguments.output)
    write_printable(f"{path}: {path.stat().st_size / 1e6:.1f} MB; open it in a browser\n")
