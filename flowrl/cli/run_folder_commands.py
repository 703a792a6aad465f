"""`flowrl show`, `report`, `diff` and `replay`, which read the output folders of runs."""

import argparse
import inspect
import os
import sys
from pathlib import Path

from flowrl.cli.command_parser import Commands, natural, row_count, tolerance
from flowrl.cli.imports import add_working_folder, training_function
from flowrl.config import CheckFailed, ConfigError, RunConfig, UserError, loading, recipe_class
from flowrl.data.console import write_printable
from flowrl.report.rollout_text import show_rows

_NUM_SHOWN_ROWS = 10
"""Number of rows that are printed as plain text without `--worst` and `--best`."""


def add_show(commands: Commands) -> None:
    """Adds `show` to the parser of the `flowrl` command."""
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
    is_interactive = sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    if not arguments.plain and order == "row" and is_interactive:
        from flowrl.report.viewer.viewer_app import view_run  # noqa: PLC0415 (textual only for the viewer)

        view_run(arguments.run_folder, step=arguments.step, kind=kind)
        return
    count = arguments.worst or arguments.best or _NUM_SHOWN_ROWS
    text = show_rows(arguments.run_folder, step=arguments.step, kind=kind, order=order, count=count)
    write_printable(text)


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


def add_replay(commands: Commands) -> None:
    """Adds `replay` to the parser of the `flowrl` command."""
    parser = commands.add_parser("replay", help="run a recorded step again, and compare its results")
    parser.add_argument("run_folder", type=Path, metavar="RUN", help="the output folder of a run with `record`")
    parser.add_argument("--step", type=natural, metavar="K", help="the recorded step; default: the only one")
    parser.add_argument(
        "--pdb", action="store_true", help="stop in the debugger at the start of the step and at an exception"
    )
    parser.add_argument(
        "--break",
        dest="functions",
        action="append",
        default=[],
        metavar="MODULE:FUNCTION",
        help="stop in the debugger at a function, such as flowrl.algorithms.losses.policy_losses:ppo; can be repeated",
    )
    parser.add_argument(
        "--backend",
        choices=("inline", "ray"),
        help="inline: one rank per role in this process, without sharding; ray: the processes of the placement, for "
        "bitwise identical results of roles with several ranks or a sharded model; default: ray if a model was sharded "
        "and there is no debugger",
    )
    parser.add_argument("--output", type=Path, metavar="F", help="new folder for the results of the replay")
    parser.add_argument("overrides", nargs="*", default=[], metavar="KEY=VALUE", help="settings to override")
    parser.set_defaults(run=_replay)


def _replay(arguments: argparse.Namespace) -> None:
    if arguments.backend == "ray" and (arguments.pdb or arguments.functions):
        raise UserError("--backend ray runs workers in other processes: remove --pdb and --break, or use inline")
    if arguments.output is not None and arguments.output.exists():
        raise UserError(f"--output: {arguments.output} exists: choose a new folder")

    # imported here, because only commands that run a model need torch
    from flowrl.run.replay.recording import CONFIG, read_recording  # noqa: PLC0415
    from flowrl.run.replay.step_debugger import StepDebugger  # noqa: PLC0415
    from flowrl.run.replay.step_replay import replay_step  # noqa: PLC0415

    recording = read_recording(arguments.run_folder.absolute(), arguments.step)
    has_debugger = bool(arguments.pdb or arguments.functions)
    # Without sharding, 16-bit models compute in other dtypes, so results differ by more than the rounding of sums.
    default_backend = "ray" if recording.sharded_roles and not has_debugger else "inline"
    add_working_folder()
    path = recording.path / CONFIG
    schema = recipe_class(path)
    if not issubclass(schema, RunConfig) or (train := training_function(schema)) is None:
        raise ConfigError(f"{path}: the recipe has no function `train` next to its config class {schema.__name__}")
    if "start" not in inspect.signature(train).parameters:
        raise UserError(
            f"{path}: the function `train` of the recipe has no parameter `start`, so no step can be replayed: "
            "write `def train(config, start=Run)`, and `with start(config) as run` (docs/write_a_recipe.md)"
        )
    with loading(path, arguments.overrides, schema) as config:
        debugger = StepDebugger(arguments.functions, stops_at_start=arguments.pdb) if has_debugger else None
        replay_step(
            recording,
            config,
            train,
            overrides=arguments.overrides,
            backend=arguments.backend or default_backend,
            output=arguments.output,
            debugger=debugger,
        )
