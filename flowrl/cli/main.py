"""The command `flowrl`, and how every program of this project ends: 0, or 2 with one sentence about what to correct."""

import argparse
import errno
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from flowrl.checkpoints.checkpoints import Checkpoints
from flowrl.checkpoints.resume import check_base_model
from flowrl.config import CheckFailed, ConfigError, OnPolicyConfig, Placement, RunConfig, UserError, load, recipe_class
from flowrl.config.source import read
from flowrl.controller.errors import WorkerError
from flowrl.controller.placement.inventory import local_inventory
from flowrl.controller.placement.plan import plan
from flowrl.controller.placement.plan_table import render_plan
from flowrl.memory.memory_estimate import estimate_memory
from flowrl.memory.memory_table import check_memory, memory_budget, render_memory
from flowrl.report.chrome_trace import TraceError, read_trace
from flowrl.report.trace import loop_events
from flowrl.run.interrupt import Interrupted
from flowrl.run.preflight import check_functions, check_run, check_start, plan_run
from flowrl.run.restarts import with_restarts
from flowrl.schedules.schedule_plan import check_routes, render_graph

RecipeConfig = TypeVar("RecipeConfig", bound=RunConfig)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line `argv` (the process's own by default) and returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="flowrl", description="Reinforcement learning of language models.", allow_abbrev=False
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_plan(commands)
    _add_trace(commands)
    _add_checkpoints(commands)
    _add_export(commands)
    _add_doctor(commands)
    arguments, rest = parser.parse_known_args(argv)
    # argparse gives up on key=value words that follow an option; they belong to the ones before it.
    if rest and ("overrides" not in arguments or any(word.startswith("-") for word in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        arguments.overrides += rest
    return exit_code(lambda: arguments.run(arguments))


def exit_code(program: Callable[[], object]) -> int:
    """Runs `program` and tells what ended it.

    Returns: 0 when it returns; 2 for a `UserError`, whose sentence goes to stderr, and for a full disk; 1 when a worker
    failed, with its own traceback instead of the driver's, or a check of the run's, in one sentence; 130 when it was
    interrupted and 143 when SIGTERM ended it, with a line that says where its results are. Any other exception is a
    defect, and is raised.
    """
    try:
        program()
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    except (WorkerError, CheckFailed) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    except Interrupted as ended:
        sys.stderr.write(f"{ended}\n")
        return ended.exit_code
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return 130
    except OSError as error:
        if error.errno not in _DISK_FULL:
            raise
        where = f" while {error.filename} was written" if error.filename else ""
        sys.stderr.write(
            f"error: the disk is full{where} ({error.strerror}): make room, or set output to another disk; checkpoints "
            f"that were saved are whole, and resume=auto goes on from the newest\n"
        )
        return 2
    return 0


_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def run_recipe(
    schema: type[RecipeConfig], train: Callable[[RecipeConfig], object], argv: Sequence[str] | None = None
) -> int:
    """The command line of a recipe: `CONFIG [KEY=VALUE ...] [--address HOST:PORT]`.

    Reads the config, calls `train`, again after a failure that `restarts` allows, and returns an exit code.
    """
    parser = argparse.ArgumentParser(description=(schema.__doc__ or "").strip(), allow_abbrev=False)
    parser.add_argument("config", type=Path, metavar="CONFIG", help="the recipe's YAML file")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="settings put over the file's")
    parser.add_argument("--address", metavar="HOST:PORT", help="the Ray cluster to join, as address=HOST:PORT")
    arguments = parser.parse_intermixed_args(argv)
    address = [] if arguments.address is None else [f"address={arguments.address}"]

    def program() -> None:
        config = load(arguments.config, [*arguments.overrides, *address], schema)
        check_run(config)
        with_restarts(train, config)

    return exit_code(program)


def _add_plan(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "plan",
        help="print which role runs on which device, who feeds whom and what memory it takes, and start nothing",
        allow_abbrev=False,
    )
    parser.add_argument("config", type=Path, metavar="CONFIG", help="a recipe's YAML file, or one of placement/")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="settings put over the file's")
    parser.add_argument(
        "--devices", type=_counts, metavar="N[,N...]", help="devices per node, instead of this machine's"
    )
    parser.set_defaults(run=_plan)


def _plan(arguments: argparse.Namespace) -> None:
    if "pools" in read(arguments.config).values:
        placement = load(arguments.config, arguments.overrides, Placement)
        planned, below = plan(placement, local_inventory(placement.device, arguments.devices)), ""
        check_routes(placement, planned)
    else:
        config = load(arguments.config, arguments.overrides, _run_config(arguments.config))
        check_functions(config)
        planned = plan_run(config, arguments.devices)
        available = memory_budget(config, planned, is_local=arguments.devices is None and config.address is None)
        devices = estimate_memory(config, planned)
        check_memory(config, planned, devices, available)
        graph = f"\n{render_graph(config, planned)}\n" if isinstance(config, OnPolicyConfig) else ""
        below = f"{graph}\n{render_memory(devices, available)}\n"
    sys.stdout.write(f"{render_plan(planned)}\n{below}")


def _run_config(path: Path) -> type[RunConfig]:
    # A recipe beside the working folder is found as `python -m` finds it; a console script's path lacks that folder.
    if "" not in sys.path:
        sys.path.insert(0, "")
    found = recipe_class(path)
    if not issubclass(found, RunConfig):
        raise ConfigError(f"{path}: recipe is {found.__name__}, which is not the config of a run and has no placement")
    return found


def _add_trace(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "trace", help="print where the time of a run went, and what bounds it", allow_abbrev=False
    )
    parser.add_argument("trace", type=Path, metavar="RUN", help="the output folder of a run, or its trace.json")
    parser.add_argument("--last", type=_seconds, metavar="SECONDS", help="look at the end of the run only")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw the timeline too")
    parser.set_defaults(run=_trace)


def _trace(arguments: argparse.Namespace) -> None:
    events = loop_events(read_trace(arguments.trace).last_process())
    if not events:
        raise TraceError(f"{arguments.trace} has no calls after the start of the run: there is nothing to explain")

    from flowrl.report.explain import explain  # noqa: PLC0415 (rich only where tables are printed)

    explain(events, window_s=arguments.last)
    if arguments.png is not None:
        from flowrl.report.timeline import draw_timeline  # noqa: PLC0415 (matplotlib only where a picture is asked for)

        try:
            draw_timeline(events, arguments.png, window_s=arguments.last)
        except OSError as error:
            raise UserError(f"--png {arguments.png} cannot be written ({error.strerror}); name another file") from error


def _add_checkpoints(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "checkpoints", help="list what a run can go on from; reads every file", allow_abbrev=False
    )
    parser.add_argument("run_folder", type=Path, metavar="RUN", help="the output folder of a run")
    parser.set_defaults(run=_checkpoints)


def _checkpoints(arguments: argparse.Namespace) -> None:
    from flowrl.checkpoints.listing import show_checkpoints  # noqa: PLC0415 (rich only where tables are printed)

    show_checkpoints(arguments.run_folder)


def _add_export(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "export", help="write the policy of a checkpoint as a folder that transformers loads", allow_abbrev=False
    )
    parser.add_argument("run_folder", type=Path, metavar="RUN", help="the output folder of a run")
    parser.add_argument("--step", type=int, metavar="N", help="the checkpoint of this step; the newest if not stated")
    parser.add_argument("--output", type=Path, metavar="F", help="folder to make; RUN/export-step-N if not stated")
    parser.add_argument(
        "--adapter", action="store_true", help="the adapter alone, for peft; into RUN/adapter-step-N if not stated"
    )
    parser.set_defaults(run=_export)


def _export(arguments: argparse.Namespace) -> None:
    checkpoints = Checkpoints(arguments.run_folder)
    step = checkpoints.require_steps()[-1] if arguments.step is None else arguments.step
    checkpoint = checkpoints.read(step)
    checkpoint.check()
    what, name = ("adapter", "adapter") if arguments.adapter else ("policy", "export")
    output = arguments.output or arguments.run_folder / f"{name}-step-{step:06d}"

    # torch and transformers only where a model is read
    from flowrl.engines.checkpoint.export import adapter_base, export_adapter, export_policy  # noqa: PLC0415

    if (base := adapter_base(checkpoint.role("actor"))) is not None:
        check_base_model(checkpoint, base)
    try:
        (export_adapter if arguments.adapter else export_policy)(checkpoint.role("actor"), output)
    except OSError as error:
        if str(error.filename) == str(output):
            raise UserError(f"--output {output} cannot be written ({error.strerror}); name another folder") from error
        # Who fails to write into a folder says so in an error of its own.
        reason = str(error).split("\n")[0]
        raise UserError(
            f"checkpoint {checkpoint.path} cannot be read ({reason}); choose another one with --step"
        ) from error
    sys.stdout.write(f"{output}: the {what} after step {step}\n")


def _add_doctor(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "doctor", help="start a recipe's actor and rollout, and compare what the two compute", allow_abbrev=False
    )
    parser.add_argument("--rollout", type=Path, metavar="CONFIG", required=True, help="a recipe's YAML file")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="settings put over the file's")
    parser.set_defaults(run=_doctor)


def _doctor(arguments: argparse.Namespace) -> None:
    schema = _run_config(arguments.rollout)
    if not issubclass(schema, OnPolicyConfig):
        raise ConfigError(
            f"{arguments.rollout}: {schema.__name__} has no rollout: name a recipe that samples responses"
        )
    config = load(arguments.rollout, arguments.overrides, schema)
    check_start(config)

    # torch and Ray only where a model is run
    from flowrl.run.doctor import examine  # noqa: PLC0415
    from flowrl.workers import Actor, Rollout  # noqa: PLC0415

    examine(config, Actor, Rollout)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds: write one above 0, like 30")
    return seconds


def _counts(text: str) -> tuple[int, ...]:
    counts = tuple(int(part) if part.isdecimal() else -1 for part in text.split(","))
    if min(counts) < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of counts: write 8, or 4,4 for two nodes")
    return counts


if __name__ == "__main__":
    sys.exit(main())
