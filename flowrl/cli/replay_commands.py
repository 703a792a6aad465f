"""`flowrl replay`: runs a recorded step of a run again."""

import argparse
import inspect
from pathlib import Path
from typing import Any

from flowrl.cli.imports import add_working_folder
from flowrl.cli.number_types import natural
from flowrl.cli.recipe_names import training_function
from flowrl.config import ConfigError, RunConfig, UserError, loading, recipe_class

Commands = Any  # argparse's type of sub-commands is private


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
    # Without sharding, 16-bit models compute in other dtypes, which differ by more than the rounding of sums.
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
