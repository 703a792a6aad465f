"""`flowrl diff`: compares two runs."""

import argparse
from pathlib import Path
from typing import Any

from flowrl.cli.number_types import tolerance
from flowrl.config import CheckFailed

Commands = Any  # argparse's type of sub-commands is private


def add_diff(commands: Commands) -> None:
    """Adds `diff` to the parser of the `flowrl` command."""
    parser = commands.add_parser(
        "diff",
        help="compare two runs: settings, inputs, versions, and the first step and call at which they diverge",
    )
    parser.add_argument("first", type=Path, metavar="RUN_A", help="the output folder of a run")
    parser.add_argument("second", type=Path, metavar="RUN_B", help="the output folder of another run")
    parser.add_argument(
        "--tolerance",
        type=tolerance,
        default=0.0,
        metavar="X",
        help="largest difference of equal numbers, relative to the larger magnitude or 1; default: 0, bitwise equal",
    )
    parser.add_argument("--exit-code", action="store_true", help="exit with 1 if the runs differ")
    parser.set_defaults(run=_diff)


def _diff(arguments: argparse.Namespace) -> None:
    # imported here, because only this command needs rich and yaml
    from flowrl.data.console import make_console  # noqa: PLC0415
    from flowrl.report.run_diff import compare_runs, print_diff  # noqa: PLC0415

    diff = compare_runs(arguments.first, arguments.second, tolerance=arguments.tolerance)
    print_diff(diff, make_console())
    if arguments.exit_code and not diff.is_equal:
        raise CheckFailed(f"{arguments.first} and {arguments.second} differ")
